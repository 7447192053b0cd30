// The inner product of matmul and attention: a tile of sums that stays in registers. It is written
// with intrinsics because a compiler left to itself neither takes the widest registers nor keeps
// the tile in them.
#pragma once
#include <cmath>
#include <cstdint>
#if defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#endif

#include "kernels/cpu_math.h"

namespace fbt::kernels::cpu {

// kLanes floats that live in registers, whatever the processor's vectors are.
#if defined(__AVX512F__)
struct Vec {
    __m512 v;
};
static inline Vec splat(float x) { return {_mm512_set1_ps(x)}; }
static inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline Vec load(const bf16* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    // Zeroing masks, of all lanes, because gcc 12 warns of the other form's undefined operand.
    const __m512i wide = _mm512_maskz_cvtepu16_epi32(0xffff, half);
    return {_mm512_castsi512_ps(_mm512_maskz_slli_epi32(0xffff, wide, 16))};
}
static inline void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
// The first `count` lanes only, at least 1; the others are loaded as 0 and not stored.
static inline __mmask16 first_lanes(int64_t count) {
    return count >= kLanes ? __mmask16(0xffff) : __mmask16((1u << count) - 1);
}
static inline Vec load_first(const float* p, int64_t count) {
    return {_mm512_maskz_loadu_ps(first_lanes(count), p)};
}
static inline void store_first(float* p, Vec a, int64_t count) {
    _mm512_mask_storeu_ps(p, first_lanes(count), a.v);
}
static inline Vec add(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// kLanes floats, rounded as bf16's constructor rounds.
static inline void store(bf16* p, Vec a) {
    const __m512i bits = _mm512_castps_si512(a.v), one = _mm512_set1_epi32(1);
    const __m512i tie = _mm512_and_si512(_mm512_maskz_srli_epi32(__mmask16(0xffff), bits, 16), one);
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(tie, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
    rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
    rounded = _mm512_maskz_srli_epi32(__mmask16(0xffff), rounded, 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_maskz_cvtepi32_epi16(__mmask16(0xffff), rounded));
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
static inline Vec add(Vec a, Vec b) {
    return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
static inline Vec fma(Vec a, Vec b, Vec c) {
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
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
static inline Vec add(Vec a, Vec b) {
    for (int l = 0; l < kLanes; ++l) a.v[l] += b.v[l];
    return a;
}
static inline Vec fma(Vec a, Vec b, Vec c) {
    for (int l = 0; l < kLanes; ++l) c.v[l] = std::fma(a.v[l], b.v[l], c.v[l]);
    return c;
}
static inline Vec load_first_of_pairs(const bf16* p) {
    Vec a;
    for (int l = 0; l < kLanes; ++l) a.v[l] = float(p[2 * l]);
    return a;
}
static inline Vec load_second_of_pairs(const bf16* p) { return load_first_of_pairs(p + 1); }
#endif
#if !defined(__AVX512F__)
static inline void store(bf16* p, Vec a) {
    float lane[kLanes];
    store(lane, a);
    for (int l = 0; l < kLanes; ++l) p[l] = bf16(lane[l]);
}
static inline Vec load(const bf16* p) {
    float lane[kLanes];
    for (int l = 0; l < kLanes; ++l) lane[l] = float(p[l]);
    return load(lane);
}
#endif
// Without masks, part of a Vec goes through memory.
template <class T>
static inline Vec load_first(const T* p, int64_t count) {
    if (count >= kLanes) return load(p);
    float lane[kLanes] = {};
    for (int64_t l = 0; l < count; ++l) lane[l] = float(p[l]);
    return load(lane);
}
#if !defined(__AVX512F__)
static inline void store_first(float* p, Vec a, int64_t count) {
    if (count >= kLanes) return store(p, a);
    float lane[kLanes];
    store(lane, a);
    for (int64_t l = 0; l < count; ++l) p[l] = lane[l];
}
#endif

// sum[r][p] += sum_k a[r,k] * b[k,p,0..15], one chain of fused multiply-adds, k ascending: the same
// bits whatever R and P are, and however the range of k is cut into calls.
// a[r,k] lies at a[r*row + k*column], b[k,p] at b[k*step + p*panel]. Always inlined, so that
// distances that the caller knows cost no register.
template <int R, int P>
[[gnu::always_inline]] static inline void multiply(Vec (&sum)[R][P], const float* a, int64_t row,
                                                   int64_t column, const float* b, int64_t step,
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
