// Per-head RMSNorm, then rotary position embedding, on the GPU. A few neighbouring lanes take the
// row of one position and head; a lane has one pack of the first half and the pack that it is
// paired with in the second. So a head's bits depend on that head and on C alone.
#include "kernels/qk_norm_rope.h"
#include "kernels/row_sums.cuh"

namespace fbt::kernels::cuda {
namespace {

constexpr int kMaxC = 256;
constexpr int kForwardThreads = 256, kBackwardThreads = 512;

// f(n, h, inside) for every head of positions [begin, end), one for each threadIdx.y at a time. The
// warp stays together for f's sums: `inside` is false where its other rows go on.
template <class F>
__device__ void each_head(int64_t begin, int64_t end, int H, F f) {
    const int step = blockDim.y, positions = step / H, heads = step % H;
    int64_t n = begin + int(threadIdx.y) / H;
    int h = int(threadIdx.y) % H;
    for (int64_t row = 0; row < (end - begin) * H; row += step) {
        f(n, h, n < end);
        n += positions;
        h += heads;
        if (h >= H) {
            h -= H;
            ++n;
        }
    }
}

// z = x * rstd * gain, then the pair (z[i], z[i + C/2]) turns by the angle of position t. y may be
// x: a lane reads its elements before it writes them.
template <class T>
__global__ void __launch_bounds__(kForwardThreads)
    qk_norm_rope_forward_lanes(T* y, float* __restrict__ rstd, const T* x,
                               const float* __restrict__ gain, const float* __restrict__ cos,
                               const float* __restrict__ sin, const int32_t* __restrict__ positions,
                               int64_t N, int H, int C, float inv_C, float eps, int block_positions,
                               bool aligned) {
    const int half = C / 2, i = threadIdx.x * kPack<T>;
    const int64_t begin = int64_t(blockIdx.x) * block_positions;
    each_head(begin, min(begin + block_positions, N), H, [&](int64_t n, int h, bool inside) {
        const int count = inside ? half - i : 0;
        const bool whole = aligned && count > 0;
        const int64_t row = n * H + h;
        const T* const from = x + row * C + i;
        const Pack<T> x0 = load_pack(from, count, whole), x1 = load_pack(from + half, count, whole);
        float sum = 0;
#pragma unroll
        for (int j = 0; j < kPack<T>; ++j) sum = std::fma(x0[j], x0[j], sum);
#pragma unroll
        for (int j = 0; j < kPack<T>; ++j) sum = std::fma(x1[j], x1[j], sum);
        const float r = rsqrtf(std::fma(lanes_sum(sum, int(blockDim.x)), inv_C, eps));
        if (count <= 0) return;

        const int64_t t = positions[n];
        const Floats<T> g0 = load_floats<T>(gain + i, count, whole),
                        g1 = load_floats<T>(gain + half + i, count, whole),
                        c = load_floats<T>(cos + t * half + i, count, whole),
                        s = load_floats<T>(sin + t * half + i, count, whole);
        Pack<T> y0, y1;
#pragma unroll
        for (int j = 0; j < kPack<T>; ++j) {
            const float z0 = x0[j] * r * g0.v[j], z1 = x1[j] * r * g1.v[j];
            y0.set(j, T(std::fma(z0, c.v[j], -(z1 * s.v[j]))));
            y1.set(j, T(std::fma(z1, c.v[j], z0 * s.v[j])));
        }
        T* const to = y + row * C + i;
        store_pack(to, y0, count, whole);
        store_pack(to + half, y1, count, whole);
        if (rstd && threadIdx.x == 0) rstd[row] = r;
    });
}

// dz is dy turned back by the angle of t. With g = dz*gain, xhat = x*rstd:
//   dx = rstd*(g - xhat*mean_c(g*xhat))      partial[k,c] = sum of dz[c]*xhat[c] over chunk k
// A block takes a chunk of kRowChunk positions. Each lane adds its columns' terms over its rows;
// then the rows of a warp are added pairwise and the warps in order.
template <class T>
__global__ void __launch_bounds__(kBackwardThreads)
    qk_norm_rope_backward_chunk(T* dx, float* __restrict__ partial, const T* dy,
                                const T* __restrict__ x, const float* __restrict__ gain,
                                const float* __restrict__ rstd, const float* __restrict__ cos,
                                const float* __restrict__ sin,
                                const int32_t* __restrict__ positions, int64_t N, int H, int C,
                                float inv_C, bool aligned) {
    constexpr int kWarps = kBackwardThreads / 32;
    using Sums = float[kWarps][kMaxC];
    SHARED(Sums, sums);
    const int half = C / 2, i = threadIdx.x * kPack<T>, lanes = blockDim.x;
    const int64_t chunk = blockIdx.x, begin = chunk * kRowChunk;
    Floats<T> dgain0{}, dgain1{};
    each_head(begin, min(begin + kRowChunk, N), H, [&](int64_t n, int h, bool inside) {
        const int count = inside ? half - i : 0;
        const bool whole = aligned && count > 0;
        const int64_t row = n * H + h, at = row * C + i;
        const Pack<T> dy0 = load_pack(dy + at, count, whole),
                      dy1 = load_pack(dy + at + half, count, whole),
                      x0 = load_pack(x + at, count, whole),
                      x1 = load_pack(x + at + half, count, whole);
        const float r = inside ? rstd[row] : 0.f;
        const int64_t t = inside ? positions[n] : 0;
        const Floats<T> c = load_floats<T>(cos + t * half + i, count, whole),
                        s = load_floats<T>(sin + t * half + i, count, whole),
                        gain0 = load_floats<T>(gain + i, count, whole),
                        gain1 = load_floats<T>(gain + half + i, count, whole);
        Floats<T> g0, g1;
        float dot = 0;
#pragma unroll
        for (int j = 0; j < kPack<T>; ++j) {
            const float dz0 = std::fma(dy0[j], c.v[j], dy1[j] * s.v[j]),
                        dz1 = std::fma(dy1[j], c.v[j], -(dy0[j] * s.v[j]));
            dgain0.v[j] = std::fma(dz0, x0[j] * r, dgain0.v[j]);
            dgain1.v[j] = std::fma(dz1, x1[j] * r, dgain1.v[j]);
            g0.v[j] = dz0 * gain0.v[j];
            g1.v[j] = dz1 * gain1.v[j];
            dot = std::fma(g0.v[j], x0[j] * r, dot);
            dot = std::fma(g1.v[j], x1[j] * r, dot);
        }
        const float mean = lanes_sum(dot, lanes) * inv_C;
        Pack<T> dx0, dx1;
#pragma unroll
        for (int j = 0; j < kPack<T>; ++j) {
            dx0.set(j, T(r * std::fma(-(x0[j] * r), mean, g0.v[j])));
            dx1.set(j, T(r * std::fma(-(x1[j] * r), mean, g1.v[j])));
        }
        store_pack(dx + at, dx0, count, whole);
        store_pack(dx + at + half, dx1, count, whole);
    });

    const int thread = threadIdx.y * lanes + threadIdx.x, warp = thread / 32;
#pragma unroll
    for (int j = 0; j < kPack<T>; ++j) {
        for (int distance = 16; distance >= lanes; distance /= 2) {
            dgain0.v[j] += __shfl_xor_sync(0xffffffffu, dgain0.v[j], distance);
            dgain1.v[j] += __shfl_xor_sync(0xffffffffu, dgain1.v[j], distance);
        }
        if (thread % 32 < lanes && i + j < half) {
            sums[warp][i + j] = dgain0.v[j];
            sums[warp][half + i + j] = dgain1.v[j];
        }
    }
    __syncthreads();
    if (thread >= C) return;
    float total = 0;
    for (int w = 0; w < kWarps; ++w) total += sums[w][thread];
    partial[chunk * C + thread] = total;
}

bool bad_sizes(int64_t N, int H, int C) {
    return N < 0 || H < 1 || C < 2 || C % 2 != 0 || C > kMaxC;
}

}  // namespace

template <class T, class A>
Status qk_norm_rope_forward(T* y, A* rstd, const T* x, const A* gain, const A* cos, const A* sin,
                            const int32_t* positions, int64_t N, int H, int C, A eps, Stream s) {
    if (bad_sizes(N, H, C))
        return {Code::bad_argument,
                "qk_norm_rope_forward needs N >= 0, H >= 1, C even and in 2..256"};
    if (N == 0) return {};
    const int lanes = row_lanes(ceil_div(C / 2, kPack<T>)), rows = kForwardThreads / lanes;
    const int block_positions = int(ceil_div(rows, H));
    return launch(
        qk_norm_rope_forward_lanes<T>,
        {.grid = dim3(unsigned(ceil_div(N, block_positions))), .block = dim3(lanes, rows)}, s, y,
        rstd, x, gain, cos, sin, positions, N, H, C, 1.f / float(C), eps, block_positions,
        whole_packs<T>(C / 2, y, x, gain, cos, sin));
}

template <class T, class A>
Status qk_norm_rope_backward(T* dx, A* dgain_accum, const T* dy, const T* x, const A* gain,
                             const A* rstd, const A* cos, const A* sin, const int32_t* positions,
                             int64_t N, int H, int C, A* scratch, Stream s) {
    if (bad_sizes(N, H, C))
        return {Code::bad_argument,
                "qk_norm_rope_backward needs N >= 0, H >= 1, C even and in 2..256"};
    if (N == 0) return {};
    const int lanes = row_lanes(ceil_div(C / 2, kPack<T>)), rows = kBackwardThreads / lanes;
    const int64_t chunks = row_chunks(N);
    const Status status = launch(qk_norm_rope_backward_chunk<T>,
                                 {.grid = dim3(unsigned(chunks)), .block = dim3(lanes, rows)}, s,
                                 dx, scratch, dy, x, gain, rstd, cos, sin, positions, N, H, C,
                                 1.f / float(C), whole_packs<T>(C / 2, dx, dy, x, gain, cos, sin));
    if (!status.ok()) return status;
    return add_chunks(dgain_accum, scratch, A(1), chunks, C, s);
}

#define FBT_INSTANTIATE(T)                                                                    \
    template Status qk_norm_rope_forward<T>(T*, float*, const T*, const float*, const float*, \
                                            const float*, const int32_t*, int64_t, int, int,  \
                                            float, Stream);                                   \
    template Status qk_norm_rope_backward<T>(T*, float*, const T*, const T*, const float*,    \
                                             const float*, const float*, const float*,        \
                                             const int32_t*, int64_t, int, int, float*, Stream);
FBT_INSTANTIATE(float)
FBT_INSTANTIATE(bf16)

}  // namespace fbt::kernels::cuda
