// kernels/cross_entropy.cu against the plain loops in double, on the same rounded logits.
#include "kernels/cross_entropy.h"

#include <algorithm>

#include "tests/compare.h"
#include "tests/cuda/device.h"

namespace fbt::tests {
namespace {

namespace cuda = kernels::cuda;
namespace ref = kernels::ref;
using kernels::bf16;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr int kStepLogits = 512 * 16;  // that all threads take between two looks at the maximum

// Rows of logits around `offset`, some of them -infinity, targets among the others, every fourth
// row ignored.
template <class T>
struct Rows {
    int64_t N;
    int V;
    std::vector<T> logits;
    std::vector<int32_t> targets;
    std::vector<double> wide, ce, lse;

    Rows(int64_t rows, int width, double offset)
        : N(rows), V(width), logits(normal<T>(size_t(N * V), 1, 3)), ce(size_t(N)), lse(size_t(N)) {
        for (int64_t n = 0; n < N; ++n) {
            targets.push_back(n % 4 == 3 ? -1 : int32_t((n * 31 + V - 1) % V));
            for (int v = 0; v < V; ++v) {
                T& x = logits[size_t(n * V + v)];
                x = T(float(wide_of(x) + offset));
                if (v % 5 == 4 && v != targets.back() && v + 1 < V) x = T(float(-kInf));
            }
        }
        wide = cast<double>(logits);
        EXPECT_TRUE(ok(ref::cross_entropy_forward<double>(ce.data(), lse.data(), wide.data(),
                                                          targets.data(), N, V, {})));
    }
    static double wide_of(T x) { return tests::wide(x); }

