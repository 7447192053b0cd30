// Cross-entropy and z-loss of rows of logits in plain loops.
#include <algorithm>
#include <cmath>

#include "kernels/cross_entropy.h"

namespace fbt::kernels::ref {

// m = max_v logits[v], S = sum_v exp(logits[v] - m):   lse = m + log S
//   ce = log S + (m - logits[target]), which keeps its digits where the logits are large
// A NaN logit makes S, and so lse and ce, NaN, whichever way the comparison with m went.
template <class T, class A>
Status cross_entropy_forward(A* ce, A* lse, const T* logits, const int32_t* targets, int64_t N,
                             int V, Stream) {
    if (N < 0 || V < 1) return {Code::bad_argument, "cross_entropy_forward needs N >= 0, V >= 1"};
    for (int64_t n = 0; n < N; ++n) {
        const T* row = logits + n * V;
        A m = A(row[0]), sum = 0;
        for (int v = 1; v < V; ++v) m = std::max(m, A(row[v]));
        for (int v = 0; v < V; ++v) sum += std::exp(A(row[v]) - m);
        const A log_sum = std::log(sum);
        lse[n] = m + log_sum;
        ce[n] = targets[n] < 0 ? A(0) : log_sum + (m - A(row[targets[n]]));
    }
    return {};
}

// dlogits[v] = weight*((1 + 2*z_weight*lse)*exp(logits[v] - lse) - [v == target])
template <class T, class A>
Status cross_entropy_backward(T* dlogits, const T* logits, const A* lse, const int32_t* targets,
                              const A* weight, A z_weight, int64_t N, int V, Stream) {
    if (N < 0 || V < 1) return {Code::bad_argument, "cross_entropy_backward needs N >= 0, V >= 1"};
    for (int64_t n = 0; n < N; ++n) {
        if (targets[n] < 0) {
            std::fill_n(dlogits + n * V, V, T(0));
            continue;
        }
        const A z = 1 + 2 * z_weight * lse[n];
        for (int v = 0; v < V; ++v) {
            const A p = std::exp(A(logits[n * V + v]) - lse[n]);
            dlogits[n * V + v] = T(weight[n] * (z * p - A(v == targets[n])));
        }
    }
    return {};
}

#define FBT_INSTANTIATE(T, A)                                                                      \
    template Status cross_entropy_forward<T, A>(A*, A*, const T*, const int32_t*, int64_t, int,    \
                                                Stream);                                           \
    template Status cross_entropy_backward<T, A>(T*, const T*, const A*, const int32_t*, const A*, \
                                                 A, int64_t, int, Stream);
FBT_INSTANTIATE(float, float)
FBT_INSTANTIATE(double, double)

}  // namespace fbt::kernels::ref
