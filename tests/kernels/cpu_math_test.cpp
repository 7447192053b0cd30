// The vectorised exponential against std::exp in double, and the fixed order of row sums.
#include <algorithm>

#include "kernels/cpu_tile.h"
#include "tests/compare.h"

namespace fbt::tests {
namespace {

namespace cpu = kernels::cpu;

float next_up(float x) { return std::nextafter(x, INFINITY); }

// |exp(x) - e^x| in units of the last place of the correctly rounded result
double error_in_ulp(float x) {
    const double want = std::exp(double(x));
    const float rounded = float(want);
    const double ulp = double(next_up(rounded)) - double(rounded);
    return std::abs(double(cpu::exp(x)) - want) / ulp;
}

// One float in nine, at every exponent from 2^-27 up to the ends of the range; below, exp(x) is 1
// to half an ulp. (All of them take half a minute and give the same worst, 1.0104 ulp.)
TEST(CpuMath, ExpIsWithinItsBound) {
    const uint32_t first = std::bit_cast<uint32_t>(0x1p-27f);
    const uint32_t past_positive = std::bit_cast<uint32_t>(88.72284f);   // the last finite result
    const uint32_t past_negative = std::bit_cast<uint32_t>(103.97208f);  // the last that is not 0
    double worst = 0, worst_subnormal = 0;
#pragma omp parallel for num_threads(2) reduction(max : worst, worst_subnormal)
    for (uint32_t bits = first; bits <= past_negative; bits += 9) {
        const float x = std::bit_cast<float>(bits);
        if (bits <= past_positive) worst = std::max(worst, error_in_ulp(x));
        double& negative = -x < -87.33654f ? worst_subnormal : worst;
        negative = std::max(negative, error_in_ulp(-x));
    }
    RecordProperty("worst_ulp", std::to_string(worst));
    EXPECT_LT(worst, 1.1);
    EXPECT_LE(worst_subnormal, 1);
    for (uint32_t bits = 0; bits < first; bits += 4099) {
        const float x = std::bit_cast<float>(bits);
        EXPECT_LE(error_in_ulp(x), 0.51);
        EXPECT_LE(error_in_ulp(-x), 0.51);
    }
}

TEST(CpuMath, ExpAtTheEnds) {
    const float inf = INFINITY, largest = std::numeric_limits<float>::max();
    EXPECT_EQ(cpu::exp(0.f), 1.f);
    EXPECT_EQ(cpu::exp(-0.f), 1.f);
    EXPECT_EQ(cpu::exp(-inf), 0.f);
    EXPECT_EQ(cpu::exp(-largest), 0.f);
    EXPECT_EQ(cpu::exp(-104.f), 0.f);
    EXPECT_EQ(cpu::exp(88.74f), inf);
    EXPECT_EQ(cpu::exp(largest), inf);
    EXPECT_EQ(cpu::exp(inf), inf);
    EXPECT_TRUE(std::isnan(cpu::exp(NAN)));
    EXPECT_TRUE(std::isnan(cpu::exp(-NAN)));
    EXPECT_EQ(cpu::sigmoid(-inf), 0.f);
    EXPECT_EQ(cpu::sigmoid(-largest), 0.f);
    EXPECT_EQ(cpu::sigmoid(inf), 1.f);
    EXPECT_EQ(cpu::sigmoid(0.f), 0.5f);
    EXPECT_TRUE(std::isnan(cpu::sigmoid(NAN)));
}

// volatile keeps the compiler from vectorising the scalar side.
TEST(CpuMath, LanesAndScalarsGiveTheSameBits) {
    const std::vector<float> x = normal<float>(1601, 1, 30);
    std::vector<float> vectors(x.size()), scalars(x.size());
#pragma omp simd
    for (size_t i = 0; i < x.size(); ++i) vectors[i] = cpu::exp(x[i]);
    for (size_t i = 0; i < x.size(); ++i) {
        volatile float one = x[i];
        scalars[i] = cpu::exp(one);
    }
    EXPECT_TRUE(same_bits(vectors, scalars));
}

bool same_or_nan(float a, float b) {
    return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b) ||
           (std::isnan(a) && std::isnan(b));
}

// Every exponent and sign, subnormal numbers, ties, infinities and NaN among them: a vector of
// them, and its first lanes alone, against one float after the other.
TEST(CpuMath, VectorsGiveTheBitsOfOneFloat) {
    int64_t wrong = 0;
    for (uint64_t bits = 0; bits < uint64_t(1) << 32; bits += 16 * 0x0fff) {
        float x[cpu::kLanes], e[cpu::kLanes], some[cpu::kLanes] = {};
        kernels::bf16 rounded[cpu::kLanes], first[cpu::kLanes] = {};
        for (int l = 0; l < cpu::kLanes; ++l)
            x[l] = std::bit_cast<float>(uint32_t(bits + uint64_t(l) * 0x0fff));
        const int count = 1 + int(bits >> 8) % (cpu::kLanes - 1);
        cpu::store(e, cpu::exp(cpu::load(x)));
        cpu::store(rounded, cpu::load(x));
        cpu::store_first(first, cpu::load(x), count);
        cpu::store_first(some, cpu::load_first(rounded, count), count);
        for (int l = 0; l < cpu::kLanes; ++l) {
            const kernels::bf16 want(x[l]);
            wrong += !same_or_nan(e[l], cpu::exp(x[l]));
            wrong += rounded[l].bits != want.bits;
            wrong += first[l].bits != (l < count ? want.bits : 0);
            wrong += !same_or_nan(some[l], l < count ? float(want) : 0.f);
        }
    }
    EXPECT_EQ(wrong, 0);
}

// The order that the comments promise, written out: lane i % 16, then the tree.
TEST(CpuMath, RowSumsHaveTheirOrder) {
    for (const int64_t n : {0, 1, 3, 15, 16, 17, 37, 1601}) {
        const std::vector<float> a = normal<float>(size_t(n), 2), b = normal<float>(size_t(n), 3);
        float sum[16] = {}, dot[16] = {}, largest = -INFINITY;
        double wide[16] = {};
        for (int64_t i = 0; i < n; ++i) {
            const size_t at = size_t(i);
            sum[i % 16] += a[at];
            wide[i % 16] += double(a[at]);
            dot[i % 16] = std::fma(a[at], b[at], dot[i % 16]);
            largest = std::max(largest, a[at]);
        }
        for (int l = 1; l < 16; ++l) wide[0] += wide[l];
        for (const int w : {8, 4, 2, 1})
            for (int l = 0; l < w; ++l) {
                sum[l] += sum[l + w];
                dot[l] += dot[l + w];
            }
        const auto at_a = [&](int64_t i) { return a[size_t(i)]; };
        const auto vec_a = cpu::elements(a.data()), vec_b = cpu::elements(b.data());
        EXPECT_EQ(cpu::row_sum(n, vec_a), sum[0]) << n;
        const auto ones = [](int64_t, int) { return cpu::splat(1.f); };
        EXPECT_EQ(cpu::row_sum(n, ones), float(n));  // nothing behind the end counts
        EXPECT_EQ(cpu::row_sum_double(n, at_a), wide[0]) << n;
        EXPECT_EQ(cpu::row_dot(n, vec_a, vec_b), dot[0]) << n;
        EXPECT_EQ(cpu::row_max(n, at_a), largest) << n;
    }
}

TEST(CpuMath, SmallWorkStaysOnOneThread) {
    EXPECT_EQ(cpu::threads_for_elements({nullptr, 8}, 100), 1);
    EXPECT_EQ(cpu::threads_for_elements({nullptr, 8}, 1 << 20), 8);
    EXPECT_EQ(cpu::threads_for_elements({nullptr, 0}, 1 << 20), 1);
}

}  // namespace
}  // namespace fbt::tests
