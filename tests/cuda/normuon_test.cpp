// kernels/normuon.cu against the plain loops in double, and Newton-Schulz on the device.
#include "kernels/normuon.h"

#include <algorithm>

#include "tests/compare.h"
#include "tests/cuda/device.h"
#include "tests/tensor/newton_schulz_cases.h"

namespace fbt::tests {
namespace {

namespace cuda = kernels::cuda;
namespace ref = kernels::ref;
using kernels::bf16;
using kernels::NorMuonStep;

double largest(const std::vector<double>& v) {
    double most = 0;
    for (double x : v) most = std::max(most, std::abs(x));
    return most;
}

// A copy on the device, its first element `shift` elements behind an aligned address.
template <class T>
struct Moved {
    size_t shift;
    DeviceArray<T> array;
    Moved(const std::vector<T>& x, size_t by) : shift(by), array(behind(x, by)) {}
    T* data() { return array.data() + shift; }
    std::vector<T> host() const {
        const auto all = array.host();
        return std::vector<T>(all.begin() + shift, all.end());
    }
    static std::vector<T> behind(const std::vector<T>& x, size_t by) {
        std::vector<T> all(by, T(7.f));
        all.insert(all.end(), x.begin(), x.end());
        return all;
    }
};

const NorMuonStep kStep{1e-2, 0.95, 1e-8, 0.1};

// The mean of K squares has relative error gamma(K + 2), v one of gamma(K + 5), its root half of
// it; r so gamma(K/2 + 6). ||r|| has half the error of a sum of N such squares. The weights' own
// three roundings follow. o is given as it is, so T adds nothing.
template <class T>
void check_step(int64_t N, int64_t K) {
    const size_t size = size_t(N * K);
    const auto w0 = normal<float>(size, 1);
    const auto o = normal<T>(size, 2);
    auto v0 = normal<float>(size_t(N), 3);
    for (float& x : v0) x = x * x + 0.01f;
    auto w = cast<double>(w0), v = cast<double>(v0);
    std::vector<double> scratch(size_t(N) + 1);
    ASSERT_TRUE(ok(ref::normuon_step(w.data(), v.data(), cast<double>(o).data(), N, K, kStep,
                                     scratch.data(), {})));
    double update = 0;
    for (size_t i = 0; i < size; ++i)
        update = std::max(update, std::abs(w[i] - double(w0[i]) * (1 - 1e-3)));

    std::vector<float> first_w, first_v;
    for (const size_t shift : {0, 1}) {  // the same bits at any alignment
        Moved<float> dev_w(w0, shift), dev_v(v0, 0);
        Moved<T> dev_o(o, shift);
        DeviceArray<float> dev_scratch(size_t(N) + 1);
        ASSERT_TRUE(ok(cuda::normuon_step<T>(dev_w.data(), dev_v.data(), dev_o.data(), N, K, kStep,
                                             dev_scratch.data(), {})));
        if (shift == 0) {
            first_w = dev_w.host();
            first_v = dev_v.host();
        }
        EXPECT_TRUE(same_bits(dev_w.host(), first_w)) << N << " x " << K;
        EXPECT_TRUE(same_bits(dev_v.host(), first_v)) << N << " x " << K;
    }
    EXPECT_TRUE(close(first_v, v, 0, gamma<float>(double(K + 5)))) << N << " x " << K;
    EXPECT_TRUE(close(first_w, w,
                      update * gamma<float>(1.5 * double(K) + double(N) + 20) +
                          3 * unit_roundoff<float>() * largest(cast<double>(w0))))
        << N << " x " << K;
}

// One division's or three products' roundings in float, then one to T.
template <class T>
void check_elementwise(size_t n) {
    const auto x = normal<float>(n, 1), grad = normal<float>(n, 2);
    const auto a = normal<T>(n, 3), b = normal<T>(n, 4);
    const auto wide_x = cast<double>(x), wide_a = cast<double>(a), wide_b = cast<double>(b);
    const double u = unit_roundoff<T>();
    double square = 0;
    for (double value : wide_x) square += value * value;
    std::vector<double> normed(n), sum = wide_b;
    ASSERT_TRUE(
        ok(ref::frobenius_normalize(normed.data(), wide_x.data(), &square, int64_t(n), {})));
    ASSERT_TRUE(ok(ref::axpby(sum.data(), 2.5, wide_a.data(), -0.75, int64_t(n), {})));
    for (const size_t shift : {0, 1}) {
        Moved<float> dev_x(x, shift);
        Moved<T> dev_y(std::vector<T>(n, T(0.f)), shift), dev_a(a, shift), dev_b(b, shift);
        DeviceArray<double> dev_square(std::vector<double>{square});
        ASSERT_TRUE(ok(cuda::frobenius_normalize<T>(dev_y.data(), dev_x.data(), dev_square.data(),
                                                    int64_t(n), {})));
        EXPECT_TRUE(close(dev_y.host(), normed, 0, gamma<float>(4) + u)) << n;
        ASSERT_TRUE(ok(cuda::axpby<T>(dev_b.data(), 2.5f, dev_a.data(), -0.75f, int64_t(n), {})));
        const double size = 2.5 * largest(wide_a) + 0.75 * largest(wide_b);
        EXPECT_TRUE(close(dev_b.host(), sum, gamma<float>(3) * size, u)) << n;
    }
}

template <class T>
void check_transpose(int64_t N, int64_t K) {
    const auto x = normal<T>(size_t(N * K), 1);
    std::vector<T> want(x.size());
    for (int64_t n = 0; n < N; ++n)
        for (int64_t k = 0; k < K; ++k) want[size_t(k * N + n)] = x[size_t(n * K + k)];
    DeviceArray<T> dev_x(x), dev_y(x.size());
    ASSERT_TRUE(ok(cuda::transpose<T>(dev_y.data(), dev_x.data(), N, K, {})));
    EXPECT_TRUE(same_bits(dev_y.host(), want)) << N << " x " << K;
}

class NorMuonKernel : public ScheduleTest {};

TEST_P(NorMuonKernel, StepMatchesPlainLoops) {
    for (const int64_t N : {1, 5, 67})
        for (const int64_t K : {1, 37, 1600, 1601}) {
            check_step<float>(N, K);
            check_step<bf16>(N, K);
        }
}

// m: products and constants rounded, may cancel.
TEST_P(NorMuonKernel, MomentumMatchesPlainLoops) {
    for (const size_t n : {1, 3, 1601}) {
        const auto start = normal<float>(n, 1), grad = normal<float>(n, 2);
        auto want = cast<double>(start);
        const double size = largest(want) + largest(cast<double>(grad));
        ASSERT_TRUE(ok(ref::normuon_momentum(want.data(), cast<double>(grad).data(), int64_t(n),
                                             0.95, 0.5, {})));
        for (const size_t shift : {0, 1}) {
            Moved<float> m(start, shift), g(grad, shift);
            ASSERT_TRUE(ok(cuda::normuon_momentum(m.data(), g.data(), int64_t(n), 0.95, 0.5, {})));
            EXPECT_TRUE(close(m.host(), want, gamma<float>(4) * size)) << n;
        }
    }
}

TEST_P(NorMuonKernel, ElementwiseParts) {
    for (const size_t n : {1, 3, 37, 4099}) {
        check_elementwise<float>(n);
        check_elementwise<bf16>(n);
    }
    for (const int64_t N : {1, 32, 67})
        for (const int64_t K : {1, 33, 128}) {
            check_transpose<float>(N, K);
            check_transpose<bf16>(N, K);
        }
}

// A row's moment does not depend on the other rows (its step does: they share one norm).
TEST_P(NorMuonKernel, MomentsDoNotDependOnOtherRows) {
    const int64_t N = 5, K = 601;
    const auto o = normal<float>(size_t(N * K), 1);
    DeviceArray<float> w(std::vector<float>(size_t(N * K))), v(std::vector<float>(N, 0.1f)),
        dev_o(o), scratch(N + 1);
    ASSERT_TRUE(ok(cuda::normuon_step<float>(w.data(), v.data(), dev_o.data(), N, K, kStep,
                                             scratch.data(), {})));
    for (int64_t n = 0; n < N; ++n) {
        DeviceArray<float> one(std::vector<float>{0.1f});
        ASSERT_TRUE(ok(cuda::normuon_step<float>(w.data(), one.data(), dev_o.data() + n * K, 1, K,
                                                 kStep, scratch.data(), {})));
        EXPECT_TRUE(same_bits(one.host(), {v.host()[size_t(n)]})) << n;
    }
}

// A zero o leaves the decay alone; NaN and infinity show.
TEST_P(NorMuonKernel, ZeroAndNan) {
    for (const float bad : {0.f, NAN, INFINITY}) {
        DeviceArray<float> w(std::vector<float>{1, 2, 3, 4}), v(std::vector<float>{0, 0}),
            o(std::vector<float>{0, bad, 0, 0}), scratch(3);
        ASSERT_TRUE(ok(cuda::normuon_step<float>(w.data(), v.data(), o.data(), 2, 2,
                                                 {0.5, 0.95, 1e-8, 0.5}, scratch.data(), {})));
        if (bad == 0)
            EXPECT_EQ(w.host(), (std::vector<float>{0.75f, 1.5f, 2.25f, 3}));
        else
            EXPECT_TRUE(std::isnan(w.host()[1]));
    }
}

TEST_P(NorMuonKernel, NothingToDoAndBadSizes) {
    DeviceArray<float> x(std::vector<float>{3});
    DeviceArray<double> sum(std::vector<double>{1});
    const auto step = [&](int64_t N, int64_t K) {
        return cuda::normuon_step<float>(x.data(), x.data(), x.data(), N, K, kStep, x.data(), {});
    };
    const auto bad = kernels::Code::bad_argument;
    EXPECT_TRUE(ok(step(0, 1)));
    EXPECT_TRUE(ok(step(1, 0)));
    EXPECT_EQ(step(-1, 1).code, bad);
    EXPECT_EQ(step(1, -1).code, bad);
    for (const int64_t n : {0, -1}) {
        const auto code = n ? bad : kernels::Code::ok;
        EXPECT_EQ(cuda::normuon_momentum(x.data(), x.data(), n, 0.9, 1, {}).code, code);
        EXPECT_EQ(cuda::axpby<float>(x.data(), 1.f, x.data(), 1.f, n, {}).code, code);
        EXPECT_EQ(cuda::frobenius_normalize<float>(x.data(), x.data(), sum.data(), n, {}).code,
                  code);
        EXPECT_EQ(cuda::transpose<float>(x.data(), x.data(), n, 1, {}).code, code);
        EXPECT_EQ(cuda::transpose<float>(x.data(), x.data(), 1, n, {}).code, code);
    }
    EXPECT_EQ(x.host(), std::vector<float>{3});
}
INSTANTIATE_TEST_SUITE_P(Device, NorMuonKernel, testing::ValuesIn(kSchedules), schedule_name);

// Rows that blocks stride over and one block adds.
class NorMuonOnce : public ScheduleTest {};
TEST_P(NorMuonOnce, ManyRows) {
    check_step<float>(4096 + 3, 5);
    check_step<bf16>(4096 + 3, 8);
}
TEST_P(NorMuonOnce, NewtonSchulzMatchesTheSingularValueDecomposition) {
    tensor::Context device(kDevice);
    for (const Size size : kSmall) check_newton_schulz<float>(device, size);
}
INSTANTIATE_TEST_SUITE_P(Device, NorMuonOnce, testing::Values(kSchedules[0]), schedule_name);

}  // namespace
}  // namespace fbt::tests
