#include "model/core/decode.h"

#include <algorithm>
#include <bit>

namespace fbt::model::core {

constexpr int64_t kPrefillRows = 4096;  // of one call; a longer prompt has a call of its own
constexpr size_t kMostSteps = 8;        // recordings that are kept
constexpr int kShortestReach = 256;     // positions that a step's kernels are launched for

std::string to_string(Mode mode) {
    switch (mode) {
        case Mode::standard:
            return "standard";
        case Mode::soft:
            return "soft";
        case Mode::fused:
            return "fused";
    }
    return "?";
}

Mode mode_from(const std::string& name) {
    for (Mode m : {Mode::standard, Mode::soft, Mode::fused})
        if (to_string(m) == name) return m;
    throw tensor::Error(tensor::ErrorKind::usage,
                        "mode is '" + name + "', needed standard, soft or fused");
}

Decoder::Decoder(Model& model, Mode mode, int most_pages)
    : model_(model), mode_(mode), store_(std::make_shared<PagedStore>(model, most_pages)) {}

int Decoder::add(PagedStore::Pages pages) {
    size_t id = 0;
    while (id < live_.size() && live_[id].used) ++id;
    if (id == live_.size()) live_.emplace_back();
    const int length = int(pages.size()) * kernels::kKeyBlock;
    live_[id] = {std::move(pages), length, true};
    return int(id);
}

int Decoder::fork(int id, int end) {
    const int copy = add(store_->fork(live_[id].pages, end));
    live_[copy].length = end;
    return copy;
}

void Decoder::drop(int id) {
    store_->release(live_[id].pages);
    live_[id].used = false;
}

Tensor Decoder::states(const std::vector<int>& ids) const {
    std::vector<int64_t> slots;
    for (int id : ids) slots.push_back(PagedStore::slot(live_[id].pages, live_[id].length - 1));
    return store_->read_states(Tensor::from(model_.context(), slots, {int64_t(slots.size())}));
}

std::vector<int> Decoder::prefill(const std::vector<std::vector<int32_t>>& prompts,
                                  std::vector<Tensor>* states) {
    std::vector<int> ids;
    for (size_t i = 0; i < prompts.size(); ++i) ids.push_back(add());
    // As many whole prompts a call as fit, so that activations stay small.
    for (size_t begin = 0, end = 0; begin < ids.size(); begin = end) {
        std::vector<Feed> plain, fused;
        int64_t rows = 0;
        while (end < ids.size() &&
               (end == begin || rows + int64_t(prompts[end].size()) <= kPrefillRows)) {
            plain.push_back({ids[end], 0, prompts[end], int(prompts[end].size()), {}});
            rows += int64_t(prompts[end++].size());
        }
        const Tensor h = feed(plain);
        if (mode_ != Mode::fused) continue;
        // Position 0 is plain in every pass, so its keys and values stand; the second pass rewrites
        // the others, each fused with pass 1's state before it.
        rows = 0;
        for (const Feed& f : plain) {
            const int64_t P = int64_t(f.tokens.size());
            if (P > 1) fused.push_back({f.id, 1, f.tokens.subspan(1), 0, h.rows(rows, P - 1)});
            rows += P;
        }
        if (!fused.empty()) feed(fused);
    }
    for (size_t i = 0; states && i < ids.size(); ++i)
        states->push_back(store_->read_states(pages(ids[i]), 0, int(prompts[i].size())));
    return ids;
}

Decoder::Call Decoder::call_of(const std::vector<Feed>& feeds) {
    Call call;
    for (const Feed& f : feeds) {
        Live& live = live_[f.id];
        const int count = int(f.tokens.size()), plain = std::clamp(f.plain_end - f.first, 0, count);
        if (!f.carried.defined() && count - plain > 1)
            throw tensor::Error(tensor::ErrorKind::internal,
                                "several fused positions need the states before them");
        store_->reserve(live.pages, f.first, f.first + count);
        PagedStore::add_span(*call.spans, live.pages, f.first, count);
        if (count > plain) {
            const int64_t row = int64_t(call.fused.size());
            if (f.carried.defined()) {
                call.given.emplace_back(row, f.carried);
            } else {
                call.from_store.push_back(row);
                call.slots.push_back(PagedStore::slot(live.pages, f.first + plain - 1));
            }
        }
        for (int i = 0; i < count; ++i) {
            if (i >= plain) {
                call.fused.push_back(int64_t(call.tokens.size()));
                call.fused_tokens.push_back(f.tokens[i]);
            }
            call.tokens.push_back(f.tokens[i]);
        }
        live.length = f.first + count;
    }
    return call;
}

Tensor Decoder::feed(const std::vector<Feed>& feeds, std::vector<Tensor>* depths) {
    const Call call = call_of(feeds);
    if (call.given.empty() && call.tokens.size() == feeds.size() && !depths) return run_step(call);
    Context& context = model_.context();
    const auto indices = [&](const std::vector<int64_t>& v) {
        return Tensor::from(context, v, {int64_t(v.size())});
    };
    call.spans->upload(context);
    const int64_t N = int64_t(call.tokens.size()), R = int64_t(call.fused.size());
    CallInputs inputs;
    inputs.spans = call.spans;
    inputs.tokens = Tensor::from(context, call.tokens, {N});
    inputs.slots = indices(call.spans->own_slots());
    if (R > 0) {
        inputs.fused_tokens = Tensor::from(context, call.fused_tokens, {R});
        if (R < N) inputs.fused = indices(call.fused);
        if (call.given.size() == 1 && call.from_store.empty()) {
            inputs.carried = call.given[0].second;
        } else {
            inputs.carried = Tensor::empty(context, {R, model_.config().dim}, model_.dtype());
            for (const auto& [row, states] : call.given)
                inputs.carried.rows(row, states.dim(0)).copy_from(states);
            if (!call.from_store.empty())
                tensor::copy_rows(inputs.carried, indices(call.from_store),
                                  store_->read_states(indices(call.slots)), {},
                                  int64_t(call.slots.size()));
        }
    }
    return advance(model_, store_, inputs, depths);
}

// Steps share a recording until the longest sequence passes a power of two.
Decoder::Step& Decoder::step_of(const Call& call) {
    const int reach = std::max(kShortestReach, int(std::bit_ceil(unsigned(call.spans->max_end()))));
    model_.reserve_positions(reach);
    // Recordings hold addresses: what has moved makes them void.
    if (steps_capacity_ != store_->capacity() || steps_rope_ != model_.rope_positions())
        steps_.clear();
    steps_capacity_ = store_->capacity();
    steps_rope_ = model_.rope_positions();
    const int64_t n = int64_t(call.tokens.size()), R = int64_t(call.fused.size());
    // Each holds its activations: as sequences end one by one, numbers that do not come back must
    // go.
    if (steps_.size() >= kMostSteps && !steps_.contains({n, R, reach})) steps_.clear();
    Step& step = steps_[{n, R, reach}];
    CallInputs& inputs = step.inputs;
    if (inputs.spans) {
        inputs.spans->overwrite(*call.spans);
        return step;
    }
    Context& context = model_.context();
    inputs.spans = call.spans;
    inputs.spans->upload(context, reach);
    inputs.tokens = Tensor::empty(context, {n}, DType::i32);
    inputs.slots = Tensor::empty(context, {n}, DType::i64);
    if (R > 0) {
        inputs.fused_tokens = Tensor::empty(context, {R}, DType::i32);
        inputs.carried_slots = Tensor::empty(context, {R}, DType::i64);
        if (R < n) inputs.fused = Tensor::empty(context, {R}, DType::i64);
    }
    step.states = Tensor::empty(context, {n, model_.config().dim}, model_.dtype());
    return step;
}

Tensor Decoder::run_step(const Call& call) {
    Step& step = step_of(call);
    const auto fill = [](Tensor& t, const auto& values) {
        if (t.defined()) t.copy_in(values.data(), values.size() * sizeof(values[0]));
    };
    fill(step.inputs.tokens, call.tokens);
    fill(step.inputs.slots, call.spans->own_slots());
    fill(step.inputs.fused_tokens, call.fused_tokens);
    fill(step.inputs.carried_slots, call.slots);
    fill(step.inputs.fused, call.fused);
    step.graph.run(model_.context(),
                   [&] { step.states.copy_from(advance(model_, store_, step.inputs)); });
    Tensor states = Tensor::empty(model_.context(), step.states.shape(), model_.dtype());
    states.copy_from(step.states);
    return states;
}

Tensor Decoder::step(const std::vector<int>& ids, const std::vector<int32_t>& tokens,
                     std::vector<Tensor>* depths) {
    std::vector<Feed> feeds;
    for (size_t i = 0; i < ids.size(); ++i) {
        const int first = live_[ids[i]].length;
        const int plain_end = mode_ == Mode::standard ? first + 1 : 0;
        feeds.push_back({ids[i], first, {&tokens[i], 1}, plain_end, {}});
    }
    return feed(feeds, depths);
}

Tensor Decoder::rerun(int id, int first, const std::vector<int32_t>& tokens,
                      const Tensor& carried) {
    const int plain_end = carried.defined() ? 0 : first + int(tokens.size());
    return feed({{id, first, tokens, plain_end, carried}});
}

Trace trace_of(const Decoder& decoder, int id, const Tensor& hidden) {
    Trace trace{hidden, {}, {}};
    for (int l = 0; l < decoder.model().config().layers; ++l) {
        const int T = int(hidden.dim(0));
        trace.keys.push_back(decoder.store().read_keys(decoder.pages(id), l, 0, T));
        trace.values.push_back(decoder.store().read_values(decoder.pages(id), l, 0, T));
    }
    return trace;
}

Trace decode_known(Model& model, const std::vector<int32_t>& tokens, int prompt_length, Mode mode) {
    Decoder decoder(model, mode);
    std::vector<Tensor> head;
    const int id = decoder.prefill({{tokens.begin(), tokens.begin() + prompt_length}}, &head)[0];
    const int T = int(tokens.size());
    Tensor hidden = Tensor::empty(model.context(), {T, model.config().dim}, model.dtype());
    hidden.rows(0, prompt_length).copy_from(head[0]);
    for (int t = prompt_length; t < T; ++t)
        hidden.rows(t, 1).copy_from(decoder.step({id}, {tokens[t]}));
    return trace_of(decoder, id, hidden);
}

}  // namespace fbt::model::core
