#include "kernels/elementwise.h"

#include <bit>

#include "tests/kernels/kernel_test.h"

namespace fbt::tests {
namespace {

namespace ref = kernels::ref;
namespace cpu = kernels::cpu;
using kernels::bf16;

template <class T>
class ElementwiseStored : public testing::Test {};
TYPED_TEST_SUITE(ElementwiseStored, Storage);

TYPED_TEST(ElementwiseStored, Adds) {
    using T = TypeParam;
    for (const int64_t n : {1, 3, 37, 1601, 20011}) {
        const auto a = normal<T>(size_t(n), 1), b = normal<T>(size_t(n), 2);
        std::vector<T> want;
        for (size_t i = 0; i < a.size(); ++i) want.push_back(T(float(a[i]) + float(b[i])));
        const auto check = [&](auto add, auto add_accum) {
            std::vector<T> y(a.size());
            auto over_a = a, over_b = b, sum = a;
            ASSERT_TRUE(ok(add(y.data(), a.data(), b.data(), n, kTwoThreads)));
            ASSERT_TRUE(ok(add(over_a.data(), over_a.data(), b.data(), n, kTwoThreads)));
            ASSERT_TRUE(ok(add(over_b.data(), a.data(), over_b.data(), n, kTwoThreads)));
            ASSERT_TRUE(ok(add_accum(sum.data(), b.data(), n, kTwoThreads)));
            EXPECT_TRUE(same_bits(y, want)) << n;
            EXPECT_TRUE(same_bits(over_a, want)) << n;
            EXPECT_TRUE(same_bits(over_b, want)) << n;
            EXPECT_TRUE(same_bits(sum, want)) << n;
        };
        check(cpu::add<T>, cpu::add_accum<T>);
        if constexpr (std::is_same_v<T, float>) check(ref::add<T>, ref::add_accum<T>);
    }
}

TEST(Elementwise, CastsToTheSameType) {
    const auto x = normal<float>(1601, 1);
    const auto x64 = normal<double>(37, 2);
    std::vector<float> y(x.size());
    std::vector<double> y64(x64.size());
    for (const auto cast : {ref::cast<float>, cpu::cast<float>}) {
        std::fill(y.begin(), y.end(), 0.f);
        ASSERT_TRUE(ok(cast(y.data(), x.data(), int64_t(x.size()), kTwoThreads)));
        EXPECT_TRUE(same_bits(y, x));
    }
    ASSERT_TRUE(ok(ref::cast(y64.data(), x64.data(), int64_t(x64.size()), kOneThread)));
    EXPECT_TRUE(same_bits(y64, x64));
    EXPECT_FALSE(ok(cpu::cast(y.data(), x.data(), -1, kOneThread)));
    EXPECT_FALSE(ok(ref::cast(y.data(), x.data(), -1, kOneThread)));
    EXPECT_FALSE(ok(cpu::widen(y.data(), x.data(), -1, kOneThread)));
    EXPECT_FALSE(ok(ref::widen(y.data(), x.data(), -1, kOneThread)));
}

// Every bf16 and the floats around it: in a vector as alone, to the nearest, ties to even, where a
// NaN stays one.
TEST(Elementwise, CastsToBf16) {
    std::vector<float> x;
    for (uint32_t upper = 0; upper < 0x10000; ++upper)
        for (const uint32_t lower : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu})
            x.push_back(std::bit_cast<float>(upper << 16 | lower));
    x.push_back(1.5f);  // a tail
    std::vector<bf16> y(x.size());
    ASSERT_TRUE(ok(cpu::cast(y.data(), x.data(), int64_t(x.size()), kTwoThreads)));
    std::vector<float> wide(x.size());
    ASSERT_TRUE(ok(cpu::widen(wide.data(), y.data(), int64_t(x.size()), kTwoThreads)));
    for (size_t i = 0; i < x.size(); ++i) {
        ASSERT_EQ(std::bit_cast<uint32_t>(wide[i]), uint32_t(y[i].bits) << 16);
        const uint32_t bits = std::bit_cast<uint32_t>(x[i]), upper = bits >> 16,
                       lower = bits & 0xffff;
        ASSERT_EQ(y[i].bits, bf16(x[i]).bits) << x[i];
        if (std::isnan(x[i]))
            ASSERT_TRUE(std::isnan(float(y[i]))) << std::hex << bits;
        else
            ASSERT_EQ(y[i].bits, upper + (lower > 0x8000 || (lower == 0x8000 && upper % 2)))
                << x[i];
    }
}

TYPED_TEST(ElementwiseStored, ColumnsJoinAndPart) {
    using T = TypeParam;
    for (const auto& [N, Da, Db] :
         {std::tuple<int64_t, int64_t, int64_t>{1, 1, 1}, {3, 17, 1}, {37, 3, 1601}}) {
        const auto a = normal<T>(size_t(N * Da), 1), b = normal<T>(size_t(N * Db), 2);
        std::vector<T> want;
        for (int64_t n = 0; n < N; ++n) {
            want.insert(want.end(), a.begin() + n * Da, a.begin() + (n + 1) * Da);
            want.insert(want.end(), b.begin() + n * Db, b.begin() + (n + 1) * Db);
        }
        const auto check = [&, N = N, Da = Da, Db = Db](auto concat, auto split) {
            std::vector<T> y(want.size()), a2(a.size()), b2(b.size());
            ASSERT_TRUE(ok(concat(y.data(), a.data(), b.data(), N, Da, Db, kTwoThreads)));
            EXPECT_TRUE(same_bits(y, want));
            ASSERT_TRUE(ok(split(a2.data(), b2.data(), want.data(), N, Da, Db, kTwoThreads)));
            EXPECT_TRUE(same_bits(a2, a));
            EXPECT_TRUE(same_bits(b2, b));
        };
        check(cpu::concat_columns<T>, cpu::split_columns<T>);
        if constexpr (std::is_same_v<T, float>)
            check(ref::concat_columns<T>, ref::split_columns<T>);
    }
}

TEST(Elementwise, RefusesBadSizes) {
    float v = 0;
    EXPECT_FALSE(ok(cpu::add(&v, &v, &v, -1, kOneThread)));
    EXPECT_FALSE(ok(ref::add_accum(&v, &v, -1, kOneThread)));
    EXPECT_FALSE(ok(cpu::concat_columns(&v, &v, &v, 1, 0, 1, kOneThread)));
    EXPECT_FALSE(ok(ref::split_columns(&v, &v, &v, 1, 1, 0, kOneThread)));
    EXPECT_TRUE(ok(cpu::add(&v, &v, &v, 0, kOneThread)));
}

}  // namespace
}  // namespace fbt::tests
