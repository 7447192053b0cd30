// Sum of squares on the GPU: a block for a chunk, then one block for the chunks' sums.
#include "kernels/block_reduce.cuh"
#include "kernels/square_sum.h"
#include "kernels/vector.cuh"

namespace fbt::kernels::cuda {
namespace {

constexpr int kThreads = 256;

// scratch[c] = sum of x[i]^2 over chunk c. A float's square is exact in double: 24 + 24 bits.
__global__ void __launch_bounds__(kThreads)
    square_sum_chunk(double* __restrict__ scratch, const float* __restrict__ x, int64_t n,
                     bool whole) {
    const int64_t begin = int64_t(blockIdx.x) * kSquareSumChunk;
    const int64_t end = min(begin + kSquareSumChunk, n);
    double sum = 0;
#pragma unroll 4
    for (int64_t i = begin + int64_t(threadIdx.x) * kPack<float>; i < end;
         i += int64_t(kThreads) * kPack<float>) {
        const Pack<float> pack = load_pack(x + i, end - i, whole && end - i >= kPack<float>);
#pragma unroll
        for (int j = 0; j < kPack<float>; ++j) {
            const double value = pack[j];  // 0 beyond the end
            sum = std::fma(value, value, sum);
        }
    }
    sum = block_sum<kThreads>(sum);
    if (threadIdx.x == 0) scratch[blockIdx.x] = sum;
}

// *sum = sum_c scratch[c]
__global__ void __launch_bounds__(kThreads)
    square_sum_combine(double* __restrict__ sum, const double* __restrict__ scratch,
                       int64_t chunks) {
    double total = 0;
    for (int64_t c = threadIdx.x; c < chunks; c += kThreads) total += scratch[c];
    total = block_sum<kThreads>(total);
    if (threadIdx.x == 0) *sum = total;
}

}  // namespace

template <class A>
Status square_sum(double* sum, const A* x, int64_t n, double* scratch, Stream s) {
    if (n < 0) return {Code::bad_argument, "square_sum needs n >= 0"};
    const int64_t chunks = ceil_div(n, kSquareSumChunk);
    if (chunks > 0) {
        const Status status =
            launch(square_sum_chunk, {.grid = dim3(unsigned(chunks)), .block = dim3(kThreads)}, s,
                   scratch, x, n, aligned16(x));
        if (!status.ok()) return status;
    }
    return launch(square_sum_combine, {.grid = dim3(1), .block = dim3(kThreads)}, s, sum, scratch,
                  chunks);
}

template Status square_sum<float>(double*, const float*, int64_t, double*, Stream);

}  // namespace fbt::kernels::cuda
