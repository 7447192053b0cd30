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

Decoder::Decoder(Model& model, Mode mode)
    : model_(model), mode_(mode), store_(std::make_shared<PagedStore>(model)) {}

int Decoder::add() {
    size_t id = 0;
    while (id < live_.size() && live_[id].used) ++id;
    if (id == live_.size()) {
        live_.emplace_back();
        if (!last_.defined() || int64_t(live_.size()) > last_.dim(0)) {
            Tensor larger = Tensor::zeros(
                model_.context(),
                {std::max<int64_t>(8, 2 * int64_t(live_.size())), model_.config().dim},
                model_.dtype());
            if (last_.defined()) larger.rows(0, last_.dim(0)).copy_from(last_);
            last_ = larger;
            steps_.clear();
        }
    }
    live_[id] = {{}, 0, true};
    return int(id);
}

void Decoder::remember(const std::vector<int>& ids, const Tensor& states,
                       const std::vector<int64_t>& rows) {
    Context& context = model_.context();
    const int64_t n = int64_t(ids.size());
    const std::vector<int64_t> slots(ids.begin(), ids.end());
    tensor::copy_rows(last_, Tensor::from(context, slots, {n}), states,
                      Tensor::from(context, rows, {n}), n);
}

std::vector<int> Decoder::prefill(const std::vector<std::vector<int32_t>>& prompts,
                                  std::vector<Tensor>* states) {
    std::vector<int> ids;
    for (const std::vector<int32_t>& prompt : prompts) {
        ids.push_back(add());
        live_[ids.back()].length = int(prompt.size());
        store_->reserve(live_[ids.back()].pages, int(prompt.size()));
    }
    // As many whole prompts a call as fit, so that activations stay small.
    for (size_t begin = 0, end = 0; begin < ids.size(); begin = end) {
        int64_t rows = 0;
        while (end < ids.size() && (end == begin || rows + live_[ids[end]].length <= kPrefillRows))
            rows += live_[ids[end++]].length;
        const std::vector<int> group(ids.begin() + begin, ids.begin() + end);
        const Tensor h = prefill(group, {prompts.begin() + begin, prompts.begin() + end});
        std::vector<int64_t> last;
        int64_t row = 0;
        for (int id : group) {
            if (states) states->push_back(h.rows(row, live_[id].length));
            row += live_[id].length;
            last.push_back(row - 1);
        }
        remember(group, h, last);
    }
    return ids;
}

// Top states of the prompts' positions, packed.
Tensor Decoder::prefill(const std::vector<int>& ids,
                        const std::vector<std::vector<int32_t>>& prompts) {
    const auto spans_from = [&](int first) {
        auto spans = std::make_shared<SpanBatch>();
        for (int id : ids)
            PagedStore::add_span(*spans, live_[id].pages, first, live_[id].length - first);
        return spans;
    };
    std::vector<int32_t> tokens, rest;
    std::vector<int64_t> before, here;  // rows of t-1 and t, for t >= 1
    for (const std::vector<int32_t>& prompt : prompts)
        for (size_t t = 0; t < prompt.size(); ++t) {
            if (t > 0) {
                before.push_back(int64_t(tokens.size()) - 1);
                here.push_back(int64_t(tokens.size()));
                rest.push_back(prompt[t]);
            }
            tokens.push_back(prompt[t]);
        }
    const Tensor plain = advance(model_, store_, spans_from(0), tokens);
    if (mode_ != Mode::fused || rest.empty()) return plain;
    // Position 0 is plain in every pass, so its keys and values stand; the second pass rewrites the
    // others, each fused with pass 1's state before it.
    Context& context = model_.context();
    const int64_t n = int64_t(rest.size());
    const Tensor carried = tensor::carry_forward({}, plain, Tensor::from(context, before, {n}), {});
    const Tensor fused = advance(model_, store_, spans_from(1), rest, carried);
    Tensor both = Tensor::empty(context, plain.shape(), plain.dtype());
    both.copy_from(plain);
    tensor::copy_rows(both, Tensor::from(context, here, {n}), fused, {}, n);
    return both;
}

int Decoder::fork(int id) {
    const int copy = add();
    live_[copy].pages = store_->fork(live_[id].pages, live_[id].length);
    live_[copy].length = live_[id].length;
    remember({copy}, last_, {id});
    return copy;
}

