// Reductions over a block of threads in one fixed order, so that the bits depend on the threads'
// values alone: in a warp lanes pairwise, then the warps in order. Every thread of the block calls
// and gets the result.
#pragma once
#include "kernels/gpu.h"

namespace fbt::kernels::cuda {

// `combine` must be commutative: then both lanes of a pair compute the same bits.
template <int kThreads, class A, class Combine>
__device__ A block_reduce(A v, Combine combine) {
    static_assert(kThreads % 32 == 0);
    constexpr int kWarps = kThreads / 32;
    using Values = A[kWarps];
    SHARED(Values, values);
    for (int distance = 16; distance > 0; distance /= 2)
        v = combine(v, __shfl_xor_sync(0xffffffffu, v, distance));
    __syncthreads();  // the previous call's values have been read
    if (threadIdx.x % 32 == 0) values[threadIdx.x / 32] = v;
    __syncthreads();
    A total = values[0];
    for (int warp = 1; warp < kWarps; ++warp) total = combine(total, values[warp]);
    return total;
}

template <int kThreads, class A>
__device__ A block_sum(A v) {
    return block_reduce<kThreads>(v, [](A a, A b) { return a + b; });
}

// NaN is passed over unless all are.
template <int kThreads, class A>
__device__ A block_min(A v) {
    return block_reduce<kThreads>(v, [](A a, A b) { return b < a || a != a ? b : a; });
}
template <int kThreads, class A>
__device__ A block_max(A v) {
    return block_reduce<kThreads>(v, [](A a, A b) { return b > a || a != a ? b : a; });
}

}  // namespace fbt::kernels::cuda
