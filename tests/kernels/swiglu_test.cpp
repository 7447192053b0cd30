#include "kernels/swiglu.h"

#include "tests/kernels/kernel_test.h"

namespace fbt::tests {
namespace {

namespace ref = kernels::ref;
namespace cpu = kernels::cpu;

template <class T>
class SwigluStored : public testing::Test {};
TYPED_TEST_SUITE(SwigluStored, Storage);

// Sigmoid in float: exp within 1.1 ulp (2.2 u), one sum, one division, each u.
constexpr double kSigmoid = 5;

TEST(Swiglu, RefGradientsMatchDifferences) {
    const int64_t n = 37;
    auto gate = normal<double>(n, 1), up = normal<double>(n, 2);
    const auto dy = normal<double>(n, 3);
    std::vector<double> y(n), dgate(n), dup(n), gate_slopes(n), up_slopes(n);
    const auto F = [&] {
        EXPECT_TRUE(ok(ref::swiglu_forward(y.data(), gate.data(), up.data(), n, kOneThread)));
        return sum_products(dy, y);
    };
    F();
    const double tolerance = slope_tolerance(sum_abs_products(dy, y), n + 7);
    ASSERT_TRUE(ok(ref::swiglu_backward(dgate.data(), dup.data(), dy.data(), gate.data(), up.data(),
                                        n, kOneThread)));
    for (size_t i = 0; i < n; ++i) {
        gate_slopes[i] = slope(F, gate[i]);
        up_slopes[i] = slope(F, up[i]);
    }
    EXPECT_TRUE(close(dgate, gate_slopes, tolerance));
    EXPECT_TRUE(close(dup, up_slopes, tolerance));
}

TYPED_TEST(SwigluStored, CpuMatchesRef) {
    using T = TypeParam;
    for (const int64_t n : {1, 3, 37, 1601, 40009}) {
        const size_t size = size_t(n);
        const auto gate = normal<T>(size, 1, 4), up = normal<T>(size, 2), dy = normal<T>(size, 3);
        const auto gate64 = cast<double>(gate), up64 = cast<double>(up), dy64 = cast<double>(dy);
        std::vector<T> y(size), dgate(size), dup(size);
        std::vector<double> want(size), want_gate(size), want_up(size);
        ASSERT_TRUE(ok(cpu::swiglu_forward(y.data(), gate.data(), up.data(), n, kTwoThreads)));
        ASSERT_TRUE(
            ok(ref::swiglu_forward(want.data(), gate64.data(), up64.data(), n, kOneThread)));
        EXPECT_TRUE(close_stored(y, want, 0, gamma<float>(kSigmoid + 2))) << n;
        ASSERT_TRUE(ok(cpu::swiglu_backward(dgate.data(), dup.data(), dy.data(), gate.data(),
                                            up.data(), n, kTwoThreads)));
        ASSERT_TRUE(ok(ref::swiglu_backward(want_gate.data(), want_up.data(), dy64.data(),
                                            gate64.data(), up64.data(), n, kOneThread)));
        EXPECT_TRUE(close_stored(dup, want_up, 0, gamma<float>(kSigmoid + 2))) << n;
        // 1 + a(1-s) may cancel: an error relative to |dy*up|*(1 + |a|), and s <= 1.
        double bound = 0;
        for (size_t i = 0; i < size; ++i)
            bound = std::max(bound, std::abs(dy64[i] * up64[i]) * (1 + std::abs(gate64[i])));
        EXPECT_TRUE(close_stored(dgate, want_gate, bound * gamma<float>(2 * kSigmoid + 6))) << n;
    }
}

TEST(Swiglu, ExtremeGatesAreFinite) {
    const std::vector<float> gate = {-1e30f, -200, 200, 1e30f}, up(4, 1.f),
                             want = {0, 0, 200, 1e30f}, slopes = {0, 0, 1, 1};
    std::vector<float> y(4), dgate(4), dup(4);
    for (const auto forward : {ref::swiglu_forward<float>, cpu::swiglu_forward<float>}) {
        ASSERT_TRUE(ok(forward(y.data(), gate.data(), up.data(), 4, kOneThread)));
        EXPECT_TRUE(close(y, want, 1e-36));
    }
    for (const auto backward : {ref::swiglu_backward<float>, cpu::swiglu_backward<float>}) {
        ASSERT_TRUE(ok(
            backward(dgate.data(), dup.data(), up.data(), gate.data(), up.data(), 4, kOneThread)));
        EXPECT_TRUE(close(dgate, slopes, 1e-36));
        EXPECT_TRUE(close(dup, want, 1e-36));
    }
}

TYPED_TEST(SwigluStored, ElementsDoNotDependOnPlaceNorThreads) {
    using T = TypeParam;
    const int64_t n = 40009;  // more than one thread's work
    const auto gate = normal<T>(n, 1, 4), up = normal<T>(n, 2), dy = normal<T>(n, 3);
    std::vector<T> y[2], dgate[2], dup[2];
    const kernels::Stream streams[2] = {kOneThread, kTwoThreads};
    for (int i = 0; i < 2; ++i) {
        y[i] = dgate[i] = dup[i] = std::vector<T>(n);
        ASSERT_TRUE(ok(cpu::swiglu_forward(y[i].data(), gate.data(), up.data(), n, streams[i])));
        ASSERT_TRUE(ok(cpu::swiglu_backward(dgate[i].data(), dup[i].data(), dy.data(), gate.data(),
                                            up.data(), n, streams[i])));
    }
    EXPECT_TRUE(same_bits(y[0], y[1]));
    EXPECT_TRUE(same_bits(dgate[0], dgate[1]));
    EXPECT_TRUE(same_bits(dup[0], dup[1]));
    for (size_t i = 0; i < n; i += 997) {
        T one[3];
        ASSERT_TRUE(ok(cpu::swiglu_forward(&one[0], &gate[i], &up[i], 1, kOneThread)));
        ASSERT_TRUE(
            ok(cpu::swiglu_backward(&one[1], &one[2], &dy[i], &gate[i], &up[i], 1, kOneThread)));
        const T want[3] = {y[0][i], dgate[0][i], dup[0][i]};
        EXPECT_EQ(std::memcmp(one, want, sizeof one), 0) << i;
    }
}

TYPED_TEST(SwigluStored, OutputsMayBeInputs) {
    using T = TypeParam;
    const int64_t n = 1601;
    const auto gate = normal<T>(n, 1), up = normal<T>(n, 2), dy = normal<T>(n, 3);
    std::vector<T> y(n), dgate(n), dup(n);
    ASSERT_TRUE(ok(cpu::swiglu_forward(y.data(), gate.data(), up.data(), n, kOneThread)));
    ASSERT_TRUE(ok(cpu::swiglu_backward(dgate.data(), dup.data(), dy.data(), gate.data(), up.data(),
                                        n, kOneThread)));
    auto a = gate, b = up, d = dy;
    ASSERT_TRUE(ok(cpu::swiglu_forward(a.data(), a.data(), b.data(), n, kOneThread)));
    EXPECT_TRUE(same_bits(a, y));
    a = gate;
    ASSERT_TRUE(ok(cpu::swiglu_forward(b.data(), a.data(), b.data(), n, kOneThread)));
    EXPECT_TRUE(same_bits(b, y));
    b = up;  // dgate over gate, dup over up
    ASSERT_TRUE(
        ok(cpu::swiglu_backward(a.data(), b.data(), d.data(), a.data(), b.data(), n, kOneThread)));
    EXPECT_TRUE(same_bits(a, dgate));
    EXPECT_TRUE(same_bits(b, dup));
    a = gate;  // dgate over dy, dup over up
    b = up;
    ASSERT_TRUE(
        ok(cpu::swiglu_backward(d.data(), b.data(), d.data(), a.data(), b.data(), n, kOneThread)));
    EXPECT_TRUE(same_bits(d, dgate));
    EXPECT_TRUE(same_bits(b, dup));
    b = up;  // dgate over gate, dup over dy
    d = dy;
    ASSERT_TRUE(
        ok(cpu::swiglu_backward(a.data(), d.data(), d.data(), a.data(), b.data(), n, kOneThread)));
    EXPECT_TRUE(same_bits(a, dgate));
    EXPECT_TRUE(same_bits(d, dup));
}

TEST(Swiglu, RefusesBadSizes) {
    float v = 0;
    EXPECT_FALSE(ok(cpu::swiglu_forward(&v, &v, &v, -1, kOneThread)));
    EXPECT_FALSE(ok(ref::swiglu_backward(&v, &v, &v, &v, &v, -1, kOneThread)));
    EXPECT_TRUE(ok(cpu::swiglu_forward(&v, &v, &v, 0, kOneThread)));
}

}  // namespace
}  // namespace fbt::tests
