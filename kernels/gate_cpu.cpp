// Sigmoid gates, vectorised: over columns for the head gate, over rows where C = 1 (the fusion).
#include <algorithm>

#include "kernels/cpu_tile.h"
#include "kernels/gate.h"

namespace fbt::kernels::cpu {
namespace {

// f(n, sigmoid(g[n])) for n < N, each about C elements of work, the sigmoids of kLanes rows at once
template <class T, class F>
void for_gates(Stream s, const T* g, int64_t N, int C, F f) {
    for_rows(s, ceil_div(N, kLanes), std::min<int64_t>(N, kLanes) * C, [=](int64_t block) {
        const int64_t first = block * kLanes;
        const int rows = int(std::min<int64_t>(N - first, kLanes));
        float sig[kLanes];
        store(sig, sigmoid(load_first(g + first, rows)));
        for (int r = 0; r < rows; ++r) f(first + r, sig[r]);
    });
}

}  // namespace

// y[n,c] = x[n,c] * sigmoid(g[n])
template <class T>
Status gate_forward(T* y, const T* x, const T* g, int64_t N, int C, Stream s) {
    if (N < 0 || C < 1) return {Code::bad_argument, "gate_forward needs N >= 0, C >= 1"};
    if (C == 1) {
        for_vectors(s, N, [=](int64_t n, int count) {
            store_first(y + n, load_first(x + n, count) * sigmoid(load_first(g + n, count)), count);
        });
        return {};
    }
    for_gates(s, g, N, C, [=](int64_t n, float sig) {
        const T* x_row = x + n * C;
        T* y_row = y + n * C;
        for_vectors(C, [=](int64_t c, int count) {
            store_first(y_row + c, load_first(x_row + c, count) * splat(sig), count);
        });
    });
    return {};
}

// sig = sigmoid(g):   dx[n,c] = dy[n,c]*sig[n]      dg[n] = sig(1 - sig) * sum_c dy[n,c]*x[n,c]
template <class T>
Status gate_backward(T* dx, T* dg, const T* dy, const T* x, const T* g, int64_t N, int C,
                     Stream s) {
    if (N < 0 || C < 1) return {Code::bad_argument, "gate_backward needs N >= 0, C >= 1"};
    if (C == 1) {
        for_vectors(s, N, [=](int64_t n, int count) {
            const Vec sig = sigmoid(load_first(g + n, count)), up = load_first(dy + n, count);
            const Vec slope = sig * (splat(1.f) - sig);
            store_first(dg + n, slope * (up * load_first(x + n, count)), count);
            store_first(dx + n, up * sig, count);
        });
        return {};
    }
    for_gates(s, g, N, C, [=](int64_t n, float sig) {
        const T *dy_row = dy + n * C, *x_row = x + n * C;
        T* dx_row = dx + n * C;
        dg[n] = T(sig * (1 - sig) * row_dot(C, elements(dy_row), elements(x_row)));
        for_vectors(C, [=](int64_t c, int count) {
            store_first(dx_row + c, load_first(dy_row + c, count) * splat(sig), count);
        });
    });
    return {};
}

#define FBT_INSTANTIATE(T)                                                         \
    template Status gate_forward<T>(T*, const T*, const T*, int64_t, int, Stream); \
    template Status gate_backward<T>(T*, T*, const T*, const T*, const T*, int64_t, int, Stream);
FBT_INSTANTIATE(float)
FBT_INSTANTIATE(bf16)

}  // namespace fbt::kernels::cpu
