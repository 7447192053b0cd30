// Choosing the next token in plain loops: the whole row is sorted.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "kernels/sampling.h"

namespace fbt::kernels::ref {
namespace {

// A NaN logit counts as -infinity: it is drawn only from a row that holds nothing better.
template <class T>
double value(T logit) {
    return std::isnan(logit) ? -std::numeric_limits<double>::infinity() : double(logit);
}

// exp((logit - largest)/temperature). Equal logits count 1 before the subtraction, which would make
// NaN of two equal infinities.
double weight_of(double logit, double largest, double temperature) {
    return logit == largest ? 1 : std::exp((logit - largest) / temperature);
}

template <class T>
int32_t sample_row(const T* logits, int V, const Sampling& how, double uniform, int32_t* ids) {
    std::iota(ids, ids + V, 0);
    std::sort(ids, ids + V, [&](int32_t a, int32_t b) {
        const double x = value(logits[a]), y = value(logits[b]);
        return x != y ? x > y : a < b;
    });
    if (how.temperature == 0) return ids[0];

    const double largest = value(logits[ids[0]]);
    const auto weight = [&](int i) {
        return weight_of(value(logits[ids[i]]), largest, how.temperature);
    };

    int kept = how.top_k > 0 ? std::min(how.top_k, V) : V;
    double total = 0;
    for (int i = 0; i < kept; ++i) total += weight(i);

    if (how.top_p < 1) {  // the shortest prefix that reaches top_p of the total
        const double enough = double(how.top_p) * total;
        double sum = 0;
        int i = 0;
        while (i < kept && sum < enough) sum += weight(i++);
        kept = i;
        total = sum;
    }
    double sum = 0;
    for (int i = 0; i < kept; ++i) {
        sum += weight(i);
        if (uniform * total < sum) return ids[i];
    }
    return ids[kept - 1];  // not reached: the last sum is total, and uniform < 1
}

}  // namespace

template <class T>
Status sample(int32_t* tokens, const T* logits, const Sampling* settings, const float* uniform,
              int64_t N, int V, int32_t* scratch_ids, Stream) {
    if (Status status = sample_arguments(settings, N, V); !status.ok()) return status;
    for (int64_t n = 0; n < N; ++n)
        tokens[n] = sample_row(logits + n * V, V, settings[n], uniform[n], scratch_ids + n * V);
    return {};
}

template Status sample<float>(int32_t*, const float*, const Sampling*, const float*, int64_t, int,
                              int32_t*, Stream);
template Status sample<double>(int32_t*, const double*, const Sampling*, const float*, int64_t, int,
                               int32_t*, Stream);

}  // namespace fbt::kernels::ref
