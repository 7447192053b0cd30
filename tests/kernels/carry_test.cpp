#include "kernels/carry.h"

#include <algorithm>

#include "tests/kernels/kernel_test.h"

namespace fbt::tests {
namespace {

namespace ref = kernels::ref;
namespace cpu = kernels::cpu;
using kernels::Draw;
using kernels::Jitter;
using kernels::philox_key;

template <class T>
class CarryStored : public testing::Test {};
TYPED_TEST_SUITE(CarryStored, Storage);

// R rows gathered from 2R: odd rows from `first`, even ones from `previous`, in a mixed order.
template <class T>
struct Case {
    int64_t R;
    int D;
    using A = kernels::accumulate_t<T>;
    std::vector<T> first, previous, y;
    std::vector<A> noise;
    std::vector<int64_t> source, sequence;
    std::vector<int32_t> position;
    Case(int64_t R, int D)
        : R(R),
          D(D),
          first(normal<T>(size_t(R * D), 1)),
          previous(normal<T>(size_t(R * D), 2)),
          y(size_t(R * D)),
          noise(normal<A>(size_t(R * D), 3, 0.01)) {
        for (int64_t r = 0; r < R; ++r) {
            const int64_t row = R - 1 - r;
            source.push_back(r % 2 ? -1 - row : row);
            sequence.push_back((int64_t(1) << 33) + r / 5);
            position.push_back(int32_t(r % 5));
        }
    }
    Jitter<A> jitter(A half_width, uint64_t step = 0) const {
        return {half_width, philox_key(9, Draw::jitter, step, 2), sequence.data(), position.data()};
    }
};
template <class T>
kernels::Status forward_cpu(Case<T>& p, const float* noise, const Jitter<float>& jitter,
                            const kernels::Stream& s) {
    return cpu::carry_forward(p.y.data(), p.first.data(), p.previous.data(), p.source.data(), noise,
                              jitter, p.R, p.D, s);
}

TEST(Carry, GathersFromBothSources) {
    for (const auto& [R, D] : {std::pair<int64_t, int>{1, 1}, {3, 17}, {37, 1601}}) {
        Case<float> p(R, D);
        std::vector<float> want(p.y.size());
        for (size_t r = 0; r < size_t(R); ++r)
            std::copy_n(
                ((r % 2 ? p.first : p.previous).begin() + (R - 1 - int64_t(r)) * int64_t(D)), D,
                want.begin() + int64_t(r) * D);
        ASSERT_TRUE(ok(forward_cpu(p, nullptr, {}, kTwoThreads)));
        EXPECT_TRUE(same_bits(p.y, want));
        std::fill(p.y.begin(), p.y.end(), NAN);
        ASSERT_TRUE(
            ok(ref::carry_forward<float, float>(p.y.data(), p.first.data(), p.previous.data(),
                                                p.source.data(), nullptr, {}, R, D, kOneThread)));
        EXPECT_TRUE(same_bits(p.y, want));
    }
}

// Additions in one order and one rounding at the end, so the backends agree to the bit, with noise
// and jitter.
TYPED_TEST(CarryStored, CpuIsRefToTheBit) {
    using T = TypeParam;
    for (const auto& [R, D] :
         {std::pair<int64_t, int>{1, 1}, {3, 17}, {7, 63}, {7, 64}, {7, 65}, {37, 1601}}) {
        Case<T> p(R, D);
        std::vector<float> want(p.y.size());
        const auto first = cast<float>(p.first), previous = cast<float>(p.previous);
        const Jitter<float> jitter = p.jitter(0.02f);
        ASSERT_TRUE(
            ok(ref::carry_forward(want.data(), first.data(), previous.data(), p.source.data(),
                                  p.noise.data(), jitter, R, D, kOneThread)));
        for (const auto& stream : {kOneThread, kTwoThreads}) {
            ASSERT_TRUE(ok(forward_cpu(p, p.noise.data(), jitter, stream)));
            EXPECT_TRUE(same_bits(p.y, cast<T>(want))) << R << " x " << D;
        }
    }
}

TEST(Carry, JitterIsUniformInItsHalfWidth) {
    const int64_t R = 64;
    const int D = 1601;
    Case<double> p(R, D);
    std::fill(p.first.begin(), p.first.end(), 0);
    std::fill(p.previous.begin(), p.previous.end(), 0);
    const double width = 0.02;
    ASSERT_TRUE(ok(ref::carry_forward<double, double>(p.y.data(), p.first.data(), p.previous.data(),
                                                      p.source.data(), nullptr, p.jitter(width), R,
                                                      D, kOneThread)));
    const double n = double(R) * D;
    double sum = 0, squares = 0;
    for (double x : p.y) {
        EXPECT_GE(x, -width);
        EXPECT_LT(x, width);
        sum += x;
        squares += x * x;
    }
    // Variance width^2/3; the variance of x^2 is width^4 (1/5 - 1/9). Five standard deviations.
    EXPECT_LT(std::abs(sum / n), 5 * width / std::sqrt(3 * n));
    EXPECT_LT(std::abs(squares / n - width * width / 3),
              5 * width * width * std::sqrt((1. / 5 - 1. / 9) / n));
    EXPECT_GT(*std::max_element(p.y.begin(), p.y.end()), 0.99 * width);
    EXPECT_LT(*std::min_element(p.y.begin(), p.y.end()), -0.99 * width);
}

// A row draws by its sequence and position, wherever it is packed; other steps draw otherwise.
TYPED_TEST(CarryStored, JitterDoesNotDependOnPacking) {
    using T = TypeParam;
    const int64_t R = 37;
    for (const int D : {17, 1601}) {
        const size_t width = size_t(D);
        Case<T> p(R, D);
        ASSERT_TRUE(ok(forward_cpu(p, nullptr, p.jitter(0.02f), kTwoThreads)));
        for (size_t r = 0; r < size_t(R); r += 3) {
            std::vector<T> alone(width);
            Shifted source(&(r % 2 ? p.first : p.previous)[(size_t(R) - 1 - r) * width], width,
                           r % 16 + 1);
            const int64_t row = 0;
            Jitter<float> jitter = p.jitter(0.02f);
            jitter.sequence += r;
            jitter.position += r;
            ASSERT_TRUE(ok(cpu::carry_forward<T, float>(alone.data(), nullptr, source.data(), &row,
                                                        nullptr, jitter, 1, D, kOneThread)));
            EXPECT_TRUE(same_bits<T>(alone, std::span<const T>(&p.y[r * width], width)));
        }
        const auto before = p.y;
        ASSERT_TRUE(ok(forward_cpu(p, nullptr, p.jitter(0.02f, 1), kTwoThreads)));
        EXPECT_FALSE(same_bits(p.y, before));
    }
}

// d/dsource of sum dy*y is dy's row, added to what is there.
TYPED_TEST(CarryStored, BackwardScatters) {
    using T = TypeParam;
    const auto add = [](T& to, T x) { to = T(float(to) + float(x)); };
    for (const auto& [R, D] : {std::pair<int64_t, int>{1, 1}, {3, 17}, {37, 1601}}) {
        Case<T> p(R, D);
        const auto dy = normal<T>(p.y.size(), 5);
        const auto want_first = [&, R = R, width = size_t(D)] {
            auto d = p.first;
            for (size_t r = 1; r < size_t(R); r += 2)
                for (size_t c = 0; c < width; ++c)
                    add(d[(size_t(R) - 1 - r) * width + c], dy[r * width + c]);
            return d;
        }();
        const auto want_previous = [&, R = R, width = size_t(D)] {
            auto d = p.previous;
            for (size_t r = 0; r < size_t(R); r += 2)
                for (size_t c = 0; c < width; ++c)
                    add(d[(size_t(R) - 1 - r) * width + c], dy[r * width + c]);
            return d;
        }();
        const auto check = [&, R = R, D = D](auto backward) {
            auto dfirst = p.first, dprevious = p.previous;
            ASSERT_TRUE(ok(backward(dfirst.data(), dprevious.data(), dy.data(), p.source.data(), R,
                                    D, kTwoThreads)));
            EXPECT_TRUE(same_bits(dfirst, want_first));
            EXPECT_TRUE(same_bits(dprevious, want_previous));
        };
        check(cpu::carry_backward_accum<T>);
        if constexpr (std::is_same_v<T, float>) check(ref::carry_backward_accum<T>);
    }
}

TEST(Carry, RefusesBadSizes) {
    float v = 0;
    const int64_t row = 0;
    EXPECT_FALSE(
        ok(cpu::carry_forward<float, float>(&v, &v, &v, &row, nullptr, {}, 1, 0, kOneThread)));
    EXPECT_FALSE(
        ok(ref::carry_forward<float, float>(&v, &v, &v, &row, nullptr, {}, -1, 1, kOneThread)));
    EXPECT_FALSE(ok(cpu::carry_backward_accum(&v, &v, &v, &row, 1, 0, kOneThread)));
    EXPECT_TRUE(ok(cpu::carry_forward<float, float>(&v, nullptr, nullptr, nullptr, nullptr, {}, 0,
                                                    1, kOneThread)));
}

}  // namespace
}  // namespace fbt::tests
