#include "kernels/cross_entropy.h"

#include <algorithm>

#include "tests/kernels/kernel_test.h"

namespace fbt::tests {
namespace {

namespace ref = kernels::ref;
namespace cpu = kernels::cpu;

template <class T>
class CrossEntropyStored : public testing::Test {};
TYPED_TEST_SUITE(CrossEntropyStored, Storage);

std::vector<int32_t> some_targets(int64_t N, int V) {
    std::vector<int32_t> targets;
    for (int64_t n = 0; n < N; ++n) targets.push_back(n % 4 == 3 ? -1 : int32_t(n * 7 % V));
    return targets;
}

TEST(CrossEntropy, KnownValues) {
    // Equal logits: lse = x + log V, ce = log V.
    const std::vector<double> logits(37, -2.5);
    double ce = 0, lse = 0;
    const int32_t target = 36;
    ASSERT_TRUE(
        ok(ref::cross_entropy_forward(&ce, &lse, logits.data(), &target, 1, 37, kOneThread)));
    EXPECT_NEAR(ce, std::log(37.0), 4 * gamma<double>(40));
    EXPECT_NEAR(lse, std::log(37.0) - 2.5, 4 * gamma<double>(40));
}

// F = sum_n weight*(ce + z_weight*lse^2)
TEST(CrossEntropy, RefGradientMatchesDifferences) {
    const double z_weight = 0.03;
    for (const auto& [N, V] : {std::pair<int64_t, int>{3, 1}, {5, 3}, {4, 37}}) {
        const size_t size = size_t(N * V), rows = size_t(N);
        auto logits = normal<double>(size, 1);
        const auto weight = normal<double>(rows, 2);
        const auto targets = some_targets(N, V);
        std::vector<double> ce(rows), lse(rows), dlogits(size), slopes(size), value(rows);
        const auto F = [&, N = N, V = V] {
            EXPECT_TRUE(ok(ref::cross_entropy_forward(ce.data(), lse.data(), logits.data(),
                                                      targets.data(), N, V, kOneThread)));
            for (size_t n = 0; n < rows; ++n)
                value[n] = targets[n] < 0 ? 0 : ce[n] + z_weight * lse[n] * lse[n];
            return sum_products(weight, value);
        };
        F();
        ASSERT_TRUE(ok(ref::cross_entropy_backward(dlogits.data(), logits.data(), lse.data(),
                                                   targets.data(), weight.data(), z_weight, N, V,
                                                   kOneThread)));
        // The logarithm's branch points lie at distance pi; within 1/2 a value moves by at most 1.
        double size_of_F = 0;
        for (size_t n = 0; n < rows; ++n) size_of_F += std::abs(weight[n]) * (value[n] + 1);
        const double tolerance = slope_tolerance(size_of_F, double(V + N + 10));
        for (size_t i = 0; i < size; ++i) slopes[i] = slope(F, logits[i]);
        EXPECT_TRUE(close(dlogits, slopes, tolerance)) << N << " x " << V;
    }
}

TYPED_TEST(CrossEntropyStored, CpuMatchesRef) {
    using T = TypeParam;
    const float z_weight = 0x1p-10f;
    for (const int64_t N : {1, 3, 37})
        for (const int V : {1, 17, 257, 1601}) {
            const size_t size = size_t(N * V), rows = size_t(N);
            const auto logits = normal<T>(size, 1, 3);
            const auto weight = normal<float>(rows, 2);
            const auto targets = some_targets(N, V);
            const auto logits64 = cast<double>(logits), weight64 = cast<double>(weight);
            std::vector<float> ce(rows), lse(rows);
            std::vector<T> dlogits(size);
            std::vector<double> want_ce(rows), want_lse(rows), want(size);
            ASSERT_TRUE(ok(cpu::cross_entropy_forward(ce.data(), lse.data(), logits.data(),
                                                      targets.data(), N, V, kTwoThreads)));
            ASSERT_TRUE(
                ok(ref::cross_entropy_forward(want_ce.data(), want_lse.data(), logits64.data(),
                                              targets.data(), N, V, kOneThread)));
            // An exponent is rounded by u*range, exp adds 2.2 u, the sum its depth: so much is the
            // sum off, relatively, and its logarithm absolutely. Then three roundings.
            const double range = 2 * max_abs(logits64), log_sum = std::log(double(V));
            const double absolute =
                gamma<float>(range + 3 + lane_depth(V)) + gamma<float>(3) * (range + log_sum);
            EXPECT_TRUE(close(ce, want_ce, absolute)) << N << " x " << V;
            EXPECT_TRUE(close(lse, want_lse, absolute)) << N << " x " << V;

            const auto lse64 = cast<double>(lse);  // both backends get the same
            ASSERT_TRUE(ok(cpu::cross_entropy_backward(dlogits.data(), logits.data(), lse.data(),
                                                       targets.data(), weight.data(), z_weight, N,
                                                       V, kTwoThreads)));
            ASSERT_TRUE(ok(ref::cross_entropy_backward(want.data(), logits64.data(), lse64.data(),
                                                       targets.data(), weight64.data(),
                                                       double(z_weight), N, V, kOneThread)));
            const double z = 1 + 2 * z_weight * max_abs(lse64);
            EXPECT_TRUE(close_stored(
                dlogits, want,
                max_abs(weight64) * (z * gamma<float>(range + log_sum + 8) + gamma<float>(3))))
                << N << " x " << V;
        }
}

TEST(CrossEntropy, HugeLogitsAreFinite) {
    for (const float huge : {1e4f, 1e30f, 3e38f}) {
        const std::vector<float> logits = {-huge, huge, huge, 0};
        const int32_t target = 2;
        for (const auto forward :
             {ref::cross_entropy_forward<float>, cpu::cross_entropy_forward<float>}) {
            float ce = 0, lse = 0;
            ASSERT_TRUE(ok(forward(&ce, &lse, logits.data(), &target, 1, 4, kOneThread)));
            EXPECT_NEAR(ce, std::log(2.0), gamma<float>(4));
            EXPECT_NEAR(lse, double(huge) + std::log(2.0), huge * gamma<float>(2));
        }
    }
}

TEST(CrossEntropy, NanLogitsShow) {
    for (const int V : {1, 3, 16, 37, 1601})
        for (const int at : {0, V / 2, V - 1}) {
            std::vector<float> logits(static_cast<size_t>(V), 1.f);
            logits[size_t(at)] = NAN;
            const int32_t target = 0;
            for (const auto forward :
                 {ref::cross_entropy_forward<float>, cpu::cross_entropy_forward<float>}) {
                float ce = 0, lse = 0;
                ASSERT_TRUE(ok(forward(&ce, &lse, logits.data(), &target, 1, V, kOneThread)));
                EXPECT_TRUE(std::isnan(ce)) << at << " of " << V;
                EXPECT_TRUE(std::isnan(lse)) << at << " of " << V;
            }
        }
}

// Rows without a target: zero loss and gradient, whatever they hold; lse is theirs all the same.
TEST(CrossEntropy, IgnoredRowsCountZero) {
    std::vector<float> logits = {1, 1, NAN, 1};
    const std::vector<int32_t> targets = {-1, -1};
    const std::vector<float> weight = {1, NAN};
    for (int backend = 0; backend < 2; ++backend) {
        const auto forward =
            backend ? cpu::cross_entropy_forward<float> : ref::cross_entropy_forward<float>;
        const auto backward =
            backend ? cpu::cross_entropy_backward<float> : ref::cross_entropy_backward<float>;
        std::vector<float> ce(2, 5.f), lse(2), dlogits(4, 5.f);
        ASSERT_TRUE(
            ok(forward(ce.data(), lse.data(), logits.data(), targets.data(), 2, 2, kOneThread)));
        EXPECT_TRUE(same_bits(ce, {0, 0}));
        EXPECT_NEAR(lse[0], 1 + std::log(2.0), 3 * gamma<float>(3));
        ASSERT_TRUE(ok(backward(dlogits.data(), logits.data(), lse.data(), targets.data(),
                                weight.data(), 0.1f, 2, 2, kOneThread)));
        EXPECT_TRUE(same_bits(dlogits, std::vector<float>(4, 0.f)));
    }
}

TYPED_TEST(CrossEntropyStored, RowsDoNotDependOnOtherRowsNorOnThreads) {
    using T = TypeParam;
    for (const int V : {257, 1601}) {
        const int64_t N = 97;
        const size_t width = size_t(V), rows = size_t(N);
        const auto logits = normal<T>(rows * width, 1, 3);
        const auto weight = normal<float>(rows, 2);
        const auto targets = some_targets(N, V);
        std::vector<float> ce[2], lse[2];
        std::vector<T> dlogits[2];
        const kernels::Stream streams[2] = {kOneThread, kTwoThreads};
        for (int i = 0; i < 2; ++i) {
            ce[i] = lse[i] = std::vector<float>(rows);
            dlogits[i] = std::vector<T>(logits.size());
            ASSERT_TRUE(ok(cpu::cross_entropy_forward(ce[i].data(), lse[i].data(), logits.data(),
                                                      targets.data(), N, V, streams[i])));
            ASSERT_TRUE(ok(cpu::cross_entropy_backward(dlogits[i].data(), logits.data(),
                                                       lse[i].data(), targets.data(), weight.data(),
                                                       0.01f, N, V, streams[i])));
        }
        EXPECT_TRUE(same_bits(ce[0], ce[1]));
        EXPECT_TRUE(same_bits(lse[0], lse[1]));
        EXPECT_TRUE(same_bits(dlogits[0], dlogits[1]));
        for (size_t n = 0; n < rows; n += 5) {  // alone, at another alignment; over its own logits
            Shifted row(&logits[n * width], width, n % 16 + 1);
            float one[2];
            ASSERT_TRUE(ok(cpu::cross_entropy_forward(&one[0], &one[1], row.data(), &targets[n], 1,
                                                      V, kOneThread)));
            const float want[2] = {ce[0][n], lse[0][n]};
            EXPECT_EQ(std::memcmp(one, want, sizeof one), 0) << n;
            ASSERT_TRUE(ok(cpu::cross_entropy_backward(row.data(), row.data(), &one[1], &targets[n],
                                                       &weight[n], 0.01f, 1, V, kOneThread)));
            EXPECT_TRUE(same_bits<T>(std::span<const T>(row.data(), width),
                                     std::span<const T>(&dlogits[0][n * width], width)));
        }
    }
}

TEST(CrossEntropy, RefusesBadSizes) {
    float v = 0;
    const int32_t t = 0;
    EXPECT_FALSE(ok(cpu::cross_entropy_forward(&v, &v, &v, &t, 1, 0, kOneThread)));
    EXPECT_FALSE(ok(ref::cross_entropy_forward(&v, &v, &v, &t, -1, 1, kOneThread)));
    EXPECT_FALSE(ok(cpu::cross_entropy_backward(&v, &v, &v, &t, &v, 0.f, 1, 0, kOneThread)));
    EXPECT_TRUE(ok(cpu::cross_entropy_forward(&v, &v, &v, &t, 0, 1, kOneThread)));
}

}  // namespace
}  // namespace fbt::tests
