// kernels/carry.cu, emulated, against the plain loops and against the host's Philox.
#include "kernels/carry.h"

#include <algorithm>

#include "tests/compare.h"
#include "tests/cuda/device.h"

namespace fbt::tests {
namespace {

namespace cuda = kernels::cuda;
namespace ref = kernels::ref;
using kernels::Jitter;

constexpr int64_t kFirstRows = 11, kPreviousRows = 7;
const int kWidths[] = {1, 3, 4, 37, 1601};

// Rows from both stores, out of order, none twice.
const std::vector<int64_t> kSource{3, -1, 6, 0, -11, -4, 2, 5};
const std::vector<int64_t> kSequence{0, 1, int64_t(5) << 32, 7, 7, 7, 123456789, 3};
const std::vector<int32_t> kPosition{0, 1, 2, 3, 4, 2147483646, 6, 1601};
const int64_t kRows = int64_t(kSource.size());
const kernels::PhiloxKey kKey = kernels::philox_key(42, kernels::Draw::jitter, 17, 2);

class Carry : public ScheduleTest {};

// Three additions and the jitter's two operations, none of which exceeds the terms' magnitudes.
TEST_P(Carry, ForwardMatchesPlainLoops) {
    DeviceArray<int64_t> source(kSource), sequence(kSequence);
    DeviceArray<int32_t> position(kPosition);
    for (const int D : kWidths)
        for (const bool noisy : {false, true})
            for (const float half_width : {0.f, 0.02f}) {
                const auto first = normal<float>(kFirstRows * D, 1),
                           previous = normal<float>(kPreviousRows * D, 2),
                           noise = normal<float>(kRows * D, 3);
                std::vector<float> want(kRows * D);
                ASSERT_TRUE(ok(ref::carry_forward<float, float>(
                    want.data(), first.data(), previous.data(), kSource.data(),
                    noisy ? noise.data() : nullptr,
                    Jitter<float>{half_width, kKey, kSequence.data(), kPosition.data()}, kRows, D,
                    {})));
                DeviceArray<float> dev_first(first), dev_previous(previous), dev_noise(noise),
                    dev_y(kRows * D);
                ASSERT_TRUE(ok(cuda::carry_forward<float, float>(
                    dev_y.data(), dev_first.data(), dev_previous.data(), source.data(),
                    noisy ? dev_noise.data() : nullptr,
                    half_width > 0
                        ? Jitter<float>{half_width, kKey, sequence.data(), position.data()}
                        : Jitter<float>{},
                    kRows, D, {})));
                double largest = 0;
                for (const auto* v : {&first, &previous, &noise})
                    for (float x : *v) largest = std::max(largest, double(std::abs(x)));
                EXPECT_TRUE(
                    close(dev_y.host(), want, gamma<float>(5) * (2 * largest + double(half_width))))
                    << "D " << D << " noise " << noisy << " jitter " << half_width;
            }
}

// On a zero state the output is the jitter itself: the host's draw for (sequence, position of the
// disturbed row, column), to the bit.
TEST_P(Carry, JitterIsTheHostsDraw) {
    const float half_width = 0.02f;
    DeviceArray<int64_t> source(kSource), sequence(kSequence);
    DeviceArray<int32_t> position(kPosition);
    for (const int D : kWidths) {
        std::vector<float> want(kRows * D);
        for (int64_t r = 0; r < kRows; ++r)
            for (int d = 0; d < D; ++d)
                want[r * D + d] =
                    half_width *
                    (2 * kernels::uniform_float(kernels::philox_bits(
                             kKey, uint64_t(kSequence[r]), uint32_t(kPosition[r]), uint32_t(d))) -
                     1);
        DeviceArray<float> first(std::vector<float>(kFirstRows * D)),
            previous(std::vector<float>(kPreviousRows * D)), y(kRows * D);
        ASSERT_TRUE(ok(cuda::carry_forward<float, float>(
            y.data(), first.data(), previous.data(), source.data(), nullptr,
            Jitter<float>{half_width, kKey, sequence.data(), position.data()}, kRows, D, {})));
        EXPECT_TRUE(same_bits(y.host(), want)) << "D " << D;
    }
}

// One addition an element: the same bits.
TEST_P(Carry, BackwardMatchesPlainLoops) {
    DeviceArray<int64_t> source(kSource);
    for (const int D : kWidths) {
        auto first = normal<float>(kFirstRows * D, 1),
             previous = normal<float>(kPreviousRows * D, 2);
        const auto dy = normal<float>(kRows * D, 3);
        DeviceArray<float> dev_first(first), dev_previous(previous), dev_dy(dy);
        ASSERT_TRUE(ok(cuda::carry_backward_accum<float>(
            dev_first.data(), dev_previous.data(), dev_dy.data(), source.data(), kRows, D, {})));
        ASSERT_TRUE(ok(ref::carry_backward_accum<float>(first.data(), previous.data(), dy.data(),
                                                        kSource.data(), kRows, D, {})));
        EXPECT_TRUE(same_bits(dev_first.host(), first)) << "D " << D;
        EXPECT_TRUE(same_bits(dev_previous.host(), previous)) << "D " << D;
    }
}

INSTANTIATE_TEST_SUITE_P(Simt, Carry, testing::ValuesIn(kSchedules), schedule_name);

// An unused source may be null; no rows is no work.
TEST(CarryArguments, NullSourcesAndNoRows) {
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
    const kernels::Status status = cuda::carry_forward<float, float>(
        y.data(), nullptr, states.data(), of_previous.data(), nullptr, Jitter<float>{}, 2, 0, {});
    EXPECT_EQ(status.code, kernels::Code::bad_argument);
}

}  // namespace
}  // namespace fbt::tests
