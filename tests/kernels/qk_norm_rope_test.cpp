#include "kernels/qk_norm_rope.h"

#include <algorithm>

#include "tests/kernels/kernel_test.h"

namespace fbt::tests {
namespace {

namespace ref = kernels::ref;
namespace cpu = kernels::cpu;
using kernels::row_chunks;

template <class T>
class QkNormRopeStored : public testing::Test {};
TYPED_TEST_SUITE(QkNormRopeStored, Storage);

constexpr int kPositions = 131;

// One case's inputs; positions jump about, angles are position * 100^(-2i/C).
template <class T>
struct Case {
    int64_t N;
    int H, C;
    using A = kernels::accumulate_t<T>;
    std::vector<T> x, dy, y, dx;
    std::vector<A> gain, cos, sin, rstd, dgain, scratch;
    std::vector<int32_t> positions;
    Case(int64_t N, int H, int C)
        : N(N),
          H(H),
          C(C),
          x(normal<T>(size_t(N * H * C), 1)),
          dy(normal<T>(size_t(N * H * C), 2)),
          y(x.size()),
          dx(x.size()),
          gain(normal<A>(size_t(C), 3)),
          rstd(size_t(N * H)),
          dgain(gain.size(), A(0.5)),
          scratch(size_t(row_chunks(N) * C)) {
        for (int64_t n = 0; n < N; ++n) positions.push_back(int32_t(n * 7 % kPositions));
        for (int t = 0; t < kPositions; ++t)
            for (int i = 0; i < C / 2; ++i) {
                const double angle = t * std::pow(100.0, -2.0 * i / C);
                cos.push_back(A(float(std::cos(angle))));
                sin.push_back(A(float(std::sin(angle))));
            }
    }
};
kernels::Status forward_ref(Case<double>& p, double eps) {
    return ref::qk_norm_rope_forward(p.y.data(), p.rstd.data(), p.x.data(), p.gain.data(),
                                     p.cos.data(), p.sin.data(), p.positions.data(), p.N, p.H, p.C,
                                     eps, kOneThread);
}
kernels::Status backward_ref(Case<double>& p) {
    return ref::qk_norm_rope_backward(p.dx.data(), p.dgain.data(), p.dy.data(), p.x.data(),
                                      p.gain.data(), p.rstd.data(), p.cos.data(), p.sin.data(),
                                      p.positions.data(), p.N, p.H, p.C, p.scratch.data(),
                                      kOneThread);
}
template <class T>
kernels::Status forward_cpu(Case<T>& p, float eps, const kernels::Stream& s) {
    return cpu::qk_norm_rope_forward(p.y.data(), p.rstd.data(), p.x.data(), p.gain.data(),
                                     p.cos.data(), p.sin.data(), p.positions.data(), p.N, p.H, p.C,
                                     eps, s);
}
template <class T>
kernels::Status backward_cpu(Case<T>& p, const kernels::Stream& s) {
    return cpu::qk_norm_rope_backward(p.dx.data(), p.dgain.data(), p.dy.data(), p.x.data(),
                                      p.gain.data(), p.rstd.data(), p.cos.data(), p.sin.data(),
                                      p.positions.data(), p.N, p.H, p.C, p.scratch.data(), s);
}

TEST(QkNormRope, RefGradientsMatchDifferences) {
    for (const auto& [N, H, C] :
         {std::tuple<int64_t, int, int>{3, 2, 2}, {2, 3, 6}, {67, 1, 2}, {1, 1, 34}}) {
        Case<double> p(N, H, C);
        const auto F = [&p] {
            EXPECT_TRUE(ok(forward_ref(p, 1.0)));  // eps = 1: analytic in a disc of radius 1
            return sum_products(p.dy, p.y);
        };
        F();
        // cos and sin mix two columns, so a term is bounded by the pair's.
        const double tolerance = slope_tolerance(2 * max_abs(p.dy) * max_abs(p.gain) * C * H,
                                                 double(N * H * C + C + 12));
        ASSERT_TRUE(ok(backward_ref(p)));
        std::vector<double> slopes(p.x.size()), gain_slopes(p.gain.size());
        for (size_t i = 0; i < slopes.size(); ++i) slopes[i] = slope(F, p.x[i]);
        for (size_t c = 0; c < gain_slopes.size(); ++c) gain_slopes[c] = 0.5 + slope(F, p.gain[c]);
        EXPECT_TRUE(close(p.dx, slopes, tolerance * double(N)));
        EXPECT_TRUE(close(p.dgain, gain_slopes, tolerance * double(N)));
    }
}

// Rotation keeps lengths, and the score of a query and a key depends on the distance only.
TEST(QkNormRope, ScoresDependOnDistance) {
    const int C = 34;
    const double eps = 0x1p-20;
    Case<double> q(2, 1, C), k(2, 1, C);
    for (size_t c = 0; c < C; ++c) {  // two equal rows, at two positions
        q.x[C + c] = q.x[c];
        k.x[c] = k.x[C + c] = q.dy[c];
    }
    // The tables are rounded to float elsewhere; here the angles must add up in double.
    for (int t = 0; t < kPositions; ++t)
        for (int i = 0; i < C / 2; ++i) {
            const double angle = t * std::pow(100.0, -2.0 * i / C);
            q.cos[size_t(t * C / 2 + i)] = k.cos[size_t(t * C / 2 + i)] = std::cos(angle);
            q.sin[size_t(t * C / 2 + i)] = k.sin[size_t(t * C / 2 + i)] = std::sin(angle);
        }
    const int32_t at_q[2] = {9, 109}, at_k[2] = {4, 104};
    std::copy_n(at_q, 2, q.positions.begin());
    std::copy_n(at_k, 2, k.positions.begin());
    ASSERT_TRUE(ok(forward_ref(q, eps)));
    ASSERT_TRUE(ok(forward_ref(k, eps)));
    double score[2] = {}, size = 0;
    for (size_t c = 0; c < 2 * C; ++c) {
        score[c / C] += q.y[c] * k.y[c];
        size += std::abs(q.y[c] * k.y[c]);
    }
    // Angles up to 109 radians are off by 109 u, and so are their sines.
    EXPECT_NEAR(score[0], score[1], size * gamma<double>(2 * 109 + C + 20));
    k.positions[1] = 103;
    ASSERT_TRUE(ok(forward_ref(k, eps)));
    double other = 0;
    for (size_t c = C; c < 2 * C; ++c) other += q.y[c] * k.y[c];
    EXPECT_GT(std::abs(other - score[0]), 1e-3);
}

TYPED_TEST(QkNormRopeStored, CpuMatchesRef) {
    using T = TypeParam;
    for (const auto& [N, H, C] : {std::tuple<int64_t, int, int>{1, 1, 2},
                                  {3, 1, 34},
                                  {37, 3, 96},
                                  {131, 2, 64},
                                  {5, 1, 256}}) {
        Case<T> p(N, H, C);
        Case<double> want(N, H, C);
        want.x = cast<double>(p.x);  // rounded to T
        want.dy = cast<double>(p.dy);
        const float eps = 0x1p-20f;
        ASSERT_TRUE(ok(forward_cpu(p, eps, kTwoThreads)));
        ASSERT_TRUE(ok(forward_ref(want, double(eps))));
        double z = 0;  // the largest normed value; a rotated one is at most sqrt(2) times that
        for (size_t i = 0; i < p.x.size(); ++i)
            z = std::max(z,
                         std::abs(want.x[i] * want.rstd[i / size_t(C)] * want.gain[i % size_t(C)]));
        const double depth = lane_depth(C) / 2 + 6;  // rstd, then z
        EXPECT_TRUE(close_stored(p.y, want.y, 2 * z * gamma<float>(depth + 2))) << N << H << C;
        EXPECT_TRUE(close(p.rstd, want.rstd, 0, gamma<float>(depth))) << N << H << C;

        want.rstd = cast<double>(p.rstd);  // both backends get the same
        ASSERT_TRUE(ok(backward_cpu(p, kTwoThreads)));
        ASSERT_TRUE(ok(backward_ref(want)));
        // |dz| <= sqrt(2) max|dy|; |g| <= |dz| max|gain|; xhat <= sqrt(C) and mean|xhat| <= 1, both
        // to rounding: |dx| <= rstd*|g|*(1 + xhat).
        const double dz = 1.5 * max_abs(want.dy), g = dz * max_abs(want.gain),
                     bound = max_abs(want.rstd) * g * (1 + std::sqrt(double(C)));
        EXPECT_TRUE(close_stored(p.dx, want.dx, bound * gamma<float>(lane_depth(C) + 12)))
            << N << H << C;
        std::vector<double> columns(static_cast<size_t>(C), 0.5);
        for (size_t i = 0; i < p.x.size(); ++i)
            columns[i % size_t(C)] += dz * std::abs(want.x[i] * want.rstd[i / size_t(C)]);
        const double sums = double(std::min<int64_t>(N, 64) * H + row_chunks(N) + 5);
        EXPECT_TRUE(close(p.dgain, want.dgain, max_abs(columns) * gamma<float>(sums)))
            << N << H << C;
    }
}

TYPED_TEST(QkNormRopeStored, RowsDoNotDependOnOtherRowsNorOnThreads) {
    using T = TypeParam;
    for (const int C : {34, 96}) {
        const int64_t N = 301;
        const int H = 2;
        Case<T> one(N, H, C), two(N, H, C);
        ASSERT_TRUE(ok(forward_cpu(one, 1e-6f, kOneThread)));
        ASSERT_TRUE(ok(forward_cpu(two, 1e-6f, kTwoThreads)));
        ASSERT_TRUE(ok(backward_cpu(one, kOneThread)));
        ASSERT_TRUE(ok(backward_cpu(two, kTwoThreads)));
        EXPECT_TRUE(same_bits(one.y, two.y));
        EXPECT_TRUE(same_bits(one.rstd, two.rstd));
        EXPECT_TRUE(same_bits(one.dx, two.dx));
        EXPECT_TRUE(same_bits(one.dgain, two.dgain));
        const size_t width = size_t(H * C);
        for (size_t n = 0; n < size_t(N); n += 37) {
            Case<T> alone(1, H, C);
            Shifted x(&one.x[n * width], width, n % 16 + 1),
                dy(&one.dy[n * width], width, n % 16 + 1);
            alone.positions[0] = one.positions[n];
            ASSERT_TRUE(ok(cpu::qk_norm_rope_forward(
                alone.y.data(), alone.rstd.data(), x.data(), one.gain.data(), one.cos.data(),
                one.sin.data(), alone.positions.data(), 1, H, C, 1e-6f, kOneThread)));
            ASSERT_TRUE(ok(cpu::qk_norm_rope_backward(
                alone.dx.data(), alone.dgain.data(), dy.data(), x.data(), one.gain.data(),
                alone.rstd.data(), one.cos.data(), one.sin.data(), alone.positions.data(), 1, H, C,
                alone.scratch.data(), kOneThread)));
            EXPECT_TRUE(same_bits<T>(alone.y, std::span<const T>(&one.y[n * width], width)));
            EXPECT_TRUE(same_bits<T>(alone.dx, std::span<const T>(&one.dx[n * width], width)));
        }
    }
}

TYPED_TEST(QkNormRopeStored, OutputsMayBeInputs) {
    using T = TypeParam;
    Case<T> p(37, 2, 34);
    ASSERT_TRUE(ok(forward_cpu(p, 1e-6f, kOneThread)));
    ASSERT_TRUE(ok(backward_cpu(p, kOneThread)));
    auto y = p.x, dx = p.dy;
    std::vector<float> dgain(34, 0.5f);
    ASSERT_TRUE(ok(cpu::qk_norm_rope_forward(y.data(), p.rstd.data(), y.data(), p.gain.data(),
                                             p.cos.data(), p.sin.data(), p.positions.data(), p.N,
                                             p.H, p.C, 1e-6f, kOneThread)));
    ASSERT_TRUE(ok(cpu::qk_norm_rope_backward(
        dx.data(), dgain.data(), dx.data(), p.x.data(), p.gain.data(), p.rstd.data(), p.cos.data(),
        p.sin.data(), p.positions.data(), p.N, p.H, p.C, p.scratch.data(), kOneThread)));
    EXPECT_TRUE(same_bits(y, p.y));
    EXPECT_TRUE(same_bits(dx, p.dx));
    EXPECT_TRUE(same_bits(dgain, p.dgain));
}

TEST(QkNormRope, RefusesBadSizes) {
    for (const auto& [H, C] : {std::pair<int, int>{0, 2}, {1, 0}, {1, 3}, {1, 258}}) {
        float v = 0;
        const int32_t t = 0;
        for (const auto forward :
             {ref::qk_norm_rope_forward<float>, cpu::qk_norm_rope_forward<float>})
            EXPECT_FALSE(ok(forward(&v, &v, &v, &v, &v, &v, &t, 1, H, C, 1, kOneThread)));
        for (const auto backward :
             {ref::qk_norm_rope_backward<float>, cpu::qk_norm_rope_backward<float>})
            EXPECT_FALSE(ok(backward(&v, &v, &v, &v, &v, &v, &v, &v, &t, 1, H, C, &v, kOneThread)));
    }
}

}  // namespace
}  // namespace fbt::tests
