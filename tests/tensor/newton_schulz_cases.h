// Newton-Schulz on matrices whose singular value decomposition is known, for every device.
#pragma once
#include <algorithm>

#include "tensor/newton_schulz.h"
#include "tests/compare.h"

namespace fbt::tests {

struct Size {
    int64_t N, K;
};
// Where float's bound below is still of use.
inline const Size kSmall[] = {{1, 1}, {1, 7}, {7, 1}, {2, 2}, {5, 3}, {3, 5}, {4, 4}};

inline double five_iterations(double s) {
    for (int i = 0; i < tensor::kNewtonSchulzIterations; ++i)
        s = tensor::kNewtonSchulzA * s + tensor::kNewtonSchulzB * s * s * s +
            tensor::kNewtonSchulzC * s * s * s * s * s;
    return s;
}

// r orthonormal columns of length n, row-major [n,r], by Gram-Schmidt, twice for full precision.
inline std::vector<double> orthonormal(int64_t n, int64_t r, unsigned seed) {
    auto q = normal<double>(size_t(n * r), seed);
    const auto at = [&](int64_t i, int64_t j) -> double& { return q[size_t(i * r + j)]; };
    for (int64_t j = 0; j < r; ++j) {
        for (int round = 0; round < 2; ++round)
            for (int64_t l = 0; l < j; ++l) {
                double dot = 0;
                for (int64_t i = 0; i < n; ++i) dot += at(i, j) * at(i, l);
                for (int64_t i = 0; i < n; ++i) at(i, j) -= dot * at(i, l);
            }
        double square = 0;
        for (int64_t i = 0; i < n; ++i) square += at(i, j) * at(i, j);
        for (int64_t i = 0; i < n; ++i) at(i, j) /= std::sqrt(square);
    }
    return q;
}

// U diag(s) V^T
inline std::vector<double> compose(const std::vector<double>& U, const std::vector<double>& s,
                                   const std::vector<double>& V, Size size) {
    const size_t r = s.size();
    std::vector<double> m(size_t(size.N * size.K));
    for (size_t n = 0; n < size_t(size.N); ++n)
        for (size_t k = 0; k < size_t(size.K); ++k)
            for (size_t j = 0; j < r; ++j)
                m[n * size_t(size.K) + k] += U[n * r + j] * s[j] * V[k * r + j];
    return m;
}

// A bound on the Frobenius norm of the error, to first order in u, doubled for the higher orders.
// Of X, M x r and tall, singular values stay below 1.21 (p's maximum on [0, 1.21] is 1.2025), so
//   |X|_F <= f = 1.21 sqrt(r),  |G| <= 1.47 for G = X^T X,  |G|_F <= g = 1.47 sqrt(r), and
//   |B| <= 2.81 for B = kB*G + kC*G^2 (at the eigenvalue 1.175).
// An iteration adds the rounding of its products (Higham, eq. 3.13: gamma_n |A|_F |B|_F) and sums.
// What it receives it multiplies by at most 4: the derivative of such a map is bounded by
// max |p'| = 3.97 and max p(s)/s = 3.44. The input enters with its rounding and its norm's.
template <class T>
double newton_schulz_bound(Size size) {
    const double M = double(std::max(size.N, size.K)), r = double(std::min(size.N, size.K));
    const double f = 1.21 * std::sqrt(r), g = 1.47 * std::sqrt(r), a = 3.45, b = 4.78, c = 2.04;
    const double gram = gamma<T>(M + 1) * f * f;
    const double square = 2 * 1.47 * gram + gamma<T>(r + 1) * g * g;
    const double both = b * gram + c * square + gamma<T>(3) * (b * g + c * 1.47 * g);
    const double product = 1.21 * both + gamma<T>(r) * f * 2.81 * std::sqrt(r);
    const double step = product + gamma<T>(2) * (a * f + 1.21 * 2.81 * std::sqrt(r));
    const double input = gamma<T>(4);
    return 2 * (1024 * input + step * (256 + 64 + 16 + 4 + 1));
}

// Singular values from 1 down to 0.02, in [N,K] of T.
template <class T>
void check_newton_schulz(tensor::Context& context, Size size) {
    const int64_t r = std::min(size.N, size.K);
    const auto U = orthonormal(size.N, r, 1), V = orthonormal(size.K, r, 2);
    std::vector<double> s;
    double square = 0;
    for (int64_t j = 0; j < r; ++j) {
        s.push_back(3 * std::pow(0.02, double(j) / double(r)));
        square += s.back() * s.back();
    }
    const auto m = tensor::Tensor::from(context, cast<T>(compose(U, s, V, size)), {size.N, size.K});
    for (double& x : s) x = five_iterations(x / (std::sqrt(square) + 1e-7));
    const auto got = tensor::newton_schulz(m, tensor::dtype_of<T>::value);
    EXPECT_EQ(got.shape(), m.shape());
    EXPECT_TRUE(close(got.to_double(), compose(U, s, V, size), newton_schulz_bound<T>(size)))
        << context.name() << ", " << size.N << " x " << size.K;
}

}  // namespace fbt::tests
