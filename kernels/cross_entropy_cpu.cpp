// Cross-entropy and z-loss of rows of logits, vectorised over the vocabulary.
#include <algorithm>
#include <cmath>

#include "kernels/cpu_tile.h"
#include "kernels/cross_entropy.h"

namespace fbt::kernels::cpu {

// m = max_v logits[v], S = sum_v exp(logits[v] - m):   lse = m + log S
//   ce = log S + (m - logits[target]), which keeps its digits where the logits are large
// A NaN logit is passed over by the maximum, and makes S, and so lse and ce, NaN. The row is read
// twice: the second time from cache, and two simple loops beat one that rescales as it goes.
template <class T, class A>
Status cross_entropy_forward(A* ce, A* lse, const T* logits, const int32_t* targets, int64_t N,
                             int V, Stream s) {
    if (N < 0 || V < 1) return {Code::bad_argument, "cross_entropy_forward needs N >= 0, V >= 1"};
    for_rows(s, N, V, [=](int64_t n) {
        const T* row = logits + n * V;
        const A m = row_max(V, [row](int64_t v) { return A(row[v]); });
        const A sum = row_sum(V, [row, m](int64_t v, int count) {
            return exp(load_first(row + v, count) - splat(m));
        });
        const A log_sum = std::log(sum);
        lse[n] = m + log_sum;
        ce[n] = targets[n] < 0 ? A(0) : log_sum + (m - A(row[targets[n]]));
    });
    return {};
}

// dlogits[v] = weight*((1 + 2*z_weight*lse)*exp(logits[v] - lse) - [v == target])
template <class T, class A>
Status cross_entropy_backward(T* dlogits, const T* logits, const A* lse, const int32_t* targets,
                              const A* weight, A z_weight, int64_t N, int V, Stream s) {
    if (N < 0 || V < 1) return {Code::bad_argument, "cross_entropy_backward needs N >= 0, V >= 1"};
    for_rows(s, N, V, [=](int64_t n) {
        T* dlogits_row = dlogits + n * V;
        const T* row = logits + n * V;
        if (targets[n] < 0) {
            std::fill_n(dlogits_row, V, T(0.f));
            return;
        }
        const A z = 1 + 2 * z_weight * lse[n], l = lse[n], w = weight[n];
        const A target = A(row[targets[n]]);  // before the row is overwritten
        for_vectors(V, [=](int64_t v, int count) {
            const Vec p = exp(load_first(row + v, count) - splat(l));
            store_first(dlogits_row + v, splat(w) * (splat(z) * p), count);
        });
        dlogits_row[targets[n]] = T(w * (z * exp(target - l) - 1));
    });
    return {};
}

#define FBT_INSTANTIATE(T)                                                                       \
    template Status cross_entropy_forward<T, float>(float*, float*, const T*, const int32_t*,    \
                                                    int64_t, int, Stream);                       \
    template Status cross_entropy_backward<T, float>(T*, const T*, const float*, const int32_t*, \
                                                     const float*, float, int64_t, int, Stream);
FBT_INSTANTIATE(float)
FBT_INSTANTIATE(bf16)

}  // namespace fbt::kernels::cpu
