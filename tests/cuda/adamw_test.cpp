// kernels/adamw.cu against the plain loops in double.
#include "kernels/adamw.h"

#include <algorithm>

#include "tests/compare.h"
#include "tests/cuda/device.h"

namespace fbt::tests {
namespace {

namespace cuda = kernels::cuda;
namespace ref = kernels::ref;

double largest(const std::vector<double>& v) {
    double most = 0;
    for (double x : v) most = std::max(most, std::abs(x));
    return most;
}

// Weights, moments and gradients; the second moments positive.
struct State {
    std::vector<float> w, m, v, grad;
    explicit State(size_t n)
        : w(normal<float>(n, 1)),
          m(normal<float>(n, 2)),
          v(normal<float>(n, 3)),
          grad(normal<float>(n, 4)) {
        for (float& x : v) x = x * x + 0.01f;
    }
    // From element `begin`, behind `shift` others: their copies on the device, updated there.
    State updated(size_t begin, size_t shift, const kernels::AdamWStep& h) const {
        const auto moved = [&](const std::vector<float>& x) {
            std::vector<float> out(shift, 5.f);
            out.insert(out.end(), x.begin() + begin, x.end());
            return out;
        };
        DeviceArray<float> dw(moved(w)), dm(moved(m)), dv(moved(v)), dg(moved(grad));
        EXPECT_TRUE(ok(cuda::adamw_step(dw.data() + shift, dm.data() + shift, dv.data() + shift,
                                        dg.data() + shift, int64_t(w.size() - begin), h, {})));
        State out(0);
        const auto back = [&](const DeviceArray<float>& x) {
            const auto all = x.host();
            for (size_t i = 0; i < shift; ++i) EXPECT_EQ(all[i], 5.f);
            return std::vector<float>(all.begin() + shift, all.end());
        };
        out.w = back(dw);
        out.m = back(dm);
        out.v = back(dv);
        return out;
    }
};

class AdamWKernel : public ScheduleTest {};

// m: constants and products rounded, may cancel. v: the same, all positive. w: three roundings of
// its own; the update inherits m's error and ten roundings, divided by the root.
TEST_P(AdamWKernel, MatchesPlainLoops) {
    for (const size_t n : {1, 3, 4, 37, 1601, 4096})
        for (const int64_t step : {1, 1000}) {
            const kernels::AdamWStep h{1e-2, 0.9, 0.95, 1e-8, 0.1, 0.5, step};
            const State start(n);
            auto w = cast<double>(start.w), m = cast<double>(start.m), v = cast<double>(start.v);
            const auto grad = cast<double>(start.grad);
            const double m_error = gamma<float>(4) * (largest(m) + largest(grad));
            ASSERT_TRUE(
                ok(ref::adamw_step(w.data(), m.data(), v.data(), grad.data(), int64_t(n), h, {})));
            const State got = start.updated(0, 0, h);
            EXPECT_TRUE(close(got.m, m, m_error)) << n;
            EXPECT_TRUE(close(got.v, v, 0, gamma<float>(6))) << n;
            double w_error = 0;
            const double unbias = 1 - std::pow(h.beta2, double(step));
            const double rate = h.learning_rate / (1 - std::pow(h.beta1, double(step)));
            for (size_t i = 0; i < n; ++i)
                w_error = std::max(w_error, gamma<float>(3) * std::abs(w[i]) +
                                                rate / std::sqrt(v[i] / unbias) *
                                                    (m_error + std::abs(m[i]) * gamma<float>(10)));
            EXPECT_TRUE(close(got.w, w, w_error)) << n << ", step " << step;
        }
}

// In a pack or in the tail, aligned or not: an element has the same bits, and no other changes.
TEST_P(AdamWKernel, ElementsDoNotDependOnPlace) {
    const kernels::AdamWStep h{1e-2, 0.9, 0.95, 1e-8, 0.1, 0.5, 3};
    const State start(2051);
    const State all = start.updated(0, 0, h);
    for (const size_t begin : {1, 4, 1023, 2050})
        for (const size_t shift : {0, 1}) {
            const State part = start.updated(begin, shift, h);
            const auto tail = [&](const std::vector<float>& x) {
                return std::vector<float>(x.begin() + begin, x.end());
            };
            EXPECT_TRUE(same_bits(part.w, tail(all.w))) << begin;
            EXPECT_TRUE(same_bits(part.m, tail(all.m))) << begin;
            EXPECT_TRUE(same_bits(part.v, tail(all.v))) << begin;
        }
}

TEST_P(AdamWKernel, NanShows) {
    State start(9);
    start.grad[5] = NAN;
    const State got = start.updated(0, 0, {1e-2, 0.9, 0.95, 1e-8, 0.1, 0.5, 3});
    for (size_t i = 0; i < 9; ++i) {
        EXPECT_EQ(std::isnan(got.w[i]), i == 5);
        EXPECT_EQ(std::isnan(got.m[i]), i == 5);
        EXPECT_EQ(std::isnan(got.v[i]), i == 5);
    }
}

TEST_P(AdamWKernel, NoElementsAndBadArguments) {
    DeviceArray<float> one(std::vector<float>{7});
    const auto run = [&](int64_t n, int64_t step) {
        return cuda::adamw_step(one.data(), one.data(), one.data(), one.data(), n,
                                {1e-2, 0.9, 0.95, 1e-8, 0.1, 1, step}, {});
    };
    EXPECT_TRUE(ok(run(0, 1)));
    EXPECT_EQ(run(1, 0).code, kernels::Code::bad_argument);
    EXPECT_EQ(run(-1, 1).code, kernels::Code::bad_argument);
    EXPECT_EQ(one.host(), std::vector<float>{7});
}

INSTANTIATE_TEST_SUITE_P(Device, AdamWKernel, testing::ValuesIn(kSchedules), schedule_name);

}  // namespace
}  // namespace fbt::tests
