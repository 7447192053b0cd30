// The SiLU-gated product, vectorised.
#include "kernels/cpu_math.h"
#include "kernels/swiglu.h"

namespace fbt::kernels::cpu {

// y = a*sigmoid(a) * up,   a = gate
template <class T>
Status swiglu_forward(T* y, const T* gate, const T* up, int64_t n, Stream s) {
    if (n < 0) return {Code::bad_argument, "swiglu_forward needs n >= 0"};
    for_elements(s, n, [=](int64_t i) { y[i] = gate[i] * sigmoid(gate[i]) * up[i]; });
    return {};
}

// sig = sigmoid(a):   dgate = dy*up*sig*(1 + a*(1 - sig))      dup = dy*a*sig
template <class T>
Status swiglu_backward(T* dgate, T* dup, const T* dy, const T* gate, const T* up, int64_t n,
                       Stream s) {
    if (n < 0) return {Code::bad_argument, "swiglu_backward needs n >= 0"};
    for_elements(s, n, [=](int64_t i) {
        const T a = gate[i], u = up[i], d = dy[i], sig = sigmoid(a);
        dgate[i] = d * u * sig * std::fma(a, 1 - sig, T(1));
        dup[i] = d * (a * sig);
    });
    return {};
}

template Status swiglu_forward<float>(float*, const float*, const float*, int64_t, Stream);
template Status swiglu_backward<float>(float*, float*, const float*, const float*, const float*,
                                       int64_t, Stream);

}  // namespace fbt::kernels::cpu
