// What the kernels' tests share: streams, derivatives by differences, rounding of lane-wise sums.
#pragma once
#include <functional>

#include "kernels/types.h"
#include "tests/compare.h"

namespace fbt::tests {

inline constexpr kernels::Stream kOneThread{nullptr, 1};
inline constexpr kernels::Stream kTwoThreads{nullptr, 2};

inline testing::AssertionResult ok(const kernels::Status& status) {
    return status.ok() ? testing::AssertionSuccess()
                       : testing::AssertionFailure() << status.message;
}

// Additions that one element of a row of n passes through when summed in 16 lanes and a tree.
inline double lane_depth(int64_t n) { return double((n + 15) / 16) + 5; }

// dF/dx by the fourth-order central difference
//   (8 (F(x+h) - F(x-h)) - (F(x+2h) - F(x-2h))) / 12h      h = 2^-11, so that x + h is exact
inline constexpr double kStep = 0x1p-11;
inline double slope(const std::function<double()>& F, double& x) {
    const double at = x;
    const auto value = [&](double step) {
        x = at + step * kStep;
        return F();
    };
    const double near = value(1) - value(-1), far = value(2) - value(-2);
    x = at;
    return (8 * near - far) / (12 * kStep);
}

// Its error, for an F that is a sum whose terms add up to `size` in absolute value, evaluated with
// `terms` roundings, and that is analytic in a disc of radius 1/2 around x where its terms at most
// double:
//   truncation  h^4/30 |F^(5)| <= h^4/30 * 5!*2^5 * 2 size        (Cauchy's estimate)
//   rounding    18/12h * gamma_terms * 2 size
inline double slope_tolerance(double size, double terms) {
    return size * (256 * std::pow(kStep, 4) + 3 / kStep * gamma<double>(terms));
}

// sum_i |a_i b_i|: the size above
template <class T>
double sum_abs_products(const std::vector<T>& a, const std::vector<T>& b) {
    double sum = 0;
    for (size_t i = 0; i < a.size(); ++i) sum += std::abs(double(a[i]) * double(b[i]));
    return sum;
}
template <class T>
double sum_products(const std::vector<T>& a, const std::vector<T>& b) {
    double sum = 0;
    for (size_t i = 0; i < a.size(); ++i) sum += double(a[i]) * double(b[i]);
    return sum;
}
template <class T>
double max_abs(const std::vector<T>& v) {
    double largest = 0;
    for (T x : v) largest = std::max(largest, std::abs(wide(x)));
    return largest;
}

// What the CPU's kernels store: a test for each.
using Storage = testing::Types<float, kernels::bf16>;

// A copy whose first element lies `shift` elements behind an aligned address.
template <class T>
struct Shifted {
    std::vector<T> storage;
    size_t shift;
    Shifted(const T* from, size_t n, size_t by) : storage(by), shift(by) {
        storage.insert(storage.end(), from, from + n);
    }
    T* data() { return storage.data() + shift; }
};

}  // namespace fbt::tests
