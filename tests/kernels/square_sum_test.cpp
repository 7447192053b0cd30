#include "kernels/square_sum.h"

#include "tests/kernels/kernel_test.h"

namespace fbt::tests {
namespace {

namespace ref = kernels::ref;
namespace cpu = kernels::cpu;
constexpr int64_t kChunk = kernels::kSquareSumChunk;

TEST(SquareSum, MatchesALongDoubleSum) {
    for (const int64_t n : {int64_t(0), int64_t(1), int64_t(3), int64_t(37), int64_t(1601),
                            kChunk - 1, kChunk, kChunk + 1, 6 * kChunk + 17}) {
        const auto x = normal<float>(size_t(n), 1);
        const auto x64 = cast<double>(x);
        long double want = 0;
        for (double value : x64) want += static_cast<long double>(value) * value;
        std::vector<double> scratch(size_t(n / kChunk + 1));
        double one = -1, two = -1, plain = -1;
        ASSERT_TRUE(ok(cpu::square_sum(&one, x.data(), n, scratch.data(), kOneThread)));
        ASSERT_TRUE(ok(cpu::square_sum(&two, x.data(), n, scratch.data(), kTwoThreads)));
        ASSERT_TRUE(ok(ref::square_sum(&plain, x64.data(), n, scratch.data(), kOneThread)));
        const double bound = double(want) * gamma<double>(double(std::min(n, kChunk) + 8));
        EXPECT_NEAR(one, double(want), bound) << n;
        EXPECT_NEAR(plain, double(want), bound) << n;
        EXPECT_EQ(std::memcmp(&one, &two, sizeof one), 0) << n;
    }
}

TEST(SquareSum, NanAndInfinityShow) {
    for (const size_t at : {size_t(0), size_t(kChunk), size_t(2 * kChunk + 36)}) {
        std::vector<float> x(size_t(2 * kChunk + 37), 1.f);
        std::vector<double> scratch(3);
        double sum = 0;
        for (const float bad : {NAN, INFINITY, -INFINITY}) {
            x[at] = bad;
            for (const auto square_sum : {ref::square_sum<float>, cpu::square_sum<float>}) {
                ASSERT_TRUE(
                    ok(square_sum(&sum, x.data(), int64_t(x.size()), scratch.data(), kTwoThreads)));
                EXPECT_FALSE(std::isfinite(sum)) << at;
            }
        }
    }
}

TEST(SquareSum, LargeFloatsDoNotOverflow) {
    const float x = 3e38f;
    double sum = 0, scratch = 0;
    ASSERT_TRUE(ok(cpu::square_sum(&sum, &x, 1, &scratch, kOneThread)));
    EXPECT_EQ(sum, double(x) * double(x));
    EXPECT_FALSE(ok(cpu::square_sum(&sum, &x, -1, &scratch, kOneThread)));
}

}  // namespace
}  // namespace fbt::tests
