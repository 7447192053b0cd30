// Multi-pass replay: the states and cache of a rollout, rebuilt in parallel (paper section 4).
#pragma once
#include <vector>

#include "model/core/decode.h"

namespace fbt::model::core {

// From tokens alone. The prompt is prefilled once, as decoding did; then passes over the response:
// pass 1 plain, each later one fused with the previous pass's shifted states. After n passes the
// first n-1 response positions are exact whatever the weights. Construct, then next() per pass.
class Replay {
  public:
    // tokens: every token that was fed, P of them the prompt's, at least one the response's.
    Replay(Model& model, std::vector<int32_t> tokens, int prompt_length, Mode mode);

    void next();  // runs one more pass
    int passes() const { return passes_; }
    Trace trace() const { return trace_of(decoder_, id_, hidden_); }

  private:
    Decoder decoder_;
    std::vector<int32_t> response_;
    int id_, prompt_length_, passes_ = 0;
    Tensor hidden_;  // [T,D]: the prompt's states, then the last pass's
};

// From recorded top states [T,D]: one parallel pass rebuilds everything. The row rule makes its
// states equal to the recorded ones bit for bit, which certifies the rollout.
Trace replay_recorded(Model& model, const std::vector<int32_t>& tokens, int prompt_length,
                      Mode mode, const Tensor& states);

// How far a replay is from its rollout, over the fed response positions [P,T).
struct ReplayError {
    double keys, values;  // relative L2 (Frobenius ratio) over all layers
    double argmax;        // agreement of the next-token argmax, 0..1
    double kl;            // mean KL(rollout || replay), nats
    double logprob;       // mean |delta log p| of the rollout's next tokens
    int64_t exact;        // positions whose state, keys and values all have the same bits
    int64_t prefix;       // of them, those before the first that differs
    int64_t positions;    // T - P
};
// next: the token that followed each response position, [T-P]; -1 where none did.
ReplayError compare(Model& model, const Trace& rollout, const Trace& replay, int prompt_length,
                    const std::vector<int32_t>& next);

}  // namespace fbt::model::core
