// Recurrent decoding (paper section 3.3): a set of live sequences, advanced one token at a time.
#pragma once
#include <array>
#include <map>
#include <memory>
#include <span>
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

// Consecutive positions of one sequence in a call of the stack: [first, first + tokens).
struct Feed {
    int id;
    int first;
    std::span<const int32_t> tokens;
    int plain_end = 0;  // positions before it have plain inputs, the others are fused
    // The states that those are fused with, [of them, D]. Undefined: the store's own at first - 1,
    // for a single fused position.
    Tensor carried;
};

class Decoder {
  public:
    // mode  of what prefill() and step() run; feed() runs any. most_pages  is PagedStore's.
    explicit Decoder(Model& model, Mode mode = Mode::soft, int most_pages = 0);

    // Runs prompts (each of at least one token) and returns an id for each. With `states` not
    // null, appends each prompt's top states [P,D].
    std::vector<int> prefill(const std::vector<std::vector<int32_t>>& prompts,
                             std::vector<Tensor>* states = nullptr);
    // Feeds one token to each of the sequences. Returns their new top states [ids,D].
    Tensor step(const std::vector<int>& ids, const std::vector<int32_t>& tokens,
                std::vector<Tensor>* depths = nullptr);

    // One call of the stack for all of these, plain and fused, one position and many, mixed at
    // will; each sequence then ends where its feed does. Returns the top states of all positions,
    // in their order [N,D]; a state's bits do not depend on what else is in the call. `depths` is
    // Model::stack's, of the same rows; calls of single positions that need no `carried` are
    // recorded and replayed (tensor/graph.h), but for those that give depths.
    Tensor feed(const std::vector<Feed>& feeds, std::vector<Tensor>* depths = nullptr);
    // For replay: positions [first, first + tokens) of one sequence in one call, plain or, where
    // `carried` is defined, fused with its rows.
    Tensor rerun(int id, int first, const std::vector<int32_t>& tokens, const Tensor& carried);

    // A sequence without positions; its pages, if any, now belong to it.
    int add(PagedStore::Pages pages = {});
    // Another sequence that shares this one's positions [0, end).
    int fork(int id, int end);
    int fork(int id) { return fork(id, live_[id].length); }
    void drop(int id);

    int length(int id) const { return live_[id].length; }
    Tensor states(const std::vector<int>& ids) const;  // the newest top states, [ids,D]
    Model& model() const { return model_; }
    PagedStore& store() { return *store_; }
    const PagedStore& store() const { return *store_; }
    const PagedStore::Pages& pages(int id) const { return live_[id].pages; }

  private:
    struct Live {
        PagedStore::Pages pages;
        int length = 0;
        bool used = false;
    };
    // What feeds come to on the host: N rows, R of them fused. A fused row's carried state is the
    // store's (from_store: which of the R; slots: where) or given (the first of the R, then rows).
    struct Call {
        std::shared_ptr<SpanBatch> spans = std::make_shared<SpanBatch>();
        std::vector<int32_t> tokens, fused_tokens;  // [N], [R]
        std::vector<int64_t> fused;                 // [R] which rows
        std::vector<int64_t> from_store, slots;
        std::vector<std::pair<int64_t, Tensor>> given;
    };
    // A call of single positions: its inputs and outputs in fixed memory, so that a CUDA device can
    // record it once and replay it.
    struct Step {
        CallInputs inputs;
        Tensor states;  // [n,D], the new top states
        tensor::Graph graph;
    };
    Call call_of(const std::vector<Feed>& feeds);
    Step& step_of(const Call& call);
    Tensor run_step(const Call& call);

    Model& model_;
    Mode mode_;
    std::shared_ptr<PagedStore> store_;
    std::vector<Live> live_;
    std::map<std::array<int64_t, 3>, Step> steps_;  // by rows, fused rows and reach; a few
    int64_t steps_capacity_ = 0;                    // of the store, when steps_ were made
    int steps_rope_ = 0;                            // the model's rope_positions(), likewise
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
