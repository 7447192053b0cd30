// Recurrent decoding (paper section 3.3): a set of live sequences, advanced one token at a time.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "model/core/paged_store.h"
#include "tensor/graph.h"

namespace fbt::model::core {

enum class Mode {
    standard,  // plain inputs everywhere
    soft,      // plain prompt, then every token fused with the state before it
    fused,     // the prompt run twice, the second time fused with pass 1's states; then as soft
};
std::string to_string(Mode mode);
Mode mode_from(const std::string& name);  // throws usage, listing the three

class Decoder {
  public:
    Decoder(Model& model, Mode mode);

    // Runs prompts (each of at least one token) and returns an id for each. With `states` not
    // null, appends each prompt's top states [P,D].
    std::vector<int> prefill(const std::vector<std::vector<int32_t>>& prompts,
                             std::vector<Tensor>* states = nullptr);
    // Another sequence that shares this one's past.
    int fork(int id);
    void drop(int id);
    // Feeds one token to each of the sequences. Returns their new top states [ids,D]; a state's
    // bits do not depend on which other sequences are in the call. `depths` is Model::stack's, of
    // the same rows; a step that gives them is neither recorded nor replayed.
    Tensor step(const std::vector<int>& ids, const std::vector<int32_t>& tokens,
                std::vector<Tensor>* depths = nullptr);

    Tensor states(const std::vector<int>& ids) const;  // the newest top states, [ids,D]
    Model& model() const { return model_; }
    const PagedStore& store() const { return *store_; }
    const PagedStore::Pages& pages(int id) const { return live_[id].pages; }

    // For replay: runs positions [first, first+count) of one sequence in one call, as a plain pass
    // or fused with `carried` [count,D]; first is at least its length, which stays where it is.
    Tensor rerun(int id, int first, const std::vector<int32_t>& tokens, const Tensor& carried);

  private:
    struct Live {
        PagedStore::Pages pages;
        int length = 0;
        bool used = false;
    };
    // A step of some number of sequences: its inputs and outputs in fixed memory, so that a CUDA
    // device can record it once and replay it.
    struct Step {
        CallInputs inputs;
        Tensor ids;     // [n] i64, rows of last_
        Tensor states;  // [n,D], the new top states
        tensor::Graph graph;
    };
    Step& step_of(const SpanBatch& spans);
    int add();
    Tensor prefill(const std::vector<int>& ids, const std::vector<std::vector<int32_t>>& prompts);
    void remember(const std::vector<int>& ids, const Tensor& states,
                  const std::vector<int64_t>& rows);

    Model& model_;
    Mode mode_;
    std::shared_ptr<PagedStore> store_;
    std::vector<Live> live_;
    Tensor last_;  // [capacity,D]: row id is the newest top state of sequence id
    std::map<std::pair<int64_t, int>, Step> steps_;  // by number of sequences and reach; a few
    int64_t steps_capacity_ = 0;                     // of the store, when steps_ were made
    int steps_rope_ = 0;                             // the model's rope_positions(), likewise
};

// The states and the cache of one sequence of T positions.
struct Trace {
    Tensor hidden;                     // [T,D]
    std::vector<Tensor> keys, values;  // [L] of [T,G,C], keys after RoPE
};
// Copies the cache of sequence `id` beside its states.
Trace trace_of(const Decoder& decoder, int id, const Tensor& hidden);

// Decoding of known tokens, one position at a time: what a rollout's own states and cache are.
Trace decode_known(Model& model, const std::vector<int32_t>& tokens, int prompt_length, Mode mode);

}  // namespace fbt::model::core
