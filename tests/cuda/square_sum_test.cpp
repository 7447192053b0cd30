// kernels/square_sum.cu against the plain loops in double.
#include "kernels/square_sum.h"

#include <algorithm>

#include "tests/compare.h"
#include "tests/cuda/device.h"

namespace fbt::tests {
namespace {

namespace cuda = kernels::cuda;
namespace ref = kernels::ref;
constexpr int64_t kChunk = kernels::kSquareSumChunk;

// Of x, behind `shift` other floats on the device.
double device_sum(const std::vector<float>& x, size_t shift = 0) {
    std::vector<float> moved(shift, 1e9f);
    moved.insert(moved.end(), x.begin(), x.end());
    moved.push_back(1e9f);  // must not be read into the sum
    const int64_t n = int64_t(x.size());
    DeviceArray<float> dev(moved);
    DeviceArray<double> sum(1), scratch(size_t(n / kChunk + 1));
    EXPECT_TRUE(ok(cuda::square_sum(sum.data(), dev.data() + shift, n, scratch.data(), {})));
    return sum.host()[0];
}

class SquareSumKernel : public ScheduleTest {};

// Both sum squares that are exact in double: at most a chunk's additions and one for every chunk.
// The result depends on no alignment.
TEST_P(SquareSumKernel, MatchesPlainLoops) {
    for (const int64_t n : {int64_t(0), int64_t(1), int64_t(3), int64_t(37), int64_t(1601),
                            kChunk - 1, kChunk, kChunk + 1, 3 * kChunk + 17}) {
        const auto x = normal<float>(size_t(n), 1);
        const auto wide_x = cast<double>(x);
        double want = 0;
        std::vector<double> scratch(size_t(n / kChunk + 1));
        ASSERT_TRUE(ok(ref::square_sum(&want, wide_x.data(), n, scratch.data(), {})));
        const double got = device_sum(x), shifted = device_sum(x, 3);
        EXPECT_TRUE(close(std::vector<double>{got}, std::vector<double>{want}, 0,
                          2 * gamma<double>(double(std::min(n, kChunk) + 4))))
            << n;
        EXPECT_EQ(std::memcmp(&got, &shifted, sizeof got), 0) << n;
    }
}

TEST_P(SquareSumKernel, NanAndInfinityShow) {
    for (const size_t at : {size_t(0), size_t(kChunk), size_t(2 * kChunk + 36)})
        for (const float bad : {NAN, INFINITY, -INFINITY}) {
            std::vector<float> x(size_t(2 * kChunk + 37), 1.f);
            x[at] = bad;
            EXPECT_FALSE(std::isfinite(device_sum(x))) << at;
        }
}

TEST_P(SquareSumKernel, LargeFloatsDoNotOverflow) {
    const float x = 3e38f;
    EXPECT_EQ(device_sum({x}), double(x) * double(x));
    DeviceArray<float> none(1);
    DeviceArray<double> sum(2);
    EXPECT_EQ(cuda::square_sum(sum.data(), none.data(), -1, sum.data() + 1, {}).code,
              kernels::Code::bad_argument);
}

INSTANTIATE_TEST_SUITE_P(Device, SquareSumKernel, testing::ValuesIn(kSchedules), schedule_name);

class SquareSumOnce : public ScheduleTest {};

// More chunks than the threads that combine them.
TEST_P(SquareSumOnce, ChunksOutnumberThreads) {
    const size_t n = size_t(300 * kChunk + 5);
    EXPECT_EQ(device_sum(std::vector<float>(n, 0.5f)), 0.25 * double(n));
}

INSTANTIATE_TEST_SUITE_P(Device, SquareSumOnce, testing::Values(kSchedules[0]), schedule_name);

}  // namespace
}  // namespace fbt::tests
