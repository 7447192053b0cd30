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
