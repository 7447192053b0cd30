// Vectors of kLanes floats, whatever the processor's are, loops and sums over them, and the inner
// product of matmul and attention. They are written with intrinsics because a compiler left to
// itself takes half of the registers where bf16 turns to float or back, and keeps no tile in them.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#endif

#include "kernels/cpu_math.h"

namespace fbt::kernels::cpu {

#if defined(__AVX2__) && defined(__FMA__)
// The sum of eight lanes, as a tree: l + (l + 4), then + (l + 2), then + (l + 1).
static inline float sum_lanes(__m256 a) {
    const __m128 four = _mm256_castps256_ps128(a) + _mm256_extractf128_ps(a, 1);
    const __m128 two = four + _mm_movehl_ps(four, four);
    return two[0] + two[1];
}
#endif

// kLanes floats that live in registers. (AVX-512 with VL has BW and DQ in every processor.)
#if defined(__AVX512VL__)
struct Vec {
    __m512 v;
};
static inline Vec splat(float x) { return {_mm512_set1_ps(x)}; }
static inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline Vec widen(__m256i a) {
    // Zeroing masks, of all lanes, because gcc 12 warns of the other form's undefined operand.
    const __m512i wide = _mm512_maskz_cvtepu16_epi32(0xffff, a);
    return {_mm512_castsi512_ps(_mm512_maskz_slli_epi32(0xffff, wide, 16))};
}
static inline Vec load(const bf16* p) {
    return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
static inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
// The first `count` lanes only, at least 1; the others are loaded as 0 and not stored.
static inline __mmask16 first_lanes(int64_t count) {
    return count >= kLanes ? __mmask16(0xffff) : __mmask16((1u << count) - 1);
}
static inline Vec load_first(const float* p, int64_t count) {
    return {_mm512_maskz_loadu_ps(first_lanes(count), p)};
}
static inline Vec load_first(const bf16* p, int64_t count) {
    if (count >= kLanes) return load(p);
    return widen(_mm256_maskz_loadu_epi16(first_lanes(count), p));
}
static inline void store_first(float* p, Vec a, int64_t count) {
    _mm512_mask_storeu_ps(p, first_lanes(count), a.v);
}
// Rounded, with the bits of bf16's constructor.
static inline __m256i rounded(Vec a) {
#if defined(__AVX512BF16__)
    // One instruction, but it takes subnormal numbers (0x20) for 0 and keeps more of a NaN (0x81).
    if (_mm512_fpclass_ps_mask(a.v, 0x20 | 0x81) == 0) [[likely]]
        return std::bit_cast<__m256i>(_mm512_cvtneps_pbh(a.v));
#endif
    const __m512i bits = _mm512_castps_si512(a.v);
    const __m512i high = _mm512_maskz_srli_epi32(0xffff, bits, 16);
    const __m512i tie = _mm512_and_si512(high, _mm512_set1_epi32(1));
    const __m512i half = _mm512_add_epi32(tie, _mm512_set1_epi32(0x7fff));
    const __m512i sum = _mm512_mask_mov_epi32(_mm512_add_epi32(bits, half),
                                              _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q),
                                              _mm512_set1_epi32(0x7fc00000));
    return _mm512_maskz_cvtepi32_epi16(0xffff, _mm512_maskz_srli_epi32(0xffff, sum, 16));
}
static inline void store(bf16* p, Vec a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), rounded(a));
}
static inline void store_first(bf16* p, Vec a, int64_t count) {
    if (count >= kLanes) return store(p, a);
    _mm256_mask_storeu_epi16(p, first_lanes(count), rounded(a));
}
template <class F>
static inline Vec lanewise(F f, Vec a, Vec b) {
    return {f(a.v, b.v)};
}
static inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline float sum_lanes(Vec a) {
    return sum_lanes(_mm512_maskz_extractf32x8_ps(0xff, a.v, 0) +
                     _mm512_maskz_extractf32x8_ps(0xff, a.v, 1));
}
// As exp of one float, bit for bit. A mask zeroes what would be 0, in x and in the result; the
// minimum takes its second operand for NaN; scalef multiplies by 2^n, rounding once.
static inline Vec exp(Vec x) {
    const __mmask16 some = _mm512_cmp_ps_mask(x.v, splat(-104.f).v, _CMP_NLT_UQ);
    x = {_mm512_maskz_min_ps(some, splat(89.f).v, x.v)};
    const Vec round = splat(12582912.f);
    const Vec n = {fma(x, splat(1.44269504f), round).v - round.v};
    const Vec r = fma(n, splat(2.12194440e-4f), fma(n, splat(-0.693359375f), x));
    Vec p = fma(splat(1.9875691500e-4f), r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, {r.v * r.v}, r);
    return {_mm512_maskz_scalef_ps(some, p.v + splat(1.f).v, n.v)};
}
// The first or the second elements of kLanes pairs of bf16.
static inline Vec load_first_of_pairs(const bf16* p) {
    // (the masked shift, because GCC 12 warns of the plain one's own code)
    return {
        _mm512_castsi512_ps(_mm512_maskz_slli_epi32(__mmask16(0xffff), _mm512_loadu_si512(p), 16))};
}
static inline Vec load_second_of_pairs(const bf16* p) {
    return {_mm512_castsi512_ps(
        _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(int(0xffff0000u))))};
}
#elif defined(__AVX2__) && defined(__FMA__)
struct Vec {
    __m256 lo, hi;
};
static inline Vec splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float* p, Vec a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}
template <class F>
static inline Vec lanewise(F f, Vec a, Vec b) {
    return {f(a.lo, b.lo), f(a.hi, b.hi)};
}
static inline Vec fma(Vec a, Vec b, Vec c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
static inline float sum_lanes(Vec a) { return sum_lanes(a.lo + a.hi); }
static inline __m256i load_pairs(const bf16* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
static inline Vec load_first_of_pairs(const bf16* p) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(load_pairs(p), 16)),
            _mm256_castsi256_ps(_mm256_slli_epi32(load_pairs(p + kLanes), 16))};
}
static inline Vec load_second_of_pairs(const bf16* p) {
    const __m256i upper = _mm256_set1_epi32(int(0xffff0000u));
    return {_mm256_castsi256_ps(_mm256_and_si256(load_pairs(p), upper)),
            _mm256_castsi256_ps(_mm256_and_si256(load_pairs(p + kLanes), upper))};
}
#else
struct Vec {
    float v[kLanes];
};
static inline Vec splat(float x) {
    Vec a;
    for (float& lane : a.v) lane = x;
    return a;
}
static inline Vec load(const float* p) {
    Vec a;
    for (int l = 0; l < kLanes; ++l) a.v[l] = p[l];
    return a;
}
static inline void store(float* p, Vec a) {
    for (int l = 0; l < kLanes; ++l) p[l] = a.v[l];
}
template <class F>
static inline Vec lanewise(F f, Vec a, Vec b) {
    for (int l = 0; l < kLanes; ++l) a.v[l] = f(a.v[l], b.v[l]);
    return a;
}
static inline Vec fma(Vec a, Vec b, Vec c) {
    for (int l = 0; l < kLanes; ++l) c.v[l] = std::fma(a.v[l], b.v[l], c.v[l]);
    return c;
}
static inline float sum_lanes(Vec a) {
    for (int w = kLanes / 2; w > 0; w /= 2)
        for (int l = 0; l < w; ++l) a.v[l] += a.v[l + w];
    return a.v[0];
}
static inline Vec load_first_of_pairs(const bf16* p) {
    Vec a;
    for (int l = 0; l < kLanes; ++l) a.v[l] = float(p[2 * l]);
    return a;
}
static inline Vec load_second_of_pairs(const bf16* p) { return load_first_of_pairs(p + 1); }
#endif
#if !defined(__AVX512VL__)
static inline Vec load(const bf16* p) {
    float lane[kLanes];
    for (int l = 0; l < kLanes; ++l) lane[l] = float(p[l]);
    return load(lane);
}
static inline void store(bf16* p, Vec a) {
    float lane[kLanes];
    store(lane, a);
#pragma omp simd
    for (int l = 0; l < kLanes; ++l) store(p[l], lane[l]);
}
// Without masks, part of a Vec goes through memory.
template <class T>
static inline Vec load_first(const T* p, int64_t count) {
    if (count >= kLanes) return load(p);
    float lane[kLanes] = {};
    for (int64_t l = 0; l < count; ++l) lane[l] = float(p[l]);
    return load(lane);
}
template <class T>
static inline void store_first(T* p, Vec a, int64_t count) {
    if (count >= kLanes) return store(p, a);
    T lane[kLanes];
    store(lane, a);
    for (int64_t l = 0; l < count; ++l) p[l] = lane[l];
}
static inline Vec exp(Vec x) {
    float lane[kLanes];
    store(lane, x);
#pragma omp simd
    for (int l = 0; l < kLanes; ++l) lane[l] = exp(lane[l]);
    return load(lane);
}
#endif