void Decoder::drop(int id) {
    store_->release(live_[id].pages);
    live_[id].used = false;
}

Tensor Decoder::states(const std::vector<int>& ids) const {
    const int64_t n = int64_t(ids.size());
    Tensor out = Tensor::empty(model_.context(), {n, model_.config().dim}, model_.dtype());
    const std::vector<int64_t> rows(ids.begin(), ids.end());
    tensor::copy_rows(out, {}, last_, Tensor::from(model_.context(), rows, {n}), n);
    return out;
}

// Steps share a recording until the longest sequence passes a power of two.
Decoder::Step& Decoder::step_of(const SpanBatch& spans) {
    const int reach = std::max(kShortestReach, int(std::bit_ceil(unsigned(spans.max_end()))));
    model_.reserve_positions(reach);
    // Recordings hold addresses: what has moved makes them void.
    if (steps_capacity_ != store_->capacity() || steps_rope_ != model_.rope_positions())
        steps_.clear();
    steps_capacity_ = store_->capacity();
    steps_rope_ = model_.rope_positions();
    const int64_t n = spans.rows();
    // Each holds its activations: as sequences end one by one, numbers that do not come back must
    // go.
    if (steps_.size() >= kMostSteps && !steps_.contains({n, reach})) steps_.clear();
    Step& step = steps_[{n, reach}];
    Context& context = model_.context();
    if (!step.inputs.spans) {
        step.inputs = {std::make_shared<SpanBatch>(spans), Tensor::empty(context, {n}, DType::i32),
                       Tensor::empty(context, {n}, DType::i64)};
        step.inputs.spans->upload(context, reach);
        step.ids = Tensor::empty(context, {n}, DType::i64);
        step.states = Tensor::empty(context, {n, model_.config().dim}, model_.dtype());
    } else {
        step.inputs.spans->overwrite(spans);
    }
    return step;
}

Tensor Decoder::step(const std::vector<int>& ids, const std::vector<int32_t>& tokens,
                     std::vector<Tensor>* depths) {
    SpanBatch spans;
    for (int id : ids) {
        Live& live = live_[id];
        store_->reserve(live.pages, live.length + 1);
        PagedStore::add_span(spans, live.pages, live.length, 1);
    }
    Step& step = step_of(spans);
    const int64_t n = int64_t(ids.size());
    const auto fill = [](Tensor& t, const auto& values) {
        t.copy_in(values.data(), values.size() * sizeof(values[0]));
    };
    fill(step.inputs.tokens, tokens);
    fill(step.inputs.slots, spans.own_slots());
    fill(step.ids, std::vector<int64_t>(ids.begin(), ids.end()));
    Context& context = model_.context();
    const auto work = [&] {
        Tensor carried;
        if (mode_ != Mode::standard) {
            carried = Tensor::empty(context, step.states.shape(), model_.dtype());
            tensor::copy_rows(carried, {}, last_, step.ids, n);
        }
        const Tensor h = advance(model_, store_, step.inputs, carried, depths);
        tensor::copy_rows(last_, step.ids, h, {}, n);
        step.states.copy_from(h);
    };
    if (depths)  // a graph may keep no tensor that it made
        work();
    else
        step.graph.run(context, work);
    for (int id : ids) ++live_[id].length;
    Tensor states = Tensor::empty(context, step.states.shape(), model_.dtype());
    states.copy_from(step.states);
    return states;
}

Tensor Decoder::rerun(int id, int first, const std::vector<int32_t>& tokens,
                      const Tensor& carried) {
    PagedStore::Pages& pages = live_[id].pages;
    const int count = int(tokens.size());
    store_->reserve(pages, first + count);
    auto spans = std::make_shared<SpanBatch>();
    PagedStore::add_span(*spans, pages, first, count);
    return advance(model_, store_, spans, tokens, carried);
}

Trace trace_of(const Decoder& decoder, int id, const Tensor& hidden) {
    Trace trace{hidden, {}, {}};
    for (int l = 0; l < decoder.model().config().layers; ++l) {
        const int T = int(hidden.dim(0));
        trace.keys.push_back(decoder.store().read_keys(decoder.pages(id), l, T));
        trace.values.push_back(decoder.store().read_values(decoder.pages(id), l, T));
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
