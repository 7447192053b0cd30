#include "kernels/philox.h"

#include <gtest/gtest.h>

#include <vector>

namespace fbt::tests {
namespace {

using namespace kernels;

// Random123's known-answer vectors (kat_vectors, philox4x32 10).
TEST(Philox, KnownAnswers) {
    const Philox4 zeros = philox({{0, 0}}, 0, 0, 0, 0);
    EXPECT_EQ(zeros.v[0], 0x6627e8d5u);
    EXPECT_EQ(zeros.v[1], 0xe169c58du);
    EXPECT_EQ(zeros.v[2], 0xbc57ac4cu);
    EXPECT_EQ(zeros.v[3], 0x9b00dbd8u);
    const uint32_t f = 0xffffffffu;
    const Philox4 ones = philox({{f, f}}, f, f, f, f);
    EXPECT_EQ(ones.v[0], 0x408f276du);
    EXPECT_EQ(ones.v[1], 0x41c83b0eu);
    EXPECT_EQ(ones.v[2], 0xa20bc7c6u);
    EXPECT_EQ(ones.v[3], 0x6d5451fdu);
    const Philox4 pi =
        philox({{0xa4093822u, 0x299f31d0u}}, 0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u);
    EXPECT_EQ(pi.v[0], 0xd16cfe09u);
    EXPECT_EQ(pi.v[1], 0x94fdccebu);
    EXPECT_EQ(pi.v[2], 0x5001e420u);
    EXPECT_EQ(pi.v[3], 0x24126ea1u);
}

TEST(Philox, ColumnsAreDrawnFourAtATime) {
    const PhiloxKey key = philox_key(7, Draw::jitter, 3, 1);
    for (uint32_t d = 0; d < 37; ++d)
        EXPECT_EQ(philox_bits(key, 5, 9, d), philox_four(key, 5, 9, d / 4).v[d % 4]);
}

// Every part of an address changes the number: seed (both halves), purpose, step (both halves),
// pass; sequence (both halves), position, column.
TEST(Philox, EveryPartOfTheAddressCounts) {
    const uint64_t high = uint64_t(1) << 40;
    std::vector<uint32_t> drawn;
    for (const PhiloxKey key :
         {philox_key(0, Draw::jitter), philox_key(1, Draw::jitter), philox_key(high, Draw::jitter),
          philox_key(0, Draw::task), philox_key(0, Draw::jitter, 1),
          philox_key(0, Draw::jitter, high), philox_key(0, Draw::jitter, 0, 1)})
        drawn.push_back(philox_bits(key, 0));
    const PhiloxKey key = philox_key(0, Draw::jitter);
    drawn.push_back(philox_bits(key, 1));
    drawn.push_back(philox_bits(key, high));
    drawn.push_back(philox_bits(key, 0, 1));
    drawn.push_back(philox_bits(key, 0, 0, 1));
    drawn.push_back(philox_bits(key, 0, 0, 4));
    for (size_t i = 0; i < drawn.size(); ++i)
        for (size_t j = 0; j < i; ++j) EXPECT_NE(drawn[i], drawn[j]) << i << " and " << j;
}

TEST(Philox, UniformsStayInRange) {
    EXPECT_EQ(uniform_float(0), 0.f);
    EXPECT_EQ(uniform_float(0xffffffffu), 1 - 0x1p-24f);
    EXPECT_EQ(uniform_below(0, 7), 0u);
    EXPECT_EQ(uniform_below(0xffffffffu, 7), 6u);
    EXPECT_EQ(uniform_below(0xffffffffu, 1), 0u);
    EXPECT_EQ(uniform_below(0xffffffffu, 0x7fffffffu), 0x7ffffffeu);
}

}  // namespace
}  // namespace fbt::tests
