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
    double ce = 0, correct = 0, last = 0, unsettled = 0, unsettled_targets = 0, difference = 0,
           size = 0;
    // Which of them there are.
    static constexpr double Sums::*kParts[] = {
        &Sums::ce,         &Sums::correct, &Sums::last, &Sums::unsettled, &Sums::unsettled_targets,
        &Sums::difference, &Sums::size};

    void add(const Sums& o) {
        for (const auto part : kParts) this->*part += o.*part;
    }
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
    for (size_t s = 0; s < S; ++s) store->reserve(pages[s], 0, batch.lengths[s]);

    std::vector<Sums> sums(passes);
    const Tensor h1 = advance(model, store, spans(0), batch.tokens);
    const Scores first = score(model, h1, batch.targets);
    std::vector<int> last_target(S, -1);
    for (size_t s = 0; s < S; ++s)
        for (int t = 0; t < batch.lengths[s]; ++t)
            if (batch.targets[whole.row(s, t)] >= 0) last_target[s] = t;
    // Adds pass k's scores of positions [begin, end) of every sequence; row (s, t) is at.row(s, t).
    const auto count = [&](int pass, int begin, int end, const PassRows& at, const Scores& scores) {
        Sums& sum = sums[pass - 1];
        for (size_t s = 0; s < S; ++s)
            for (int t = begin; t < std::min(end, batch.lengths[s]); ++t) {
                const int64_t n = at.row(s, t);
                sum.ce += scores.ce[n];
                sum.correct += scores.correct[n];
                if (t == last_target[s]) sum.last += scores.correct[n];
                if (t < pass || batch.targets[whole.row(s, t)] < 0) continue;
                sum.unsettled += scores.ce[n];
                ++sum.unsettled_targets;
            }
    };
    constexpr int kAll = std::numeric_limits<int>::max();
    count(1, 0, kAll, whole, first);
    std::vector<int32_t> tokens, targets;
    for (size_t s = 0; s < S; ++s) {
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
        count(pass, 0, 1, whole, first);  // positions 0 are the same in every pass
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
        count(pass, 1, kAll, rows, scores);
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
                                 int passes, uint64_t seed, bool disturb, const SumNumbers& sum) {
    std::vector<Sums> clean(passes), permuted(passes), mean(passes);
    int64_t targets = 0, sequences = 0, batches = 0;
    const auto add = [&](std::vector<Sums>& total, const std::vector<Sums>& part) {
        for (int k = 0; k < passes; ++k) total[k].add(part[k]);
    };
    while (const std::optional<Batch> batch = next()) {
        targets += batch->targets_counted();
        sequences += int64_t(batch->lengths.size());
        add(clean, run(model, *batch, passes, Disturb::none, seed, batches));
        if (disturb) {
            add(permuted, run(model, *batch, passes, Disturb::permuted, seed, batches));
            add(mean, run(model, *batch, passes, Disturb::mean, seed, batches));
        }
        ++batches;
    }
    if (sum) {
        std::vector<double> numbers = {double(targets), double(sequences)};
        const auto each = [&](auto&& f) {
            for (std::vector<Sums>* part : {&clean, &permuted, &mean})
                for (Sums& s : *part)
                    for (const auto number : Sums::kParts) f(s.*number);
        };
        each([&](double x) { numbers.push_back(x); });
        numbers = sum(numbers);
        targets = int64_t(numbers[0]);
        sequences = int64_t(numbers[1]);
        size_t next_number = 2;
        each([&](double& x) { x = numbers[next_number++]; });
    }
    std::vector<PassResult> results;
    const double n = double(std::max<int64_t>(targets, 1));
    constexpr double nan = std::numeric_limits<double>::quiet_NaN();
    for (int k = 0; k < passes; ++k) {
        const Sums& c = clean[k];
        results.push_back(
            {.pass = k + 1,
             .loss = c.ce / n,
             .accuracy = c.correct / n,
             .last = c.last / double(std::max<int64_t>(sequences, 1)),
             .unsettled = c.unsettled_targets > 0 ? c.unsettled / c.unsettled_targets : nan,
             .change = c.size > 0 ? std::sqrt(c.difference / c.size) : nan,
             .permuted = disturb ? permuted[k].ce / n : nan,
             .mean = disturb ? mean[k].ce / n : nan,
             .targets = targets,
             .sequences = sequences});
    }
    return results;
}

InputScales input_scales(Model& model, const Batch& batch) {
    Context& context = model.context();
    const size_t S = batch.lengths.size();
    const PassRows whole(batch.lengths, std::vector<int32_t>(S, 0));
    const PassRows rows(batch.lengths, std::vector<int32_t>(S, 1));
    auto store = std::make_shared<PagedStore>(model);
    auto spans = std::make_shared<SpanBatch>();
    std::vector<PagedStore::Pages> pages(S);
    std::vector<int32_t> fused_tokens;
    for (size_t s = 0; s < S; ++s) {
        store->reserve(pages[s], 0, batch.lengths[s]);
        PagedStore::add_span(*spans, pages[s], 0, batch.lengths[s]);
        for (int t = 1; t < batch.lengths[s]; ++t)
            fused_tokens.push_back(batch.tokens[whole.row(s, t)]);
    }
    const Tensor h1 = advance(model, store, spans, batch.tokens);
    const CarrySource from = carry_source(whole, whole, true, rows, batch.indices);
    const Tensor carried =
        tensor::carry_forward(h1, {}, Tensor::from(context, from.source, {rows.count}), {});
    Tape tape(false);
    const Tensor tokens = Tensor::from(context, fused_tokens, {rows.count});
    const std::vector<double>
        e = model.embed(tape, tokens).value().to_double(),
        u = model.fuse(tape, tape.constant(carried), tokens).value().to_double();
    InputScales out;
    const size_t D = size_t(model.config().dim);
    for (size_t row = 0; row < e.size(); row += D) {
        double ee = 0, uu = 0, eu = 0;
        for (size_t i = row; i < row + D; ++i) {
            ee += e[i] * e[i];
            uu += u[i] * u[i];
            eu += e[i] * u[i];
        }
        out.plain += ee;
        out.fused += uu;
        out.cosine += eu / std::sqrt(ee * uu);
    }
    const double n = double(std::max<int64_t>(rows.count, 1));
    return {std::sqrt(out.plain / n / double(D)), std::sqrt(out.fused / n / double(D)),
            out.cosine / n};
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
