// Sums in one fixed order: over lanes, and over the chunks of rows that gains' gradients come in.
#pragma once
#include "kernels/vector.cuh"

namespace fbt::kernels::cuda {

// The sum of v over `lanes` neighbouring lanes, a power of two; the same bits in each of them. The
// whole warp calls it.
__device__ inline float lanes_sum(float v, int lanes = 32) {
    for (int distance = lanes / 2; distance > 0; distance /= 2)
        v += __shfl_xor_sync(0xffffffffu, v, distance);
    return v;
}

// f(d, the Warps warps' sums of column d, added in order), once for each column below D of the 32
// packs from d0 on, of which lane l of every warp has added up the l-th. For blocks of 32 x Warps
// threads, all of which call.
template <int Warps, class T, class F>
__device__ void add_warps(const Floats<T>& own, int64_t d0, int64_t D, F f) {
    constexpr int kElements = kPack<T>;
    static_assert(Warps >= kElements);
    using Sums = float[Warps][kElements][32];
    SHARED(Sums, sums);
    const int lane = threadIdx.x, warp = threadIdx.y;
    __syncthreads();  // the previous call's sums have been read
#pragma unroll
    for (int j = 0; j < kElements; ++j) sums[warp][j][lane] = own.v[j];
    __syncthreads();
    const int64_t d = d0 + lane * kElements + warp;
    if (warp >= kElements || d >= D) return;
    float total = 0;
    for (int w = 0; w < Warps; ++w) total += sums[w][warp][lane];
    f(d, total);
}

// ---- sum[d] += scale * sum_c partial[c,d]. A thread adds every kChunkWarps-th chunk of a column,
// so that many loads are under way; those sums are added in order.

inline constexpr int kChunkWarps = 16;

template <class A>
__global__ void __launch_bounds__(32 * kChunkWarps)
    add_chunks_columns(A* __restrict__ sum, const A* __restrict__ partial, A scale, int64_t chunks,
                       int64_t D) {
    using Sums = A[kChunkWarps][32];
    SHARED(Sums, sums);
    const int64_t d = int64_t(blockIdx.x) * 32 + threadIdx.x;
    A own = 0;
    if (d < D) {
#pragma unroll 4
        for (int64_t c = threadIdx.y; c < chunks; c += kChunkWarps) own += partial[c * D + d];
    }
    sums[threadIdx.y][threadIdx.x] = own;
    __syncthreads();
    if (threadIdx.y > 0 || d >= D) return;
    A total = 0;
    for (int warp = 0; warp < kChunkWarps; ++warp) total += sums[warp][threadIdx.x];
    sum[d] = std::fma(scale, total, sum[d]);
}

template <class A>
Status add_chunks(A* sum, const A* partial, A scale, int64_t chunks, int64_t D, Stream s) {
    return launch(add_chunks_columns<A>,
                  {.grid = dim3(unsigned(ceil_div(D, 32))), .block = dim3(32, kChunkWarps)}, s, sum,
                  partial, scale, chunks, D);
}

}  // namespace fbt::kernels::cuda
