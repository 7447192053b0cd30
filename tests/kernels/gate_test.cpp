#include "kernels/gate.h"

#include "tests/kernels/kernel_test.h"

namespace fbt::tests {
namespace {

namespace ref = kernels::ref;
namespace cpu = kernels::cpu;

template <class T>
class GateStored : public testing::Test {};
TYPED_TEST_SUITE(GateStored, Storage);

// Sigmoid in float: exp within 1.1 ulp (2.2 u), one sum, one division, each u.
constexpr double kSigmoid = 5;

TEST(Gate, RefGradientsMatchDifferences) {
    for (const auto& [N, C] : {std::pair<int64_t, int>{37, 1}, {3, 17}}) {
        const size_t size = size_t(N * C);
        auto x = normal<double>(size, 1), g = normal<double>(size_t(N), 2);
        const auto dy = normal<double>(size, 3);
        std::vector<double> y(size), dx(size), dg(g.size()), x_slopes(size), g_slopes(g.size());
        const auto F = [&, N = N, C = C] {
            EXPECT_TRUE(ok(ref::gate_forward(y.data(), x.data(), g.data(), N, C, kOneThread)));
            return sum_products(dy, y);
        };
        F();
        const double tolerance = slope_tolerance(sum_abs_products(dy, y), double(N * C + 6));
        ASSERT_TRUE(ok(ref::gate_backward(dx.data(), dg.data(), dy.data(), x.data(), g.data(), N, C,
                                          kOneThread)));
        for (size_t i = 0; i < size; ++i) x_slopes[i] = slope(F, x[i]);
        for (size_t n = 0; n < g.size(); ++n) g_slopes[n] = slope(F, g[n]);
        EXPECT_TRUE(close(dx, x_slopes, tolerance)) << N << " x " << C;
        EXPECT_TRUE(close(dg, g_slopes, tolerance)) << N << " x " << C;
    }
}

TYPED_TEST(GateStored, CpuMatchesRef) {
    using T = TypeParam;
    for (const int64_t N : {1, 3, 37, 1601})
        for (const int C : {1, 17, 96}) {
            const size_t size = size_t(N * C), rows = size_t(N), width = size_t(C);
            const auto x = normal<T>(size, 1), g = normal<T>(rows, 2, 3), dy = normal<T>(size, 3);
            const auto x64 = cast<double>(x), g64 = cast<double>(g), dy64 = cast<double>(dy);
            std::vector<T> y(size), dx(size), dg(rows);
            std::vector<double> want(size), want_dx(size), want_dg(rows);
            ASSERT_TRUE(ok(cpu::gate_forward(y.data(), x.data(), g.data(), N, C, kTwoThreads)));
            ASSERT_TRUE(
                ok(ref::gate_forward(want.data(), x64.data(), g64.data(), N, C, kOneThread)));
            EXPECT_TRUE(close_stored(y, want, 0, gamma<float>(kSigmoid + 1))) << N << " x " << C;
            ASSERT_TRUE(ok(cpu::gate_backward(dx.data(), dg.data(), dy.data(), x.data(), g.data(),
                                              N, C, kTwoThreads)));
            ASSERT_TRUE(ok(ref::gate_backward(want_dx.data(), want_dg.data(), dy64.data(),
                                              x64.data(), g64.data(), N, C, kOneThread)));
            EXPECT_TRUE(close_stored(dx, want_dx, 0, gamma<float>(kSigmoid + 1)))
                << N << " x " << C;
            // s(1-s) is off by at most s*(error of 1-s) + (1-s)*(error of s) <= gamma(kSigmoid + 2)
            double sums = 0;
            for (size_t n = 0; n < rows; ++n) {
                double sum = 0;
                for (size_t c = 0; c < width; ++c)
                    sum += std::abs(dy64[n * width + c] * x64[n * width + c]);
                sums = std::max(sums, sum);
            }
            EXPECT_TRUE(close_stored(
                dg, want_dg,
                sums * (gamma<float>(kSigmoid + 2) + 0.25 * gamma<float>(lane_depth(C) + 1))))
                << N << " x " << C;
        }
}

TEST(Gate, ExtremeGatesSaturate) {
    const std::vector<float> g = {-INFINITY, -1e30f, -100, 100, 1e30f, INFINITY}, x(g.size(), 2.f),
                             want = {0, 0, 0, 2, 2, 2};
    std::vector<float> y(g.size());
    const int64_t N = int64_t(g.size());
    for (const auto forward : {ref::gate_forward<float>, cpu::gate_forward<float>}) {
        ASSERT_TRUE(ok(forward(y.data(), x.data(), g.data(), N, 1, kOneThread)));
        EXPECT_TRUE(close(y, want, 1e-37));
    }
}

TYPED_TEST(GateStored, RowsDoNotDependOnOtherRowsNorOnThreads) {
    using T = TypeParam;
    for (const int C : {1, 17, 96}) {
        const int64_t N = C == 1 ? 20011 : 1601;  // more than one thread's work
        const size_t size = size_t(N * C), width = size_t(C);
        const auto x = normal<T>(size, 1), g = normal<T>(size_t(N), 2), dy = normal<T>(size, 3);
        std::vector<T> y[2], dx[2], dg[2];
        const kernels::Stream streams[2] = {kOneThread, kTwoThreads};
        for (int i = 0; i < 2; ++i) {
            y[i] = dx[i] = std::vector<T>(size);
            dg[i] = g;
            ASSERT_TRUE(ok(cpu::gate_forward(y[i].data(), x.data(), g.data(), N, C, streams[i])));
            ASSERT_TRUE(ok(cpu::gate_backward(dx[i].data(), dg[i].data(), dy.data(), x.data(),
                                              g.data(), N, C, streams[i])));
        }
        EXPECT_TRUE(same_bits(y[0], y[1]));
        EXPECT_TRUE(same_bits(dx[0], dx[1]));
        EXPECT_TRUE(same_bits(dg[0], dg[1]));
        for (size_t n = 0; n < size_t(N); n += 7) {  // alone, at another alignment
            const size_t at = n * width, shift = n % 16 + 1;
            Shifted row(&x[at], width, shift), gradient(&dy[at], width, shift);
            std::vector<T> one(width), gate(1);
            ASSERT_TRUE(ok(cpu::gate_forward(one.data(), row.data(), &g[n], 1, C, kOneThread)));
            EXPECT_TRUE(same_bits<T>(one, std::span<const T>(&y[0][at], width)));
            ASSERT_TRUE(ok(cpu::gate_backward(one.data(), gate.data(), gradient.data(), row.data(),
                                              &g[n], 1, C, kOneThread)));
            EXPECT_TRUE(same_bits<T>(one, std::span<const T>(&dx[0][at], width)));
            EXPECT_TRUE(same_bits<T>(gate, std::span<const T>(&dg[0][n], 1)));
        }
    }
}

TYPED_TEST(GateStored, OutputsMayBeInputs) {
    using T = TypeParam;
    for (const int C : {1, 37}) {
        const int64_t N = 37;
        const size_t size = size_t(N * C);
        const auto x = normal<T>(size, 1), g = normal<T>(size_t(N), 2), dy = normal<T>(size, 3);
        std::vector<T> y(size), dx(size), dg(g.size()), again(g.size()), same = x;
        ASSERT_TRUE(ok(cpu::gate_forward(y.data(), x.data(), g.data(), N, C, kOneThread)));
        ASSERT_TRUE(ok(cpu::gate_forward(same.data(), same.data(), g.data(), N, C, kOneThread)));
        EXPECT_TRUE(same_bits(same, y));
        same = dy;
        ASSERT_TRUE(ok(cpu::gate_backward(dx.data(), dg.data(), dy.data(), x.data(), g.data(), N, C,
                                          kOneThread)));
        ASSERT_TRUE(ok(cpu::gate_backward(same.data(), again.data(), same.data(), x.data(),
                                          g.data(), N, C, kOneThread)));
        EXPECT_TRUE(same_bits(same, dx));
        EXPECT_TRUE(same_bits(again, dg));
    }
}

TEST(Gate, RefusesBadSizes) {
    float v = 0;
    EXPECT_FALSE(ok(cpu::gate_forward(&v, &v, &v, 1, 0, kOneThread)));
    EXPECT_FALSE(ok(ref::gate_backward(&v, &v, &v, &v, &v, -1, 1, kOneThread)));
    EXPECT_TRUE(ok(cpu::gate_forward(&v, &v, &v, 0, 1, kOneThread)));
}

}  // namespace
}  // namespace fbt::tests
