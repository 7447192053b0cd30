// The carried state on the GPU: lanes along a row, a pack of neighbouring columns each. One Philox
// block is four numbers, so a pack's draws need no neighbour.
#include "kernels/carry.h"
#include "kernels/vector.cuh"

namespace fbt::kernels::cuda {
namespace {

constexpr int kDraws = 4;  // of a Philox block

// y[r,:] = source(r) + noise[r,:] + half_width*(2*uniform - 1)
template <class T>
__global__ void __launch_bounds__(kRowThreads)
    carry_forward_row(T* __restrict__ y, const T* __restrict__ first,
                      const T* __restrict__ previous, const int64_t* __restrict__ source,
                      const float* __restrict__ noise, Jitter<float> jitter, int64_t R, int D,
                      bool whole) {
    const int64_t r = block_row();
    if (r >= R) return;
    const int64_t row = source[r];
    const T* const from = row >= 0 ? previous + row * D : first + (-1 - row) * D;
    const bool jittered = jitter.half_width != 0;
    const uint64_t sequence = jittered ? uint64_t(jitter.sequence[r]) : 0;
    const uint32_t position = jittered ? uint32_t(jitter.position[r]) : 0;
    for (int64_t d = threadIdx.x * kPack<T>; d < D; d += blockDim.x * kPack<T>) {
        const Pack<T> state = load_pack(from + d, D - d, whole);
        Floats<T> v;
#pragma unroll
        for (int j = 0; j < kPack<T>; ++j) v.v[j] = state[j];
        if (noise) {
            const Floats<T> added = load_floats<T>(noise + r * D + d, D - d, whole);
#pragma unroll
            for (int j = 0; j < kPack<T>; ++j) v.v[j] += added.v[j];
        }
        if (jittered) {
#pragma unroll
            for (int j = 0; j < kPack<T>; j += kDraws) {
                const Philox4 draw =
                    philox_four(jitter.key, sequence, position, uint32_t((d + j) / kDraws));
#pragma unroll
                for (int i = 0; i < kDraws; ++i)  // 2u - 1 is exact
                    v.v[j + i] = std::fma(jitter.half_width, 2.f * uniform_float(draw.v[i]) - 1.f,
                                          v.v[j + i]);
            }
        }
        Pack<T> out;
#pragma unroll
        for (int j = 0; j < kPack<T>; ++j) out.set(j, T(v.v[j]));
        store_pack(y + r * D + d, out, D - d, whole);
    }
}

// d(source row)[:] += dy[r,:]. No two rows share a source, so no two threads share an element.
template <class T>
__global__ void __launch_bounds__(kRowThreads)
    carry_backward_accum_row(T* __restrict__ dfirst, T* __restrict__ dprevious,
                             const T* __restrict__ dy, const int64_t* __restrict__ source,
                             int64_t R, int D, bool whole) {
    const int64_t r = block_row();
    if (r >= R) return;
    const int64_t row = source[r];
    T* const to = row >= 0 ? dprevious + row * D : dfirst + (-1 - row) * D;
    for (int64_t d = threadIdx.x * kPack<T>; d < D; d += blockDim.x * kPack<T>) {
        const Pack<T> before = load_pack(to + d, D - d, whole),
                      added = load_pack(dy + r * D + d, D - d, whole);
        Pack<T> sum;
#pragma unroll
        for (int j = 0; j < kPack<T>; ++j) sum.set(j, T(before[j] + added[j]));
        store_pack(to + d, sum, D - d, whole);
    }
}

}  // namespace

template <class T, class A>
Status carry_forward(T* y, const T* first, const T* previous, const int64_t* source, const A* noise,
                     const Jitter<A>& jitter, int64_t R, int D, Stream s) {
    if (R < 0 || D < 1) return {Code::bad_argument, "carry_forward needs R >= 0, D >= 1"};
    if (R == 0) return {};
    return launch(carry_forward_row<T>, row_launch(R, ceil_div(D, kPack<T>)), s, y, first, previous,
                  source, noise, jitter, R, D, whole_packs<T>(D, y, first, previous, noise));
}

template <class T>
Status carry_backward_accum(T* dfirst, T* dprevious, const T* dy, const int64_t* source, int64_t R,
                            int D, Stream s) {
    if (R < 0 || D < 1) return {Code::bad_argument, "carry_backward_accum needs R >= 0, D >= 1"};
    if (R == 0) return {};
    return launch(carry_backward_accum_row<T>, row_launch(R, ceil_div(D, kPack<T>)), s, dfirst,
                  dprevious, dy, source, R, D, whole_packs<T>(D, dfirst, dprevious, dy));
}

#define FBT_INSTANTIATE(T)                                                                 \
    template Status carry_forward<T>(T*, const T*, const T*, const int64_t*, const float*, \
                                     const Jitter<float>&, int64_t, int, Stream);          \
    template Status carry_backward_accum<T>(T*, T*, const T*, const int64_t*, int64_t, int, Stream);
FBT_INSTANTIATE(float)
FBT_INSTANTIATE(bf16)

}  // namespace fbt::kernels::cuda
