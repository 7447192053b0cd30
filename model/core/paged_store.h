// Keys and values of many sequences in pages of kKeyBlock positions: what serving, replay and
// evaluation run the stack on. Pages are counted: samples of one prompt share its full pages.
#pragma once
#include <memory>
#include <vector>

#include "model/core/model.h"

namespace fbt::model::core {

class PagedStore : public nn::KeyValueStore {
  public:
    // One sequence's pages, in order; page i holds positions [i*kKeyBlock, (i+1)*kKeyBlock).
    using Pages = std::vector<int32_t>;

    explicit PagedStore(const Model& model);

    // Makes room for positions [0, end).
    void reserve(Pages& pages, int end);
    // Another sequence that continues from positions [0, end): full pages are shared, the last,
    // partial one is copied.
    Pages fork(const Pages& pages, int end);
    void release(Pages& pages);

    // A span [first, first+count) of a sequence, for the next call of the stack. reserve() first.
    static void add_span(SpanBatch& spans, const Pages& pages, int first, int count);
    // Tells the store which rows the coming call of the stack writes: own_slots() of its spans.
    void begin(Tensor slots) { slots_ = std::move(slots); }
    // Positions that the pools have room for. They move to other memory when this grows.
    int64_t capacity() const { return int64_t(references_.size()) * kernels::kKeyBlock; }

    // Keys and values of positions [0, end) of one layer, [end, G, C].
    Tensor read_keys(const Pages& pages, int layer, int end) const;
    Tensor read_values(const Pages& pages, int layer, int end) const;

    nn::KeyValues prefix(int) override { return {}; }
    nn::KeyValues join(Tape& tape, int layer, const nn::KeyValues& prefix,
                       const nn::KeyValues& own) override;
    void keep(int, const nn::KeyValues&) override {}

  private:
    void grow(int pages);
    int32_t take();
    Tensor read(const std::vector<Tensor>& pool, const Pages& pages, int layer, int end) const;

    Context& context_;
    DType dtype_;
    int layers_;
    int64_t kv_heads_, head_dim_;
    std::vector<Tensor> keys_, values_;  // [layers] of [pages*kKeyBlock, G, C]
    std::vector<int32_t> references_;    // [pages]
    std::vector<int32_t> free_;
    Tensor slots_;  // of the coming call, [N] i64
};

// What a call of the stack is given, in the device's memory.
struct CallInputs {
    std::shared_ptr<SpanBatch> spans;  // uploaded
    Tensor tokens;                     // [N] i32
    Tensor slots;                      // [N] i64, spans' own slots
};

// The stack over spans, without gradients: inputs are plain, or fused where `carried` is defined.
// The first form does all on the device, so that a graph may record it. `depths` is Model::stack's.
Tensor advance(Model& model, const std::shared_ptr<PagedStore>& store, const CallInputs& inputs,
               const Tensor& carried = {}, std::vector<Tensor>* depths = nullptr);
Tensor advance(Model& model, const std::shared_ptr<PagedStore>& store,
               std::shared_ptr<SpanBatch> spans, const std::vector<int32_t>& tokens,
               const Tensor& carried = {}, std::vector<Tensor>* depths = nullptr);

}  // namespace fbt::model::core
