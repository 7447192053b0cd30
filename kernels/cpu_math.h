// What the vectorised kernels share: an exponential that compilers vectorise, and sums over a row
// in one fixed order. A lane and a scalar tail run the same operations, so they give the same bits.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

#include "kernels/types.h"

namespace fbt::kernels::cpu {

// Threads for an op over so many elements: one where the work, a few microseconds, would be over
// before a second thread woke. No result depends on it.
static inline int threads_for_elements(const Stream& s, int64_t elements) {
    return elements < 16384 || s.threads < 1 ? 1 : s.threads;
}

// to = x, rounded once. A call, because gcc vectorises no loop that makes a bf16 in its own body.
template <class T>
static inline void store(T& to, float x) {
    to = T(x);
}

// f(i) for i < n, vectorised. One thread enters no parallel region: that alone costs 0.4 us, as
// much as a decoding step's norm. f holds its pointers by value, so that they stay in registers.
template <class F>
static inline void for_elements(const Stream& s, int64_t n, F f) {
    const int threads = threads_for_elements(s, n);
    if (threads == 1) {
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) f(i);
    } else {
#pragma omp parallel for simd num_threads(threads) firstprivate(f)
        for (int64_t i = 0; i < n; ++i) f(i);
    }
}

// f(row) for row < N, each about `width` elements of work.
template <class F>
static inline void for_rows(const Stream& s, int64_t N, int64_t width, F f) {
    const int threads = N == 1 ? 1 : threads_for_elements(s, N * width);
    if (threads == 1) {
        for (int64_t n = 0; n < N; ++n) f(n);
    } else {
#pragma omp parallel for num_threads(threads) firstprivate(f)
        for (int64_t n = 0; n < N; ++n) f(n);
    }
}

// exp(x), branch-free. With n = round(x/ln 2) and r = x - n ln 2, |r| <= ln(2)/2:
//   exp(x) = 2^n (1 + r + r^2 (c2 + c3 r + c4 r^2 + ...)),  coefficients of Cephes' expf.
// Off by less than 1.1 ulp wherever the result is a normal number, by one unit of the last place
// of a subnormal one; 0 below -104, infinity above 88.73, NaN for NaN. (The unit tests sweep all
// exponents.)
static inline float exp(float x) {
    constexpr float round = 12582912.f;  // 1.5 * 2^23: adding it leaves an integer in the low bits
    // exp(0) stands in for the results that are 0: many processors take a hundred cycles to round
    // a product to 0, and masked scores, -infinity, come by the thousand.
    const bool zero = x < -104.f;  // false for NaN, which therefore stays
    x = zero ? 0.f : x;
    x = x > 89.f ? 89.f : x;
    const float shifted = std::fma(x, 1.44269504f, round);
    const float n = shifted - round;
    const int32_t e = int32_t(std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(round));
    float r = std::fma(n, -0.693359375f, x);  // ln 2 in two parts: n times the first is exact
    r = std::fma(n, 2.12194440e-4f, r);
    float p = 1.9875691500e-4f;
    p = std::fma(p, r, 1.3981999507e-3f);
    p = std::fma(p, r, 8.3334519073e-3f);
    p = std::fma(p, r, 4.1665795894e-2f);
    p = std::fma(p, r, 1.6666665459e-1f);
    p = std::fma(p, r, 5.0000001201e-1f);
    p = std::fma(p, r * r, r) + 1.f;
    // 2^n in two factors, so that neither leaves the range of normal exponents (-150 <= n <= 128).
    const int32_t half = e >> 1;
    const float a = std::bit_cast<float>(uint32_t(half + 127) << 23);
    const float b = std::bit_cast<float>(uint32_t(e - half + 127) << 23);
    return zero ? 0.f : p * a * b;
}

// 1 / (1 + exp(-x))
static inline float sigmoid(float x) { return 1.f / (1.f + exp(-x)); }

// Sums over a row run in kLanes lanes, element i in lane i % kLanes, tail included; the lanes are
// then added in a fixed tree. So the result depends on the row alone, and is vectorisable.
inline constexpr int kLanes = 16;

// sum_i f(i) in lanes of doubles, for what must not lose digits over a long row.
template <class F>
static inline double row_sum_double(int64_t n, F f) {
    double lane[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
#pragma omp simd
        for (int l = 0; l < kLanes; ++l) lane[l] += double(f(i + l));
    }
    for (int l = 0; l < int(n - i); ++l) lane[l] += double(f(i + l));
    for (int l = 1; l < kLanes; ++l) lane[0] += lane[l];
    return lane[0];
}

// max_i f(i), -infinity for an empty row. NaN is passed over (the comparison is false).
template <class F>
static inline float row_max(int64_t n, F f) {
    float lane[kLanes];
    for (float& m : lane) m = -INFINITY;
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
#pragma omp simd
        for (int l = 0; l < kLanes; ++l) {
            // + 0, as gcc else selects a bf16's bits as integers and keeps the lanes in memory.
            const float x = f(i + l) + 0.f;
            lane[l] = x > lane[l] ? x : lane[l];
        }
    }
    for (int l = 0; l < int(n - i); ++l) lane[l] = f(i + l) > lane[l] ? f(i + l) : lane[l];
    for (int l = 1; l < kLanes; ++l) lane[0] = lane[l] > lane[0] ? lane[l] : lane[0];
    return lane[0];
}

}  // namespace fbt::kernels::cpu
