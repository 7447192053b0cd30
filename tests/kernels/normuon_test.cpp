#include "kernels/normuon.h"

#include <algorithm>

#include "tests/kernels/kernel_test.h"

namespace fbt::tests {
namespace {

namespace ref = kernels::ref;
namespace cpu = kernels::cpu;
using kernels::NorMuonStep;

template <class T>
class NorMuonStored : public testing::Test {};
TYPED_TEST_SUITE(NorMuonStored, Storage);

// At the first step v[n] is (1-beta2) times the row's mean square, so every row, divided by its
// root, has the same mean square, and the step is 0.2*lr*o[n,k]/rms(row n).
TEST(NorMuon, FirstStepHasAClosedForm) {
    const int64_t N = 5, K = 7;
    const auto o = normal<double>(size_t(N * K), 1), start = normal<double>(size_t(N * K), 2);
    const NorMuonStep h{0.1, 0.95, 1e-300, 0.5};
    auto w = start;
    std::vector<double> v(N), scratch(N + 1);
    ASSERT_TRUE(
        ok(ref::normuon_step(w.data(), v.data(), o.data(), N, K, h, scratch.data(), kOneThread)));
    for (int64_t n = 0; n < N; ++n) {
        double mean = 0;
        for (int64_t k = 0; k < K; ++k) mean += o[size_t(n * K + k)] * o[size_t(n * K + k)] / K;
        EXPECT_NEAR(v[size_t(n)], 0.05 * mean, mean * gamma<double>(40));  // 1 - 0.95 loses digits
        for (int64_t k = 0; k < K; ++k) {
            const size_t i = size_t(n * K + k);
            const double want = start[i] * 0.95 - 0.1 * 0.2 * o[i] / std::sqrt(mean);
            EXPECT_NEAR(w[i], want, gamma<double>(60) * (std::abs(want) + 1));
        }
    }
}

// Later, too, the step's root mean square is 0.2*lr; and a row that has been large is divided by
// more than one that has not.
TEST(NorMuon, RowsAreDividedByTheirOwnMoment) {
    const int64_t N = 2, K = 3;
    const std::vector<double> o(size_t(N * K), 0.5);
    std::vector<double> w(size_t(N * K)), v{4, 0.01}, scratch(N + 1);
    const NorMuonStep h{0.1, 0.9, 1e-8, 0};
    ASSERT_TRUE(
        ok(ref::normuon_step(w.data(), v.data(), o.data(), N, K, h, scratch.data(), kOneThread)));
    double square = 0;
    for (double x : w) square += x * x / double(N * K);
    EXPECT_NEAR(std::sqrt(square), 0.02, 0.02 * gamma<double>(40));
    const double v0 = 0.9 * 4 + 0.1 * 0.25, v1 = 0.9 * 0.01 + 0.1 * 0.25;
    EXPECT_NEAR(w[3] / w[0], std::sqrt(v0) / std::sqrt(v1), 1e-6);  // eps is 1e-8 of 0.18
}

// m: products and constants rounded, may cancel.
TEST(NorMuon, MomentumMatchesRefAndPlace) {
    const int64_t n = 20011;
    const auto start = normal<float>(n, 1), grad = normal<float>(n, 2);
    auto m = start, again = start;
    auto wide = cast<double>(start);
    ASSERT_TRUE(ok(cpu::normuon_momentum(m.data(), grad.data(), n, 0.95, 0.5, kTwoThreads)));
    ASSERT_TRUE(ok(cpu::normuon_momentum(again.data(), grad.data(), n, 0.95, 0.5, kOneThread)));
    ASSERT_TRUE(ok(
        ref::normuon_momentum(wide.data(), cast<double>(grad).data(), n, 0.95, 0.5, kOneThread)));
    EXPECT_TRUE(close(m, wide, gamma<float>(4) * (max_abs(start) + max_abs(grad))));
    EXPECT_TRUE(same_bits(m, again));
    EXPECT_NEAR(wide[7], 0.95 * double(start[7]) + 0.05 * 0.5 * double(grad[7]), 1e-14);
}

// The mean of K squares has relative error gamma(K + 2), v one of gamma(K + 5), its root half of
// it; r so gamma(K/2 + 6). ||r|| has half the error of a sum of N such squares. The weights' own
// three roundings follow.
TYPED_TEST(NorMuonStored, CpuMatchesRefAndDoesNotDependOnThreads) {
    using T = TypeParam;
    for (const int64_t N : {1, 3, 37})
        for (const int64_t K : {1, 5, 601}) {
            const size_t size = size_t(N * K);
            const NorMuonStep h{1e-2, 0.95, 1e-8, 0.1};
            const auto w0 = normal<float>(size, 1);
            const auto o = normal<T>(size, 2);
            auto v0 = normal<float>(size_t(N), 3);
            for (float& x : v0) x = x * x + 0.01f;
            auto w = w0, v = v0, w2 = w0, v2 = v0;
            auto wide_w = cast<double>(w0), wide_v = cast<double>(v0);
            std::vector<float> scratch(size_t(N) + 1);
            std::vector<double> wide_scratch(size_t(N) + 1);
            ASSERT_TRUE(ok(cpu::normuon_step(w.data(), v.data(), o.data(), N, K, h, scratch.data(),
                                             kTwoThreads)));
            ASSERT_TRUE(ok(cpu::normuon_step(w2.data(), v2.data(), o.data(), N, K, h,
                                             scratch.data(), kOneThread)));
            ASSERT_TRUE(ok(ref::normuon_step(wide_w.data(), wide_v.data(), cast<double>(o).data(),
                                             N, K, h, wide_scratch.data(), kOneThread)));
            double update = 0;
            for (size_t i = 0; i < size; ++i)
                update = std::max(update, std::abs(wide_w[i] - double(w0[i]) * (1 - 1e-3)));
            EXPECT_TRUE(close(v, wide_v, 0, gamma<float>(double(K + 5))));
            EXPECT_TRUE(close(w, wide_w,
                              update * gamma<float>(1.5 * double(K) + double(N) + 20) +
                                  3 * unit_roundoff<float>() * max_abs(w0)))
                << N << " x " << K;
            EXPECT_TRUE(same_bits(w, w2));
            EXPECT_TRUE(same_bits(v, v2));
        }
}

// A zero o leaves the decay alone; NaN and infinity show.
TEST(NorMuon, ZeroAndNan) {
    for (const auto step : {ref::normuon_step<float>, cpu::normuon_step<float>}) {
        std::vector<float> w{1, 2, 3, 4}, v(2), o(4), scratch(3);
        const NorMuonStep h{0.5, 0.95, 1e-8, 0.5};
        ASSERT_TRUE(ok(step(w.data(), v.data(), o.data(), 2, 2, h, scratch.data(), kOneThread)));
        EXPECT_EQ(w, (std::vector<float>{0.75f, 1.5f, 2.25f, 3}));
        for (const float bad : {NAN, INFINITY}) {
            o[1] = bad;
            w = {1, 2, 3, 4};
            v = {0, 0};
            ASSERT_TRUE(
                ok(step(w.data(), v.data(), o.data(), 2, 2, h, scratch.data(), kOneThread)));
            EXPECT_TRUE(std::isnan(w[1]));
        }
    }
}

TYPED_TEST(NorMuonStored, ElementwiseParts) {
    using T = TypeParam;
    const int64_t N = 37, K = 67, n = N * K;
    const auto x = normal<T>(size_t(n), 1), y0 = normal<T>(size_t(n), 2);
    const auto x32 = cast<float>(x);
    std::vector<double> sum, ratio;
    double square = 0;
    for (const float value : x32) square += double(value) * double(value);
    for (size_t i = 0; i < size_t(n); ++i) {
        sum.push_back(2 * wide(x[i]) - 0.5 * wide(y0[i]));
        ratio.push_back(wide(x[i]) / (std::sqrt(square) + 1e-7));
    }
    const auto check = [&](auto axpby, auto normalize, auto transpose) {
        auto y = y0;
        ASSERT_TRUE(ok(axpby(y.data(), 2.f, x.data(), -0.5f, n, kTwoThreads)));
        EXPECT_TRUE(close_stored(y, sum, gamma<float>(2) * (2 * max_abs(x) + max_abs(y0))));
        ASSERT_TRUE(ok(normalize(y.data(), x32.data(), &square, n, kTwoThreads)));
        EXPECT_TRUE(close_stored(y, ratio, 0, gamma<float>(3)));
        ASSERT_TRUE(ok(transpose(y.data(), x.data(), N, K, kTwoThreads)));
        EXPECT_EQ(wide(y[size_t(3 * N + 5)]), wide(x[size_t(5 * K + 3)]));
        std::vector<T> back(x.size());
        ASSERT_TRUE(ok(transpose(back.data(), y.data(), K, N, kTwoThreads)));
        EXPECT_TRUE(same_bits(back, x));
    };
    check(cpu::axpby<T, float>, cpu::frobenius_normalize<T, float>, cpu::transpose<T>);
    if constexpr (std::is_same_v<T, float>)
        check(ref::axpby<T, float>, ref::frobenius_normalize<T, float>, ref::transpose<T>);
}

TEST(NorMuon, RefusesBadSizes) {
    float x = 3;
    double sum = 1;
    const NorMuonStep h{0.1, 0.9, 1e-8, 0};
    EXPECT_FALSE(ok(ref::normuon_momentum(&x, &x, -1, 0.9, 1, kOneThread)));
    EXPECT_FALSE(ok(cpu::normuon_momentum(&x, &x, -1, 0.9, 1, kOneThread)));
    EXPECT_FALSE(ok(ref::normuon_step(&x, &x, &x, -1, 1, h, &x, kOneThread)));
    EXPECT_FALSE(ok(cpu::normuon_step(&x, &x, &x, 1, -1, h, &x, kOneThread)));
    EXPECT_FALSE(ok(ref::axpby(&x, 1.f, &x, 1.f, -1, kOneThread)));
    EXPECT_FALSE(ok(cpu::axpby(&x, 1.f, &x, 1.f, -1, kOneThread)));
    EXPECT_FALSE(ok(ref::frobenius_normalize(&x, &x, &sum, -1, kOneThread)));
    EXPECT_FALSE(ok(cpu::frobenius_normalize(&x, &x, &sum, -1, kOneThread)));
    EXPECT_FALSE(ok(ref::transpose(&x, &x, -1, 1, kOneThread)));
    EXPECT_FALSE(ok(cpu::transpose(&x, &x, 1, -1, kOneThread)));
    for (const auto step : {ref::normuon_step<float>, cpu::normuon_step<float>}) {
        EXPECT_TRUE(ok(step(&x, &x, &x, 0, 1, h, &x, kOneThread)));
        EXPECT_TRUE(ok(step(&x, &x, &x, 1, 0, h, &x, kOneThread)));
    }
    EXPECT_EQ(x, 3);
}

}  // namespace
}  // namespace fbt::tests
