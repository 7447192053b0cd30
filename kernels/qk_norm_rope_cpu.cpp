// Per-head RMSNorm, then rotary position embedding, vectorised over a head's columns.
#include <algorithm>
#include <cmath>

#include "kernels/cpu_tile.h"
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
    for_norms(s, x, N * H, C, eps, [=](int64_t head, A r) {
        const A* cos_t = cos + int64_t(positions[head / H]) * half;
        const A* sin_t = sin + int64_t(positions[head / H]) * half;
        const T* x_row = x + head * C;
        T* y_row = y + head * C;
        for_vectors(half, [=](int64_t i, int count) {
            const auto z = [=](int64_t c) {
                return load_first(x_row + c, count) * splat(r) * load_first(gain + c, count);
            };
            const Vec z0 = z(i), z1 = z(i + half);
            const Vec cos = load_first(cos_t + i, count), sin = load_first(sin_t + i, count);
            store_first(y_row + i, fma(z0, cos, -(z1 * sin)), count);
            store_first(y_row + i + half, fma(z1, cos, z0 * sin), count);
        });
        if (rstd) rstd[head] = r;
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
        alignas(64) A dz[kNormRows * kMaxC], dgain[kMaxC] = {};
        const int64_t end = std::min(N, (k + 1) * kRowChunk) * H;
        for (int64_t first = k * kRowChunk * H; first < end; first += kNormRows) {
            const int heads = int(std::min<int64_t>(end - first, kNormRows));
            A mean[kNormRows];  // of g*xhat
            for (int i = 0; i < heads; ++i) {
                const A* cos_t = cos + int64_t(positions[(first + i) / H]) * half;
                const A* sin_t = sin + int64_t(positions[(first + i) / H]) * half;
                const T* dy_row = dy + (first + i) * C;
                A* dz_row = dz + i * C;
                for_vectors(half, [=](int64_t c, int count) {
                    const Vec dy0 = load_first(dy_row + c, count);
                    const Vec dy1 = load_first(dy_row + c + half, count);
                    const Vec cos = load_first(cos_t + c, count),
                              sin = load_first(sin_t + c, count);
                    store_first(dz_row + c, fma(dy0, cos, dy1 * sin), count);
                    store_first(dz_row + c + half, fma(dy1, cos, -(dy0 * sin)), count);
                });
                const auto g = [=](int64_t c, int count) {
                    return load_first(dz_row + c, count) * load_first(gain + c, count);
                };
                mean[i] = row_dot(C, g, elements(x + (first + i) * C)) * rstd[first + i] / A(C);
            }
            for (int i = 0; i < heads; ++i) {
                const T* x_row = x + (first + i) * C;
                T* dx_row = dx + (first + i) * C;
                const A* dz_row = dz + i * C;
                const Vec r = splat(rstd[first + i]), minus_mean = splat(-mean[i]);
                for_vectors(C, [=, &dgain](int64_t c, int count) {
                    const Vec xhat = load_first(x_row + c, count) * r;
                    const Vec d = load_first(dz_row + c, count);
                    const Vec g = d * load_first(gain + c, count);
                    store_first(dgain + c, fma(d, xhat, load_first(dgain + c, count)), count);
                    store_first(dx_row + c, r * fma(xhat, minus_mean, g), count);
                });
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