static inline Vec operator+(Vec a, Vec b) {
    return lanewise([](auto x, auto y) { return x + y; }, a, b);
}
static inline Vec operator-(Vec a, Vec b) {
    return lanewise([](auto x, auto y) { return x - y; }, a, b);
}
static inline Vec operator*(Vec a, Vec b) {
    return lanewise([](auto x, auto y) { return x * y; }, a, b);
}
static inline Vec operator/(Vec a, Vec b) {
    return lanewise([](auto x, auto y) { return x / y; }, a, b);
}
static inline Vec operator-(Vec a) { return splat(-0.f) - a; }
static inline Vec sigmoid(Vec x) { return splat(1.f) / (splat(1.f) + exp(-x)); }

// f(i, count) for i = 0, kLanes, ... < n: `count` elements from i on, kLanes but for the last ones.
// Flattened, so that for whole vectors load_first and store_first are plain loads and stores.
template <class F>
[[gnu::flatten]] static inline void for_vectors(int64_t n, F f) {
    int64_t i = 0;
#pragma GCC unroll 4
    for (; i + kLanes <= n; i += kLanes) f(i, kLanes);
    if (i < n) f(i, int(n - i));
}
// The same, the elements spread over threads.
template <class F>
static inline void for_vectors(const Stream& s, int64_t n, F f) {
    constexpr int64_t kPart = 4096;
    for_rows(s, ceil_div(n, kPart), kPart, [=](int64_t part) {
        const int64_t first = part * kPart;
        for_vectors(std::min(n - first, kPart), [=](int64_t i, int count) { f(first + i, count); });
    });
}

