// The SiLU-gated product, vectorised.
#include "kernels/cpu_math.h"
#include "kernels/swiglu.h"

namespace fbt::kernels::cpu {

// y = a*sigmoid(a) * up,   a = gate
template <class T>
Status swiglu_forward(T* y, const T* gate, const T* up, int64_t n, Stream s) {
    if (n < 0) return {Code::bad_argument, "swiglu_forward needs n >= 0"};
    for_elements(s, n, [=](int64_t i) {
        const float a = float(gate[i]);
        store(y[i], a * sigmoid(a) * float(up[i]));
    });
    return {};
}

// sig = sigmoid(a):   dgate = dy*up*sig*(1 + a*(1 - sig))      dup = dy*a*sig
template <class T>
Status swiglu_backward(T* dgate, T* dup, const T* dy, const T* gate, const T* up, int64_t n,
                       Stream s) {
    if (n < 0) return {Code::bad_argument, "swiglu_backward needs n >= 0"};
    for_elements(s, n, [=](int64_t i) {
        const float a = float(gate[i]), u = float(up[i]), d = float(dy[i]), sig = sigmoid(a);
        store(dgate[i], d * u * sig * std::fma(a, 1 - sig, 1.f));
        store(dup[i], d * (a * sig));
    });
    return {};
}

#define FBT_INSTANTIATE(T)                                                      \
    template Status swiglu_forward<T>(T*, const T*, const T*, int64_t, Stream); \
    template Status swiglu_backward<T>(T*, T*, const T*, const T*, const T*, int64_t, Stream);
FBT_INSTANTIATE(float)
FBT_INSTANTIATE(bf16)

}  // namespace fbt::kernels::cpu
