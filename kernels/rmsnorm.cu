// RMSNorm on the GPU. A block of threads takes a row: thread i adds columns i, i + kThreads, ...,
// and the threads' sums are added in one fixed tree, so a row's bits depend on that row alone.
#include <algorithm>
#include <cmath>

#include "kernels/gpu.h"
#include "kernels/rmsnorm.h"

namespace fbt::kernels::cuda {
namespace {

constexpr int kThreads = 128;  // a multiprocessor holds up to 16 such blocks, so 16 rows
constexpr int kWarps = kThreads / 32;
constexpr int64_t kMaxBlocks = 4096;  // enough to fill any GPU; each block strides over the rows

// The sum of every thread's v, the same bits in all threads: lanes pairwise, then warps in order.
template <class A>
__device__ A block_sum(A v) {
    using Sums = A[kWarps];
    SHARED(Sums, sums);
    for (int distance = 16; distance > 0; distance /= 2)
        v += __shfl_xor_sync(0xffffffffu, v, distance);
    __syncthreads();  // the previous call's sums have been read
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = v;
    __syncthreads();
    A total = sums[0];
    for (int warp = 1; warp < kWarps; ++warp) total += sums[warp];
    return total;
}

// 1/sqrt(mean_d x[d]^2 + eps)
template <class T, class A>
__device__ A row_rstd(const T* x, int D, A eps) {
    A sum = 0;
    for (int d = threadIdx.x; d < D; d += kThreads) {
        const A v = A(x[d]);
        sum = std::fma(v, v, sum);
    }
    return A(1) / std::sqrt(block_sum(sum) / A(D) + eps);
}

// y[n,d] = x[n,d] * rstd[n] * gain[d]. y may be x: an element is read for the last time by the
// thread that then writes it, after the barriers in block_sum.
template <class T, class A>
__global__ void __launch_bounds__(kThreads)
    rmsnorm_forward_block(T* y, A* __restrict__ rstd, const T* x, const A* __restrict__ gain,
                          int64_t N, int D, A eps) {
    for (int64_t n = blockIdx.x; n < N; n += gridDim.x) {
        const T* xn = x + n * D;
        T* yn = y + n * D;
        const A r = row_rstd(xn, D, eps);
        if (rstd && threadIdx.x == 0) rstd[n] = r;
        for (int d = threadIdx.x; d < D; d += kThreads) yn[d] = T(A(xn[d]) * r * gain[d]);
    }
}

// y[n,d] = x[n,d] + alpha * branch[n,d] * rstd[n] * gain[d],  rstd of `branch`
template <class T, class A>
__global__ void __launch_bounds__(kThreads)
    residual_rmsnorm_forward_block(T* y, A* __restrict__ rstd, const T* x, const T* branch,
                                   const A* __restrict__ gain, A alpha, int64_t N, int D, A eps) {
    for (int64_t n = blockIdx.x; n < N; n += gridDim.x) {
        const T *xn = x + n * D, *bn = branch + n * D;
        T* yn = y + n * D;
        const A r = row_rstd(bn, D, eps);
        if (rstd && threadIdx.x == 0) rstd[n] = r;
        for (int d = threadIdx.x; d < D; d += kThreads)
            yn[d] = T(A(xn[d]) + alpha * (A(bn[d]) * r * gain[d]));
    }
}

// dx = rstd*(g - xhat*mean_d(g*xhat)),  g = scale*dy*gain,  xhat = x*rstd
template <class T, class A>
__global__ void __launch_bounds__(kThreads)
    rmsnorm_backward_block(T* dx, const T* dy, const T* __restrict__ x, const A* __restrict__ gain,
                           const A* __restrict__ rstd, A scale, int64_t N, int D) {
    for (int64_t n = blockIdx.x; n < N; n += gridDim.x) {
        const T *dyn = dy + n * D, *xn = x + n * D;
        T* dxn = dx + n * D;
        const A r = rstd[n];
        A sum = 0;
        for (int d = threadIdx.x; d < D; d += kThreads)
            sum = std::fma(scale * A(dyn[d]) * gain[d], A(xn[d]) * r, sum);
        const A mean = block_sum(sum) / A(D);
        for (int d = threadIdx.x; d < D; d += kThreads) {
            const A g = scale * A(dyn[d]) * gain[d], xhat = A(xn[d]) * r;
            dxn[d] = T(r * (g - xhat * mean));
        }
    }
}

// partial[c,d] = sum of dy[n,d]*x[n,d]*rstd[n] over chunk c's rows: a block for kThreads columns of
// one chunk, so that a warp reads 32 neighbours of one row at a time.
template <class T, class A>
__global__ void __launch_bounds__(kThreads)
    rmsnorm_dgain_chunk(A* __restrict__ partial, const T* __restrict__ dy, const T* __restrict__ x,
                        const A* __restrict__ rstd, int64_t N, int D) {
    const int64_t c = blockIdx.x, d = int64_t(blockIdx.y) * kThreads + threadIdx.x;
    if (d >= D) return;
    const int64_t end = min((c + 1) * kRowChunk, N);
    A sum = 0;
    for (int64_t n = c * kRowChunk; n < end; ++n)
        sum = std::fma(A(dy[n * D + d]), A(x[n * D + d]) * rstd[n], sum);
    partial[c * D + d] = sum;
}

// dgain[d] += scale * sum_c partial[c,d], in the order of c
template <class A>
__global__ void __launch_bounds__(kThreads)
    rmsnorm_dgain_combine(A* __restrict__ dgain, const A* __restrict__ partial, A scale,
                          int64_t chunks, int D) {
    const int64_t d = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    if (d >= D) return;
    A sum = 0;
    for (int64_t c = 0; c < chunks; ++c) sum += partial[c * D + d];
    dgain[d] += scale * sum;
}

dim3 row_blocks(int64_t N) { return dim3(unsigned(std::min(N, kMaxBlocks))); }

}  // namespace

template <class T, class A>
Status rmsnorm_forward(T* y, A* rstd, const T* x, const A* gain, int64_t N, int D, A eps,
                       Stream s) {
    if (N < 0 || D < 1) return {Code::bad_argument, "rmsnorm_forward needs N >= 0, D >= 1"};
    if (N == 0) return {};
    return launch(rmsnorm_forward_block<T, A>, {.grid = row_blocks(N), .block = dim3(kThreads)}, s,
                  y, rstd, x, gain, N, D, eps);
}

template <class T, class A>
Status residual_rmsnorm_forward(T* y, A* rstd, const T* x, const T* branch, const A* gain, A alpha,
                                int64_t N, int D, A eps, Stream s) {
    if (N < 0 || D < 1)
        return {Code::bad_argument, "residual_rmsnorm_forward needs N >= 0, D >= 1"};
    if (N == 0) return {};
    return launch(residual_rmsnorm_forward_block<T, A>,
                  {.grid = row_blocks(N), .block = dim3(kThreads)}, s, y, rstd, x, branch, gain,
                  alpha, N, D, eps);
}

template <class T, class A>
Status rmsnorm_backward(T* dx, A* dgain_accum, const T* dy, const T* x, const A* gain,
                        const A* rstd, A scale, int64_t N, int D, A* scratch, Stream s) {
    if (N < 0 || D < 1) return {Code::bad_argument, "rmsnorm_backward needs N >= 0, D >= 1"};
    if (N == 0) return {};
    const int64_t chunks = row_chunks(N);
    const unsigned columns = unsigned((int64_t(D) + kThreads - 1) / kThreads);
    // dgain first: it reads dy, which dx may overwrite.
    Status status = launch(rmsnorm_dgain_chunk<T, A>,
                           {.grid = dim3(unsigned(chunks), columns), .block = dim3(kThreads)}, s,
                           scratch, dy, x, rstd, N, D);
    if (!status.ok()) return status;
    status = launch(rmsnorm_dgain_combine<A>, {.grid = dim3(columns), .block = dim3(kThreads)}, s,
                    dgain_accum, scratch, scale, chunks, D);
    if (!status.ok()) return status;
    return launch(rmsnorm_backward_block<T, A>, {.grid = row_blocks(N), .block = dim3(kThreads)}, s,
                  dx, dy, x, gain, rstd, scale, N, D);
}

template Status rmsnorm_forward<float>(float*, float*, const float*, const float*, int64_t, int,
                                       float, Stream);
template Status residual_rmsnorm_forward<float>(float*, float*, const float*, const float*,
                                                const float*, float, int64_t, int, float, Stream);
template Status rmsnorm_backward<float>(float*, float*, const float*, const float*, const float*,
                                        const float*, float, int64_t, int, float*, Stream);

}  // namespace fbt::kernels::cuda
