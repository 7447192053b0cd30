// Per-head RMSNorm, then rotary position embedding, vectorised over a head's columns.
#include <algorithm>
#include <cmath>

#include "kernels/cpu_math.h"
#include "kernels/qk_norm_rope.h"

namespace fbt::kernels::cpu {
namespace {

constexpr int kMaxC = 256;

}  // namespace

// z = x * rstd * gain, then the pair (z[i], z[i + C/2]) turns by the angle of position t.
template <class T, class A>
Status qk_norm_rope_forward(T* y, A* rstd, const T* x, const A* gain, const A* cos, const A* sin,
                            const int32_t* positions, int64_t N, int H, int C, A eps, Stream s) {
    if (N < 0 || H < 1 || C < 2 || C % 2 != 0 || C > kMaxC)
        return {Code::bad_argument,
                "qk_norm_rope_forward needs N >= 0, H >= 1, C even and in 2..256"};
    const int half = C / 2;
    for_rows(s, N, int64_t(H) * C, [=](int64_t n) {
        const A* cos_t = cos + int64_t(positions[n]) * half;
        const A* sin_t = sin + int64_t(positions[n]) * half;
        for (int h = 0; h < H; ++h) {
            const T* x_row = x + (n * H + h) * C;
            T* y_row = y + (n * H + h) * C;
            const auto at = [x_row](int64_t c) { return A(x_row[c]); };
            const A r = 1 / std::sqrt(row_dot(C, at, at) / A(C) + eps);
#pragma omp simd
            for (int i = 0; i < half; ++i) {
                const A z0 = A(x_row[i]) * r * gain[i];
                const A z1 = A(x_row[i + half]) * r * gain[i + half];
                store(y_row[i], std::fma(z0, cos_t[i], -(z1 * sin_t[i])));
                store(y_row[i + half], std::fma(z1, cos_t[i], z0 * sin_t[i]));
            }
            if (rstd) rstd[n * H + h] = r;
        }
    });
    return {};
}

// dz is dy turned back by the angle of t. With g = dz*gain, xhat = x*rstd:
//   dx = rstd*(g - xhat*mean_c(g*xhat))      dgain[c] += sum_{n,h} dz[c]*xhat[c]
// A thread takes whole chunks of kRowChunk rows, and their sums are added in order.
template <class T, class A>
Status qk_norm_rope_backward(T* dx, A* dgain_accum, const T* dy, const T* x, const A* gain,
                             const A* rstd, const A* cos, const A* sin, const int32_t* positions,
                             int64_t N, int H, int C, A* scratch, Stream s) {
    if (N < 0 || H < 1 || C < 2 || C % 2 != 0 || C > kMaxC)
        return {Code::bad_argument,
                "qk_norm_rope_backward needs N >= 0, H >= 1, C even and in 2..256"};
    const int half = C / 2;
    const int64_t chunks = row_chunks(N);
    for_rows(s, chunks, std::min<int64_t>(N, kRowChunk) * H * C, [=](int64_t k) {
        A dz[kMaxC], dgain[kMaxC] = {};
        const int64_t end = std::min(N, (k + 1) * kRowChunk);
        for (int64_t n = k * kRowChunk; n < end; ++n) {
            const A* cos_t = cos + int64_t(positions[n]) * half;
            const A* sin_t = sin + int64_t(positions[n]) * half;
            for (int h = 0; h < H; ++h) {
                const T *dy_row = dy + (n * H + h) * C, *x_row = x + (n * H + h) * C;
                T* dx_row = dx + (n * H + h) * C;
                const A r = rstd[n * H + h];
#pragma omp simd
                for (int i = 0; i < half; ++i) {
                    const A dy0 = A(dy_row[i]), dy1 = A(dy_row[i + half]);
                    dz[i] = std::fma(dy0, cos_t[i], dy1 * sin_t[i]);
                    dz[i + half] = std::fma(dy1, cos_t[i], -(dy0 * sin_t[i]));
                }
                const A dot = row_dot(
                    C, [&dz, gain](int64_t c) { return dz[c] * gain[c]; },
                    [x_row](int64_t c) { return A(x_row[c]); });
                const A mean = dot * r / A(C);  // of g*xhat
#pragma omp simd
                for (int c = 0; c < C; ++c) {
                    const A xhat = A(x_row[c]) * r;
                    dgain[c] = std::fma(dz[c], xhat, dgain[c]);
                    store(dx_row[c], r * std::fma(-xhat, mean, dz[c] * gain[c]));
                }
            }
        }
        std::copy_n(dgain, C, scratch + k * C);
    });
    for (int c = 0; c < C; ++c) {
        A sum = 0;
        for (int64_t k = 0; k < chunks; ++k) sum += scratch[k * C + c];
        dgain_accum[c] += sum;
    }
    return {};
}

#define FBT_INSTANTIATE(T)                                                                      \
    template Status qk_norm_rope_forward<T, float>(T*, float*, const T*, const float*,          \
                                                   const float*, const float*, const int32_t*,  \
                                                   int64_t, int, int, float, Stream);           \
    template Status qk_norm_rope_backward<T, float>(                                            \
        T*, float*, const T*, const T*, const float*, const float*, const float*, const float*, \
        const int32_t*, int64_t, int, int, float*, Stream);
FBT_INSTANTIATE(float)
FBT_INSTANTIATE(bf16)

}  // namespace fbt::kernels::cpu
