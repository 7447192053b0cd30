// How tests compare numbers. NaN fails, infinity must match exactly, sizes must agree.
#pragma once
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <type_traits>
#include <vector>

#include "kernels/types.h"

namespace fbt::tests {

// Element types may be bf16, which converts to float only.
template <class T>
double wide(T x) {
    if constexpr (std::is_same_v<T, kernels::bf16>)
        return double(float(x));
    else
        return double(x);
}

// Passes when every |got[i] - want[i]| <= absolute + relative * |want[i]|; else names the worst.
template <class T, class U>
testing::AssertionResult close(const std::vector<T>& got, const std::vector<U>& want,
                               double absolute, double relative = 0) {
    if (got.size() != want.size())
        return testing::AssertionFailure() << got.size() << " values, expected " << want.size();
    double worst = 0;
    size_t where = 0;
    for (size_t i = 0; i < got.size(); ++i) {
        const double g = wide(got[i]), w = wide(want[i]);
        if (g == w) continue;  // equal infinities included
        const double excess = std::abs(g - w) / (absolute + relative * std::abs(w));
        if (!(excess <= worst)) {  // NaN lands here
            worst = excess;
            where = i;
            if (std::isnan(excess)) break;
        }
    }
    if (worst <= 1) return testing::AssertionSuccess();
    return testing::AssertionFailure()
           << "element " << where << " of " << got.size() << ": got " << wide(got[where])
           << ", expected " << wide(want[where]) << ", " << worst << " times the tolerance";
}

// Passes when both hold the same bytes.
template <class T>
testing::AssertionResult same_bits(std::span<const T> got, std::span<const T> want) {
    if (got.size() != want.size())
        return testing::AssertionFailure() << got.size() << " values, expected " << want.size();
    for (size_t i = 0; i < got.size(); ++i)
        if (std::memcmp(&got[i], &want[i], sizeof(T)) != 0)
            return testing::AssertionFailure()
                   << "element " << i << " of " << got.size() << ": got " << wide(got[i])
                   << ", expected the same bits as " << wide(want[i]);
    return testing::AssertionSuccess();
}
template <class T>
testing::AssertionResult same_bits(const std::vector<T>& got, const std::vector<T>& want) {
    return same_bits(std::span<const T>(got), std::span<const T>(want));
}

// The largest relative error of one rounding to T.
template <class T>
constexpr double unit_roundoff() {
    if constexpr (std::is_same_v<T, kernels::bf16>)
        return 0x1p-8;
    else
        return std::numeric_limits<T>::epsilon() / 2;
}

// The relative error of storing a float as T.
template <class T>
constexpr double store_roundoff() {
    return std::is_same_v<T, kernels::bf16> ? unit_roundoff<kernels::bf16>() : 0;
}

// Passes when a result that float arithmetic leaves within absolute + relative * |want| was stored
// as T: the store rounds what it was given, the error included.
template <class T, class U>
testing::AssertionResult close_stored(const std::vector<T>& got, const std::vector<U>& want,
                                      double absolute, double relative = 0) {
    const double u = store_roundoff<T>();
    return close(got, want, absolute * (1 + u), relative * (1 + u) + u);
}

// Rounding of a sum of n products of type T: a bound on |computed - exact| / sum_i |a_i b_i|
// (Higham, Accuracy and Stability, eq. 3.3: gamma_n = n u / (1 - n u)).
template <class T>
double gamma(double n) {
    const double u = unit_roundoff<T>();
    return n * u / (1 - n * u);
}

// Reproducible test values.
template <class T>
std::vector<T> normal(size_t n, unsigned seed, double scale = 1) {
    std::mt19937 generator(seed);
    std::normal_distribution<double> draw(0, scale);
    std::vector<T> out(n);
    for (T& x : out) x = T(float(draw(generator)));  // in bf16 rounded, else the same
    return out;
}

template <class To, class From>
std::vector<To> cast(const std::vector<From>& v) {
    std::vector<To> out;
    out.reserve(v.size());
    for (const From& x : v) {
        if constexpr (std::is_same_v<To, kernels::bf16>)
            out.push_back(To(float(x)));
        else
            out.push_back(To(wide(x)));
    }
    return out;
}

}  // namespace fbt::tests