    // The largest difference between two finite logits.
    double range() const {
        double low = kInf, high = -kInf;
        for (double x : wide)
            if (std::isfinite(x)) {
                low = std::min(low, x);
                high = std::max(high, x);
            }
        return high - low;
    }
};

// A term exp(x - m) of the sum: its exponent is rounded (range * u, over all rescalings together);
// exp is off by 2 ulp = 4u, once for itself and once for each of `steps + 1` rescalings; it passes
// through 16 additions and one multiply-add a step, and 5 + 15 in the block. The logarithm turns
// that relative error into an absolute one, adds 2 ulp of its own, and two sums follow, the last
// of which is relative to the result.
template <class T>
void check_forward(int64_t N, int V, double offset) {
    Rows<T> rows(N, V, offset);
    DeviceArray<T> logits(rows.logits);
    DeviceArray<int32_t> targets(rows.targets);
    DeviceArray<float> ce(N), lse(N);
    ASSERT_TRUE(ok(cuda::cross_entropy_forward<T>(ce.data(), lse.data(), logits.data(),
                                                  targets.data(), N, V, {})));
    const double steps = double((V + kStepLogits - 1) / kStepLogits), range = rows.range();
    const double absolute = gamma<float>(range + 4 * (steps + 2) + 17 * steps + 20) +
                            gamma<float>(5) * (std::log(double(V)) + range);
    EXPECT_TRUE(close(lse.host(), rows.lse, absolute, gamma<float>(1))) << N << " x " << V;
    EXPECT_TRUE(close(ce.host(), rows.ce, absolute, gamma<float>(1))) << N << " x " << V;
}

// dlogits = w*(z*p - hit): p = exp(x - lse) has relative error (|x - lse| + 4)u, and p*|x - lse| is
// below 1 where x <= lse, so z*p is off by 5u |z| and its own roundings by 2u; hit and w follow
// with 3 more. Then the one rounding to T.
template <class T>
void check_backward(int64_t N, int V) {
    Rows<T> rows(N, V, 0);
    const float z_weight = 0.01f;
    const auto weight = normal<float>(size_t(N), 7);
    const auto lse = cast<float>(rows.lse);
    std::vector<double> want(size_t(N * V));
    ASSERT_TRUE(ok(ref::cross_entropy_backward<double>(
        want.data(), rows.wide.data(), cast<double>(lse).data(), rows.targets.data(),
        cast<double>(weight).data(), double(z_weight), N, V, {})));
    double size = 0;
    for (int64_t n = 0; n < N; ++n)
        size = std::max(size, std::abs(double(weight[n])) *
                                  (2 + 2 * std::abs(double(z_weight) * double(lse[n]))));

    DeviceArray<T> logits(rows.logits), dlogits(size_t(N * V));
    DeviceArray<int32_t> targets(rows.targets);
    DeviceArray<float> dev_lse(lse), dev_weight(weight);
    const auto run = [&](T* out) {
        return ok(cuda::cross_entropy_backward<T>(out, logits.data(), dev_lse.data(),
                                                  targets.data(), dev_weight.data(), z_weight, N, V,
                                                  {}));
    };
    ASSERT_TRUE(run(dlogits.data()));
    EXPECT_TRUE(close(dlogits.host(), want, size * gamma<float>(10) * (1 + unit_roundoff<T>()),
                      unit_roundoff<T>()))
        << N << " x " << V;
    ASSERT_TRUE(run(logits.data()));  // in place
    EXPECT_TRUE(same_bits(logits.host(), dlogits.host())) << N << " x " << V;
}

// The row rule: a row alone, and at another alignment, has the same bits.
template <class T>
void check_rows(int V) {
    const int64_t N = 5;
    Rows<T> rows(N, V, 0);
    const auto weight = normal<float>(size_t(N), 7), lse = cast<float>(rows.lse);
    DeviceArray<T> logits(rows.logits), dlogits(size_t(N * V));
    DeviceArray<int32_t> targets(rows.targets);
    DeviceArray<float> ce(N), out_lse(N), dev_lse(lse), dev_weight(weight);
    ASSERT_TRUE(ok(cuda::cross_entropy_forward<T>(ce.data(), out_lse.data(), logits.data(),
                                                  targets.data(), N, V, {})));
    ASSERT_TRUE(
        ok(cuda::cross_entropy_backward<T>(dlogits.data(), logits.data(), dev_lse.data(),
                                           targets.data(), dev_weight.data(), 0.01f, N, V, {})));
    const auto all_ce = ce.host(), all_lse = out_lse.host();
    const auto all_d = dlogits.host();
    for (const int64_t n : {int64_t(0), N - 1})
        for (const size_t shift : {size_t(0), size_t(1)}) {
            std::vector<T> moved(shift);
            moved.insert(moved.end(), rows.logits.begin() + n * V,
                         rows.logits.begin() + (n + 1) * V);
            DeviceArray<T> row(moved);
            DeviceArray<float> one_ce(1), one_lse(1);
            ASSERT_TRUE(ok(cuda::cross_entropy_forward<T>(
                one_ce.data(), one_lse.data(), row.data() + shift, targets.data() + n, 1, V, {})));
            EXPECT_TRUE(same_bits(one_ce.host(), {all_ce[size_t(n)]})) << n << ", " << shift;
            EXPECT_TRUE(same_bits(one_lse.host(), {all_lse[size_t(n)]})) << n << ", " << shift;
            ASSERT_TRUE(ok(cuda::cross_entropy_backward<T>(
                row.data() + shift, row.data() + shift, dev_lse.data() + n, targets.data() + n,
                dev_weight.data() + n, 0.01f, 1, V, {})));
            const auto got = row.host();
            EXPECT_TRUE(
                same_bits(std::vector<T>(got.begin() + shift, got.end()),
                          std::vector<T>(all_d.begin() + n * V, all_d.begin() + (n + 1) * V)))
                << n << ", " << shift;
        }
}

// NaN in any place, +infinity, and nothing but -infinity give NaN, as the plain loops do.
template <class T>
void check_odd_logits() {
    const int V = 601;
    std::vector<std::vector<double>> cases(4, std::vector<double>(V, 1.0));
    cases[0][0] = cases[1][V - 1] = NAN;
    cases[2][300] = kInf;
    cases[3].assign(V, -kInf);
    for (const auto& row : cases) {
        DeviceArray<T> logits(cast<T>(row));
        DeviceArray<int32_t> target(std::vector<int32_t>{5});
        DeviceArray<float> ce(1), lse(1);
        double want_ce = 0, want_lse = 0;
        const int32_t five = 5;
        ASSERT_TRUE(ok(
            ref::cross_entropy_forward<double>(&want_ce, &want_lse, row.data(), &five, 1, V, {})));
        ASSERT_TRUE(std::isnan(want_lse) && std::isnan(want_ce));
        ASSERT_TRUE(ok(cuda::cross_entropy_forward<T>(ce.data(), lse.data(), logits.data(),
                                                      target.data(), 1, V, {})));
        EXPECT_TRUE(std::isnan(lse.host()[0]));
        EXPECT_TRUE(std::isnan(ce.host()[0]));
    }
}

// All but three tokens masked: threads that see nothing but -infinity add nothing.
template <class T>
void check_masked() {
    const int V = 3 * kStepLogits;
    std::vector<double> row(V, -kInf);
    row[7] = 1;
    row[kStepLogits] = 3;  // behind a step of the thread that saw only masked tokens
    row[V - 1] = 2;
    const int32_t target = V - 1;
    double want_ce = 0, want_lse = 0;
    ASSERT_TRUE(
        ok(ref::cross_entropy_forward<double>(&want_ce, &want_lse, row.data(), &target, 1, V, {})));
    DeviceArray<T> logits(cast<T>(row));
    DeviceArray<int32_t> targets(std::vector<int32_t>{target});
    DeviceArray<float> ce(1), lse(1);
    ASSERT_TRUE(ok(cuda::cross_entropy_forward<T>(ce.data(), lse.data(), logits.data(),
                                                  targets.data(), 1, V, {})));
    // Three terms, exponents up to 2; the rest as in check_forward.
    const double absolute = gamma<float>(2 + 4 * 3 + 3 + 10);
    EXPECT_TRUE(close(lse.host(), std::vector<double>{want_lse}, absolute, gamma<float>(1)));
    EXPECT_TRUE(close(ce.host(), std::vector<double>{want_ce}, absolute, gamma<float>(1)));
}

class CrossEntropy : public ScheduleTest {};

TEST_P(CrossEntropy, ForwardMatchesPlainLoops) {
    for (const int V : {1, 3, 37, 257, 1601}) {
        check_forward<float>(5, V, 0);
        check_forward<bf16>(5, V, 0);
    }
    check_forward<float>(1, 1600, 1000);  // ce keeps its digits; whole packs
    check_forward<bf16>(1, 1600, 100);
}
TEST_P(CrossEntropy, BackwardMatchesPlainLoops) {
    for (const int V : {1, 3, 37, 257, 1600}) {
        check_backward<float>(5, V);
        check_backward<bf16>(5, V);
    }
}
TEST_P(CrossEntropy, RowsDoNotDependOnOtherRowsNorOnAlignment) {
    for (const int V : {37, 1600}) {
        check_rows<float>(V);
        check_rows<bf16>(V);
    }
}
TEST_P(CrossEntropy, MaskedTokensAddNothing) {
    check_masked<float>();
    check_masked<bf16>();
}
TEST_P(CrossEntropy, OddLogitsShow) {
    check_odd_logits<float>();
    check_odd_logits<bf16>();
}
INSTANTIATE_TEST_SUITE_P(Device, CrossEntropy, testing::ValuesIn(kSchedules), schedule_name);

// Threads take several steps here, so their maxima rise and their sums are rescaled.
class CrossEntropyOnce : public ScheduleTest {};
TEST_P(CrossEntropyOnce, WideVocabularies) {
    for (const int V : {2 * kStepLogits + 24, 50257, 262144}) {
        check_forward<float>(2, V, 0);
        check_forward<bf16>(2, V, 0);
    }
    check_backward<float>(2, 50257);
    check_backward<bf16>(2, 2 * kStepLogits + 24);
    check_rows<float>(2 * kStepLogits + 24);
    check_rows<bf16>(2 * kStepLogits + 24);
}
TEST_P(CrossEntropyOnce, BlocksStrideOverRows) {
    check_forward<float>(1024 + 3, 5, 0);
    check_backward<float>(1024 + 3, 5);
}
TEST_P(CrossEntropyOnce, NoRowsAndBadArguments) {
    DeviceArray<float> one(std::vector<float>{7});
    DeviceArray<int32_t> target(std::vector<int32_t>{0});
    const auto forward = [&](int64_t N, int V) {
        return cuda::cross_entropy_forward<float>(one.data(), one.data(), one.data(), target.data(),
                                                  N, V, {});
    };
    const auto backward = [&](int64_t N, int V) {
        return cuda::cross_entropy_backward<float>(one.data(), one.data(), one.data(),
                                                   target.data(), one.data(), 0.f, N, V, {});
    };
    EXPECT_TRUE(ok(forward(0, 1)));
    EXPECT_TRUE(ok(backward(0, 1)));
    EXPECT_EQ(one.host(), std::vector<float>{7});
    EXPECT_EQ(forward(1, 0).code, kernels::Code::bad_argument);
    EXPECT_EQ(forward(-1, 1).code, kernels::Code::bad_argument);
    EXPECT_EQ(backward(1, 0).code, kernels::Code::bad_argument);
    EXPECT_EQ(backward(-1, 1).code, kernels::Code::bad_argument);
}
INSTANTIATE_TEST_SUITE_P(Device, CrossEntropyOnce, testing::Values(kSchedules[0]), schedule_name);

}  // namespace
}  // namespace fbt::tests
