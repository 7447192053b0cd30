#include "model/core/replay.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

namespace fbt::model::core {

Replay::Replay(Model& model, std::vector<int32_t> tokens, int prompt_length, Mode mode)
    : decoder_(model, mode),
      mode_(mode),
      response_(tokens.begin() + prompt_length, tokens.end()),
      prompt_length_(prompt_length),
      squares_(response_.size()) {
    std::vector<Tensor> head;
    tokens.resize(prompt_length);
    id_ = decoder_.prefill({tokens}, &head)[0];
    const int64_t T = prompt_length + int64_t(response_.size());
    hidden_ = Tensor::empty(model.context(), {T, model.config().dim}, model.dtype());
    hidden_.rows(0, prompt_length).copy_from(head[0]);
    begin_block(0, int(response_.size()));
}

void Replay::begin_block(int begin, int end) {
    begin_ = settled_ = begin;
    end_ = end;
    block_passes_ = 0;
}

// Let r be the response positions, and all those before `settled` be as decoding makes them from
// what lies before the block. A later pass k computes position r = settled from decoding's own
// inputs: the carried state of r-1, and the keys and values before it. So r too is right now. If
// its state is the one that pass k-1 gave, then that state, which pass k carried into r+1, was
// right already, and so r+1 is right now; and so on until the first state that changed. What
// pass k+1 would compute of them has the same inputs, hence the same bits (the row rule), and it
// may leave them out. Once all have settled, the block equals decoding: that is the only fixed
// point there is.
void Replay::next() {
    const int from = settled_, count = end_ - from;
    ++passes_;
    ++block_passes_;
    visited_ += end_ - begin_;
    computed_ += count;
    if (count == 0) {
        change_ = 0;
        return;
    }
    const bool plain = block_passes_ == 1;
    // h_{t-1} of each: the state before the block or the settled positions, then the last pass's.
    const Tensor carried = plain ? Tensor() : hidden_.rows(prompt_length_ + from - 1, count);
    const std::vector<int32_t> tokens(response_.begin() + from, response_.begin() + end_);
    const Tensor h = decoder_.rerun(id_, prompt_length_ + from, tokens, carried);
    Tensor rows = hidden_.rows(prompt_length_ + from, count);
    const std::vector<double> before = plain ? std::vector<double>() : rows.to_double();
    const std::vector<double> after = h.to_double();
    rows.copy_from(h);

    const size_t D = after.size() / size_t(count);
    int same = 0;
    double difference = 0, size = 0;
    for (int r = 0; r < count; ++r) {
        const double* now = after.data() + size_t(r) * D;
        double square = 0;
        for (size_t d = 0; d < D; ++d) square += now[d] * now[d];
        squares_[size_t(from + r)] = square;
        if (plain) continue;
        const double* then = before.data() + size_t(r) * D;
        for (size_t d = 0; d < D; ++d) difference += (now[d] - then[d]) * (now[d] - then[d]);
        if (same == r && std::memcmp(now, then, D * sizeof(double)) == 0) ++same;
    }
    for (int r = begin_; r < end_; ++r) size += squares_[size_t(r)];
    change_ = plain ? INFINITY : std::sqrt(difference / size);
    if (mode_ == Mode::standard)
        settled_ = end_;  // decoding is plain too
    else if (!plain)
        settled_ = std::min(end_, from + same + 1);
}

void Replay::run(const ReplayLimits& limits) {
    const int n = int(response_.size()), size = limits.block > 0 ? limits.block : n;
    passes_ = 0;
    computed_ = visited_ = 0;
    exact_ = true;
    for (int begin = 0; begin < n; begin += std::min(size, n - begin)) {
        if (begin > 0) exact_ = exact_ && settled_ == end_;
        begin_block(begin, begin + std::min(size, n - begin));
        do next();
        while (settled_ < end_ && block_passes_ < limits.passes &&
               !(limits.tolerance > 0 && change_ <= limits.tolerance));
    }
}

Trace replay_recorded(Model& model, const std::vector<int32_t>& tokens, int prompt_length,
                      Mode mode, const Tensor& states) {
    Decoder decoder(model, mode);
    const int T = int(tokens.size()), P = prompt_length, n = T - P;
    const Tensor carried = mode == Mode::standard || n == 0 ? Tensor() : states.rows(P - 1, n);
    int id = 0;
    if (mode == Mode::fused) {  // whose prompt takes two passes of its own
        id = decoder.prefill({{tokens.begin(), tokens.begin() + P}})[0];
        if (n > 0) decoder.feed({{id, P, std::span(tokens).subspan(size_t(P)), P, carried}});
    } else {
        id = decoder.add();
        decoder.feed({{id, 0, tokens, mode == Mode::standard ? T : P, carried}});
    }
    return trace_of(decoder, id, decoder.store().read_states(decoder.pages(id), 0, T));
}

constexpr int64_t kLogitRows = 256;  // positions whose logits are in memory at a time

Difference first_difference(Model& model, const std::vector<int32_t>& tokens, int prompt_length,
                            const Record& record, const Trace& trace) {
    Difference first;
    const auto differs = [&](int64_t position, const std::string& what) {
        if (first.position < 0 || position < first.position) first = {position, what};
    };
    // At one position, causes come first: the token's probability, keys and values, the state.
    const int64_t n = int64_t(record.logprobs.size());
    bool same = true;
    for (int64_t i = 0; i < n && same; i += kLogitRows) {
        const int64_t rows = std::min(kLogitRows, n - i);
        const auto sampled = tokens.begin() + prompt_length + i;
        const std::vector<double> own =
            log_probabilities(model.logits(trace.hidden.rows(prompt_length - 1 + i, rows)),
                              {sampled, sampled + rows});
        for (int64_t r = 0; r < rows && same; ++r) {
            same = std::isfinite(own[size_t(r)]) &&
                   std::bit_cast<uint64_t>(own[size_t(r)]) ==
                       std::bit_cast<uint64_t>(record.logprobs[size_t(i + r)]);
            if (!same) differs(prompt_length + i + r, "log-probability");
        }
    }
    const auto look = [&](const std::string& what, std::span<const float> recorded,
                          const Tensor& computed) {
        const std::vector<double> own = computed.to_double();
        for (size_t i = 0; i < own.size(); ++i)
            if (!std::isfinite(own[i]) ||
                std::bit_cast<uint32_t>(float(own[i])) != std::bit_cast<uint32_t>(recorded[i])) {
                differs(int64_t(i) / (int64_t(own.size()) / computed.dim(0)), what);
                return;
            }
    };
    for (size_t l = 0; l < trace.keys.size(); ++l) {
        const size_t each = size_t(trace.keys[l].numel());
        const std::string layer = " of layer " + std::to_string(l + 1);
        if (!record.keys.empty())
            look("keys" + layer, record.keys.subspan(l * each, each), trace.keys[l]);
        if (!record.values.empty())
            look("values" + layer, record.values.subspan(l * each, each), trace.values[l]);
    }
    if (!record.states.empty()) look("state", record.states, trace.hidden);
    return first;
}

Certificate certify(Model& model, const std::vector<int32_t>& tokens, int prompt_length, Mode mode,
                    const Record& record) {
    const Config& c = model.config();
    const int64_t n = int64_t(tokens.size()) - prompt_length;
    const int64_t T = prompt_length + std::max<int64_t>(n - 1, 0);
    const auto check = [](const char* what, size_t got, int64_t wanted, bool needed) {
        if (got != size_t(wanted) && (got > 0 || needed))
            throw tensor::Error(tensor::ErrorKind::usage,
                                std::string("the record holds ") + std::to_string(got) + " " +
                                    what + ", expected " + std::to_string(wanted));
    };
    const bool carries = mode != Mode::standard && T > prompt_length;
    const int64_t cache = int64_t(c.layers) * T * c.kv_heads * c.head_dim;
    check("values of states", record.states.size(), T * c.dim, carries);
    check("values of keys", record.keys.size(), cache, false);
    check("values of values", record.values.size(), cache, false);
    check("log-probabilities", record.logprobs.size(), n, false);
    Tensor states;
    if (carries)
        states = Tensor::from_double(model.context(), {record.states.begin(), record.states.end()},
                                     {T, c.dim}, model.dtype());
    const std::vector<int32_t> fed(tokens.begin(), tokens.begin() + T);
    Certificate out{replay_recorded(model, fed, prompt_length, mode, states), {}};
    out.difference = first_difference(model, tokens, prompt_length, record, out.trace);
    return out;
}

namespace {

// sum (a-b)^2 and sum a^2 of the rows [first, ...); marks rows whose bits differ.
void add_difference(const Tensor& a, const Tensor& b, int first, double& difference, double& size,
                    std::vector<char>& exact) {
    const std::vector<double> x = a.to_double(), y = b.to_double();
    const size_t width = x.size() / size_t(a.dim(0));
    for (size_t i = size_t(first) * width; i < x.size(); ++i) {
        difference += (x[i] - y[i]) * (x[i] - y[i]);
        size += x[i] * x[i];
        if (std::memcmp(&x[i], &y[i], sizeof(double)) != 0) exact[i / width - first] = 0;
    }
}

struct Row {
    double max = -INFINITY, lse = 0;
    int64_t argmax = 0;
};

Row summary(const double* logits, int64_t V) {
    Row row;
    for (int64_t v = 0; v < V; ++v)
        if (logits[v] > row.max) {
            row.max = logits[v];
            row.argmax = v;
        }
    double sum = 0;
    for (int64_t v = 0; v < V; ++v) sum += std::exp(logits[v] - row.max);
    row.lse = row.max + std::log(sum);
    return row;
}

}  // namespace

ReplayError compare(Model& model, const Trace& rollout, const Trace& replay, int prompt_length,
                    const std::vector<int32_t>& next) {
    const int64_t T = rollout.hidden.dim(0), n = T - prompt_length, V = model.config().vocab_size;
    ReplayError error{};
    error.positions = n;
    std::vector<char> exact(n, 1);
    double dk = 0, k = 0, dv = 0, v = 0, dh = 0, h = 0;
    for (size_t l = 0; l < rollout.keys.size(); ++l) {
        add_difference(rollout.keys[l], replay.keys[l], prompt_length, dk, k, exact);
        add_difference(rollout.values[l], replay.values[l], prompt_length, dv, v, exact);
    }
    add_difference(rollout.hidden, replay.hidden, prompt_length, dh, h, exact);
    error.keys = std::sqrt(dk / k);
    error.values = std::sqrt(dv / v);
    for (char e : exact) error.exact += e;
    while (error.prefix < n && exact[size_t(error.prefix)]) ++error.prefix;

    int64_t agree = 0, counted = 0;
    for (int64_t first = 0; first < n; first += kLogitRows) {
        const int64_t rows = std::min(kLogitRows, n - first);
        const auto logits = [&](const Trace& t) {
            return model.logits(t.hidden.rows(prompt_length + first, rows)).to_double();
        };
        const std::vector<double> a = logits(rollout), b = logits(replay);
        for (int64_t r = 0; r < rows; ++r) {
            const double *p = a.data() + r * V, *q = b.data() + r * V;
            const Row rp = summary(p, V), rq = summary(q, V);
            agree += rp.argmax == rq.argmax;
            for (int64_t i = 0; i < V; ++i) {
                const double lp = p[i] - rp.lse, lq = q[i] - rq.lse;
                error.kl += std::exp(lp) * (lp - lq);
            }
            const int32_t token = next[first + r];
            if (token < 0) continue;
            ++counted;
            error.logprob += std::abs((p[token] - rp.lse) - (q[token] - rq.lse));
        }
    }
    error.argmax = double(agree) / double(n);
    error.kl /= double(n);
    error.logprob /= double(std::max<int64_t>(counted, 1));
    return error;
}

}  // namespace fbt::model::core
