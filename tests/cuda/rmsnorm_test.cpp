// kernels/rmsnorm.cu against the plain loops in double, on the same (rounded) inputs.
#include "kernels/rmsnorm.h"

#include "tests/cuda/rows.h"

namespace fbt::tests {
namespace {

namespace cuda = kernels::cuda;
namespace ref = kernels::ref;
using kernels::bf16;

constexpr float kEps = 1e-5f;
struct Shape {
    int64_t N;
    int D;
};
// Every way to walk a row: a warp or a block, its packs held in registers (few or many) or read
// again, whole or element by element.
const Shape kShapes[] = {{1, 1},    {75, 37},  {2, 128},  {67, 129}, {130, 8},
                         {3, 1536}, {3, 1601}, {2, 2056}, {1, 8196}};
constexpr int kWidest = 16400;  // too wide to be held, in any dtype

class RmsNorm : public ScheduleTest {};

// A sum of D squares has relative error gamma(D), the root halves it; the mean, eps, reciprocal
// root (2 ulp) and the products around it are 8 more roundings at most.
template <class T>
void expect_forward(Shape shape) {
    const int64_t N = shape.N;
    const int D = shape.D;
    const auto x = normal<T>(N * D, 1);
    const auto gain = normal<float>(D, 2);
    std::vector<double> y(N * D), rstd(N);
    ASSERT_TRUE(
        ok(ref::rmsnorm_forward<double>(y.data(), rstd.data(), cast<double>(x).data(),
                                        cast<double>(gain).data(), N, D, double(kEps), {})));
    DeviceRows<T> dev_x(x), dev_y(N * D);
    DeviceRows<float> dev_gain(gain), dev_rstd(N);
    ASSERT_TRUE(ok(cuda::rmsnorm_forward(dev_y.data(), dev_rstd.data(), dev_x.data(),
                                         dev_gain.data(), N, D, kEps, {})));
    EXPECT_TRUE(close_stored(dev_y.host(), y, 0, gamma<float>(D / 2. + 8))) << N << " x " << D;
    EXPECT_TRUE(close(dev_rstd.host(), rstd, 0, gamma<float>(D / 2. + 8))) << N << " x " << D;

    // Unaligned, or in place and without saving rstd, the same bits.
    DeviceRows<T> odd_x(x, 1), odd_y(N * D, 1);
    ASSERT_TRUE(ok(cuda::rmsnorm_forward(odd_y.data(), dev_rstd.data(), odd_x.data(),
                                         dev_gain.data(), N, D, kEps, {})));
    EXPECT_TRUE(same_bits(odd_y.host(), dev_y.host())) << N << " x " << D;
    for (auto* in_place : {&dev_x, &odd_x}) {
        ASSERT_TRUE(ok(cuda::rmsnorm_forward<T, float>(in_place->data(), nullptr, in_place->data(),
                                                       dev_gain.data(), N, D, kEps, {})));
        EXPECT_TRUE(same_bits(in_place->host(), dev_y.host())) << N << " x " << D;
    }
}
TEST_P(RmsNorm, ForwardMatchesPlainLoops) {
    for (const Shape shape : kShapes) {
        expect_forward<float>(shape);
        expect_forward<bf16>(shape);
    }
}

// The branch term as above; then one addition, relative to the sum.
template <class T>
void expect_residual_forward(Shape shape) {
    const float alpha = 0.37f;
    const int64_t N = shape.N;
    const int D = shape.D;
    const auto x = normal<T>(N * D, 1), branch = normal<T>(N * D, 2);
    const auto gain = normal<float>(D, 3);
    std::vector<double> y(N * D), rstd(N), term(N * D);
    const auto wide_x = cast<double>(x);
    ASSERT_TRUE(ok(ref::residual_rmsnorm_forward<double>(
        y.data(), rstd.data(), wide_x.data(), cast<double>(branch).data(),
        cast<double>(gain).data(), double(alpha), N, D, double(kEps), {})));
    for (size_t i = 0; i < y.size(); ++i) term[i] = y[i] - wide_x[i];

    DeviceRows<float> dev_gain(gain), dev_rstd(N);
    const auto run = [&](T* out, const T* from_x, const T* from_branch) {
        return ok(cuda::residual_rmsnorm_forward(out, dev_rstd.data(), from_x, from_branch,
                                                 dev_gain.data(), alpha, N, D, kEps, {}));
    };
    DeviceRows<T> dev_x(x), dev_branch(branch), dev_y(N * D);
    ASSERT_TRUE(run(dev_y.data(), dev_x.data(), dev_branch.data()));
    EXPECT_TRUE(
        close_stored(dev_y.host(), y, gamma<float>(D / 2. + 9) * largest(term), gamma<float>(1)))
        << N << " x " << D;
    EXPECT_TRUE(close(dev_rstd.host(), rstd, 0, gamma<float>(D / 2. + 8))) << N << " x " << D;

    for (const size_t skip : {0, 1}) {  // y may be the branch, or x; aligned or not
        DeviceRows<T> x_in(x, skip), branch_in(branch, skip);
        ASSERT_TRUE(run(branch_in.data(), x_in.data(), branch_in.data()));
        EXPECT_TRUE(same_bits(branch_in.host(), dev_y.host())) << N << " x " << D;
        ASSERT_TRUE(run(x_in.data(), x_in.data(), dev_branch.data()));
        EXPECT_TRUE(same_bits(x_in.host(), dev_y.host())) << N << " x " << D;
    }
}
TEST_P(RmsNorm, ResidualForwardMatchesPlainLoops) {
    for (const Shape shape : kShapes) {
        expect_residual_forward<float>(shape);
        expect_residual_forward<bf16>(shape);
    }
}

// dx = rstd*(g - xhat*mean_d(g*xhat)): the mean has error gamma(D + 4) of mean|g*xhat|, the rest
// is under 8 roundings of |g| and of |xhat*mean|. dgain: N products and additions, 5 more around.
template <class T>
void expect_backward(Shape shape) {
    const float scale = 0.37f;
    const int64_t N = shape.N;
    const int D = shape.D;
    const auto x = normal<T>(N * D, 1), dy = normal<T>(N * D, 2);
    const auto gain = normal<float>(D, 3), start = normal<float>(D, 4);
    const auto wide_x = cast<double>(x), wide_dy = cast<double>(dy), wide_gain = cast<double>(gain);
    std::vector<float> rstd(N);
    std::vector<double> dx(N * D), dgain = cast<double>(start), scratch(kernels::row_chunks(N) * D),
                                   column(D);
    double dx_size = 0;
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
    const double dgain_size = largest(dgain) + largest(column);
    ASSERT_TRUE(ok(ref::rmsnorm_backward<double>(
        dx.data(), dgain.data(), wide_dy.data(), wide_x.data(), wide_gain.data(),
        cast<double>(rstd).data(), double(scale), N, D, scratch.data(), {})));

    DeviceRows<float> dev_gain(gain), dev_rstd(rstd);
    const auto run = [&](T* dx_out, const T* from_dy, const T* from_x) {
        DeviceRows<float> dev_dgain(start), dev_scratch(kernels::row_chunks(N) * D);
        EXPECT_TRUE(
            ok(cuda::rmsnorm_backward(dx_out, dev_dgain.data(), from_dy, from_x, dev_gain.data(),
                                      dev_rstd.data(), scale, N, D, dev_scratch.data(), {})));
        return dev_dgain.host();
    };
    DeviceRows<T> dev_x(x), dev_dy(dy), dev_dx(N * D);
    const auto got_dgain = run(dev_dx.data(), dev_dy.data(), dev_x.data());
    EXPECT_TRUE(close_stored(dev_dx.host(), dx, gamma<float>(D + 12) * dx_size)) << N << " x " << D;
    EXPECT_TRUE(close(got_dgain, dgain, gamma<float>(N + 5) * dgain_size)) << N << " x " << D;

    for (const size_t skip : {0, 1}) {  // dx may be dy; aligned or not
        DeviceRows<T> x_in(x, skip), dy_in(dy, skip);
        const auto in_place_dgain = run(dy_in.data(), dy_in.data(), x_in.data());
        EXPECT_TRUE(same_bits(dy_in.host(), dev_dx.host())) << N << " x " << D;
        EXPECT_TRUE(same_bits(in_place_dgain, got_dgain)) << N << " x " << D;
    }
}
TEST_P(RmsNorm, BackwardMatchesPlainLoops) {
    for (const Shape shape : kShapes) {
        expect_backward<float>(shape);
        expect_backward<bf16>(shape);
    }
}

// The row rule: alone or among others, and in another place, a row has the same bits.
template <class T>
void expect_rows_apart(int D) {
    const int64_t N = 37;
    const float alpha = 0.37f;
    const auto x = normal<T>(N * D, 1), dy = normal<T>(N * D, 3);
    const auto gain = normal<float>(D, 2);
    DeviceRows<T> dev_x(x), dev_dy(dy), dev_y(N * D), dev_sum(N * D), dev_dx(N * D), row(D);
    DeviceRows<float> dev_gain(gain), dev_rstd(N), dev_dgain(gain), dev_scratch(D), rstd(1);
    ASSERT_TRUE(ok(cuda::rmsnorm_forward(dev_y.data(), dev_rstd.data(), dev_x.data(),
                                         dev_gain.data(), N, D, kEps, {})));
    ASSERT_TRUE(ok(cuda::residual_rmsnorm_forward<T, float>(dev_sum.data(), nullptr, dev_dy.data(),
                                                            dev_x.data(), dev_gain.data(), alpha, N,
                                                            D, kEps, {})));
    ASSERT_TRUE(ok(cuda::rmsnorm_backward(dev_dx.data(), dev_dgain.data(), dev_dy.data(),
                                          dev_x.data(), dev_gain.data(), dev_rstd.data(), 1.f, N, D,
                                          dev_scratch.data(), {})));
    const auto y = dev_y.host(), sum = dev_sum.host(), dx = dev_dx.host();
    for (int64_t n : {int64_t(0), int64_t(5), N - 1}) {
        ASSERT_TRUE(ok(cuda::rmsnorm_forward(row.data(), rstd.data(), dev_x.data() + n * D,
                                             dev_gain.data(), 1, D, kEps, {})));
        EXPECT_TRUE(same_bits(row.host(), row_of(y, n, D))) << D;
        ASSERT_TRUE(ok(cuda::residual_rmsnorm_forward<T, float>(
            row.data(), nullptr, dev_dy.data() + n * D, dev_x.data() + n * D, dev_gain.data(),
            alpha, 1, D, kEps, {})));
        EXPECT_TRUE(same_bits(row.host(), row_of(sum, n, D))) << D;
        ASSERT_TRUE(ok(cuda::rmsnorm_backward(row.data(), dev_dgain.data(), dev_dy.data() + n * D,
                                              dev_x.data() + n * D, dev_gain.data(), rstd.data(),
                                              1.f, 1, D, dev_scratch.data(), {})));
        EXPECT_TRUE(same_bits(row.host(), row_of(dx, n, D))) << D;
    }
}
TEST_P(RmsNorm, RowsDoNotDependOnOtherRows) {
    for (const int D : {37, 96, 1601, 2056}) {
        expect_rows_apart<float>(D);
        expect_rows_apart<bf16>(D);
    }
}

INSTANTIATE_TEST_SUITE_P(Device, RmsNorm, testing::ValuesIn(kSchedules), schedule_name);

// What costs the emulator time runs under one schedule: lifo, where one warp gets as far ahead as
// barriers allow.
class RmsNormGrid : public ScheduleTest {};

// Rows too wide for registers are read twice.
TEST_P(RmsNormGrid, WidestRows) {
    expect_forward<float>({2, kWidest});
    expect_forward<bf16>({2, kWidest});
    expect_residual_forward<float>({2, kWidest});
    expect_residual_forward<bf16>({2, kWidest});
    expect_backward<float>({2, kWidest});
    expect_backward<bf16>({2, kWidest});
}

// More rows than blocks hold: a block takes several, and no warp may start the next row's sum
// while another reads this one's. 4096 blocks have 4 narrow rows each, or a wide one.
template <class T>
void expect_strides(int64_t blocks_rows, int D) {
    const int64_t N = blocks_rows + 3;
    const auto x = normal<T>(N * D, 1);
    const auto gain = normal<float>(D, 2);
    std::vector<double> y(N * D);
    ASSERT_TRUE(ok(ref::rmsnorm_forward<double, double>(y.data(), nullptr, cast<double>(x).data(),
                                                        cast<double>(gain).data(), N, D,
                                                        double(kEps), {})));
    DeviceRows<T> dev_x(x);
    DeviceRows<float> dev_gain(gain);
    ASSERT_TRUE(ok(cuda::rmsnorm_forward<T, float>(dev_x.data(), nullptr, dev_x.data(),
                                                   dev_gain.data(), N, D, kEps, {})));
    EXPECT_TRUE(close_stored(dev_x.host(), y, 0, gamma<float>(D / 2. + 8))) << N << " x " << D;
}
TEST_P(RmsNormGrid, BlocksStrideOverRows) {
    expect_strides<float>(4 * 4096, 5);
    expect_strides<bf16>(4 * 4096, 8);
    expect_strides<float>(4096, 1028);
}

TEST_P(RmsNormGrid, NoRowsIsNoWork) {
    DeviceRows<float> one(std::vector<float>{7});
    float* const v = one.data();
    EXPECT_TRUE(ok(cuda::rmsnorm_forward<float, float>(v, nullptr, v, v, 0, 1, kEps, {})));
    EXPECT_TRUE(
        ok(cuda::residual_rmsnorm_forward<float, float>(v, nullptr, v, v, v, 1.f, 0, 1, kEps, {})));
    EXPECT_TRUE(ok(cuda::rmsnorm_backward(v, v, v, v, v, v, 1.f, 0, 1, v, {})));
    EXPECT_EQ(one.host(), std::vector<float>{7});
    const auto bad = kernels::Code::bad_argument;
    EXPECT_EQ((cuda::rmsnorm_forward<float, float>(v, nullptr, v, v, 1, 0, kEps, {}).code), bad);
    EXPECT_EQ(
        (cuda::residual_rmsnorm_forward<float, float>(v, nullptr, v, v, v, 1.f, -1, 1, kEps, {})
             .code),
        bad);
    EXPECT_EQ(cuda::rmsnorm_backward(v, v, v, v, v, v, 1.f, 1, 0, v, {}).code, bad);
}

INSTANTIATE_TEST_SUITE_P(Device, RmsNormGrid,
                         testing::Values(Schedule(kSchedules[std::size(kSchedules) / 2])),
                         schedule_name);

}  // namespace
}  // namespace fbt::tests
