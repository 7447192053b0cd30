// Multi-pass replay: the states and cache of a rollout, rebuilt in parallel (paper section 4).
#pragma once
#include <climits>
#include <cmath>
#include <span>
#include <string>
#include <vector>

#include "model/core/decode.h"

namespace fbt::model::core {

// When a replay from tokens ends: at whichever comes first, and anyway once it is exact, which
// takes one pass more than there are response positions at most.
struct ReplayLimits {
    int passes = INT_MAX;
    // Ends after a pass that changed the states by at most this, relative to their norm (L2); 0: no
    // change is small enough.
    double tolerance = 0;
    // The response is swept in blocks of so many positions, each brought to its own end (passes,
    // tolerance, exactness) before the next one begins; 0: all of it is one block.
    int block = 0;
};

// From tokens alone. The prompt is prefilled once, as decoding did; then passes over the response:
// pass 1 plain, each later one fused with the previous pass's shifted states. After n passes the
// first n-1 response positions are exact whatever the weights, and more of them where the states
// before them did not change: passes leave those out. Construct, then next() per pass, or run().
class Replay {
  public:
    // tokens: every token that was fed, P of them the prompt's, at least one the response's.
    Replay(Model& model, std::vector<int32_t> tokens, int prompt_length, Mode mode);

    // One more pass over the response; after run() in blocks, over the last one.
    void next();
    void run(const ReplayLimits& limits);  // begins anew

    int passes() const { return passes_; }  // of all blocks together
    // Response positions that the passes ran, and that they would have run without leaving any out.
    int64_t computed() const { return computed_; }
    int64_t visited() const { return visited_; }
    // The last pass's: |h - h of the pass before| / |h| over its block; infinite in a block's
    // first.
    double change() const { return change_; }
    // Whether all is known to be the rollout itself, bit for bit.
    bool exact() const { return exact_ && settled_ == int(response_.size()); }
    Trace trace() const { return trace_of(decoder_, id_, hidden_); }

  private:
    void begin_block(int begin, int end);

    Decoder decoder_;
    Mode mode_;
    std::vector<int32_t> response_;
    int id_, prompt_length_;
    Tensor hidden_;                // [T,D]: the prompt's states, then the newest of the response's
    std::vector<double> squares_;  // |h|^2 of the response's positions
    // The current block: response positions [begin,end), of which no later pass changes those
    // before settled.
    int begin_ = 0, end_ = 0, settled_ = 0, block_passes_ = 0;
    bool exact_ = true;  // every block before this one is
    int passes_ = 0;
    int64_t computed_ = 0, visited_ = 0;
    double change_ = INFINITY;
};

// From recorded top states [T,D]: one parallel pass rebuilds everything. The row rule makes its
// states equal to the recorded ones bit for bit, which certifies the rollout. (Standard decoding
// carries no states: there they are not used.)
Trace replay_recorded(Model& model, const std::vector<int32_t>& tokens, int prompt_length,
                      Mode mode, const Tensor& states);

// What was kept of a rollout of n sampled tokens, T = P+n-1 of them fed (P where n is 0), on the
// host; f32 holds bf16 exactly. What was not kept is empty.
struct Record {
    std::span<const float> states;        // [T,D]
    std::span<const float> keys, values;  // [L,T,G,C], keys after RoPE
    std::span<const double> logprobs;     // [n], of the sampled tokens
};
struct Difference {
    int64_t position = -1;  // of the token in the rollout; -1: there is none
    std::string what;       // "log-probability", "keys of layer 2", "values of layer 2", "state"
};
// The first position where something that was recorded has not every bit of what a trace of the
// same tokens (the last sampled one included) has or, for log-probabilities, makes; or where that
// is not finite, which no rollout is.
Difference first_difference(Model& model, const std::vector<int32_t>& tokens, int prompt_length,
                            const Record& record, const Trace& trace);

// A rollout is what it claims to be if one parallel pass over its recorded states gives all of them
// again: the prompt's do not depend on the record, and each later one is decoding's if the one
// before it is. So nothing has to be decoded to know it.
struct Certificate {
    Trace trace;            // of that pass: the rollout's own, where there is no difference
    Difference difference;  // from the record
    bool holds() const { return difference.position < 0; }
};
// Errors  usage when a part of the record has another size, or a mode that carries states lacks
// them.
Certificate certify(Model& model, const std::vector<int32_t>& tokens, int prompt_length, Mode mode,
                    const Record& record);

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
