// Choosing the next token: a heap yields the best tokens one at a time, so that a peaked row costs
// one pass and a few pops where the reference sorts all of it.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/cpu_math.h"
#include "kernels/sampling.h"

namespace fbt::kernels::cpu {
namespace {

// A NaN logit counts as -infinity: it is drawn only from a row that holds nothing better.
template <class T>
float value(T logit) {
    const float x = float(logit);
    return x == x ? x : -INFINITY;
}

// exp((logit - largest)/temperature). Equal logits count 1 before the subtraction, which would make
// NaN of two equal infinities.
inline float weight_of(float logit, float largest, float temperature) {
    const float w = exp((logit - largest) / temperature);
    return logit == largest ? 1.f : w;
}

template <class T>
int32_t sample_row(const T* logits, int V, const Sampling& how, double uniform, int32_t* ids) {
    const float largest = row_max(V, [logits](int64_t v) { return value(logits[v]); });
    if (how.temperature == 0)
        return int32_t(std::find_if(logits, logits + V, [=](T x) { return value(x) == largest; }) -
                       logits);

    std::iota(ids, ids + V, 0);
    const auto worse = [logits](int32_t a, int32_t b) {
        const float x = value(logits[a]), y = value(logits[b]);
        return x != y ? x < y : a > b;
    };
    std::make_heap(ids, ids + V, worse);
    int popped = 0;  // the i-th best token moves to ids[V - 1 - i], behind the shrinking heap
    const auto best = [&](int i) {
        for (; popped <= i; ++popped) std::pop_heap(ids, ids + V - popped, worse);
        return ids[V - 1 - i];
    };
    const auto weight = [logits, largest, temperature = how.temperature](int64_t id) {
        return double(weight_of(value(logits[id]), largest, temperature));
    };

    int kept = how.top_k > 0 ? std::min(how.top_k, V) : V;
    double total = 0;
    if (kept < V)
        for (int i = 0; i < kept; ++i) total += weight(best(i));
    else
        total = row_sum_double(V, weight);
    if (how.top_p < 1) {  // the shortest prefix that reaches top_p of the total
        const double enough = double(how.top_p) * total;
        double sum = 0;
        int i = 0;
        while (i < kept && sum < enough) sum += weight(best(i++));
        kept = i;
        total = sum;
    }
    double sum = 0;
    for (int i = 0; i < kept; ++i) {
        sum += weight(best(i));
        if (uniform * total < sum) return best(i);
    }
    // Not reached: uniform <= 1 - 2^-24, and the two sums of doubles agree much better.
    return best(kept - 1);
}

}  // namespace

template <class T>
Status sample(int32_t* tokens, const T* logits, const Sampling* settings, const float* uniform,
              int64_t N, int V, int32_t* scratch_ids, Stream s) {
    if (Status status = sample_arguments(settings, N, V); !status.ok()) return status;
    for_rows(s, N, V, [=](int64_t n) {
        tokens[n] = sample_row(logits + n * V, V, settings[n], uniform[n], scratch_ids + n * V);
    });
    return {};
}

#define FBT_INSTANTIATE(T)                                                                     \
    template Status sample<T>(int32_t*, const T*, const Sampling*, const float*, int64_t, int, \
                              int32_t*, Stream);
FBT_INSTANTIATE(float)
FBT_INSTANTIATE(bf16)

}  // namespace fbt::kernels::cpu
