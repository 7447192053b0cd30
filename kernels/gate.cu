// Sigmoid gates on the GPU. With one gate a row (attention's head gate) neighbouring lanes take a
// row; with C = 1 (the fusion) the op is elementwise.
#include "kernels/gate.h"
#include "kernels/row_sums.cuh"

namespace fbt::kernels::cuda {
namespace {

// y[n,c] = x[n,c] * sigmoid(g[n]). y may be x, dx may be dy: an element is read and written by one
// thread.
template <class T>
__global__ void __launch_bounds__(kRowThreads)
    gate_forward_row(T* y, const T* x, const T* __restrict__ g, int64_t N, int C, bool whole) {
    const int64_t n = block_row();
    if (n >= N) return;
    const float s = sigmoid(float(g[n]));
    for (int64_t c = threadIdx.x * kPack<T>; c < C; c += blockDim.x * kPack<T>) {
        const Pack<T> v = load_pack(x + n * C + c, C - c, whole);
        Pack<T> out;
#pragma unroll
        for (int j = 0; j < kPack<T>; ++j) out.set(j, T(v[j] * s));
        store_pack(y + n * C + c, out, C - c, whole);
    }
}

// s = sigmoid(g):   dx[n,c] = dy[n,c]*s[n]      dg[n] = s(1 - s) * sum_c dy[n,c]*x[n,c]
// A lane adds its products in order of c; the lanes' sums are added pairwise.
template <class T>
__global__ void __launch_bounds__(kRowThreads)
    gate_backward_row(T* dx, T* __restrict__ dg, const T* dy, const T* __restrict__ x,
                      const T* __restrict__ g, int64_t N, int C, bool whole) {
    const int64_t n = block_row();
    const bool inside = n < N;  // rows beyond the end meet in the warp's sum
    const float s = inside ? sigmoid(float(g[n])) : 0.f;
    float dot = 0;
    for (int64_t c = inside ? threadIdx.x * kPack<T> : C; c < C; c += blockDim.x * kPack<T>) {
        const Pack<T> up = load_pack(dy + n * C + c, C - c, whole),
                      v = load_pack(x + n * C + c, C - c, whole);
        Pack<T> out;
#pragma unroll
        for (int j = 0; j < kPack<T>; ++j) {
            dot = std::fma(up[j], v[j], dot);
            out.set(j, T(up[j] * s));
        }
        store_pack(dx + n * C + c, out, C - c, whole);
    }
    dot = lanes_sum(dot, int(blockDim.x));
    if (inside && threadIdx.x == 0) dg[n] = T(s * (1.f - s) * dot);
}

// The same with C = 1.
template <class T>
__global__ void __launch_bounds__(kElementThreads)
    gate_forward_packs(T* y, const T* x, const T* __restrict__ g, int64_t N, bool aligned) {
    const int64_t n = first_element<T>(), count = N - n;
    if (count <= 0) return;
    const bool whole = aligned && count >= kPack<T>;
    const Pack<T> v = load_pack(x + n, count, whole), gate = load_pack(g + n, count, whole);
    Pack<T> out;
#pragma unroll
    for (int j = 0; j < kPack<T>; ++j) out.set(j, T(v[j] * sigmoid(gate[j])));
    store_pack(y + n, out, count, whole);
}
template <class T>
__global__ void __launch_bounds__(kElementThreads)
    gate_backward_packs(T* dx, T* __restrict__ dg, const T* dy, const T* __restrict__ x,
                        const T* __restrict__ g, int64_t N, bool aligned) {
    const int64_t n = first_element<T>(), count = N - n;
    if (count <= 0) return;
    const bool whole = aligned && count >= kPack<T>;
    const Pack<T> up = load_pack(dy + n, count, whole), v = load_pack(x + n, count, whole),
                  gate = load_pack(g + n, count, whole);
    Pack<T> out, out_gate;
#pragma unroll
    for (int j = 0; j < kPack<T>; ++j) {
        const float s = sigmoid(gate[j]);
        out.set(j, T(up[j] * s));
        out_gate.set(j, T(s * (1.f - s) * (up[j] * v[j])));
    }
    store_pack(dx + n, out, count, whole);
    store_pack(dg + n, out_gate, count, whole);
}

}  // namespace

template <class T>
Status gate_forward(T* y, const T* x, const T* g, int64_t N, int C, Stream s) {
    if (N < 0 || C < 1) return {Code::bad_argument, "gate_forward needs N >= 0, C >= 1"};
    if (N == 0) return {};
    if (C == 1)
        return launch(gate_forward_packs<T>, element_launch<T>(N), s, y, x, g, N,
                      aligned16(y, x, g));
    return launch(gate_forward_row<T>, row_launch(N, ceil_div(C, kPack<T>)), s, y, x, g, N, C,
                  whole_packs<T>(C, y, x));
}

template <class T>
Status gate_backward(T* dx, T* dg, const T* dy, const T* x, const T* g, int64_t N, int C,
                     Stream s) {
    if (N < 0 || C < 1) return {Code::bad_argument, "gate_backward needs N >= 0, C >= 1"};
    if (N == 0) return {};
    if (C == 1)
        return launch(gate_backward_packs<T>, element_launch<T>(N), s, dx, dg, dy, x, g, N,
                      aligned16(dx, dg, dy, x, g));
    return launch(gate_backward_row<T>, row_launch(N, ceil_div(C, kPack<T>)), s, dx, dg, dy, x, g,
                  N, C, whole_packs<T>(C, dx, dy, x));
}

#define FBT_INSTANTIATE(T)                                                         \
    template Status gate_forward<T>(T*, const T*, const T*, int64_t, int, Stream); \
    template Status gate_backward<T>(T*, T*, const T*, const T*, const T*, int64_t, int, Stream);
FBT_INSTANTIATE(float)
FBT_INSTANTIATE(bf16)

}  // namespace fbt::kernels::cuda
