// NorMuon, vectorised, rows spread over threads.
#include <algorithm>
#include <cmath>

#include "kernels/cpu_tile.h"
#include "kernels/normuon.h"

namespace fbt::kernels::cpu {

// m = beta1*m + (1-beta1)*grad*grad_scale
template <class A>
Status normuon_momentum(A* m, const A* grad, int64_t n, double beta1, double grad_scale, Stream s) {
    if (n < 0) return {Code::bad_argument, "normuon_momentum needs n >= 0"};
    const A keep = A(beta1), rest = A(1 - beta1), scale = A(grad_scale);
    for_elements(s, n, [=](int64_t i) { m[i] = std::fma(keep, m[i], rest * (grad[i] * scale)); });
    return {};
}

// v[n] = beta2*v[n] + (1-beta2)*mean_k o[n,k]^2        r[n,k] = o[n,k] / (sqrt(v[n]) + eps)
// w = w*(1 - lr*weight_decay) - lr * 0.2*sqrt(N*K)/||r||_F * r
template <class T, class A>
Status normuon_step(A* w, A* v, const T* o, int64_t N, int64_t K, const NorMuonStep& h, A* scratch,
                    Stream s) {
    if (N < 0 || K < 0) return {Code::bad_argument, "normuon_step needs N, K >= 0"};
    if (N == 0 || K == 0) return {};
    const A beta2 = A(h.beta2), rest2 = A(1 - h.beta2), eps = A(h.eps);
    for_rows(s, N, K, [=](int64_t n) {
        const T* row = o + n * K;
        const A squares = row_sum(K, [row](int64_t k, int count) {
            const Vec x = load_first(row + k, count);
            return x * x;
        });
        v[n] = std::fma(beta2, v[n], rest2 * (squares / A(K)));
        const A divisor = std::sqrt(v[n]) + eps;
        scratch[n] = squares / (divisor * divisor);
    });
    const A total = row_sum(N, elements(scratch));
    const A scale =
        total == 0 ? A(0) : A(0.2 * std::sqrt(double(N) * double(K))) / std::sqrt(total);
    const A lr = A(h.learning_rate), keep = A(1 - h.learning_rate * h.weight_decay);
    for_rows(s, N, K, [=](int64_t n) {
        const A rate = lr * scale / (std::sqrt(v[n]) + eps);
        const T* row = o + n * K;
        A* weights = w + n * K;
#pragma omp simd
        for (int64_t k = 0; k < K; ++k)
            weights[k] = std::fma(weights[k], keep, -(rate * A(row[k])));
    });
    return {};
}

// y = x / (sqrt(*square_sum) + 1e-7)
template <class T, class A>
Status frobenius_normalize(T* y, const A* x, const double* square_sum, int64_t n, Stream s) {
    if (n < 0) return {Code::bad_argument, "frobenius_normalize needs n >= 0"};
    const A inverse = A(1 / (std::sqrt(*square_sum) + kNormEps));
    for_elements(s, n, [=](int64_t i) { store(y[i], x[i] * inverse); });
    return {};
}

// y = alpha*x + beta*y
template <class T, class A>
Status axpby(T* y, A alpha, const T* x, A beta, int64_t n, Stream s) {
    if (n < 0) return {Code::bad_argument, "axpby needs n >= 0"};
    for_elements(s, n, [=](int64_t i) { store(y[i], std::fma(alpha, A(x[i]), beta * A(y[i]))); });
    return {};
}

// y[k,n] = x[n,k], in squares that the cache holds
template <class T>
Status transpose(T* y, const T* x, int64_t N, int64_t K, Stream s) {
    if (N < 0 || K < 0) return {Code::bad_argument, "transpose needs N, K >= 0"};
    constexpr int64_t kTile = 32;
    for_rows(s, (N + kTile - 1) / kTile, kTile * K, [=](int64_t tile) {
        const int64_t end = std::min((tile + 1) * kTile, N);
        for (int64_t first = 0; first < K; first += kTile)
            for (int64_t k = first; k < std::min(first + kTile, K); ++k)
                for (int64_t n = tile * kTile; n < end; ++n) y[k * N + n] = x[n * K + k];
    });
    return {};
}

template Status normuon_momentum<float>(float*, const float*, int64_t, double, double, Stream);
#define FBT_INSTANTIATE(T)                                                                  \
    template Status normuon_step<T, float>(float*, float*, const T*, int64_t, int64_t,      \
                                           const NorMuonStep&, float*, Stream);             \
    template Status frobenius_normalize<T, float>(T*, const float*, const double*, int64_t, \
                                                  Stream);                                  \
    template Status axpby<T, float>(T*, float, const T*, float, int64_t, Stream);           \
    template Status transpose<T>(T*, const T*, int64_t, int64_t, Stream);
FBT_INSTANTIATE(float)
FBT_INSTANTIATE(bf16)

}  // namespace fbt::kernels::cpu
