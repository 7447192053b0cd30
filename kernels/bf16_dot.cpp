#include "kernels/bf16_dot.h"

#include <array>
#include <utility>
#include <vector>

#include "kernels/cpu_tile.h"
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

#include "kernels/amx_dot.h"
#endif

namespace fbt::kernels::cpu {
namespace {

// A full tile's rows and panels as template arguments, so that its sums stay in registers:
// table[rows-1][panels-1].
template <template <int, int> class Tile, int R, int P>
constexpr auto tile_table() {
    return []<size_t... r, size_t... p>(std::index_sequence<r...>, std::index_sequence<p...>) {
        constexpr auto row = []<int rows>() { return std::array{Tile<rows, int(p) + 1>::run...}; };
        return std::array{row.template operator()<int(r) + 1>()...};
    }
    (std::make_index_sequence<R>(), std::make_index_sequence<P>());
}

// ------------------------------------------------------- fma: whatever vectors the compiler has

#if defined(__AVX512VL__)
constexpr int kFmaRows = 6, kFmaPanels = 4;
#else
constexpr int kFmaRows = 6, kFmaPanels = 1;
#endif

// A pair is two fused multiply-adds, the even k first.
template <int R, int P>
struct FmaTile {
    static void run(float* out, int64_t stride, const bf16* a, const bf16* b, int64_t panel,
                    int64_t depth, bool add) {
        Vec sum[R][P];
        for (int r = 0; r < R; ++r)
            for (int p = 0; p < P; ++p)
                sum[r][p] = add ? load(out + r * stride + p * kDotColumns) : splat(0.f);
        for (int64_t block = 0; block < depth; block += kDotDepth)
            for (int k = 0; k < kDotDepth; k += 2) {
                Vec low[P], high[P];
                for (int p = 0; p < P; ++p) {
                    const bf16* pairs = b + p * panel + (block + k) * kDotColumns;
                    low[p] = load_first_of_pairs(pairs);
                    high[p] = load_second_of_pairs(pairs);
                }
                for (int r = 0; r < R; ++r) {
                    const bf16* pair = a + block * kFmaRows + r * kDotDepth + k;
                    const Vec x = splat(float(pair[0])), y = splat(float(pair[1]));
                    for (int p = 0; p < P; ++p)
                        sum[r][p] = fma(y, high[p], fma(x, low[p], sum[r][p]));
                }
            }
        for (int r = 0; r < R; ++r)
            for (int p = 0; p < P; ++p) store(out + r * stride + p * kDotColumns, sum[r][p]);
    }
};

void fma_multiply(float* out, int64_t stride, const bf16* a, const bf16* b, int64_t panel,
                  int64_t depth, int rows, int panels, bool add, const bf16*, int) {
    static constexpr auto table = tile_table<FmaTile, kFmaRows, kFmaPanels>();
    table[rows - 1][panels - 1](out, stride, a, b, panel, depth, add);
}

#if defined(__x86_64__)

// -------------------------------------------------- avx512_bf16: one instruction a pair and panel

constexpr int kAvx512Rows = 6, kAvx512Panels = 4;  // 24 sums, 4 of b, 1 of a: 29 of 32 registers

// A pair of bf16 as the instruction broadcasts it.
using Pair [[gnu::may_alias]] = int;

// Products of few rows wait for b. Up to 3 rows do so in any case, and the processor's own
// prefetchers then do best; up to 6 need several panels to hide an addition's latency; more take
// one panel at a time, whose lines are neighbours. Lines are asked for so far ahead of their use.
constexpr int kAvx512FewRows = 16;
constexpr int few_panels(int rows) { return rows <= 6 ? kAvx512Panels : 1; }
constexpr int few_ahead(int rows) { return rows <= 3 ? 0 : rows <= 6 ? 32 : 128; }

template <int R, int P, bool few>
struct Avx512Dot {
    static constexpr int kRows = few ? R : kAvx512Rows;  // of a's blocks

