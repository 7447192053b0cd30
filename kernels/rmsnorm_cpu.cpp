// RMSNorm, vectorised: a row's sums run in fixed lanes, rows are spread over threads.
#include <algorithm>
#include <cmath>

#include "kernels/cpu_math.h"
#include "kernels/rmsnorm.h"

namespace fbt::kernels::cpu {
namespace {

// 1/sqrt(mean_d x[d]^2 + eps)
template <class T>
float inverse_rms(const T* x, int D, float eps) {
    const auto at = [x](int64_t d) { return float(x[d]); };
    return 1.f / std::sqrt(row_dot(D, at, at) / float(D) + eps);
}

}  // namespace

// y = x * rstd * gain
template <class T, class A>
Status rmsnorm_forward(T* y, A* rstd, const T* x, const A* gain, int64_t N, int D, A eps,
                       Stream s) {
    if (N < 0 || D < 1) return {Code::bad_argument, "rmsnorm_forward needs N >= 0, D >= 1"};
    for_rows(s, N, D, [=](int64_t n) {
        const T* x_row = x + n * D;
        T* y_row = y + n * D;
        const A r = inverse_rms(x_row, D, eps);
#pragma omp simd
        for (int d = 0; d < D; ++d) store(y_row[d], A(x_row[d]) * r * gain[d]);
        if (rstd) rstd[n] = r;
    });
    return {};
}

// y = x + alpha * branch * rstd * gain
template <class T, class A>
Status residual_rmsnorm_forward(T* y, A* rstd, const T* x, const T* branch, const A* gain, A alpha,
                                int64_t N, int D, A eps, Stream s) {
    if (N < 0 || D < 1)
        return {Code::bad_argument, "residual_rmsnorm_forward needs N >= 0, D >= 1"};
    for_rows(s, N, D, [=](int64_t n) {
        const T *x_row = x + n * D, *branch_row = branch + n * D;
        T* y_row = y + n * D;
        const A r = inverse_rms(branch_row, D, eps);
#pragma omp simd
        for (int d = 0; d < D; ++d)
            store(y_row[d], std::fma(alpha, A(branch_row[d]) * r * gain[d], A(x_row[d])));
        if (rstd) rstd[n] = r;
    });
    return {};
}

// g = scale*dy*gain, xhat = x*rstd:
//   dx = rstd*(g - xhat*mean_d(g*xhat))      dgain[d] += scale * sum_n dy[n,d]*xhat[n,d]
// A thread takes whole chunks of kRowChunk rows, and their sums are added in order.
template <class T, class A>
Status rmsnorm_backward(T* dx, A* dgain_accum, const T* dy, const T* x, const A* gain,
                        const A* rstd, A scale, int64_t N, int D, A* scratch, Stream s) {
    if (N < 0 || D < 1) return {Code::bad_argument, "rmsnorm_backward needs N >= 0, D >= 1"};
    const int64_t chunks = row_chunks(N);
    for_rows(s, chunks, std::min<int64_t>(N, kRowChunk) * D, [=](int64_t c) {
        A* dgain = scratch + c * D;
        std::fill_n(dgain, D, A(0));
        for (int64_t n = c * kRowChunk; n < std::min(N, (c + 1) * kRowChunk); ++n) {
            const T *dy_row = dy + n * D, *x_row = x + n * D;
            T* dx_row = dx + n * D;
            const A r = rstd[n];
            const A dot = row_dot(
                D, [=](int64_t d) { return A(dy_row[d]) * gain[d]; },
                [=](int64_t d) { return A(x_row[d]); });
            const A mean = scale * dot * r / A(D);  // of g*xhat
#pragma omp simd
            for (int d = 0; d < D; ++d) {
                const A up = scale * A(dy_row[d]), xhat = A(x_row[d]) * r;
                dgain[d] = std::fma(up, xhat, dgain[d]);
                store(dx_row[d], r * std::fma(-xhat, mean, up * gain[d]));
            }
        }
    });
    for (int64_t c = 1; c < chunks; ++c)
#pragma omp simd
        for (int d = 0; d < D; ++d) scratch[d] += scratch[c * D + d];
    if (chunks > 0)
        for (int d = 0; d < D; ++d) dgain_accum[d] += scratch[d];
    return {};
}

#define FBT_INSTANTIATE(T)                                                                      \
    template Status rmsnorm_forward<T, float>(T*, float*, const T*, const float*, int64_t, int, \
                                              float, Stream);                                   \
    template Status residual_rmsnorm_forward<T, float>(                                         \
        T*, float*, const T*, const T*, const float*, float, int64_t, int, float, Stream);      \
    template Status rmsnorm_backward<T, float>(T*, float*, const T*, const T*, const float*,    \
                                               const float*, float, int64_t, int, float*, Stream);
FBT_INSTANTIATE(float)
FBT_INSTANTIATE(bf16)

}  // namespace fbt::kernels::cpu