// What the sums below take for f: the elements of a row from i on, 0 behind its end.
template <class T>
static inline auto elements(const T* row) {
    return [row](int64_t i, int count) { return load_first(row + i, count); };
}

// sum_i f(i), whatever f gives behind the end
template <class F>
static inline float row_sum(int64_t n, F f) {
    Vec sum = splat(0.f);
    for_vectors(n, [&sum, f](int64_t i, int count) {
        Vec x = f(i, count);
        if (count < kLanes) {
            float lane[kLanes];
            store(lane, x);
            x = load_first(lane, count);
        }
        sum = sum + x;
    });
    return sum_lanes(sum);
}

// sum_i f(i) * g(i), each product fused into its lane's sum; f and g give 0 behind the end
template <class F, class G>
static inline float row_dot(int64_t n, F f, G g) {
    Vec sum = splat(0.f);
    for_vectors(n,
                [&sum, f, g](int64_t i, int count) { sum = fma(f(i, count), g(i, count), sum); });
    return sum_lanes(sum);
}

// Norms take the sums of so many rows first, then these rows again: from the end of a sum to the
// first product takes as long as a processor looks ahead, so that short rows, one by one, wait.
inline constexpr int kNormRows = 8;

// f(n, 1/sqrt(mean_d x[n,d]^2 + eps)) for the rows n < N of x [N,D]
template <class T, class F>
static inline void for_norms(const Stream& s, const T* x, int64_t N, int64_t D, float eps, F f) {
    for_rows(s, ceil_div(N, kNormRows), std::min<int64_t>(N, kNormRows) * D, [=](int64_t block) {
        const int64_t first = block * kNormRows;
        const int rows = int(std::min<int64_t>(N - first, kNormRows));
        float r[kNormRows] = {};
        for (int i = 0; i < rows; ++i) {
            const T* row = x + (first + i) * D;
            r[i] = row_dot(D, elements(row), elements(row));
        }
#pragma omp simd
        for (int i = 0; i < kNormRows; ++i) r[i] = 1.f / std::sqrt(r[i] / float(D) + eps);
        for (int i = 0; i < rows; ++i) f(first + i, r[i]);
    });
}

// Transposes 16 vectors of 16 elements in four rounds, each of which exchanges lanes l + W of one
// with lanes l of another, for the l without the bit W.
template <int W, class Lanes, int... l>
inline void exchange(Lanes& a, Lanes& b, std::integer_sequence<int, l...>) {
    const Lanes low = __builtin_shufflevector(a, b, (l & W ? kLanes + l - W : l)...);
    b = __builtin_shufflevector(a, b, (l & W ? kLanes + l : l + W)...);
    a = low;
}
template <class Lanes>
inline void transpose(Lanes (&x)[kLanes]) {
    const auto round = [&]<int W>() {
        for (int i = 0; i < kLanes; ++i)
            if (!(i & W)) exchange<W>(x[i], x[i + W], std::make_integer_sequence<int, kLanes>());
    };
    round.template operator()<8>();
    round.template operator()<4>();
    round.template operator()<2>();
    round.template operator()<1>();
}

// sum[r][p] += sum_k a[r,k] * b[k,p,0..15], one chain of fused multiply-adds, k ascending: the same
// bits whatever R and P are, and however the range of k is cut into calls.
// a[r,k] lies at a[r*row + k*column], b[k,p] at b[k*step + p*panel]. Always inlined, so that
// distances that the caller knows cost no register.
template <int R, int P, class T>
[[gnu::always_inline]] static inline void multiply(Vec (&sum)[R][P], const float* a, int64_t row,
                                                   int64_t column, const T* b, int64_t step,
                                                   int64_t panel, int64_t K) {
#pragma GCC unroll 4
    for (int64_t k = 0; k < K; ++k) {
        Vec v[P];
        for (int p = 0; p < P; ++p) v[p] = load(b + k * step + p * panel);
        for (int r = 0; r < R; ++r) {
            const Vec u = splat(a[r * row + k * column]);
            for (int p = 0; p < P; ++p) sum[r][p] = fma(u, v[p], sum[r][p]);
        }
    }
}

}  // namespace fbt::kernels::cpu
