#include "model/core/evaluate.h"

#include <cmath>
#include <limits>
#include <numeric>

#include "kernels/philox.h"
#include "model/core/pass_rows.h"

namespace fbt::model::core {
namespace {

enum class Disturb { none, permuted, mean };

// What one pass over one batch adds up to.
struct Sums {
    double ce = 0, correct = 0, difference = 0, size = 0;
};

struct Scores {
    std::vector<double> ce;  // per row; 0 where there is no target
    std::vector<char> correct;
};

// Cross-entropy and argmax of rows against their targets, in chunks.
Scores score(Model& model, const Tensor& h, const std::vector<int32_t>& targets) {
    Scores out;
    const int64_t N = h.dim(0);
    const DType a = tensor::accumulate_dtype(model.dtype());
    for (int64_t first = 0; first < N; first += autograd::kLogitRows) {
        const int64_t n = std::min(autograd::kLogitRows, N - first);
        const Tensor logits = model.logits(h.rows(first, n));
        Tensor ce = Tensor::empty(model.context(), {n}, a);
        Tensor lse = Tensor::empty(model.context(), {n}, a);
        tensor::cross_entropy_forward(
            ce, lse, logits,
            Tensor::from(model.context(),
                         std::vector<int32_t>(targets.begin() + first, targets.begin() + first + n),
                         {n}));
        const std::vector<double> values = ce.to_double();
        out.ce.insert(out.ce.end(), values.begin(), values.end());
        const std::vector<int32_t> best =
            tensor::sample(logits, std::vector<kernels::Sampling>(n, {.temperature = 0}),
                           std::vector<float>(n, 0.f));
        for (int64_t i = 0; i < n; ++i)
            out.correct.push_back(targets[first + i] >= 0 && best[i] == targets[first + i]);
    }
    return out;
}

// Replaces every row by the mean of all, summed in double in row order.
Tensor mean_rows(const Tensor& x) {
    const int64_t R = x.dim(0), D = x.dim(1);
    std::vector<double> v = x.to_double(), mean(D, 0);
    for (int64_t r = 0; r < R; ++r)
        for (int64_t d = 0; d < D; ++d) mean[d] += v[r * D + d] / double(R);
    for (int64_t i = 0; i < R * D; ++i) v[i] = mean[i % D];
    return Tensor::from_double(x.context(), v, x.shape(), x.dtype());
}

// A permutation of 0..n-1 (Fisher and Yates), drawn by counter.
std::vector<int64_t> permutation(int64_t n, uint64_t seed, int64_t batch, int pass) {
    const auto key = kernels::philox_key(seed, kernels::Draw::disturb, uint64_t(batch), pass);
    std::vector<int64_t> p(n);
    std::iota(p.begin(), p.end(), 0);
    for (int64_t i = n - 1; i > 0; --i)
        std::swap(
            p[i],
            p[kernels::uniform_below(kernels::philox_bits(key, uint64_t(i)), uint32_t(i + 1))]);
    return p;
}

// All passes over one batch. Position 0 is plain in every pass, so its state, keys and values are
// pass 1's; each later pass rewrites positions [1, T) of the same store.
std::vector<Sums> run(Model& model, const Batch& batch, int passes, Disturb disturb, uint64_t seed,
                      int64_t batch_index) {
    Context& context = model.context();
    const size_t S = batch.lengths.size();
    const PassRows whole(batch.lengths, std::vector<int32_t>(S, 0));
    const PassRows rows(batch.lengths, std::vector<int32_t>(S, 1));
    auto store = std::make_shared<PagedStore>(model);
    std::vector<PagedStore::Pages> pages(S);
    const auto spans = [&](int first) {
        auto out = std::make_shared<SpanBatch>();
        for (size_t s = 0; s < S; ++s)
            PagedStore::add_span(*out, pages[s], first, batch.lengths[s] - first);
        return out;
    };
    for (size_t s = 0; s < S; ++s) store->reserve(pages[s], batch.lengths[s]);

    std::vector<Sums> sums(passes);
    const Tensor h1 = advance(model, store, spans(0), batch.tokens);
    const Scores first = score(model, h1, batch.targets);
    double head_ce = 0, head_correct = 0;  // of the positions 0, the same in every pass
    for (size_t n = 0; n < batch.tokens.size(); ++n) {
        sums[0].ce += first.ce[n];
        sums[0].correct += first.correct[n];
    }
    std::vector<int32_t> tokens, targets;
    for (size_t s = 0; s < S; ++s) {
        head_ce += first.ce[whole.row(s, 0)];
        head_correct += first.correct[whole.row(s, 0)];
        for (int t = 1; t < batch.lengths[s]; ++t) {
            tokens.push_back(batch.tokens[whole.row(s, t)]);
            targets.push_back(batch.targets[whole.row(s, t)]);
        }
    }

    Tensor previous;                              // states of positions [1, T) of the last pass
    std::vector<double> before = h1.to_double();  // and on the host, of all positions
    const int64_t D = model.config().dim;
    for (int pass = 2; pass <= passes; ++pass) {
        Sums& sum = sums[pass - 1];
        sum.ce = head_ce;
        sum.correct = head_correct;
        if (rows.count == 0) continue;
        CarrySource from =
            carry_source(whole, pass == 2 ? whole : rows, pass == 2, rows, batch.indices);
        if (disturb == Disturb::permuted) {
            const std::vector<int64_t> p = permutation(rows.count, seed, batch_index, pass);
            std::vector<int64_t> source(rows.count);
            for (int64_t r = 0; r < rows.count; ++r) source[r] = from.source[p[r]];
            from.source = std::move(source);
        }
        Tensor carried = tensor::carry_forward(
            h1, previous, Tensor::from(context, from.source, {rows.count}), {});
        if (disturb == Disturb::mean) carried = mean_rows(carried);
        const Tensor h = advance(model, store, spans(1), tokens, carried);
        const Scores scores = score(model, h, targets);
        for (int64_t r = 0; r < rows.count; ++r) {
            sum.ce += scores.ce[r];
            sum.correct += scores.correct[r];
        }
        if (disturb == Disturb::none) {
            const std::vector<double> now = h.to_double();
            for (size_t s = 0; s < S; ++s)
                for (int t = 1; t < batch.lengths[s]; ++t)
                    for (int64_t d = 0; d < D; ++d) {
                        const double x = now[rows.row(s, t) * D + d];
                        double& y = before[whole.row(s, t) * D + d];
                        if (t >= pass) {
                            sum.difference += (x - y) * (x - y);
                            sum.size += x * x;
                        }
                        y = x;
                    }
        }
        previous = h;
    }
    return sums;
}

}  // namespace

std::vector<PassResult> evaluate(Model& model, const std::function<std::optional<Batch>()>& next,
                                 int passes, uint64_t seed, bool disturb) {
    std::vector<Sums> clean(passes), permuted(passes), mean(passes);
    int64_t targets = 0, batches = 0;
    const auto add = [&](std::vector<Sums>& total, const std::vector<Sums>& part) {
        for (int k = 0; k < passes; ++k) {
            total[k].ce += part[k].ce;
            total[k].correct += part[k].correct;
            total[k].difference += part[k].difference;
            total[k].size += part[k].size;
        }
    };
    while (const std::optional<Batch> batch = next()) {
        for (int32_t t : batch->targets) targets += t >= 0;
        add(clean, run(model, *batch, passes, Disturb::none, seed, batches));
        if (disturb) {
            add(permuted, run(model, *batch, passes, Disturb::permuted, seed, batches));
            add(mean, run(model, *batch, passes, Disturb::mean, seed, batches));
        }
        ++batches;
    }
    std::vector<PassResult> results;
    const double n = double(std::max<int64_t>(targets, 1));
    constexpr double nan = std::numeric_limits<double>::quiet_NaN();
    for (int k = 0; k < passes; ++k)
        results.push_back({k + 1, clean[k].ce / n, clean[k].correct / n,
                           clean[k].size > 0 ? std::sqrt(clean[k].difference / clean[k].size) : nan,
                           disturb ? permuted[k].ce / n : nan, disturb ? mean[k].ce / n : nan,
                           targets});
    return results;
}

namespace {

// Adds the numbers of targets and sequences, and of those that are right to the shares.
void add_decoded(Accuracy& out, Model& model, const Batch& batch, Mode mode) {
    const size_t S = batch.lengths.size();
    const PassRows whole(batch.lengths, std::vector<int32_t>(S, 0));
    Decoder decoder(model, mode);
    std::vector<std::vector<int32_t>> prompts;
    for (size_t s = 0; s < S; ++s) prompts.push_back({batch.tokens[whole.row(s, 0)]});
    std::vector<int> ids = decoder.prefill(prompts);
    std::vector<size_t> live(S);  // the sequence of each id
    std::iota(live.begin(), live.end(), size_t(0));

    std::vector<char> last(S, 0);
    Tensor h = decoder.states(ids);
    for (int t = 0; !ids.empty(); ++t) {
        std::vector<int32_t> targets;
        for (size_t s : live) targets.push_back(batch.targets[whole.row(s, t)]);
        const Scores scores = score(model, h, targets);
        for (size_t i = 0; i < live.size(); ++i) {
            if (targets[i] < 0) continue;
            ++out.targets;
            out.all += scores.correct[i];
            last[live[i]] = scores.correct[i];
        }
        std::vector<int> next_ids;
        std::vector<size_t> next_live;
        std::vector<int32_t> tokens;
        for (size_t i = 0; i < live.size(); ++i) {
            if (t + 1 == batch.lengths[live[i]]) {
                decoder.drop(ids[i]);
                continue;
            }
            next_ids.push_back(ids[i]);
            next_live.push_back(live[i]);
            tokens.push_back(batch.tokens[whole.row(live[i], t + 1)]);
        }
        ids = std::move(next_ids);
        live = std::move(next_live);
        if (!ids.empty()) h = decoder.step(ids, tokens);
    }
    for (char l : last) out.last += l;
    out.sequences += int64_t(S);
}

}  // namespace

Accuracy decode_accuracy(Model& model, const std::function<std::optional<Batch>()>& next,
                         Mode mode) {
    Accuracy out;
    while (const std::optional<Batch> batch = next()) add_decoded(out, model, *batch, mode);
    out.all /= double(std::max<int64_t>(out.targets, 1));
    out.last /= double(std::max<int64_t>(out.sequences, 1));
    return out;
}

}  // namespace fbt::model::core
