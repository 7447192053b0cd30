#include "kernels/elementwise.h"

#include "tests/kernels/kernel_test.h"

namespace fbt::tests {
namespace {

namespace ref = kernels::ref;
namespace cpu = kernels::cpu;

TEST(Elementwise, Adds) {
    for (const int64_t n : {1, 3, 37, 1601, 20011}) {
        const auto a = normal<float>(size_t(n), 1), b = normal<float>(size_t(n), 2);
        std::vector<float> want;
        for (size_t i = 0; i < a.size(); ++i) want.push_back(a[i] + b[i]);
        for (const auto add : {ref::add<float>, cpu::add<float>}) {
            std::vector<float> y(a.size());
            auto over_a = a, over_b = b;
            ASSERT_TRUE(ok(add(y.data(), a.data(), b.data(), n, kTwoThreads)));
            ASSERT_TRUE(ok(add(over_a.data(), over_a.data(), b.data(), n, kTwoThreads)));
            ASSERT_TRUE(ok(add(over_b.data(), a.data(), over_b.data(), n, kTwoThreads)));
            EXPECT_TRUE(same_bits(y, want)) << n;
            EXPECT_TRUE(same_bits(over_a, want)) << n;
            EXPECT_TRUE(same_bits(over_b, want)) << n;
        }
        for (const auto add_accum : {ref::add_accum<float>, cpu::add_accum<float>}) {
            auto y = a;
            ASSERT_TRUE(ok(add_accum(y.data(), b.data(), n, kTwoThreads)));
            EXPECT_TRUE(same_bits(y, want)) << n;
        }
    }
}

// On hosts T = A: a copy.
TEST(Elementwise, Casts) {
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
}

TEST(Elementwise, ColumnsJoinAndPart) {
    for (const auto& [N, Da, Db] :
         {std::tuple<int64_t, int64_t, int64_t>{1, 1, 1}, {3, 17, 1}, {37, 3, 1601}}) {
        const auto a = normal<float>(size_t(N * Da), 1), b = normal<float>(size_t(N * Db), 2);
        std::vector<float> want;
        for (int64_t n = 0; n < N; ++n) {
            want.insert(want.end(), a.begin() + n * Da, a.begin() + (n + 1) * Da);
            want.insert(want.end(), b.begin() + n * Db, b.begin() + (n + 1) * Db);
        }
        for (int backend = 0; backend < 2; ++backend) {
            const auto concat = backend ? cpu::concat_columns<float> : ref::concat_columns<float>;
            const auto split = backend ? cpu::split_columns<float> : ref::split_columns<float>;
            std::vector<float> y(want.size()), a2(a.size()), b2(b.size());
            ASSERT_TRUE(ok(concat(y.data(), a.data(), b.data(), N, Da, Db, kTwoThreads)));
            EXPECT_TRUE(same_bits(y, want));
            ASSERT_TRUE(ok(split(a2.data(), b2.data(), want.data(), N, Da, Db, kTwoThreads)));
            EXPECT_TRUE(same_bits(a2, a));
            EXPECT_TRUE(same_bits(b2, b));
        }
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
