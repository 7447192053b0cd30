#include "model/core/replay.h"

#include <cmath>
#include <cstring>

namespace fbt::model::core {

Replay::Replay(Model& model, std::vector<int32_t> tokens, int prompt_length, Mode mode)
    : decoder_(model, mode),
      response_(tokens.begin() + prompt_length, tokens.end()),
      prompt_length_(prompt_length) {
    std::vector<Tensor> head;
    tokens.resize(prompt_length);
    id_ = decoder_.prefill({tokens}, &head)[0];
    const int64_t T = prompt_length + int64_t(response_.size());
    hidden_ = Tensor::empty(model.context(), {T, model.config().dim}, model.dtype());
    hidden_.rows(0, prompt_length).copy_from(head[0]);
}

void Replay::next() {
    const int64_t n = int64_t(response_.size());
    // h_{t-1} for t = P..T-1: the prompt's last state, then the last pass's.
    const Tensor carried = passes_ == 0 ? Tensor() : hidden_.rows(prompt_length_ - 1, n);
    const Tensor h = decoder_.rerun(id_, prompt_length_, response_, carried);
    hidden_.rows(prompt_length_, n).copy_from(h);
    ++passes_;
}

Trace replay_recorded(Model& model, const std::vector<int32_t>& tokens, int prompt_length,
                      Mode mode, const Tensor& states) {
    Decoder decoder(model, mode);
    std::vector<Tensor> head;
    const int id = decoder.prefill({{tokens.begin(), tokens.begin() + prompt_length}}, &head)[0];
    const int64_t T = int64_t(tokens.size()), n = T - prompt_length;
    Tensor hidden = Tensor::empty(model.context(), {T, model.config().dim}, model.dtype());
    hidden.rows(0, prompt_length).copy_from(head[0]);
    const Tensor carried = mode == Mode::standard ? Tensor() : states.rows(prompt_length - 1, n);
    hidden.rows(prompt_length, n)
        .copy_from(decoder.rerun(id, prompt_length, {tokens.begin() + prompt_length, tokens.end()},
                                 carried));
    return trace_of(decoder, id, hidden);
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
    constexpr int64_t kRows = 256;  // logits of that many positions at a time
    for (int64_t first = 0; first < n; first += kRows) {
        const int64_t rows = std::min(kRows, n - first);
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
