// NorMuon in plain loops.
#include <cmath>

#include "kernels/normuon.h"

namespace fbt::kernels::ref {

// m = beta1*m + (1-beta1)*grad*grad_scale
template <class A>
Status normuon_momentum(A* m, const A* grad, int64_t n, double beta1, double grad_scale, Stream) {
    if (n < 0) return {Code::bad_argument, "normuon_momentum needs n >= 0"};
    for (int64_t i = 0; i < n; ++i)
        m[i] = A(beta1) * m[i] + A(1 - beta1) * (grad[i] * A(grad_scale));
    return {};
}

// v[n] = beta2*v[n] + (1-beta2)*mean_k o[n,k]^2        r[n,k] = o[n,k] / (sqrt(v[n]) + eps)
// w = w*(1 - lr*weight_decay) - lr * 0.2*sqrt(N*K)/||r||_F * r
template <class T, class A>
Status normuon_step(A* w, A* v, const T* o, int64_t N, int64_t K, const NorMuonStep& h, A* scratch,
                    Stream) {
    if (N < 0 || K < 0) return {Code::bad_argument, "normuon_step needs N, K >= 0"};
    if (N == 0 || K == 0) return {};
    A total = 0;
    for (int64_t n = 0; n < N; ++n) {
        A squares = 0;
        for (int64_t k = 0; k < K; ++k) squares += o[n * K + k] * o[n * K + k];
        v[n] = A(h.beta2) * v[n] + A(1 - h.beta2) * (squares / A(K));
        const A divisor = std::sqrt(v[n]) + A(h.eps);
        scratch[n] = squares / (divisor * divisor);
        total += scratch[n];
    }
    scratch[N] = total == 0 ? A(0) : A(0.2 * std::sqrt(double(N) * double(K))) / std::sqrt(total);
    for (int64_t n = 0; n < N; ++n) {
        const A rate = A(h.learning_rate) * scratch[N] / (std::sqrt(v[n]) + A(h.eps));
        for (int64_t k = 0; k < K; ++k)
            w[n * K + k] =
                w[n * K + k] * A(1 - h.learning_rate * h.weight_decay) - rate * o[n * K + k];
    }
    return {};
}

// y = x / (sqrt(*square_sum) + 1e-7)
template <class T, class A>
Status frobenius_normalize(T* y, const A* x, const double* square_sum, int64_t n, Stream) {
    if (n < 0) return {Code::bad_argument, "frobenius_normalize needs n >= 0"};
    const A norm = A(std::sqrt(*square_sum) + kNormEps);
    for (int64_t i = 0; i < n; ++i) y[i] = T(x[i] / norm);
    return {};
}

// y = alpha*x + beta*y
template <class T, class A>
Status axpby(T* y, A alpha, const T* x, A beta, int64_t n, Stream) {
    if (n < 0) return {Code::bad_argument, "axpby needs n >= 0"};
    for (int64_t i = 0; i < n; ++i) y[i] = T(alpha * x[i] + beta * y[i]);
    return {};
}

// y[k,n] = x[n,k]
template <class T>
Status transpose(T* y, const T* x, int64_t N, int64_t K, Stream) {
    if (N < 0 || K < 0) return {Code::bad_argument, "transpose needs N, K >= 0"};
    for (int64_t n = 0; n < N; ++n)
        for (int64_t k = 0; k < K; ++k) y[k * N + n] = x[n * K + k];
    return {};
}

#define FBT_INSTANTIATE(T)                                                                      \
    template Status normuon_momentum<T>(T*, const T*, int64_t, double, double, Stream);         \
    template Status normuon_step<T>(T*, T*, const T*, int64_t, int64_t, const NorMuonStep&, T*, \
                                    Stream);                                                    \
    template Status frobenius_normalize<T>(T*, const T*, const double*, int64_t, Stream);       \
    template Status axpby<T>(T*, T, const T*, T, int64_t, Stream);                              \
    template Status transpose<T>(T*, const T*, int64_t, int64_t, Stream);
FBT_INSTANTIATE(float)
FBT_INSTANTIATE(double)

}  // namespace fbt::kernels::ref
