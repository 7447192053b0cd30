// Sigmoid gates in plain loops.
#include <cmath>

#include "kernels/gate.h"

namespace fbt::kernels::ref {
namespace {

template <class A>
A sigmoid(A x) {
    return 1 / (1 + std::exp(-x));
}

}  // namespace

// y[n,c] = x[n,c] * sigmoid(g[n])
template <class T>
Status gate_forward(T* y, const T* x, const T* g, int64_t N, int C, Stream) {
    if (N < 0 || C < 1) return {Code::bad_argument, "gate_forward needs N >= 0, C >= 1"};
    using A = accumulate_t<T>;
    for (int64_t n = 0; n < N; ++n) {
        const A s = sigmoid(A(g[n]));
        for (int c = 0; c < C; ++c) y[n * C + c] = T(A(x[n * C + c]) * s);
    }
    return {};
}

// s = sigmoid(g):   dx[n,c] = dy[n,c]*s[n]      dg[n] = s(1 - s) * sum_c dy[n,c]*x[n,c]
template <class T>
Status gate_backward(T* dx, T* dg, const T* dy, const T* x, const T* g, int64_t N, int C, Stream) {
    if (N < 0 || C < 1) return {Code::bad_argument, "gate_backward needs N >= 0, C >= 1"};
    using A = accumulate_t<T>;
    for (int64_t n = 0; n < N; ++n) {
        const A s = sigmoid(A(g[n]));
        A dot = 0;
        for (int c = 0; c < C; ++c) {
            const A up = A(dy[n * C + c]);
            dot += up * A(x[n * C + c]);
            dx[n * C + c] = T(up * s);
        }
        dg[n] = T(s * (1 - s) * dot);
    }
    return {};
}

#define FBT_INSTANTIATE(T)                                                         \
    template Status gate_forward<T>(T*, const T*, const T*, int64_t, int, Stream); \
    template Status gate_backward<T>(T*, T*, const T*, const T*, const T*, int64_t, int, Stream);
FBT_INSTANTIATE(float)
FBT_INSTANTIATE(double)

}  // namespace fbt::kernels::ref
