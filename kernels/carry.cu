// The carried state on the GPU: a thread for four neighbouring columns of a row, because one Philox
// block is four numbers.
#include "kernels/carry.h"
#include "kernels/gpu.h"

namespace fbt::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kColumns = 4;  // of a thread

unsigned blocks_for(int64_t threads) { return unsigned((threads + kThreads - 1) / kThreads); }

// y[r,:] = source(r) + noise[r,:] + half_width*(2*uniform - 1)
template <class T, class A>
__global__ void __launch_bounds__(kThreads)
    carry_forward_columns(T* __restrict__ y, const T* __restrict__ first,
                          const T* __restrict__ previous, const int64_t* __restrict__ source,
                          const A* __restrict__ noise, Jitter<A> jitter, int64_t R, int D) {
    const int64_t groups = (int64_t(D) + kColumns - 1) / kColumns;
    const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x, r = i / groups;
    if (r >= R) return;
    const int group = int(i % groups), begin = group * kColumns;
    const int64_t row = source[r];
    const T* from = row >= 0 ? previous + row * D : first + (-1 - row) * D;
    const bool jittered = jitter.half_width != 0;
    Philox4 draw{};
    if (jittered)
        draw = philox_four(jitter.key, uint64_t(jitter.sequence[r]), uint32_t(jitter.position[r]),
                           uint32_t(group));
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
        const int d = begin + c;
        if (d >= D) break;
        A v = A(from[d]);
        if (noise) v += noise[r * D + d];
        if (jittered) v += jitter.half_width * (A(2) * A(uniform_float(draw.v[c])) - A(1));
        y[r * D + d] = T(v);
    }
}

// d(source row)[:] += dy[r,:]. No two rows share a source, so no two threads share an element.
template <class T>
__global__ void __launch_bounds__(kThreads)
    carry_backward_accum_element(T* __restrict__ dfirst, T* __restrict__ dprevious,
                                 const T* __restrict__ dy, const int64_t* __restrict__ source,
                                 int64_t R, int D) {
    const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x, r = i / D, d = i % D;
    if (r >= R) return;
    const int64_t row = source[r];
    T* to = row >= 0 ? dprevious + row * D : dfirst + (-1 - row) * D;
    to[d] += dy[i];
}

}  // namespace

template <class T, class A>
Status carry_forward(T* y, const T* first, const T* previous, const int64_t* source, const A* noise,
                     const Jitter<A>& jitter, int64_t R, int D, Stream s) {
    if (R < 0 || D < 1) return {Code::bad_argument, "carry_forward needs R >= 0, D >= 1"};
    if (R == 0) return {};
    const int64_t groups = (int64_t(D) + kColumns - 1) / kColumns;
    return launch(carry_forward_columns<T, A>,
                  {.grid = dim3(blocks_for(R * groups)), .block = dim3(kThreads)}, s, y, first,
                  previous, source, noise, jitter, R, D);
}

template <class T>
Status carry_backward_accum(T* dfirst, T* dprevious, const T* dy, const int64_t* source, int64_t R,
                            int D, Stream s) {
    if (R < 0 || D < 1) return {Code::bad_argument, "carry_backward_accum needs R >= 0, D >= 1"};
    if (R == 0) return {};
    return launch(carry_backward_accum_element<T>,
                  {.grid = dim3(blocks_for(R * D)), .block = dim3(kThreads)}, s, dfirst, dprevious,
                  dy, source, R, D);
}

template Status carry_forward<float>(float*, const float*, const float*, const int64_t*,
                                     const float*, const Jitter<float>&, int64_t, int, Stream);
template Status carry_backward_accum<float>(float*, float*, const float*, const int64_t*, int64_t,
                                            int, Stream);

}  // namespace fbt::kernels::cuda
