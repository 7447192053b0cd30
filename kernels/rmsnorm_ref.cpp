// RMSNorm in plain loops.
#include <algorithm>
#include <cmath>

#include "kernels/rmsnorm.h"

namespace fbt::kernels::ref {
namespace {

// 1/sqrt(mean_d x[d]^2 + eps)
template <class T, class A>
A inverse_rms(const T* x, int D, A eps) {
    A sum = 0;
    for (int d = 0; d < D; ++d) sum += A(x[d]) * A(x[d]);
    return 1 / std::sqrt(sum / A(D) + eps);
}

}  // namespace

// y = x * rstd * gain
template <class T, class A>
Status rmsnorm_forward(T* y, A* rstd, const T* x, const A* gain, int64_t N, int D, A eps, Stream) {
    if (N < 0 || D < 1) return {Code::bad_argument, "rmsnorm_forward needs N >= 0, D >= 1"};
    for (int64_t n = 0; n < N; ++n) {
        const A r = inverse_rms(x + n * D, D, eps);
        for (int d = 0; d < D; ++d) y[n * D + d] = T(A(x[n * D + d]) * r * gain[d]);
        if (rstd) rstd[n] = r;
    }
    return {};
}

// y = x + alpha * branch * rstd * gain
template <class T, class A>
Status residual_rmsnorm_forward(T* y, A* rstd, const T* x, const T* branch, const A* gain, A alpha,
                                int64_t N, int D, A eps, Stream) {
    if (N < 0 || D < 1)
        return {Code::bad_argument, "residual_rmsnorm_forward needs N >= 0, D >= 1"};
    for (int64_t n = 0; n < N; ++n) {
        const A r = inverse_rms(branch + n * D, D, eps);
        for (int d = 0; d < D; ++d) {
            const int64_t i = n * D + d;
            y[i] = T(A(x[i]) + alpha * (A(branch[i]) * r * gain[d]));
        }
        if (rstd) rstd[n] = r;
    }
    return {};
}

// g = scale*dy*gain, xhat = x*rstd:
//   dx = rstd*(g - xhat*mean_d(g*xhat))      dgain[d] += scale * sum_n dy[n,d]*xhat[n,d]
template <class T, class A>
Status rmsnorm_backward(T* dx, A* dgain_accum, const T* dy, const T* x, const A* gain,
                        const A* rstd, A scale, int64_t N, int D, A* scratch, Stream) {
    if (N < 0 || D < 1) return {Code::bad_argument, "rmsnorm_backward needs N >= 0, D >= 1"};
    const int64_t chunks = row_chunks(N);
    std::fill_n(scratch, chunks * D, A(0));
    for (int64_t n = 0; n < N; ++n) {
        A* chunk = scratch + n / kRowChunk * D;
        A dot = 0;  // sum_d g*xhat
        for (int d = 0; d < D; ++d) {
            const A up = scale * A(dy[n * D + d]), xhat = A(x[n * D + d]) * rstd[n];
            dot += up * gain[d] * xhat;
            chunk[d] += up * xhat;
        }
        for (int d = 0; d < D; ++d) {  // dx may be dy: row n is read above, overwritten here
            const A g = scale * A(dy[n * D + d]) * gain[d], xhat = A(x[n * D + d]) * rstd[n];
            dx[n * D + d] = T(rstd[n] * (g - xhat * (dot / A(D))));
        }
    }
    for (int d = 0; d < D; ++d) {
        A sum = 0;
        for (int64_t c = 0; c < chunks; ++c) sum += scratch[c * D + d];
        dgain_accum[d] += sum;
    }
    return {};
}

#define FBT_INSTANTIATE(T, A)                                                                   \
    template Status rmsnorm_forward<T, A>(T*, A*, const T*, const A*, int64_t, int, A, Stream); \
    template Status residual_rmsnorm_forward<T, A>(T*, A*, const T*, const T*, const A*, A,     \
                                                   int64_t, int, A, Stream);                    \
    template Status rmsnorm_backward<T, A>(T*, A*, const T*, const T*, const A*, const A*, A,   \
                                           int64_t, int, A*, Stream);
FBT_INSTANTIATE(float, float)
FBT_INSTANTIATE(double, double)

}  // namespace fbt::kernels::ref
