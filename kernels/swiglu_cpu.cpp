// The SiLU-gated product, vectorised.
#include "kernels/cpu_tile.h"
#include "kernels/swiglu.h"

namespace fbt::kernels::cpu {

// y = a*sigmoid(a) * up,   a = gate
template <class T>
Status swiglu_forward(T* y, const T* gate, const T* up, int64_t n, Stream s) {
    if (n < 0) return {Code::bad_argument, "swiglu_forward needs n >= 0"};
    for_vectors(s, n, [=](int64_t i, int count) {
        const Vec a = load_first(gate + i, count), u = load_first(up + i, count);
        store_first(y + i, a * sigmoid(a) * u, count);
    });
    return {};
}

// sig = sigmoid(a):   dgate = dy*up*sig*(1 + a*(1 - sig))      dup = dy*a*sig
template <class T>
Status swiglu_backward(T* dgate, T* dup, const T* dy, const T* gate, const T* up, int64_t n,
                       Stream s) {
    if (n < 0) return {Code::bad_argument, "swiglu_backward needs n >= 0"};
    for_vectors(s, n, [=](int64_t i, int count) {
        const Vec a = load_first(gate + i, count), u = load_first(up + i, count);
        const Vec d = load_first(dy + i, count), sig = sigmoid(a), one = splat(1.f);
        store_first(dgate + i, d * u * sig * fma(a, one - sig, one), count);
        store_first(dup + i, d * (a * sig), count);
    });
    return {};
}

#define FBT_INSTANTIATE(T)                                                      \
    template Status swiglu_forward<T>(T*, const T*, const T*, int64_t, Stream); \
    template Status swiglu_backward<T>(T*, T*, const T*, const T*, const T*, int64_t, Stream);
FBT_INSTANTIATE(float)
FBT_INSTANTIATE(bf16)

}  // namespace fbt::kernels::cpu
