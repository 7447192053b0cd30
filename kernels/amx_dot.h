// The tile product on AMX: 32 rows by 2 panels of sums in four of the eight tile registers. It is a
// template over the registers, so that tests can run it on a model of them where there are none.
#pragma once
#include "kernels/bf16_dot.h"

namespace fbt::kernels::cpu {

// How the processor is told that every register holds 16 rows of 64 bytes.
struct alignas(64) AmxConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(AmxConfig) == 64);

inline constexpr int kAmxRows = 32, kAmxPanels = 2;

// Tiles has load<t>(pointer, bytes between rows), store<t>(likewise), zero<t>() and
// dot<sum, a, b>(), which adds to each float [m,n] of register `sum` the products of a's pairs
// [m,k] and b's pairs [k,n].
// Registers: 0 to 3 the sums (row half * 2 + panel), 4 and 5 halves of a, 6 and 7 panels of b.
template <class Tiles>
[[gnu::target("amx-tile,amx-bf16")]] void amx_multiply(Tiles& tiles, float* out, int64_t stride,
                                                       const bf16* a, const bf16* b, int64_t panel,
                                                       int64_t depth, int rows, int panels,
                                                       bool add) {
    constexpr int64_t kHalf = 16, kLine = kDotDepth * sizeof(bf16);
    constexpr int64_t kTile = kHalf * kDotDepth;  // elements of a register of a or b
    const bool two_halves = rows > kHalf, two_panels = panels > 1;
    const int64_t line = stride * int64_t(sizeof(float));
    float* lower = out + kHalf * stride;
    if (add) {
        tiles.template load<0>(out, line);
        if (two_panels) tiles.template load<1>(out + kDotColumns, line);
        if (two_halves) tiles.template load<2>(lower, line);
        if (two_halves && two_panels) tiles.template load<3>(lower + kDotColumns, line);
    } else {
        tiles.template zero<0>();
        tiles.template zero<1>();
        tiles.template zero<2>();
        tiles.template zero<3>();
    }
    for (int64_t k = 0; k < depth; k += kDotDepth, a += 2 * kTile, b += kTile) {
        tiles.template load<4>(a, kLine);
        tiles.template load<6>(b, kLine);
        tiles.template dot<0, 4, 6>();
        if (two_panels) {
            tiles.template load<7>(b + panel, kLine);
            tiles.template dot<1, 4, 7>();
        }
        if (two_halves) {
            tiles.template load<5>(a + kTile, kLine);
            tiles.template dot<2, 5, 6>();
            if (two_panels) tiles.template dot<3, 5, 7>();
        }
    }
    tiles.template store<0>(out, line);
    if (two_panels) tiles.template store<1>(out + kDotColumns, line);
    if (two_halves) tiles.template store<2>(lower, line);
    if (two_halves && two_panels) tiles.template store<3>(lower + kDotColumns, line);
}

}  // namespace fbt::kernels::cpu
