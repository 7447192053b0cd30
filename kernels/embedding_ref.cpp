// Token embedding in plain loops.
#include "kernels/embedding.h"

namespace fbt::kernels::ref {

// y[n,:] = T(w[tokens[n],:])
template <class T, class W>
Status embedding_forward(T* y, const int32_t* tokens, const W* w, int64_t N, int D, Stream) {
    if (N < 0 || D < 1) return {Code::bad_argument, "embedding_forward needs N >= 0, D >= 1"};
    for (int64_t n = 0; n < N; ++n)
        for (int d = 0; d < D; ++d) y[n * D + d] = T(w[int64_t(tokens[n]) * D + d]);
    return {};
}

// dw[tokens[n],:] += dy[n,:], n ascending
template <class T, class A>
Status embedding_backward_accum(A* dw, const T* dy, const int32_t* tokens, int64_t N, int D, int V,
                                int32_t*, Stream) {
    if (N < 0 || D < 1 || V < 1)
        return {Code::bad_argument, "embedding_backward_accum needs N >= 0 and D, V >= 1"};
    for (int64_t n = 0; n < N; ++n)
        for (int d = 0; d < D; ++d) dw[int64_t(tokens[n]) * D + d] += A(dy[n * D + d]);
    return {};
}

#define FBT_INSTANTIATE(T, A)                                                                  \
    template Status embedding_forward<T>(T*, const int32_t*, const A*, int64_t, int, Stream);  \
    template Status embedding_backward_accum<T, A>(A*, const T*, const int32_t*, int64_t, int, \
                                                   int, int32_t*, Stream);
FBT_INSTANTIATE(float, float)
FBT_INSTANTIATE(double, double)

}  // namespace fbt::kernels::ref
