#include "model/core/paged_store.h"

#include <algorithm>
#include <limits>

namespace fbt::model::core {

using kernels::kKeyBlock;

namespace {

int pages_of(int positions) { return (positions + kKeyBlock - 1) / kKeyBlock; }

}  // namespace

PagedStore::PagedStore(const Model& model, int most_pages)
    : context_(model.context()),
      dtype_(model.dtype()),
      layers_(model.config().layers),
      most_pages_(most_pages == 0 ? std::numeric_limits<int>::max() : most_pages),
      kv_heads_(model.config().kv_heads),
      head_dim_(model.config().head_dim),
      dim_(model.config().dim) {}

// Doubles the pools; rows keep their index, so tables of live sequences stay valid.
void PagedStore::grow() {
    const int old = int(pages_.size()), total = std::min(most_pages_, std::max(2 * old, 16));
    if (total == old)
        throw tensor::Error(tensor::ErrorKind::internal,
                            "all " + std::to_string(old) + " pages are held");
    const auto enlarge = [&](Tensor& t, const tensor::Shape& shape) {
        Tensor larger = Tensor::empty(context_, shape, dtype_);
        if (t.defined()) larger.rows(0, t.dim(0)).copy_from(t);
        t = larger;
    };
    const int64_t rows = int64_t(total) * kKeyBlock;
    for (std::vector<Tensor>* pool : {&keys_, &values_}) {
        pool->resize(layers_);
        for (Tensor& t : *pool) enlarge(t, {rows, kv_heads_, head_dim_});
    }
    enlarge(states_, {rows, dim_});
    pages_.resize(total);
    for (int p = total; p-- > old;) free_.push_back(p);
}

int32_t PagedStore::take() {
    if (free_.empty() && !findable_.empty()) {
        const int32_t page = findable_.begin()->second;
        findable_.erase(findable_.begin());
        found_by_.erase(pages_[page].found);
        pages_[page] = {};
        free_.push_back(page);
    }
    if (free_.empty()) grow();
    const int32_t page = free_.back();
    free_.pop_back();
    pages_[page].references = 1;
    return page;
}

int PagedStore::available() const {
    return most_pages_ - int(pages_.size()) + int(free_.size()) + int(findable_.size());
}

int PagedStore::held() const {
    return int(pages_.size()) - int(free_.size()) - int(findable_.size());
}

void PagedStore::copy_page(int32_t to, int32_t from) {
    const auto copy = [&](Tensor& pool) {
        pool.rows(int64_t(to) * kKeyBlock, kKeyBlock)
            .copy_from(pool.rows(int64_t(from) * kKeyBlock, kKeyBlock));
    };
    for (int l = 0; l < layers_; ++l) {
        copy(keys_[l]);
        copy(values_[l]);
    }
    copy(states_);
}

int PagedStore::needed(const Pages& pages, int first, int end) const {
    int count = std::max(0, pages_of(end) - int(pages.size()));
    for (int i = first / kKeyBlock; i < std::min(pages_of(end), int(pages.size())); ++i)
        count += pages_[pages[i]].references > 1;
    return count;
}

void PagedStore::reserve(Pages& pages, int first, int end) {
    for (int i = first / kKeyBlock; i < std::min(pages_of(end), int(pages.size())); ++i) {
        if (pages_[pages[i]].references == 1) continue;
        const int32_t own = take();
        copy_page(own, pages[i]);
        --pages_[pages[i]].references;
        pages[i] = own;
    }
    while (int(pages.size()) < pages_of(end)) pages.push_back(take());
}

PagedStore::Pages PagedStore::fork(const Pages& pages, int end) {
    const Pages shared(pages.begin(), pages.begin() + pages_of(end));
    for (int32_t page : shared) ++pages_[page].references;
    return shared;
}

// Backwards, so that of a prefix that nobody holds the end goes before the beginning, without
// which it could not be found.
void PagedStore::release(Pages& pages) {
    for (size_t i = pages.size(); i-- > 0;) {
        Page& page = pages_[pages[i]];
        if (--page.references > 0) continue;
        if (page.findable) {
            page.released = ++releases_;
            findable_[page.released] = pages[i];
        } else {
            page = {};
            free_.push_back(pages[i]);
        }
    }
    pages.clear();
}

void PagedStore::publish(const Pages& pages, std::span<const int32_t> tokens, int known, int end) {
    for (int i = known; i < end / kKeyBlock; ++i) {
        const auto own = tokens.subspan(size_t(i) * kKeyBlock, kKeyBlock);
        Page& page = pages_[pages[i]];
        const Key key(i == 0 ? 0 : pages_[pages[i - 1]].content, {own.begin(), own.end()});
        const auto [at, inserted] = found_by_.try_emplace(key, pages[i]);
        if (inserted) {
            page.content = ++contents_;
            page.found = at;
            page.findable = true;
        } else {
            page.content = pages_[at->second].content;  // computed twice, at the same time
        }
    }
}

PagedStore::Pages PagedStore::find(std::span<const int32_t> tokens, int end) {
    Pages pages;
    int64_t before = 0;
    for (int i = 0; i < end / kKeyBlock; ++i) {
        const auto own = tokens.subspan(size_t(i) * kKeyBlock, kKeyBlock);
        const auto at = found_by_.find(Key(before, {own.begin(), own.end()}));
        if (at == found_by_.end()) break;
        Page& page = pages_[at->second];
        if (page.references++ == 0) findable_.erase(page.released);
        before = page.content;
        pages.push_back(at->second);
    }
    return pages;
}

void PagedStore::add_span(SpanBatch& spans, const Pages& pages, int first, int count) {
    std::vector<int64_t> blocks;
    blocks.reserve(pages.size());
    for (int32_t page : pages) blocks.push_back(int64_t(page) * kKeyBlock);
    spans.add(first, count, blocks);
}

nn::KeyValues PagedStore::join(Tape& tape, int layer, const nn::KeyValues&,
                               const nn::KeyValues& own) {
    tensor::copy_rows(keys_[layer], slots_, own.k.value(), {}, slots_.numel());
    tensor::copy_rows(values_[layer], slots_, own.v.value(), {}, slots_.numel());
    return {tape.constant(keys_[layer]), tape.constant(values_[layer])};
}

void PagedStore::keep_states(const Tensor& h) {
    tensor::copy_rows(states_, slots_, h, {}, slots_.numel());
}

Tensor PagedStore::read(const Tensor& pool, const Pages& pages, int first, int end) const {
    std::vector<int64_t> rows;
    for (int t = first; t < end; ++t) rows.push_back(slot(pages, t));
    tensor::Shape shape = pool.shape();
    shape[0] = end - first;
    Tensor out = Tensor::empty(context_, shape, dtype_);
    tensor::copy_rows(out, {}, pool, Tensor::from(context_, rows, {end - first}), end - first);
    return out;
}

Tensor PagedStore::read_keys(const Pages& pages, int layer, int first, int end) const {
    return read(keys_[layer], pages, first, end);
}
Tensor PagedStore::read_values(const Pages& pages, int layer, int first, int end) const {
    return read(values_[layer], pages, first, end);
}
Tensor PagedStore::read_states(const Pages& pages, int first, int end) const {
    return read(states_, pages, first, end);
}
Tensor PagedStore::read_states(const Tensor& slots) const {
    Tensor out = Tensor::empty(context_, {slots.numel(), dim_}, dtype_);
    tensor::copy_rows(out, {}, states_, slots, slots.numel());
    return out;
}

Tensor advance(Model& model, const std::shared_ptr<PagedStore>& store, const CallInputs& inputs,
               std::vector<Tensor>* depths) {
    store->begin(inputs.slots);
    Tape tape(false);
    Var u;
    if (inputs.fused_tokens.defined()) {
        const Tensor carried =
            inputs.carried.defined() ? inputs.carried : store->read_states(inputs.carried_slots);
        u = model.fuse(tape, tape.constant(carried), inputs.fused_tokens);
    }
    if (!u.defined() || inputs.fused.defined()) {
        const Var plain = model.embed(tape, inputs.tokens);
        if (u.defined()) {
            Tensor mixed = plain.value();
            tensor::copy_rows(mixed, inputs.fused, u.value(), {}, inputs.fused.numel());
        }
        u = plain;
    }
    const Tensor h = model.stack(tape, u, inputs.spans, store, false, depths).value();
    store->keep_states(h);
    return h;
}

Tensor advance(Model& model, const std::shared_ptr<PagedStore>& store,
               std::shared_ptr<SpanBatch> spans, const std::vector<int32_t>& tokens,
               const Tensor& carried, std::vector<Tensor>* depths) {
    Context& context = model.context();
    spans->upload(context);
    const int64_t N = spans->rows();
    CallInputs inputs;
    inputs.spans = spans;
    inputs.tokens = Tensor::from(context, tokens, {N});
    inputs.slots = Tensor::from(context, spans->own_slots(), {N});
    if (carried.defined()) inputs.fused_tokens = inputs.tokens;
    inputs.carried = carried;
    return advance(model, store, inputs, depths);
}

}  // namespace fbt::model::core
