// The SiLU-gated product in plain loops.
#include <cmath>

#include "kernels/swiglu.h"

namespace fbt::kernels::ref {
namespace {

template <class A>
A sigmoid(A x) {
    return 1 / (1 + std::exp(-x));
}

}  // namespace

// y = a*sigmoid(a) * up,   a = gate
template <class T>
Status swiglu_forward(T* y, const T* gate, const T* up, int64_t n, Stream) {
    if (n < 0) return {Code::bad_argument, "swiglu_forward needs n >= 0"};
    using A = accumulate_t<T>;
    for (int64_t i = 0; i < n; ++i) {
        const A a = A(gate[i]);
        y[i] = T(a * sigmoid(a) * A(up[i]));
    }
    return {};
}

// s = sigmoid(a):   dgate = dy*up*s*(1 + a*(1 - s))      dup = dy*a*s
template <class T>
Status swiglu_backward(T* dgate, T* dup, const T* dy, const T* gate, const T* up, int64_t n,
                       Stream) {
    if (n < 0) return {Code::bad_argument, "swiglu_backward needs n >= 0"};
    using A = accumulate_t<T>;
    for (int64_t i = 0; i < n; ++i) {
        const A a = A(gate[i]), u = A(up[i]), d = A(dy[i]), s = sigmoid(a);
        dgate[i] = T(d * u * s * (1 + a * (1 - s)));
        dup[i] = T(d * (a * s));
    }
    return {};
}

#define FBT_INSTANTIATE(T)                                                      \
    template Status swiglu_forward<T>(T*, const T*, const T*, int64_t, Stream); \
    template Status swiglu_backward<T>(T*, T*, const T*, const T*, const T*, int64_t, Stream);
FBT_INSTANTIATE(float)
FBT_INSTANTIATE(double)

}  // namespace fbt::kernels::ref
