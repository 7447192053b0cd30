#include "model/core/paged_store.h"

#include <algorithm>

namespace fbt::model::core {

using kernels::kKeyBlock;

PagedStore::PagedStore(const Model& model)
    : context_(model.context()),
      dtype_(model.dtype()),
      layers_(model.config().layers),
      kv_heads_(model.config().kv_heads),
      head_dim_(model.config().head_dim) {}

// Doubles the pools; rows keep their index, so tables of live sequences stay valid.
void PagedStore::grow(int pages) {
    const int old = int(references_.size()), total = std::max({pages, 2 * old, 16});
    const tensor::Shape shape = {int64_t(total) * kKeyBlock, kv_heads_, head_dim_};
    for (std::vector<Tensor>* pool : {&keys_, &values_}) {
        pool->resize(layers_);
        for (Tensor& t : *pool) {
            Tensor larger = Tensor::empty(context_, shape, dtype_);
            if (t.defined()) larger.rows(0, t.dim(0)).copy_from(t);
            t = larger;
        }
    }
    references_.resize(total, 0);
    for (int p = total; p-- > old;) free_.push_back(p);
}

int32_t PagedStore::take() {
    if (free_.empty()) grow(int(references_.size()) + 1);
    const int32_t page = free_.back();
    free_.pop_back();
    references_[page] = 1;
    return page;
}

void PagedStore::reserve(Pages& pages, int end) {
    while (int(pages.size()) * kKeyBlock < end) pages.push_back(take());
}

PagedStore::Pages PagedStore::fork(const Pages& pages, int end) {
    Pages copy(pages.begin(), pages.begin() + end / kKeyBlock);
    for (int32_t page : copy) ++references_[page];
    if (end % kKeyBlock != 0) {
        const int32_t from = pages[end / kKeyBlock], to = take();
        for (std::vector<Tensor>* pool : {&keys_, &values_})
            for (Tensor& t : *pool)
                t.rows(int64_t(to) * kKeyBlock, end % kKeyBlock)
                    .copy_from(t.rows(int64_t(from) * kKeyBlock, end % kKeyBlock));
        copy.push_back(to);
    }
    return copy;
}

void PagedStore::release(Pages& pages) {
    for (int32_t page : pages)
        if (--references_[page] == 0) free_.push_back(page);
    pages.clear();
}

void PagedStore::add_span(SpanBatch& spans, const Pages& pages, int first, int count) {
    std::vector<int64_t> blocks;
    for (int32_t page : pages) blocks.push_back(int64_t(page) * kKeyBlock);
    spans.add(first, count, blocks);
}

nn::KeyValues PagedStore::join(Tape& tape, int layer, const nn::KeyValues&,
                               const nn::KeyValues& own) {
    tensor::copy_rows(keys_[layer], slots_, own.k.value(), {}, slots_.numel());
    tensor::copy_rows(values_[layer], slots_, own.v.value(), {}, slots_.numel());
    return {tape.constant(keys_[layer]), tape.constant(values_[layer])};
}

Tensor PagedStore::read(const std::vector<Tensor>& pool, const Pages& pages, int layer,
                        int end) const {
    std::vector<int64_t> rows;
    for (int t = 0; t < end; ++t)
        rows.push_back(int64_t(pages[t / kKeyBlock]) * kKeyBlock + t % kKeyBlock);
    Tensor out = Tensor::empty(context_, {end, kv_heads_, head_dim_}, dtype_);
    tensor::copy_rows(out, {}, pool[layer], Tensor::from(context_, rows, {end}), end);
    return out;
}

Tensor PagedStore::read_keys(const Pages& pages, int layer, int end) const {
    return read(keys_, pages, layer, end);
}
Tensor PagedStore::read_values(const Pages& pages, int layer, int end) const {
    return read(values_, pages, layer, end);
}

Tensor advance(Model& model, const std::shared_ptr<PagedStore>& store, const CallInputs& inputs,
               const Tensor& carried, std::vector<Tensor>* depths) {
    store->begin(inputs.slots);
    Tape tape(false);
    const Var u = carried.defined() ? model.fuse(tape, tape.constant(carried), inputs.tokens)
                                    : model.embed(tape, inputs.tokens);
    return model.stack(tape, u, inputs.spans, store, false, depths).value();
}

Tensor advance(Model& model, const std::shared_ptr<PagedStore>& store,
               std::shared_ptr<SpanBatch> spans, const std::vector<int32_t>& tokens,
               const Tensor& carried, std::vector<Tensor>* depths) {
    Context& context = model.context();
    spans->upload(context);
    const int64_t N = spans->rows();
    return advance(
        model, store,
        {spans, Tensor::from(context, tokens, {N}), Tensor::from(context, spans->own_slots(), {N})},
        carried, depths);
}

}  // namespace fbt::model::core
