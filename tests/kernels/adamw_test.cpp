#include "kernels/adamw.h"

#include "tests/kernels/kernel_test.h"

namespace fbt::tests {
namespace {

namespace ref = kernels::ref;
namespace cpu = kernels::cpu;

// With a constant gradient the unbiased moments are g and g^2 at every step, so that
//   w_k = w_{k-1}*(1 - lr*decay) - lr * g/(|g| + eps).
TEST(AdamW, ConstantGradientHasAClosedForm) {
    const double lr = 0.01, decay = 0.1, eps = 1e-3;
    for (const double gradient : {0.5, -2.0}) {
        double w = 3, m = 0, v = 0, want = 3;
        for (int64_t step = 1; step <= 20; ++step) {
            const double given = 4 * gradient;
            ASSERT_TRUE(ok(ref::adamw_step(&w, &m, &v, &given, 1,
                                           {lr, 0.9, 0.99, eps, decay, 0.25, step}, kOneThread)));
            want = want * (1 - lr * decay) - lr * gradient / (std::abs(gradient) + eps);
            // 1 - beta^step loses up to 1/(1-beta) = 100 u.
            EXPECT_NEAR(w, want, double(step) * gamma<double>(300)) << step;
        }
    }
}

TEST(AdamW, CpuMatchesRef) {
    for (const int64_t n : {1, 3, 37, 1601, 20011})
        for (const int64_t step : {1, 2, 1000}) {
            const size_t size = size_t(n);
            const kernels::AdamWStep h{1e-2, 0.9, 0.95, 1e-8, 0.1, 0.5, step};
            auto w = normal<float>(size, 1), m = normal<float>(size, 2), v = normal<float>(size, 3);
            const auto grad = normal<float>(size, 4);
            for (float& x : v) x = x * x + 0.01f;
            auto w64 = cast<double>(w), m64 = cast<double>(m), v64 = cast<double>(v);
            const auto old = m64;
            const auto grad64 = cast<double>(grad);
            ASSERT_TRUE(
                ok(cpu::adamw_step(w.data(), m.data(), v.data(), grad.data(), n, h, kTwoThreads)));
            ASSERT_TRUE(ok(ref::adamw_step(w64.data(), m64.data(), v64.data(), grad64.data(), n, h,
                                           kOneThread)));
            // m: constants and products rounded, may cancel. v: the same, all positive.
            const double m_error = gamma<float>(4) * (max_abs(old) + max_abs(grad64));
            EXPECT_TRUE(close(m, m64, m_error)) << n;
            EXPECT_TRUE(close(v, v64, 0, gamma<float>(6))) << n;
            double w_error = 0;
            for (size_t i = 0; i < size; ++i) {
                const double root = std::sqrt(v64[i] / (1 - std::pow(h.beta2, double(step))));
                const double rate = h.learning_rate / (1 - std::pow(h.beta1, double(step)));
                w_error = std::max(
                    w_error, gamma<float>(3) * std::abs(w64[i]) +
                                 rate / root * (m_error + std::abs(m64[i]) * gamma<float>(10)));
            }
            EXPECT_TRUE(close(w, w64, w_error)) << n << ", step " << step;
        }
}

TEST(AdamW, ElementsDoNotDependOnPlaceNorThreads) {
    const int64_t n = 20011;  // more than one thread's work
    const kernels::AdamWStep h{1e-2, 0.9, 0.95, 1e-8, 0.1, 0.5, 3};
    const auto w0 = normal<float>(n, 1), m0 = normal<float>(n, 2), grad = normal<float>(n, 4);
    const std::vector<float> v0(n, 0.5f);
    auto w = w0, m = m0, v = v0, w2 = w0, m2 = m0, v2 = v0;
    ASSERT_TRUE(ok(cpu::adamw_step(w.data(), m.data(), v.data(), grad.data(), n, h, kOneThread)));
    ASSERT_TRUE(
        ok(cpu::adamw_step(w2.data(), m2.data(), v2.data(), grad.data(), n, h, kTwoThreads)));
    EXPECT_TRUE(same_bits(w, w2));
    EXPECT_TRUE(same_bits(m, m2));
    EXPECT_TRUE(same_bits(v, v2));
    for (size_t i = 0; i < n; i += 997) {
        float one[3] = {w0[i], m0[i], v0[i]};
        ASSERT_TRUE(ok(cpu::adamw_step(&one[0], &one[1], &one[2], &grad[i], 1, h, kOneThread)));
        const float want[3] = {w[i], m[i], v[i]};
        EXPECT_EQ(std::memcmp(one, want, sizeof one), 0) << i;
    }
}

TEST(AdamW, RefusesBadArguments) {
    double x = 0;
    float y = 0;
    kernels::AdamWStep h{1e-2, 0.9, 0.95, 1e-8, 0.1, 1, 0};
    EXPECT_FALSE(ok(ref::adamw_step(&x, &x, &x, &x, 1, h, kOneThread)));  // steps count from 1
    EXPECT_FALSE(ok(cpu::adamw_step(&y, &y, &y, &y, 1, h, kOneThread)));
    h.step = 1;
    EXPECT_FALSE(ok(cpu::adamw_step(&y, &y, &y, &y, -1, h, kOneThread)));
    EXPECT_TRUE(ok(cpu::adamw_step(&y, &y, &y, &y, 0, h, kOneThread)));
}

}  // namespace
}  // namespace fbt::tests
