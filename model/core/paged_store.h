// Keys, values and top states of many sequences in pages of kKeyBlock positions: what serving,
// replay and evaluation run the stack on. Pages are counted: samples of one prompt share its pages
// until one of them writes, and whole pages of plain positions can be found again by their tokens.
#pragma once
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "model/core/model.h"

namespace fbt::model::core {

class PagedStore : public nn::KeyValueStore {
  public:
    // One sequence's pages, in order; page i holds positions [i*kKeyBlock, (i+1)*kKeyBlock).
    using Pages = std::vector<int32_t>;

    // most_pages  that it may hold; 0: as many as are asked for.
    explicit PagedStore(const Model& model, int most_pages = 0);

    // Makes positions [first, end) the sequence's own to write: adds pages, and copies those that
    // others hold too. Errors  internal when there are fewer than needed() pages available().
    void reserve(Pages& pages, int first, int end);
    int needed(const Pages& pages, int first, int end) const;  // pages that reserve() would take
    int available() const;  // nobody holds them; those that can be found again included
    int held() const;       // by sequences, each counted once
    // Another sequence that continues from positions [0, end).
    Pages fork(const Pages& pages, int end);
    void release(Pages& pages);

    // Prefix reuse. The whole pages in [0, end), all plain and written, become findable by the
    // tokens of their positions and of all before; `known` of them already are.
    void publish(const Pages& pages, std::span<const int32_t> tokens, int known, int end);
    // As many published pages as there are for positions [0, end) of such tokens, whole ones only.
    // Their keys, values and states have the bits that computing them anew would give.
    Pages find(std::span<const int32_t> tokens, int end);

    // A span [first, first+count) of a sequence, for the next call of the stack. reserve() first.
    static void add_span(SpanBatch& spans, const Pages& pages, int first, int count);
    static int64_t slot(const Pages& pages, int position) {
        return int64_t(pages[position / kernels::kKeyBlock]) * kernels::kKeyBlock +
               position % kernels::kKeyBlock;
    }
    // Tells the store which rows the coming call of the stack writes: own_slots() of its spans.
    void begin(Tensor slots) { slots_ = std::move(slots); }
    // The call's top states [N,D], into the same rows.
    void keep_states(const Tensor& h);
    // Positions that the pools have room for. They move to other memory when this grows.
    int64_t capacity() const { return int64_t(pages_.size()) * kernels::kKeyBlock; }

    // Keys and values of positions [first, end) of one layer, [end-first, G, C]; top states
    // [end-first, D], also by slot, [slots, D].
    Tensor read_keys(const Pages& pages, int layer, int first, int end) const;
    Tensor read_values(const Pages& pages, int layer, int first, int end) const;
    Tensor read_states(const Pages& pages, int first, int end) const;
    Tensor read_states(const Tensor& slots) const;

    nn::KeyValues prefix(int) override { return {}; }
    nn::KeyValues join(Tape& tape, int layer, const nn::KeyValues& prefix,
                       const nn::KeyValues& own) override;
    void keep(int, const nn::KeyValues&) override {}

  private:
    // What a published page is found by: the content of the page before it, and its own tokens.
    using Key = std::pair<int64_t, std::vector<int32_t>>;
    struct Page {
        int references = 0;
        int64_t content = 0;  // the same number, the same tokens from position 0 on; 0: unpublished
        std::map<Key, int32_t>::iterator found;  // where found_by_ names this page
        bool findable = false;
        int64_t released = 0;  // when the last reference went
    };

    void grow();
    int32_t take();
    void copy_page(int32_t to, int32_t from);
    Tensor read(const Tensor& pool, const Pages& pages, int first, int end) const;

    Context& context_;
    DType dtype_;
    int layers_, most_pages_;
    int64_t kv_heads_, head_dim_, dim_;
    std::vector<Tensor> keys_, values_;  // [layers] of [pages*kKeyBlock, G, C]
    Tensor states_;                      // [pages*kKeyBlock, D]
    std::vector<Page> pages_;
    std::vector<int32_t> free_;            // never found again
    std::map<int64_t, int32_t> findable_;  // by `released`: held by nobody, the oldest goes first
    std::map<Key, int32_t> found_by_;
    int64_t contents_ = 0, releases_ = 0;
    Tensor slots_;  // of the coming call, [N] i64
};

// What a call of the stack is given, in the device's memory. Of N rows R have fused inputs.
struct CallInputs {
    std::shared_ptr<SpanBatch> spans;  // uploaded
    Tensor tokens;                     // [N] i32
    Tensor slots;                      // [N] i64, spans' own slots
    Tensor fused;                      // [R] i64, which rows; undefined where R is 0 or N
    Tensor fused_tokens;               // [R] i32; undefined where R is 0
    // The states that they are fused with: [R,D], or, where that is undefined, the store's at these
    // slots, [R] i64.
    Tensor carried, carried_slots;
};

// The stack over spans, without gradients; keys, values and states go into the store. The first
// form does all on the device, so that a graph may record it; in the second inputs are plain, or
// all fused where `carried` is defined. `depths` is Model::stack's.
Tensor advance(Model& model, const std::shared_ptr<PagedStore>& store, const CallInputs& inputs,
               std::vector<Tensor>* depths = nullptr);
Tensor advance(Model& model, const std::shared_ptr<PagedStore>& store,
               std::shared_ptr<SpanBatch> spans, const std::vector<int32_t>& tokens,
               const Tensor& carried = {}, std::vector<Tensor>* depths = nullptr);

}  // namespace fbt::model::core
