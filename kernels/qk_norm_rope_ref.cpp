// Per-head RMSNorm, then rotary position embedding, in plain loops.
#include <algorithm>
#include <cmath>

#include "kernels/qk_norm_rope.h"

namespace fbt::kernels::ref {
namespace {

constexpr int kMaxC = 256;

}  // namespace

// z = x * rstd * gain, then the pair (z[i], z[i + C/2]) turns by the angle of position t.
template <class T, class A>
Status qk_norm_rope_forward(T* y, A* rstd, const T* x, const A* gain, const A* cos, const A* sin,
                            const int32_t* positions, int64_t N, int H, int C, A eps, Stream) {
    if (N < 0 || H < 1 || C < 2 || C % 2 != 0 || C > kMaxC)
        return {Code::bad_argument,
                "qk_norm_rope_forward needs N >= 0, H >= 1, C even and in 2..256"};
    const int half = C / 2;
    for (int64_t n = 0; n < N; ++n) {
        const A* cos_t = cos + int64_t(positions[n]) * half;
        const A* sin_t = sin + int64_t(positions[n]) * half;
        for (int h = 0; h < H; ++h) {
            const T* x_row = x + (n * H + h) * C;
            T* y_row = y + (n * H + h) * C;
            A sum = 0;
            for (int c = 0; c < C; ++c) sum += A(x_row[c]) * A(x_row[c]);
            const A r = 1 / std::sqrt(sum / A(C) + eps);
            for (int i = 0; i < half; ++i) {
                const A z0 = A(x_row[i]) * r * gain[i];
                const A z1 = A(x_row[i + half]) * r * gain[i + half];
                y_row[i] = T(z0 * cos_t[i] - z1 * sin_t[i]);
                y_row[i + half] = T(z1 * cos_t[i] + z0 * sin_t[i]);
            }
            if (rstd) rstd[n * H + h] = r;
        }
    }
    return {};
}

// dz is dy turned back by the angle of t. With g = dz*gain, xhat = x*rstd:
//   dx = rstd*(g - xhat*mean_c(g*xhat))      dgain[c] += sum_{n,h} dz[c]*xhat[c]
template <class T, class A>
Status qk_norm_rope_backward(T* dx, A* dgain_accum, const T* dy, const T* x, const A* gain,
                             const A* rstd, const A* cos, const A* sin, const int32_t* positions,
                             int64_t N, int H, int C, A* scratch, Stream) {
    if (N < 0 || H < 1 || C < 2 || C % 2 != 0 || C > kMaxC)
        return {Code::bad_argument,
                "qk_norm_rope_backward needs N >= 0, H >= 1, C even and in 2..256"};
    const int half = C / 2;
    const int64_t chunks = row_chunks(N);
    std::fill_n(scratch, chunks * C, A(0));
    for (int64_t n = 0; n < N; ++n) {
        const A* cos_t = cos + int64_t(positions[n]) * half;
        const A* sin_t = sin + int64_t(positions[n]) * half;
        A* chunk = scratch + n / kRowChunk * C;
        for (int h = 0; h < H; ++h) {
            const int64_t row = (n * H + h) * C;
            const A r = rstd[n * H + h];
            A dz[kMaxC], dot = 0;  // dot = sum_c g*xhat
            for (int i = 0; i < half; ++i) {
                const A dy0 = A(dy[row + i]), dy1 = A(dy[row + i + half]);
                dz[i] = dy0 * cos_t[i] + dy1 * sin_t[i];
                dz[i + half] = dy1 * cos_t[i] - dy0 * sin_t[i];
            }
            for (int c = 0; c < C; ++c) {
                const A xhat = A(x[row + c]) * r;
                dot += dz[c] * gain[c] * xhat;
                chunk[c] += dz[c] * xhat;
            }
            for (int c = 0; c < C; ++c) {
                const A xhat = A(x[row + c]) * r;
                dx[row + c] = T(r * (dz[c] * gain[c] - xhat * (dot / A(C))));
            }
        }
    }
    for (int c = 0; c < C; ++c) {
        A sum = 0;
        for (int64_t k = 0; k < chunks; ++k) sum += scratch[k * C + c];
        dgain_accum[c] += sum;
    }
    return {};
}

#define FBT_INSTANTIATE(T, A)                                                                     \
    template Status qk_norm_rope_forward<T, A>(T*, A*, const T*, const A*, const A*, const A*,    \
                                               const int32_t*, int64_t, int, int, A, Stream);     \
    template Status qk_norm_rope_backward<T, A>(T*, A*, const T*, const T*, const A*, const A*,   \
                                                const A*, const A*, const int32_t*, int64_t, int, \
                                                int, A*, Stream);
FBT_INSTANTIATE(float, float)
FBT_INSTANTIATE(double, double)

}  // namespace fbt::kernels::ref
