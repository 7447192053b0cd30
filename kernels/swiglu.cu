// The SiLU-gated product on the GPU, bound by memory: a thread moves 16 bytes of each array.
#include "kernels/swiglu.h"
#include "kernels/vector.cuh"

namespace fbt::kernels::cuda {
namespace {

// y = a*sigmoid(a) * up,   a = gate. A thread reads all its elements before it writes them, so
// outputs may lie on inputs.
template <class T>
__global__ void __launch_bounds__(kElementThreads)
    swiglu_forward_packs(T* y, const T* gate, const T* up, int64_t n, bool aligned) {
    const int64_t i = first_element<T>(), count = n - i;
    if (count <= 0) return;
    const bool whole = aligned && count >= kPack<T>;
    const Pack<T> a = load_pack(gate + i, count, whole), u = load_pack(up + i, count, whole);
    Pack<T> out;
#pragma unroll
    for (int j = 0; j < kPack<T>; ++j) out.set(j, T(a[j] * sigmoid(a[j]) * u[j]));
    store_pack(y + i, out, count, whole);
}

// s = sigmoid(a):   dgate = dy*up*s*(1 + a*(1 - s))      dup = dy*a*s
template <class T>
__global__ void __launch_bounds__(kElementThreads)
    swiglu_backward_packs(T* dgate, T* dup, const T* dy, const T* gate, const T* up, int64_t n,
                          bool aligned) {
    const int64_t i = first_element<T>(), count = n - i;
    if (count <= 0) return;
    const bool whole = aligned && count >= kPack<T>;
    const Pack<T> d = load_pack(dy + i, count, whole), a = load_pack(gate + i, count, whole),
                  u = load_pack(up + i, count, whole);
    Pack<T> da, du;
#pragma unroll
    for (int j = 0; j < kPack<T>; ++j) {
        const float s = sigmoid(a[j]);
        da.set(j, T(d[j] * u[j] * s * std::fma(a[j], 1.f - s, 1.f)));
        du.set(j, T(d[j] * (a[j] * s)));
    }
    store_pack(dgate + i, da, count, whole);
    store_pack(dup + i, du, count, whole);
}

}  // namespace

template <class T>
Status swiglu_forward(T* y, const T* gate, const T* up, int64_t n, Stream s) {
    if (n < 0) return {Code::bad_argument, "swiglu_forward needs n >= 0"};
    if (n == 0) return {};
    return launch(swiglu_forward_packs<T>, element_launch<T>(n), s, y, gate, up, n,
                  aligned16(y, gate, up));
}

template <class T>
Status swiglu_backward(T* dgate, T* dup, const T* dy, const T* gate, const T* up, int64_t n,
                       Stream s) {
    if (n < 0) return {Code::bad_argument, "swiglu_backward needs n >= 0"};
    if (n == 0) return {};
    return launch(swiglu_backward_packs<T>, element_launch<T>(n), s, dgate, dup, dy, gate, up, n,
                  aligned16(dgate, dup, dy, gate, up));
}

#define FBT_INSTANTIATE(T)                                                      \
    template Status swiglu_forward<T>(T*, const T*, const T*, int64_t, Stream); \
    template Status swiglu_backward<T>(T*, T*, const T*, const T*, const T*, int64_t, Stream);
FBT_INSTANTIATE(float)
FBT_INSTANTIATE(bf16)

}  // namespace fbt::kernels::cuda
