#include "kernels/rmsnorm.h"

#include <algorithm>

#include "tests/kernels/kernel_test.h"

namespace fbt::tests {
namespace {

namespace ref = kernels::ref;
namespace cpu = kernels::cpu;
using kernels::row_chunks;

template <class T>
class RmsNormStored : public testing::Test {};
TYPED_TEST_SUITE(RmsNormStored, Storage);

constexpr double kEps = 1;  // in the tests of gradients; keeps y analytic in a disc of radius 1

// F = sum_n,d dy * y, with y of the forward pass; the fused form where alpha is given
struct Problem {
    int64_t N;
    int D;
    std::vector<double> x, branch, gain, dy;
    Problem(int64_t N, int D)
        : N(N),
          D(D),
          x(normal<double>(size_t(N * D), 1)),
          branch(normal<double>(size_t(N * D), 2)),
          gain(normal<double>(size_t(D), 3)),
          dy(normal<double>(size_t(N * D), 4)) {}
};

TEST(RmsNorm, RefGradientsMatchDifferences) {
    for (const auto& [N, D] : {std::pair<int64_t, int>{3, 1}, {1, 3}, {3, 37}, {67, 3}}) {
        Problem p(N, D);
        const size_t size = size_t(N * D);
        std::vector<double> y(size), rstd(static_cast<size_t>(N)), dx(size), dgain(size_t(D), 0.5);
        std::vector<double> scratch(size_t(row_chunks(N) * D));
        const auto F = [&, N = N, D = D] {
            EXPECT_TRUE(ok(ref::rmsnorm_forward(y.data(), rstd.data(), p.x.data(), p.gain.data(), N,
                                                D, kEps, kOneThread)));
            return sum_products(p.dy, y);
        };
        F();
        ASSERT_TRUE(ok(ref::rmsnorm_backward(dx.data(), dgain.data(), p.dy.data(), p.x.data(),
                                             p.gain.data(), rstd.data(), 1.0, N, D, scratch.data(),
                                             kOneThread)));
        const double tolerance = slope_tolerance(sum_abs_products(p.dy, y), double(N * D + D + 10));
        std::vector<double> slopes(size), gain_slopes(static_cast<size_t>(D));
        for (size_t i = 0; i < size; ++i) slopes[i] = slope(F, p.x[i]);
        for (size_t d = 0; d < size_t(D); ++d) gain_slopes[d] = 0.5 + slope(F, p.gain[d]);
        EXPECT_TRUE(close(dx, slopes, tolerance)) << N << " x " << D;
        EXPECT_TRUE(close(dgain, gain_slopes, tolerance)) << N << " x " << D;
    }
}

TEST(RmsNorm, RefResidualGradientsMatchDifferences) {
    const int64_t N = 3;
    const int D = 37;
    const double alpha = 0.3;
    Problem p(N, D);
    std::vector<double> y(N * D), rstd(N), dx(N * D), dgain(D, 0.0), scratch(D);
    const auto F = [&] {
        EXPECT_TRUE(
            ok(ref::residual_rmsnorm_forward(y.data(), rstd.data(), p.x.data(), p.branch.data(),
                                             p.gain.data(), alpha, N, D, kEps, kOneThread)));
        return sum_products(p.dy, y);
    };
    F();
    ASSERT_TRUE(ok(ref::rmsnorm_backward(dx.data(), dgain.data(), p.dy.data(), p.branch.data(),
                                         p.gain.data(), rstd.data(), alpha, N, D, scratch.data(),
                                         kOneThread)));
    const double tolerance = slope_tolerance(sum_abs_products(p.dy, y), double(N * D + D + 10));
    std::vector<double> slopes(N * D), gain_slopes(D), x_slopes(N * D);
    for (size_t i = 0; i < p.x.size(); ++i) {
        slopes[i] = slope(F, p.branch[i]);
        x_slopes[i] = slope(F, p.x[i]);
    }
    for (size_t d = 0; d < D; ++d) gain_slopes[d] = slope(F, p.gain[d]);
    EXPECT_TRUE(close(dx, slopes, tolerance));
    EXPECT_TRUE(close(dgain, gain_slopes, tolerance));
    EXPECT_TRUE(close(p.dy, x_slopes, tolerance));  // the residual's own path
}

template <class T>
struct Stored {
    int64_t N;
    int D;
    std::vector<T> x, branch, dy;
    std::vector<float> gain, rstd;
    Stored(int64_t N, int D)
        : N(N),
          D(D),
          x(normal<T>(size_t(N * D), 1)),
          branch(normal<T>(size_t(N * D), 2)),
          dy(normal<T>(size_t(N * D), 4)),
          gain(normal<float>(size_t(D), 3)),
          rstd(static_cast<size_t>(N)) {}
};

TYPED_TEST(RmsNormStored, CpuForwardMatchesRef) {
    using T = TypeParam;
    const float eps = 0x1p-20f, alpha = 0.25f;
    for (const int64_t N : {1, 3, 37})
        for (const int D : {1, 17, 1601}) {
            Stored<T> p(N, D);
            std::vector<T> y(p.x.size()), z(p.x.size());
            std::vector<double> want(p.x.size()), rstd(static_cast<size_t>(N));
            const auto x = cast<double>(p.x), branch = cast<double>(p.branch),
                       gain = cast<double>(p.gain);
            // The mean of squares has lane_depth(D) + 2 roundings, halved by the root; then four.
            const double relative = gamma<float>(lane_depth(D) / 2 + 6);
            ASSERT_TRUE(ok(cpu::rmsnorm_forward(y.data(), p.rstd.data(), p.x.data(), p.gain.data(),
                                                N, D, eps, kTwoThreads)));
            ASSERT_TRUE(ok(ref::rmsnorm_forward(want.data(), rstd.data(), x.data(), gain.data(), N,
                                                D, double(eps), kOneThread)));
            EXPECT_TRUE(close_stored(y, want, 0, relative)) << N << " x " << D;
            EXPECT_TRUE(close(p.rstd, rstd, 0, relative)) << N << " x " << D;

            ASSERT_TRUE(ok(cpu::residual_rmsnorm_forward(z.data(), p.rstd.data(), p.x.data(),
                                                         p.branch.data(), p.gain.data(), alpha, N,
                                                         D, eps, kTwoThreads)));
            std::vector<double> norm(p.x.size()), sum(p.x.size());
            ASSERT_TRUE(ok(ref::rmsnorm_forward(norm.data(), rstd.data(), branch.data(),
                                                gain.data(), N, D, double(eps), kOneThread)));
            ASSERT_TRUE(ok(ref::residual_rmsnorm_forward(sum.data(), rstd.data(), x.data(),
                                                         branch.data(), gain.data(), double(alpha),
                                                         N, D, double(eps), kOneThread)));
            const double absolute =
                alpha * max_abs(norm) * relative + gamma<float>(1) * max_abs(sum);
            EXPECT_TRUE(close_stored(z, sum, absolute)) << N << " x " << D;
            EXPECT_TRUE(close(p.rstd, rstd, 0, relative)) << N << " x " << D;
        }
}

TYPED_TEST(RmsNormStored, CpuBackwardMatchesRef) {
    using T = TypeParam;
    const float scale = 0.25f;
    for (const int64_t N : {1, 37, 131})
        for (const int D : {1, 17, 1601}) {
            Stored<T> p(N, D);
            const size_t size = p.x.size(), width = size_t(D);
            const auto x = cast<double>(p.x), gain = cast<double>(p.gain), dy = cast<double>(p.dy);
            std::vector<double> y(size), rstd64(static_cast<size_t>(N));
            ASSERT_TRUE(ok(ref::rmsnorm_forward(y.data(), rstd64.data(), x.data(), gain.data(), N,
                                                D, 1e-6, kOneThread)));
            p.rstd = cast<float>(rstd64);
            const auto rstd = cast<double>(p.rstd);  // both backends get the same
            std::vector<T> dx(size);
            std::vector<float> dgain(width, 0.5f);
            std::vector<double> want(size), want_gain(width, 0.5);
            std::vector<float> scratch(size_t(row_chunks(N) * D), NAN);
            std::vector<double> scratch64(scratch.size(), NAN);
            ASSERT_TRUE(ok(cpu::rmsnorm_backward(dx.data(), dgain.data(), p.dy.data(), p.x.data(),
                                                 p.gain.data(), p.rstd.data(), scale, N, D,
                                                 scratch.data(), kTwoThreads)));
            ASSERT_TRUE(ok(ref::rmsnorm_backward(want.data(), want_gain.data(), dy.data(), x.data(),
                                                 gain.data(), rstd.data(), double(scale), N, D,
                                                 scratch64.data(), kOneThread)));
            // Both terms of dx are bounded by rstd*(max|g| + max|xhat|*mean|g*xhat|).
            double bound = 0;
            for (size_t n = 0; n < size_t(N); ++n) {
                double g = 0, xhat = 0, mean = 0;
                for (size_t d = 0; d < width; ++d) {
                    const double a = std::abs(scale * dy[n * width + d] * gain[d]),
                                 b = std::abs(x[n * width + d] * rstd[n]);
                    g = std::max(g, a);
                    xhat = std::max(xhat, b);
                    mean += a * b / D;
                }
                bound = std::max(bound, rstd[n] * (g + xhat * mean));
            }
            EXPECT_TRUE(close_stored(dx, want, bound * gamma<float>(lane_depth(D) + 9)))
                << N << " x " << D;
            double columns = 0;
            for (size_t d = 0; d < width; ++d) {
                double sum = 0.5;
                for (size_t n = 0; n < size_t(N); ++n)
                    sum += std::abs(scale * dy[n * width + d] * x[n * width + d] * rstd[n]);
                columns = std::max(columns, sum);
            }
            const double depth = double(std::min<int64_t>(N, 64) + row_chunks(N) + 3);
            EXPECT_TRUE(close(dgain, want_gain, columns * gamma<float>(depth))) << N << " x " << D;
        }
}

TYPED_TEST(RmsNormStored, RowsDoNotDependOnOtherRowsNorOnThreads) {
    using T = TypeParam;
    const float eps = 1e-6f;
    const int64_t N = 67;
    for (const int D : {17, 1601}) {
        Stored<T> p(N, D);
        const size_t width = size_t(D);
        std::vector<T> y[2], z[2], dx[2];
        std::vector<float> dgain[2];
        const kernels::Stream streams[2] = {kOneThread, kTwoThreads};
        for (int i = 0; i < 2; ++i) {
            y[i] = z[i] = dx[i] = std::vector<T>(p.x.size());
            dgain[i] = p.gain;
            std::vector<float> scratch(size_t(row_chunks(N) * D));
            ASSERT_TRUE(ok(cpu::residual_rmsnorm_forward(z[i].data(), p.rstd.data(), p.x.data(),
                                                         p.branch.data(), p.gain.data(), 0.3f, N, D,
                                                         eps, streams[i])));
            ASSERT_TRUE(ok(cpu::rmsnorm_forward(y[i].data(), p.rstd.data(), p.x.data(),
                                                p.gain.data(), N, D, eps, streams[i])));
            ASSERT_TRUE(ok(cpu::rmsnorm_backward(dx[i].data(), dgain[i].data(), p.dy.data(),
                                                 p.x.data(), p.gain.data(), p.rstd.data(), 0.3f, N,
                                                 D, scratch.data(), streams[i])));
        }
        EXPECT_TRUE(same_bits(y[0], y[1]));
        EXPECT_TRUE(same_bits(z[0], z[1]));
        EXPECT_TRUE(same_bits(dx[0], dx[1]));
        EXPECT_TRUE(same_bits(dgain[0], dgain[1]));
        for (size_t n = 0; n < size_t(N); n += 11) {  // alone, at another alignment
            const size_t at = n * width, shift = n % 16 + 1;
            Shifted x(&p.x[at], width, shift), branch(&p.branch[at], width, shift),
                dy(&p.dy[at], width, shift);
            std::vector<T> one(width);
            std::vector<float> gain_sum(width), scratch(width);
            float rstd = 0;
            ASSERT_TRUE(
                ok(cpu::residual_rmsnorm_forward(one.data(), &rstd, x.data(), branch.data(),
                                                 p.gain.data(), 0.3f, 1, D, eps, kOneThread)));
            EXPECT_TRUE(same_bits<T>(one, std::span<const T>(&z[0][at], width)));
            ASSERT_TRUE(ok(cpu::rmsnorm_forward(one.data(), &rstd, x.data(), p.gain.data(), 1, D,
                                                eps, kOneThread)));
            EXPECT_TRUE(same_bits<T>(one, std::span<const T>(&y[0][at], width)));
            ASSERT_TRUE(ok(cpu::rmsnorm_backward(one.data(), gain_sum.data(), dy.data(), x.data(),
                                                 p.gain.data(), &rstd, 0.3f, 1, D, scratch.data(),
                                                 kOneThread)));
            EXPECT_TRUE(same_bits<T>(one, std::span<const T>(&dx[0][at], width)));
        }
    }
}

TYPED_TEST(RmsNormStored, OutputsMayBeInputs) {
    using T = TypeParam;
    const int64_t N = 3;
    const int D = 37;
    Stored<T> p(N, D);
    std::vector<T> y(N * D), z(N * D), dx(N * D);
    std::vector<float> gain_sum(D), scratch(D);
    const auto forward = [&](T* out, const T* in) {
        return cpu::rmsnorm_forward(out, p.rstd.data(), in, p.gain.data(), N, D, 1e-6f, kOneThread);
    };
    const auto residual = [&](T* out, const T* x, const T* branch) {
        return cpu::residual_rmsnorm_forward(out, p.rstd.data(), x, branch, p.gain.data(), 0.3f, N,
                                             D, 1e-6f, kOneThread);
    };
    ASSERT_TRUE(ok(forward(y.data(), p.x.data())));
    ASSERT_TRUE(
        ok(cpu::rmsnorm_backward(dx.data(), gain_sum.data(), p.dy.data(), p.x.data(), p.gain.data(),
                                 p.rstd.data(), 1.f, N, D, scratch.data(), kOneThread)));
    std::vector<float> again(D);
    auto same = p.dy;
    ASSERT_TRUE(
        ok(cpu::rmsnorm_backward(same.data(), again.data(), same.data(), p.x.data(), p.gain.data(),
                                 p.rstd.data(), 1.f, N, D, scratch.data(), kOneThread)));
    EXPECT_TRUE(same_bits(same, dx));
    EXPECT_TRUE(same_bits(again, gain_sum));
    ASSERT_TRUE(ok(residual(z.data(), p.x.data(), p.branch.data())));
    same = p.x;
    ASSERT_TRUE(ok(residual(same.data(), same.data(), p.branch.data())));
    EXPECT_TRUE(same_bits(same, z));
    same = p.branch;
    ASSERT_TRUE(ok(residual(same.data(), p.x.data(), same.data())));
    EXPECT_TRUE(same_bits(same, z));
    same = p.x;
    ASSERT_TRUE(ok(forward(same.data(), same.data())));
    EXPECT_TRUE(same_bits(same, y));
}

TEST(RmsNorm, RefusesBadSizesAndAcceptsNoRows) {
    float v = 2;
    EXPECT_FALSE(ok(cpu::rmsnorm_forward(&v, &v, &v, &v, 1, 0, 1e-6f, kOneThread)));
    EXPECT_FALSE(ok(ref::rmsnorm_forward(&v, &v, &v, &v, -1, 1, 1e-6f, kOneThread)));
    EXPECT_FALSE(
        ok(cpu::residual_rmsnorm_forward(&v, &v, &v, &v, &v, 1.f, 1, 0, 1e-6f, kOneThread)));
    EXPECT_FALSE(ok(cpu::rmsnorm_backward(&v, &v, &v, &v, &v, &v, 1.f, 1, 0, &v, kOneThread)));
    for (const auto backward : {ref::rmsnorm_backward<float>, cpu::rmsnorm_backward<float>}) {
        float* none = nullptr;
        EXPECT_TRUE(ok(backward(none, &v, none, none, &v, none, 1.f, 0, 1, none, kOneThread)));
        EXPECT_EQ(v, 2.f);  // nothing is added
    }
}

}  // namespace
}  // namespace fbt::tests