    [[gnu::target("avx512f,avx512bw,avx512bf16")]] static void run(float* out, int64_t stride,
                                                                   const bf16* a, const bf16* b,
                                                                   int64_t panel, int64_t depth,
                                                                   bool add, const bf16* ahead,
                                                                   int next_panels) {
        __m512 sum[R][P];
#pragma GCC unroll 16  // else gcc zeroes them in memory
        for (int r = 0; r < R; ++r)
            for (int p = 0; p < P; ++p)
                sum[r][p] =
                    add ? _mm512_loadu_ps(out + r * stride + p * kDotColumns) : _mm512_setzero_ps();
        for (int64_t block = 0; block < depth; block += kDotDepth) {
            const auto* pairs = reinterpret_cast<const Pair*>(a + block * kRows);
#pragma GCC unroll 4
            for (int k = 0; k < kDotDepth / 2; ++k) {
                const int64_t line = (block + 2 * k) * kDotColumns;
                if constexpr (!few)  // into the L2 cache, as this strip fills the L1
                    for (int p = 0; p < next_panels; ++p)
                        __builtin_prefetch(ahead + p * panel + line, 0, 2);
                else if constexpr (few_ahead(R) > 0)
                    for (int p = 0; p < P; ++p)
                        __builtin_prefetch(b + p * panel + line + few_ahead(R) * 2 * kDotColumns);
                __m512i v[P];
                for (int p = 0; p < P; ++p) v[p] = _mm512_loadu_si512(b + p * panel + line);
                for (int r = 0; r < R; ++r) {
                    const __m512i u = _mm512_set1_epi32(pairs[r * (kDotDepth / 2) + k]);
                    for (int p = 0; p < P; ++p)
                        sum[r][p] = _mm512_dpbf16_ps(sum[r][p], __m512bh(u), __m512bh(v[p]));
                }
            }
        }
        for (int r = 0; r < R; ++r)
            for (int p = 0; p < P; ++p)
                _mm512_storeu_ps(out + r * stride + p * kDotColumns, sum[r][p]);
    }
};

template <int R, int P>
struct Avx512Tile : Avx512Dot<R, P, false> {};
void avx512_multiply(float* out, int64_t stride, const bf16* a, const bf16* b, int64_t panel,
                     int64_t depth, int rows, int panels, bool add, const bf16* ahead,
                     int next_panels) {
    static constexpr auto table = tile_table<Avx512Tile, kAvx512Rows, kAvx512Panels>();
    table[rows - 1][panels - 1](out, stride, a, b, panel, depth, add, ahead, next_panels);
}

template <int R, int P>
struct Avx512Few : Avx512Dot<R, std::min(P, few_panels(R)), true> {};

void avx512_few(float* out, int64_t stride, const bf16* a, const bf16* b, int64_t panel,
                int64_t depth, int rows, int panels, bool add, const bf16*, int) {
    static constexpr auto table = tile_table<Avx512Few, kAvx512FewRows, kAvx512Panels>();
    const int step = few_panels(rows);
    for (int p = 0; p < panels; p += step)
        table[rows - 1][std::min(step, panels - p) - 1](
            out + p * kDotColumns, stride, a, b + p * panel, panel, depth, add, nullptr, 0);
}

// ------------------------------------------------------------------------------------------ amx

// The intrinsics want literal register numbers. They do not tell the compiler that they read and
// write memory, so each stands between fences for it.
#define FBT_AMX(...)                                         \
    do {                                                     \
        std::atomic_signal_fence(std::memory_order_seq_cst); \
        __VA_ARGS__;                                         \
        std::atomic_signal_fence(std::memory_order_seq_cst); \
    } while (false)
#define FBT_TILE_CASE(t, call, ...) \
    if constexpr (T == t) FBT_AMX(call(t, __VA_ARGS__))

struct AmxTiles {
    template <int T>
    [[gnu::target("amx-tile")]] void load(const void* p, int64_t bytes) {
        FBT_TILE_CASE(0, _tile_loadd, p, bytes);
        FBT_TILE_CASE(1, _tile_loadd, p, bytes);
        FBT_TILE_CASE(2, _tile_loadd, p, bytes);
        FBT_TILE_CASE(3, _tile_loadd, p, bytes);
        FBT_TILE_CASE(4, _tile_loadd, p, bytes);
        FBT_TILE_CASE(5, _tile_loadd, p, bytes);
        FBT_TILE_CASE(6, _tile_loadd, p, bytes);
        FBT_TILE_CASE(7, _tile_loadd, p, bytes);
    }
    template <int T>
    [[gnu::target("amx-tile")]] void store(void* p, int64_t bytes) {
        FBT_TILE_CASE(0, _tile_stored, p, bytes);
        FBT_TILE_CASE(1, _tile_stored, p, bytes);
        FBT_TILE_CASE(2, _tile_stored, p, bytes);
        FBT_TILE_CASE(3, _tile_stored, p, bytes);
    }
    template <int T>
    [[gnu::target("amx-tile")]] void zero() {
        if constexpr (T == 0) _tile_zero(0);
        if constexpr (T == 1) _tile_zero(1);
        if constexpr (T == 2) _tile_zero(2);
        if constexpr (T == 3) _tile_zero(3);
    }
    template <int Sum, int A, int B>
    [[gnu::target("amx-tile,amx-bf16")]] void dot() {
        if constexpr (Sum == 0) _tile_dpbf16ps(0, 4, 6);
        if constexpr (Sum == 1) _tile_dpbf16ps(1, 4, 7);
        if constexpr (Sum == 2) _tile_dpbf16ps(2, 5, 6);
        if constexpr (Sum == 3) _tile_dpbf16ps(3, 5, 7);
    }
};

[[gnu::target("amx-tile,amx-bf16")]] void amx_multiply_here(float* out, int64_t stride,
                                                            const bf16* a, const bf16* b,
                                                            int64_t panel, int64_t depth, int rows,
                                                            int panels, bool add, const bf16*,
                                                            int) {
    static constexpr AmxConfig config;
    FBT_AMX(_tile_loadconfig(&config));
    AmxTiles tiles;
    amx_multiply(tiles, out, stride, a, b, panel, depth, rows, panels, add);
    FBT_AMX(_tile_release());
}

// Whether the processor has AMX with bf16, the system lets registers so large be used (XCR0), and
// this process may: Linux wants to be asked once, since they make signal frames larger.
bool amx_usable() {
    unsigned a, b, c, d;
    constexpr unsigned kOsXsave = 1u << 27, kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl, state component
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & kOsXsave)) return false;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & kAmxBf16) || !(d & kAmxTile))
        return false;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

}  // namespace

std::span<const DotKernel> dot_kernels() {
    static const std::vector<DotKernel> usable = [] {
        std::vector<DotKernel> list;
#if defined(__x86_64__)
        if (amx_usable()) list.push_back({"amx", kAmxRows, kAmxPanels, amx_multiply_here});
        if (__builtin_cpu_supports("avx512bf16"))
            list.push_back({"avx512_bf16", kAvx512Rows, kAvx512Panels, avx512_multiply,
                            kAvx512FewRows, avx512_few});
#endif
        list.push_back({"fma", kFmaRows, kFmaPanels, fma_multiply});
        return list;
    }();
    return usable;
}

}  // namespace fbt::kernels::cpu
