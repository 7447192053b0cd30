// Cross-entropy and z-loss of rows of logits on the GPU. A block takes a row and reads it once:
// every thread keeps the maximum and the rescaled sum of what it has seen (online softmax,
// arXiv:1805.02867, algorithm 3), and the threads' pairs are combined in one fixed order.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/block_reduce.cuh"
#include "kernels/cross_entropy.h"
#include "kernels/vector.cuh"

namespace fbt::kernels::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kStep = 16;  // logits between two looks at the maximum: 32 or 64 bytes in flight
constexpr int64_t kMaxBlocks = 1024;  // enough to fill any GPU; each block strides over the rows

dim3 row_blocks(int64_t N) { return dim3(unsigned(std::min(N, kMaxBlocks))); }

// m = max_v logits[v], S = sum_v exp(logits[v] - m):   lse = m + log S
//   ce = log S + (m - logits[target]), which keeps its digits where the logits are large
// A NaN is passed over by the maximum, and makes S, and so lse and ce, NaN; as does a row of
// nothing but -infinity, or one with +infinity.
template <class T>
__global__ void __launch_bounds__(kThreads)
    cross_entropy_forward_online(float* __restrict__ ce, float* __restrict__ lse,
                                 const T* __restrict__ logits, const int32_t* __restrict__ targets,
                                 int64_t N, int V, bool whole) {
    constexpr float kNone = -std::numeric_limits<float>::infinity();
    constexpr int kPacks = kStep / kPack<T>;
    for (int64_t n = blockIdx.x; n < N; n += gridDim.x) {
        const T* row = logits + n * V;
        float m = kNone, sum = 0;  // of this thread
        // Packs threadIdx.x, threadIdx.x + kThreads, ... are its own, kPacks of them a step.
        for (int64_t first = int64_t(threadIdx.x) * kPack<T>; first < V;
             first += int64_t(kThreads) * kStep) {
            Pack<T> packs[kPacks];
            bool inside[kPacks];
#pragma unroll
            for (int p = 0; p < kPacks; ++p) {
                const int64_t v = first + int64_t(p) * kThreads * kPack<T>;
                inside[p] = v < V;
                if (inside[p]) packs[p] = load_pack(row + v, V - v, whole);
            }
            float x[kStep], top = kNone;
#pragma unroll
            for (int i = 0; i < kStep; ++i) {
                const int p = i / kPack<T>, j = i % kPack<T>;
                const int64_t v = first + int64_t(p) * kThreads * kPack<T> + j;
                x[i] = inside[p] && v < V ? packs[p][j] : kNone;
                top = x[i] > top ? x[i] : top;
            }
            const float greater = top > m ? top : m;
            // While only -infinity has been seen, exp(x - 0) is the 0 that exp(x - m) should be.
            const float base = greater == kNone ? 0 : greater;
            float added = 0;
#pragma unroll
            for (int i = 0; i < kStep; ++i) added += std::exp(x[i] - base);
            sum = std::fma(sum, std::exp(m - base), added);
            m = greater;
        }
        const float row_max = block_max<kThreads>(m);
        // A thread without elements adds 0 * exp(-infinity).
        const float row_sum = block_sum<kThreads>(sum * std::exp(m - row_max));
        if (threadIdx.x == 0) {
            const float log_sum = std::log(row_sum);
            const int32_t target = targets[n];
            lse[n] = row_max + log_sum;
            ce[n] = target < 0 ? 0 : log_sum + (row_max - float(row[target]));
        }
    }
}

// dlogits[v] = weight*((1 + 2*z_weight*lse)*exp(logits[v] - lse) - [v == target])
// dlogits may be logits: a thread writes only what it has read itself.
template <class T>
__global__ void __launch_bounds__(kThreads)
    cross_entropy_backward_pack(T* dlogits, const T* logits, const float* __restrict__ lse,
                                const int32_t* __restrict__ targets,
                                const float* __restrict__ weight, float z_weight, int64_t N, int V,
                                bool whole) {
    for (int64_t n = blockIdx.x; n < N; n += gridDim.x) {
        const T* row = logits + n * V;
        T* dlogits_row = dlogits + n * V;
        const int32_t target = targets[n];
        const float l = lse[n], z = std::fma(2 * z_weight, l, 1.f), w = weight[n];
        for (int64_t v = int64_t(threadIdx.x) * kPack<T>; v < V;
             v += int64_t(kThreads) * kPack<T>) {
            const Pack<T> x = load_pack(row + v, V - v, whole);
            Pack<T> d;
#pragma unroll
            for (int j = 0; j < kPack<T>; ++j) {
                const float hit = v + j == target ? 1.f : 0.f;
                const float g = w * std::fma(z, std::exp(x[j] - l), -hit);
                d.set(j, T(target < 0 ? 0.f : g));
            }
            store_pack(dlogits_row + v, d, V - v, whole);
        }
    }
}

}  // namespace

template <class T, class A>
Status cross_entropy_forward(A* ce, A* lse, const T* logits, const int32_t* targets, int64_t N,
                             int V, Stream s) {
    if (N < 0 || V < 1) return {Code::bad_argument, "cross_entropy_forward needs N >= 0, V >= 1"};
    if (N == 0) return {};
    return launch(cross_entropy_forward_online<T>, {.grid = row_blocks(N), .block = dim3(kThreads)},
                  s, ce, lse, logits, targets, N, V, whole_packs<T>(V, logits));
}

template <class T, class A>
Status cross_entropy_backward(T* dlogits, const T* logits, const A* lse, const int32_t* targets,
                              const A* weight, A z_weight, int64_t N, int V, Stream s) {
    if (N < 0 || V < 1) return {Code::bad_argument, "cross_entropy_backward needs N >= 0, V >= 1"};
    if (N == 0) return {};
    return launch(cross_entropy_backward_pack<T>, {.grid = row_blocks(N), .block = dim3(kThreads)},
                  s, dlogits, logits, lse, targets, weight, z_weight, N, V,
                  whole_packs<T>(V, dlogits, logits));
}

#define FBT_INSTANTIATE(T)                                                                       \
    template Status cross_entropy_forward<T, float>(float*, float*, const T*, const int32_t*,    \
                                                    int64_t, int, Stream);                       \
    template Status cross_entropy_backward<T, float>(T*, const T*, const float*, const int32_t*, \
                                                     const float*, float, int64_t, int, Stream);
FBT_INSTANTIATE(float)
FBT_INSTANTIATE(bf16)

}  // namespace fbt::kernels::cuda
