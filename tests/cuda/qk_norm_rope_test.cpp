// kernels/qk_norm_rope.cu against the plain loops in double, on the same (rounded) inputs.
#include "kernels/qk_norm_rope.h"

#include "tests/cuda/rows.h"

namespace fbt::tests {
namespace {

namespace cuda = kernels::cuda;
namespace ref = kernels::ref;
using kernels::bf16;

constexpr float kEps = 1e-5f;
struct Shape {
    int64_t N;
    int H, C;
};
// From 1 lane a head to 32; whole packs or not; heads that fill a block of threads or not.
const Shape kShapes[] = {{1, 1, 2},   {3, 16, 96}, {67, 3, 10}, {5, 8, 64},
                         {70, 2, 96}, {9, 5, 128}, {2, 1, 256}, {3, 7, 254}};

// Rotations of every position, and positions in no order.
struct Angles {
    std::vector<float> cos, sin;
    std::vector<int32_t> positions;
};
Angles angles(int64_t N, int C) {
    const int half = C / 2, kPositions = 101;
    Angles a;
    for (int t = 0; t < kPositions; ++t)
        for (int i = 0; i < half; ++i) {
            const double angle = t * std::pow(10000., -double(i) / half);
            a.cos.push_back(float(std::cos(angle)));
            a.sin.push_back(float(std::sin(angle)));
        }
    for (int64_t n = 0; n < N; ++n) a.positions.push_back(int32_t(n * 37 % kPositions));
    return a;
}

// The device's copies of what every call reads.
struct Tables {
    explicit Tables(const Angles& a, const std::vector<float>& gain_values, size_t skip = 0)
        : cos(a.cos, skip), sin(a.sin, skip), gain(gain_values, skip), positions(a.positions) {}
    DeviceRows<float> cos, sin, gain;
    DeviceArray<int32_t> positions;
};

class QkNormRope : public ScheduleTest {};

// z is off by gamma(C/2 + 8) as in rmsnorm; y by the rotation's two roundings more, of |z0| + |z1|,
// which is at most twice the larger |y| of any pair.
template <class T>
void expect_forward(Shape shape) {
    const int64_t N = shape.N;
    const int H = shape.H, C = shape.C;
    const auto x = normal<T>(N * H * C, 1);
    const auto gain = normal<float>(C, 2);
    const Angles a = angles(N, C);
    std::vector<double> y(N * H * C), rstd(N * H);
    ASSERT_TRUE(ok(ref::qk_norm_rope_forward<double>(
        y.data(), rstd.data(), cast<double>(x).data(), cast<double>(gain).data(),
        cast<double>(a.cos).data(), cast<double>(a.sin).data(), a.positions.data(), N, H, C,
        double(kEps), {})));
    const auto run = [&](T* out, float* rstd_out, const T* in, Tables& t) {
        return ok(cuda::qk_norm_rope_forward<T, float>(out, rstd_out, in, t.gain.data(),
                                                       t.cos.data(), t.sin.data(),
                                                       t.positions.data(), N, H, C, kEps, {}));
    };
    Tables tables(a, gain), odd(a, gain, 1);
    DeviceRows<T> dev_x(x), dev_y(N * H * C);
    DeviceRows<float> dev_rstd(N * H);
    ASSERT_TRUE(run(dev_y.data(), dev_rstd.data(), dev_x.data(), tables));
    EXPECT_TRUE(close_stored(dev_y.host(), y, gamma<float>(C / 2. + 11) * 2 * largest(y)))
        << N << " x " << H << " x " << C;
    EXPECT_TRUE(close(dev_rstd.host(), rstd, 0, gamma<float>(C / 2. + 8)))
        << N << " x " << H << " x " << C;
    for (const size_t skip : {0, 1}) {  // y may be x; aligned or not; no rstd
        DeviceRows<T> in(x, skip);
        ASSERT_TRUE(run(in.data(), nullptr, in.data(), skip ? odd : tables));
        EXPECT_TRUE(same_bits(in.host(), dev_y.host())) << N << " x " << H << " x " << C;
    }
}
TEST_P(QkNormRope, ForwardMatchesPlainLoops) {
    for (const Shape shape : kShapes) {
        expect_forward<float>(shape);
        expect_forward<bf16>(shape);
    }
}

// With Z = |dy0| + |dy1| of a pair: dz is off by 2 roundings of Z, g by 3 of Z*|gain|, and the mean
// by gamma(C + 6) of M = mean(Z*|gain*xhat|); the rest is under 6 roundings of Z*|gain| and
// |xhat|*M. dgain: a sum of N*H terms of size Z*|xhat|, each off by 4 roundings, and the addition
// to dgain.
template <class T>
void expect_backward(Shape shape) {
    const int64_t N = shape.N;
    const int H = shape.H, C = shape.C;
    const int64_t size = N * H * C, chunks = kernels::row_chunks(N);
    const auto x = normal<T>(size, 1), dy = normal<T>(size, 2);
    const auto gain = normal<float>(C, 3), start = normal<float>(C, 4);
    const Angles a = angles(N, C);
    std::vector<float> rstd(N * H);
    std::vector<double> dx(size), dgain = cast<double>(start), scratch(chunks * C), column(C);
    double dx_size = 0;
    for (int64_t row = 0; row < N * H; ++row) {
        double squares = 0, mean = 0, most_g = 0, most_xhat = 0;
        for (int c = 0; c < C; ++c) squares += wide(x[row * C + c]) * wide(x[row * C + c]);
        rstd[row] = float(1 / std::sqrt(squares / C + kEps));
        for (int c = 0; c < C; ++c) {
            const double pair =
                std::abs(wide(dy[row * C + c])) + std::abs(wide(dy[row * C + (c + C / 2) % C]));
            const double xhat = std::abs(wide(x[row * C + c]) * rstd[row]);
            mean += pair * std::abs(gain[c]) * xhat / C;
            most_g = std::max(most_g, pair * std::abs(gain[c]));
            most_xhat = std::max(most_xhat, xhat);
            column[c] += pair * xhat;
        }
        dx_size = std::max(dx_size, rstd[row] * (most_g + most_xhat * mean));
    }
    const double dgain_size = largest(dgain) + largest(column);
    ASSERT_TRUE(ok(ref::qk_norm_rope_backward<double>(
        dx.data(), dgain.data(), cast<double>(dy).data(), cast<double>(x).data(),
        cast<double>(gain).data(), cast<double>(rstd).data(), cast<double>(a.cos).data(),
        cast<double>(a.sin).data(), a.positions.data(), N, H, C, scratch.data(), {})));

    DeviceRows<float> dev_rstd(rstd);
    const auto run = [&](T* dx_out, const T* from_dy, const T* from_x, Tables& t) {
        DeviceRows<float> dev_dgain(start), dev_scratch(chunks * C);
        EXPECT_TRUE(ok(cuda::qk_norm_rope_backward(
            dx_out, dev_dgain.data(), from_dy, from_x, t.gain.data(), dev_rstd.data(), t.cos.data(),
            t.sin.data(), t.positions.data(), N, H, C, dev_scratch.data(), {})));
        return dev_dgain.host();
    };
    Tables tables(a, gain), odd(a, gain, 1);
    DeviceRows<T> dev_x(x), dev_dy(dy), dev_dx(size);
    const auto got_dgain = run(dev_dx.data(), dev_dy.data(), dev_x.data(), tables);
    EXPECT_TRUE(close_stored(dev_dx.host(), dx, gamma<float>(C + 12) * dx_size))
        << N << " x " << H << " x " << C;
    EXPECT_TRUE(close(got_dgain, dgain, gamma<float>(double(N) * H + 5) * dgain_size))
        << N << " x " << H << " x " << C;
    for (const size_t skip : {0, 1}) {  // dx may be dy; aligned or not
        DeviceRows<T> in(dy, skip), x_in(x, skip);
        const auto again = run(in.data(), in.data(), x_in.data(), skip ? odd : tables);
        EXPECT_TRUE(same_bits(in.host(), dev_dx.host())) << N << " x " << H << " x " << C;
        EXPECT_TRUE(same_bits(again, got_dgain)) << N << " x " << H << " x " << C;
    }
}
TEST_P(QkNormRope, BackwardMatchesPlainLoops) {
    for (const Shape shape : kShapes) {
        expect_backward<float>(shape);
        expect_backward<bf16>(shape);
    }
}

// The row rule: a position's heads have the same bits alone, and a head's whatever H is.
template <class T>
void expect_rows_apart(int C) {
    const int64_t N = 37;
    const int H = 5, width = H * C;
    const auto x = normal<T>(N * width, 1), dy = normal<T>(N * width, 2);
    const auto gain = normal<float>(C, 3);
    const Angles a = angles(N, C);
    Tables t(a, gain);
    DeviceRows<T> dev_x(x), dev_dy(dy), y(N * width), dx(N * width), row(width), head(C);
    DeviceRows<float> rstd(N * H), dgain(C), scratch(C);
    ASSERT_TRUE(ok(cuda::qk_norm_rope_forward(y.data(), rstd.data(), dev_x.data(), t.gain.data(),
                                              t.cos.data(), t.sin.data(), t.positions.data(), N, H,
                                              C, kEps, {})));
    ASSERT_TRUE(ok(cuda::qk_norm_rope_backward(
        dx.data(), dgain.data(), dev_dy.data(), dev_x.data(), t.gain.data(), rstd.data(),
        t.cos.data(), t.sin.data(), t.positions.data(), N, H, C, scratch.data(), {})));
    for (int64_t n : {int64_t(0), int64_t(5), N - 1}) {
        ASSERT_TRUE(ok(cuda::qk_norm_rope_forward<T, float>(
            row.data(), nullptr, dev_x.data() + n * width, t.gain.data(), t.cos.data(),
            t.sin.data(), t.positions.data() + n, 1, H, C, kEps, {})));
        EXPECT_TRUE(same_bits(row.host(), row_of(y.host(), n, width))) << C;
        ASSERT_TRUE(ok(cuda::qk_norm_rope_forward<T, float>(
            head.data(), nullptr, dev_x.data() + n * width + C, t.gain.data(), t.cos.data(),
            t.sin.data(), t.positions.data() + n, 1, 1, C, kEps, {})));
        EXPECT_TRUE(same_bits(head.host(), row_of(y.host(), n * H + 1, C))) << C;
        ASSERT_TRUE(ok(cuda::qk_norm_rope_backward(
            row.data(), dgain.data(), dev_dy.data() + n * width, dev_x.data() + n * width,
            t.gain.data(), rstd.data() + n * H, t.cos.data(), t.sin.data(), t.positions.data() + n,
            1, H, C, scratch.data(), {})));
        EXPECT_TRUE(same_bits(row.host(), row_of(dx.host(), n, width))) << C;
    }
}
TEST_P(QkNormRope, RowsDoNotDependOnOtherRows) {
    for (const int C : {10, 96, 128}) {
        expect_rows_apart<float>(C);
        expect_rows_apart<bf16>(C);
    }
}

TEST_P(QkNormRope, NoRowsIsNoWork) {
    DeviceRows<float> one(std::vector<float>{7});
    float* const v = one.data();
    EXPECT_TRUE(ok(cuda::qk_norm_rope_forward(v, v, v, v, v, v, nullptr, 0, 1, 2, kEps, {})));
    EXPECT_TRUE(ok(cuda::qk_norm_rope_backward(v, v, v, v, v, v, v, v, nullptr, 0, 1, 2, v, {})));
    EXPECT_EQ(one.host(), std::vector<float>{7});
    for (const Shape bad : {Shape{-1, 1, 2}, {1, 0, 2}, {1, 1, 0}, {1, 1, 3}, {1, 1, 258}}) {
        EXPECT_EQ(
            cuda::qk_norm_rope_forward(v, v, v, v, v, v, nullptr, bad.N, bad.H, bad.C, kEps, {})
                .code,
            kernels::Code::bad_argument);
        EXPECT_EQ(
            cuda::qk_norm_rope_backward(v, v, v, v, v, v, v, v, nullptr, bad.N, bad.H, bad.C, v, {})
                .code,
            kernels::Code::bad_argument);
    }
}

INSTANTIATE_TEST_SUITE_P(Device, QkNormRope, testing::ValuesIn(kSchedules), schedule_name);

}  // namespace
}  // namespace fbt::tests
