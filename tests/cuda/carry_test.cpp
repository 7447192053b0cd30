// kernels/carry.cu against the plain loops in double and against the host's Philox.
#include "kernels/carry.h"

#include "tests/cuda/rows.h"

namespace fbt::tests {
namespace {

namespace cuda = kernels::cuda;
namespace ref = kernels::ref;
using kernels::bf16;
using kernels::Jitter;

constexpr int64_t kFirstRows = 11, kPreviousRows = 7;
const int kWidths[] = {1, 3, 4, 8, 37, 96, 1536, 1601};

// Rows from both stores, out of order, none twice.
const std::vector<int64_t> kSource{3, -1, 6, 0, -11, -4, 2, 5};
const std::vector<int64_t> kSequence{0, 1, int64_t(5) << 32, 7, 7, 7, 123456789, 3};
const std::vector<int32_t> kPosition{0, 1, 2, 3, 4, 2147483646, 6, 1601};
const int64_t kRows = int64_t(kSource.size());
const kernels::PhiloxKey kKey = kernels::philox_key(42, kernels::Draw::jitter, 17, 2);

class Carry : public ScheduleTest {};

// Three additions and the jitter's two operations, none of which exceeds the terms' magnitudes.
template <class T>
void expect_forward() {
    DeviceArray<int64_t> source(kSource), sequence(kSequence);
    DeviceArray<int32_t> position(kPosition);
    for (const int D : kWidths)
        for (const bool noisy : {false, true})
            for (const float half_width : {0.f, 0.02f}) {
                const auto first = normal<T>(kFirstRows * D, 1),
                           previous = normal<T>(kPreviousRows * D, 2);
                const auto noise = normal<float>(kRows * D, 3);
                const auto wide_first = cast<double>(first), wide_previous = cast<double>(previous),
                           wide_noise = cast<double>(noise);
                std::vector<double> want(kRows * D);
                ASSERT_TRUE(ok(ref::carry_forward<double>(
                    want.data(), wide_first.data(), wide_previous.data(), kSource.data(),
                    noisy ? wide_noise.data() : nullptr,
                    Jitter<double>{half_width, kKey, kSequence.data(), kPosition.data()}, kRows, D,
                    {})));
                const double most =
                    std::max({largest(wide_first), largest(wide_previous), largest(wide_noise)});
                const auto run = [&](size_t skip) {
                    DeviceRows<T> dev_first(first, skip), dev_previous(previous, skip),
                        y(kRows * D, skip);
                    DeviceRows<float> dev_noise(noise, skip);
                    EXPECT_TRUE(ok(cuda::carry_forward<T, float>(
                        y.data(), dev_first.data(), dev_previous.data(), source.data(),
                        noisy ? dev_noise.data() : nullptr,
                        half_width > 0
                            ? Jitter<float>{half_width, kKey, sequence.data(), position.data()}
                            : Jitter<float>{},
                        kRows, D, {})));
                    return y.host();
                };
                const auto got = run(0);
                EXPECT_TRUE(
                    close_stored(got, want, gamma<float>(5) * (2 * most + double(half_width))))
                    << "D " << D << " noise " << noisy << " jitter " << half_width;
                EXPECT_TRUE(same_bits(run(1), got)) << "D " << D;  // unaligned
            }
}
TEST_P(Carry, ForwardMatchesPlainLoops) {
    expect_forward<float>();
    expect_forward<bf16>();
}

// On a zero state the output is the jitter itself: the host's draw for (sequence, position of the
// disturbed row, column), to the bit.
template <class T>
void expect_draws() {
    const float half_width = 0.02f;
    DeviceArray<int64_t> source(kSource), sequence(kSequence);
    DeviceArray<int32_t> position(kPosition);
    for (const int D : kWidths) {
        std::vector<T> want(kRows * D);
        for (int64_t r = 0; r < kRows; ++r)
            for (int d = 0; d < D; ++d)
                want[r * D + d] =
                    T(half_width *
                      (2 * kernels::uniform_float(kernels::philox_bits(
                               kKey, uint64_t(kSequence[r]), uint32_t(kPosition[r]), uint32_t(d))) -
                       1));
        DeviceRows<T> first(std::vector<T>(kFirstRows * D)),
            previous(std::vector<T>(kPreviousRows * D)), y(kRows * D);
        ASSERT_TRUE(ok(cuda::carry_forward<T, float>(
            y.data(), first.data(), previous.data(), source.data(), nullptr,
            Jitter<float>{half_width, kKey, sequence.data(), position.data()}, kRows, D, {})));
        EXPECT_TRUE(same_bits(y.host(), want)) << "D " << D;
    }
}
TEST_P(Carry, JitterIsTheHostsDraw) {
    expect_draws<float>();
    expect_draws<bf16>();
}

// One addition an element, rounded once: the same bits.
template <class T>
void expect_backward() {
    DeviceArray<int64_t> source(kSource);
    for (const int D : kWidths)
        for (const size_t skip : {0, 1}) {
            auto first = normal<T>(kFirstRows * D, 1), previous = normal<T>(kPreviousRows * D, 2);
            const auto dy = normal<T>(kRows * D, 3);
            DeviceRows<T> dev_first(first, skip), dev_previous(previous, skip), dev_dy(dy, skip);
            ASSERT_TRUE(ok(cuda::carry_backward_accum(dev_first.data(), dev_previous.data(),
                                                      dev_dy.data(), source.data(), kRows, D, {})));
            for (int64_t r = 0; r < kRows; ++r)
                for (int d = 0; d < D; ++d) {
                    T& to = kSource[r] >= 0 ? previous[kSource[r] * D + d]
                                            : first[(-1 - kSource[r]) * D + d];
                    to = T(float(to) + float(dy[r * D + d]));
                }
            EXPECT_TRUE(same_bits(dev_first.host(), first)) << "D " << D;
            EXPECT_TRUE(same_bits(dev_previous.host(), previous)) << "D " << D;
        }
}
TEST_P(Carry, BackwardMatchesPlainLoops) {
    expect_backward<float>();
    expect_backward<bf16>();
}

// An unused source may be null; no rows is no work.
TEST_P(Carry, NullSourcesAndNoRows) {
    const std::vector<float> rows{1, 2, 3, 4};
    DeviceArray<float> states(rows), y(4);
    DeviceArray<int64_t> of_first(std::vector<int64_t>{-2, -1}),
        of_previous(std::vector<int64_t>{1, 0});
    const std::vector<float> swapped{3, 4, 1, 2};
    ASSERT_TRUE(ok(cuda::carry_forward<float, float>(
        y.data(), states.data(), nullptr, of_first.data(), nullptr, Jitter<float>{}, 2, 2, {})));
    EXPECT_EQ(y.host(), swapped);
    ASSERT_TRUE(ok(cuda::carry_forward<float, float>(
        y.data(), nullptr, states.data(), of_previous.data(), nullptr, Jitter<float>{}, 2, 2, {})));
    EXPECT_EQ(y.host(), swapped);
    EXPECT_TRUE(ok(cuda::carry_forward<float, float>(y.data(), nullptr, nullptr, nullptr, nullptr,
                                                     Jitter<float>{}, 0, 2, {})));
    EXPECT_TRUE(
        ok(cuda::carry_backward_accum<float>(nullptr, nullptr, nullptr, nullptr, 0, 2, {})));
    const auto bad = kernels::Code::bad_argument;
    EXPECT_EQ(
        (cuda::carry_forward<float, float>(y.data(), nullptr, states.data(), of_previous.data(),
                                           nullptr, Jitter<float>{}, 2, 0, {})
             .code),
        bad);
    EXPECT_EQ(cuda::carry_backward_accum<float>(nullptr, nullptr, nullptr, nullptr, -1, 2, {}).code,
              bad);
}

INSTANTIATE_TEST_SUITE_P(Device, Carry, testing::ValuesIn(kSchedules), schedule_name);

}  // namespace
}  // namespace fbt::tests
