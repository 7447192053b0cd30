// Sigmoid gates, vectorised: over columns for the head gate, over rows where C = 1 (the fusion).
#include "kernels/cpu_math.h"
#include "kernels/gate.h"

namespace fbt::kernels::cpu {

// y[n,c] = x[n,c] * sigmoid(g[n])
template <class T>
Status gate_forward(T* y, const T* x, const T* g, int64_t N, int C, Stream s) {
    if (N < 0 || C < 1) return {Code::bad_argument, "gate_forward needs N >= 0, C >= 1"};
    if (C == 1) {
        for_elements(s, N, [=](int64_t n) { store(y[n], float(x[n]) * sigmoid(float(g[n]))); });
        return {};
    }
    for_rows(s, N, C, [=](int64_t n) {
        const float sig = sigmoid(float(g[n]));
        const T* x_row = x + n * C;
        T* y_row = y + n * C;
#pragma omp simd
        for (int c = 0; c < C; ++c) store(y_row[c], float(x_row[c]) * sig);
    });
    return {};
}

// sig = sigmoid(g):   dx[n,c] = dy[n,c]*sig[n]      dg[n] = sig(1 - sig) * sum_c dy[n,c]*x[n,c]
template <class T>
Status gate_backward(T* dx, T* dg, const T* dy, const T* x, const T* g, int64_t N, int C,
                     Stream s) {
    if (N < 0 || C < 1) return {Code::bad_argument, "gate_backward needs N >= 0, C >= 1"};
    if (C == 1) {
        for_elements(s, N, [=](int64_t n) {
            const float sig = sigmoid(float(g[n])), up = float(dy[n]);
            store(dg[n], sig * (1 - sig) * (up * float(x[n])));
            store(dx[n], up * sig);
        });
        return {};
    }
    for_rows(s, N, C, [=](int64_t n) {
        const float sig = sigmoid(float(g[n]));
        const T *dy_row = dy + n * C, *x_row = x + n * C;
        T* dx_row = dx + n * C;
        const float dot = row_dot(
            C, [=](int64_t c) { return float(dy_row[c]); },
            [=](int64_t c) { return float(x_row[c]); });
        dg[n] = T(sig * (1 - sig) * dot);
#pragma omp simd
        for (int c = 0; c < C; ++c) store(dx_row[c], float(dy_row[c]) * sig);
    });
    return {};
}

#define FBT_INSTANTIATE(T)                                                         \
    template Status gate_forward<T>(T*, const T*, const T*, int64_t, int, Stream); \
    template Status gate_backward<T>(T*, T*, const T*, const T*, const T*, int64_t, int, Stream);
FBT_INSTANTIATE(float)
FBT_INSTANTIATE(bf16)

}  // namespace fbt::kernels::cpu
