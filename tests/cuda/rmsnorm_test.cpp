// kernels/rmsnorm.cu, emulated, against the plain loops in double.
#include "kernels/rmsnorm.h"

#include <algorithm>

#include "tests/compare.h"
#include "tests/cuda/device.h"

namespace fbt::tests {
namespace {

namespace cuda = kernels::cuda;
namespace ref = kernels::ref;

constexpr float kEps = 1e-5f;
struct Shape {
    int64_t N;
    int D;
};
const Shape kShapes[] = {{1, 1}, {3, 37}, {2, 128}, {67, 129}, {130, 3}, {3, 1601}};

double largest(const std::vector<double>& v) {
    double most = 0;
    for (double x : v) most = std::max(most, std::abs(x));
    return most;
}

class RmsNorm : public ScheduleTest {};

// A sum of D squares has relative error gamma(D), the root halves it; the mean, eps, root,
// reciprocal and the products around it are 8 more roundings at most.
TEST_P(RmsNorm, ForwardMatchesPlainLoops) {
    for (const Shape shape : kShapes) {
        const int64_t N = shape.N;
        const int D = shape.D;
        const auto x = normal<float>(N * D, 1), gain = normal<float>(D, 2);
        std::vector<double> y(N * D), rstd(N);
        ASSERT_TRUE(ok(ref::rmsnorm_forward<double, double>(
            y.data(), rstd.data(), cast<double>(x).data(), cast<double>(gain).data(), N, D,
            double(kEps), {})));
        DeviceArray<float> dev_x(x), dev_gain(gain), dev_y(N * D), dev_rstd(N);
        ASSERT_TRUE(ok(cuda::rmsnorm_forward<float, float>(
            dev_y.data(), dev_rstd.data(), dev_x.data(), dev_gain.data(), N, D, kEps, {})));
        EXPECT_TRUE(close(dev_y.host(), y, 0, gamma<float>(D / 2. + 8))) << N << " x " << D;
        EXPECT_TRUE(close(dev_rstd.host(), rstd, 0, gamma<float>(D / 2. + 8))) << N << " x " << D;

        // In place, and without saving rstd, the same bits.
        ASSERT_TRUE(ok(cuda::rmsnorm_forward<float, float>(dev_x.data(), nullptr, dev_x.data(),
                                                           dev_gain.data(), N, D, kEps, {})));
        EXPECT_TRUE(same_bits(dev_x.host(), dev_y.host())) << N << " x " << D;
    }
}

// The branch term as above; then one addition, relative to the sum.
TEST_P(RmsNorm, ResidualForwardMatchesPlainLoops) {
    const float alpha = 0.37f;
    for (const Shape shape : kShapes) {
        const int64_t N = shape.N;
        const int D = shape.D;
        const auto x = normal<float>(N * D, 1), branch = normal<float>(N * D, 2),
                   gain = normal<float>(D, 3);
        std::vector<double> y(N * D), rstd(N), term(N * D);
        const auto wide_x = cast<double>(x), wide_branch = cast<double>(branch),
                   wide_gain = cast<double>(gain);
        ASSERT_TRUE(ok(ref::residual_rmsnorm_forward<double, double>(
            y.data(), rstd.data(), wide_x.data(), wide_branch.data(), wide_gain.data(),
            double(alpha), N, D, double(kEps), {})));
        for (size_t i = 0; i < y.size(); ++i) term[i] = y[i] - wide_x[i];

        DeviceArray<float> dev_x(x), dev_branch(branch), dev_gain(gain), dev_y(N * D), dev_rstd(N);
        const auto run = [&](float* out) {
            return cuda::residual_rmsnorm_forward<float, float>(out, dev_rstd.data(), dev_x.data(),
                                                                dev_branch.data(), dev_gain.data(),
                                                                alpha, N, D, kEps, {});
        };
        ASSERT_TRUE(ok(run(dev_y.data())));
        EXPECT_TRUE(
            close(dev_y.host(), y, gamma<float>(D / 2. + 9) * largest(term), gamma<float>(1)))
            << N << " x " << D;
        EXPECT_TRUE(close(dev_rstd.host(), rstd, 0, gamma<float>(D / 2. + 8))) << N << " x " << D;

        ASSERT_TRUE(ok(run(dev_branch.data())));  // y may be the branch,
        EXPECT_TRUE(same_bits(dev_branch.host(), dev_y.host())) << N << " x " << D;
        DeviceArray<float> again(branch);
        ASSERT_TRUE(ok(cuda::residual_rmsnorm_forward<float, float>(
            dev_x.data(), nullptr, dev_x.data(), again.data(), dev_gain.data(), alpha, N, D, kEps,
            {})));  // or x
        EXPECT_TRUE(same_bits(dev_x.host(), dev_y.host())) << N << " x " << D;
    }
}

// dx = rstd*(g - xhat*mean_d(g*xhat)): the mean has error gamma(D + 4) of mean|g*xhat|, the rest
// is under 8 roundings of |g| and of |xhat*mean|. dgain: N products and additions, 5 more around.
TEST_P(RmsNorm, BackwardMatchesPlainLoops) {
    const float scale = 0.37f;
    for (const Shape shape : kShapes) {
        const int64_t N = shape.N;
        const int D = shape.D;
        const auto x = normal<float>(N * D, 1), dy = normal<float>(N * D, 2),
                   gain = normal<float>(D, 3), start = normal<float>(D, 4);
        std::vector<float> rstd(N);
        std::vector<double> dx(N * D), dgain = cast<double>(start),
                                       scratch(kernels::row_chunks(N) * D);
        const auto wide_x = cast<double>(x), wide_dy = cast<double>(dy),
                   wide_gain = cast<double>(gain);
        double dx_size = 0, dgain_size = largest(dgain);
        std::vector<double> column(D);
        for (int64_t n = 0; n < N; ++n) {
            double squares = 0, mean = 0, most_g = 0, most_xhat = 0;
            for (int d = 0; d < D; ++d) squares += wide_x[n * D + d] * wide_x[n * D + d];
            rstd[n] = float(1 / std::sqrt(squares / D + kEps));
            for (int d = 0; d < D; ++d) {
                const double g = std::abs(scale * wide_dy[n * D + d] * wide_gain[d]),
                             xhat = std::abs(wide_x[n * D + d] * rstd[n]);
                mean += g * xhat / D;
                most_g = std::max(most_g, g);
                most_xhat = std::max(most_xhat, xhat);
                column[d] += std::abs(scale * wide_dy[n * D + d]) * xhat;
            }
            dx_size = std::max(dx_size, rstd[n] * (most_g + most_xhat * mean));
        }
        dgain_size += largest(column);
        ASSERT_TRUE(ok(ref::rmsnorm_backward<double>(
            dx.data(), dgain.data(), wide_dy.data(), wide_x.data(), wide_gain.data(),
            cast<double>(rstd).data(), double(scale), N, D, scratch.data(), {})));

        DeviceArray<float> dev_x(x), dev_dy(dy), dev_gain(gain), dev_rstd(rstd), dev_dx(N * D);
        const auto run = [&](float* dx_out) {
            DeviceArray<float> dev_dgain(start), dev_scratch(kernels::row_chunks(N) * D);
            EXPECT_TRUE(ok(cuda::rmsnorm_backward<float>(
                dx_out, dev_dgain.data(), dev_dy.data(), dev_x.data(), dev_gain.data(),
                dev_rstd.data(), scale, N, D, dev_scratch.data(), {})));
            return dev_dgain.host();
        };
        const auto got_dgain = run(dev_dx.data());
        EXPECT_TRUE(close(dev_dx.host(), dx, gamma<float>(D + 12) * dx_size)) << N << " x " << D;
        EXPECT_TRUE(close(got_dgain, dgain, gamma<float>(N + 5) * dgain_size)) << N << " x " << D;

        const auto in_place_dgain = run(dev_dy.data());  // dx may be dy
        EXPECT_TRUE(same_bits(dev_dy.host(), dev_dx.host())) << N << " x " << D;
        EXPECT_TRUE(same_bits(in_place_dgain, got_dgain)) << N << " x " << D;
    }
}

// The row rule: alone or among others, and in another place, a row has the same bits.
TEST_P(RmsNorm, RowsDoNotDependOnOtherRows) {
    const int64_t N = 37;
    const int D = 1601;
    const auto x = normal<float>(N * D, 1), gain = normal<float>(D, 2),
               dy = normal<float>(N * D, 3);
    DeviceArray<float> dev_x(x), dev_gain(gain), dev_dy(dy), dev_y(N * D), dev_rstd(N),
        dev_dx(N * D), dev_dgain(gain), dev_scratch(D);
    ASSERT_TRUE(ok(cuda::rmsnorm_forward<float, float>(dev_y.data(), dev_rstd.data(), dev_x.data(),
                                                       dev_gain.data(), N, D, kEps, {})));
    ASSERT_TRUE(ok(cuda::rmsnorm_backward<float>(dev_dx.data(), dev_dgain.data(), dev_dy.data(),
                                                 dev_x.data(), dev_gain.data(), dev_rstd.data(),
                                                 1.f, N, D, dev_scratch.data(), {})));
    const auto y = dev_y.host(), dx = dev_dx.host();
    for (int64_t n : {int64_t(0), int64_t(5), N - 1}) {
        DeviceArray<float> row(D), rstd(1);
        ASSERT_TRUE(ok(cuda::rmsnorm_forward<float, float>(
            row.data(), rstd.data(), dev_x.data() + n * D, dev_gain.data(), 1, D, kEps, {})));
        EXPECT_TRUE(
            same_bits(row.host(), std::vector<float>(y.begin() + n * D, y.begin() + (n + 1) * D)));
        ASSERT_TRUE(ok(cuda::rmsnorm_backward<float>(
            row.data(), dev_dgain.data(), dev_dy.data() + n * D, dev_x.data() + n * D,
            dev_gain.data(), rstd.data(), 1.f, 1, D, dev_scratch.data(), {})));
        EXPECT_TRUE(same_bits(row.host(),
                              std::vector<float>(dx.begin() + n * D, dx.begin() + (n + 1) * D)));
    }
}

INSTANTIATE_TEST_SUITE_P(Simt, RmsNorm, testing::ValuesIn(kSchedules), schedule_name);

// More rows than blocks: a block takes several, and no warp may start the next row's sum while
// another reads this one's; lifo lets it try.
TEST(RmsNormGrid, BlocksStrideOverRows) {
    const int64_t N = 4096 + 3;
    const int D = 128;
    const auto x = normal<float>(N * D, 1), gain = normal<float>(D, 2);
    const auto wide_x = cast<double>(x), wide_gain = cast<double>(gain);
    std::vector<double> y(N * D), rstd(N);
    ASSERT_TRUE(ok(ref::rmsnorm_forward<double>(y.data(), rstd.data(), wide_x.data(),
                                                wide_gain.data(), N, D, double(kEps), {})));
    DeviceArray<float> dev_x(x), dev_gain(gain), dev_y(N * D), dev_rstd(N);
    simt::set_schedule({simt::Order::lifo, 1});
    ASSERT_TRUE(ok(cuda::rmsnorm_forward<float>(dev_y.data(), dev_rstd.data(), dev_x.data(),
                                                dev_gain.data(), N, D, kEps, {})));
    simt::set_schedule({});
    EXPECT_TRUE(close(dev_y.host(), y, 0, gamma<float>(D / 2. + 8)));
}

TEST(RmsNormGrid, NoRowsIsNoWork) {
    DeviceArray<float> one(std::vector<float>{7});
    EXPECT_TRUE(ok(cuda::rmsnorm_forward<float, float>(one.data(), nullptr, one.data(), one.data(),
                                                       0, 1, kEps, {})));
    EXPECT_TRUE(
        ok(cuda::rmsnorm_backward<float>(one.data(), one.data(), one.data(), one.data(), one.data(),
                                         one.data(), 1.f, 0, 1, one.data(), {})));
    EXPECT_EQ(one.host(), std::vector<float>{7});
    const kernels::Status status = cuda::rmsnorm_forward<float, float>(
        one.data(), nullptr, one.data(), one.data(), 1, 0, kEps, {});
    EXPECT_EQ(status.code, kernels::Code::bad_argument);
}

}  // namespace
}  // namespace fbt::tests
