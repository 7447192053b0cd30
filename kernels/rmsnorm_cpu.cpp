// RMSNorm, vectorised: a row's sums run in fixed lanes, rows are spread over threads.
#include <algorithm>
#include <cmath>

#include "kernels/cpu_tile.h"
#include "kernels/rmsnorm.h"

namespace fbt::kernels::cpu {

// y = x * rstd * gain
template <class T, class A>
Status rmsnorm_forward(T* y, A* rstd, const T* x, const A* gain, int64_t N, int D, A eps,
                       Stream s) {
    if (N < 0 || D < 1) return {Code::bad_argument, "rmsnorm_forward needs N >= 0, D >= 1"};
    for_norms(s, x, N, D, eps, [=](int64_t n, A r) {
        const T* x_row = x + n * D;
        T* y_row = y + n * D;
        for_vectors(D, [=](int64_t d, int count) {
            const Vec xhat = load_first(x_row + d, count) * splat(r);
            store_first(y_row + d, xhat * load_first(gain + d, count), count);
        });
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
    for_norms(s, branch, N, D, eps, [=](int64_t n, A r) {
        const T *x_row = x + n * D, *branch_row = branch + n * D;
        T* y_row = y + n * D;
        for_vectors(D, [=](int64_t d, int count) {
            const Vec xhat = load_first(branch_row + d, count) * splat(r);
            const Vec z = xhat * load_first(gain + d, count);
            store_first(y_row + d, fma(splat(alpha), z, load_first(x_row + d, count)), count);
        });
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
        const int64_t end = std::min(N, (c + 1) * kRowChunk);
        for (int64_t first = c * kRowChunk; first < end; first += kNormRows) {
            const int rows = int(std::min<int64_t>(end - first, kNormRows));
            A mean[kNormRows];  // of g*xhat
            for (int i = 0; i < rows; ++i) {
                const T* dy_row = dy + (first + i) * D;
                const auto dy_gain = [=](int64_t d, int count) {
                    return load_first(dy_row + d, count) * load_first(gain + d, count);
                };
                const A dot = row_dot(D, dy_gain, elements(x + (first + i) * D));
                mean[i] = scale * dot * rstd[first + i] / A(D);
            }
            for (int i = 0; i < rows; ++i) {
                const T *dy_row = dy + (first + i) * D, *x_row = x + (first + i) * D;
                T* dx_row = dx + (first + i) * D;
                const Vec r = splat(rstd[first + i]), minus_mean = splat(-mean[i]);
                for_vectors(D, [=](int64_t d, int count) {
                    const Vec up = splat(scale) * load_first(dy_row + d, count);
                    const Vec xhat = load_first(x_row + d, count) * r;
                    const Vec g = up * load_first(gain + d, count);
                    store_first(dgain + d, fma(up, xhat, load_first(dgain + d, count)), count);
                    store_first(dx_row + d, r * fma(xhat, minus_mean, g), count);
                });
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
