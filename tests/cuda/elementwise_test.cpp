// kernels/elementwise.cu against plain arithmetic: one rounding, so the same bits.
#include "kernels/elementwise.h"

#include "tests/cuda/rows.h"

namespace fbt::tests {
namespace {

namespace cuda = kernels::cuda;
using kernels::bf16;

// Around a pack and a block of threads.
const int64_t kSizes[] = {1, 3, 7, 8, 37, 1601, 4096, 4097};

class Elementwise : public ScheduleTest {};

template <class T>
void expect_sums() {
    for (const int64_t n : kSizes)
        for (const size_t skip : {0, 1}) {
            const auto a = normal<T>(n, 1), b = normal<T>(n, 2);
            std::vector<T> want;
            for (int64_t i = 0; i < n; ++i) want.push_back(T(float(a[i]) + float(b[i])));
            DeviceRows<T> dev_a(a, skip), dev_b(b, skip), over_a(a, skip), over_b(b, skip),
                sum(a, skip), y(n, skip);
            ASSERT_TRUE(ok(cuda::add(y.data(), dev_a.data(), dev_b.data(), n, {})));
            ASSERT_TRUE(ok(cuda::add(over_a.data(), over_a.data(), dev_b.data(), n, {})));
            ASSERT_TRUE(ok(cuda::add(over_b.data(), dev_a.data(), over_b.data(), n, {})));
            ASSERT_TRUE(ok(cuda::add_accum(sum.data(), dev_b.data(), n, {})));
            for (const auto* got : {&y, &over_a, &over_b, &sum})
                EXPECT_TRUE(same_bits(got->host(), want)) << n << " skip " << skip;
        }
}
TEST_P(Elementwise, AddsDoubles) {
    for (const int64_t n : kSizes) {
        const auto a = normal<double>(n, 1), b = normal<double>(n, 2);
        std::vector<double> want;
        for (int64_t i = 0; i < n; ++i) want.push_back(a[i] / 3 + b[i] / 7);
        std::vector<double> third = a, seventh = b;
        for (double& x : third) x /= 3;
        for (double& x : seventh) x /= 7;
        DeviceArray<double> sum(third), more(seventh);
        ASSERT_TRUE(ok(cuda::add_accum(sum.data(), more.data(), n, {})));
        EXPECT_TRUE(same_bits(sum.host(), want)) << n;
    }
}
TEST_P(Elementwise, Adds) {
    expect_sums<float>();
    expect_sums<bf16>();
}

// Against tensor-independent rounding: the nearest T, ties to even, infinities and NaN kept.
template <class T>
void expect_casts() {
    for (const int64_t n : kSizes)
        for (const size_t skip : {0, 1}) {
            auto x = normal<float>(n, 1);
            const float special[] = {INFINITY, -INFINITY, -0.f, 1 + 0x1p-8f, 1 + 0x3p-8f, 3.4e38f};
            for (int64_t i = 0; i < std::min<int64_t>(n, std::size(special)); ++i)
                x[i] = special[i];
            DeviceRows<float> dev_x(x, skip);
            DeviceRows<T> y(n, skip);
            ASSERT_TRUE(ok(cuda::cast(y.data(), dev_x.data(), n, {})));
            EXPECT_TRUE(same_bits(y.host(), cast<T>(x))) << n << " skip " << skip;
            DeviceRows<float> back(n, skip);
            ASSERT_TRUE(ok(cuda::widen(back.data(), y.data(), n, {})));
            EXPECT_TRUE(same_bits(back.host(), cast<float>(cast<T>(x)))) << n << " skip " << skip;
        }
    DeviceRows<float> nan(std::vector<float>{std::nanf("")});
    DeviceRows<T> y(1);
    ASSERT_TRUE(ok(cuda::cast(y.data(), nan.data(), 1, {})));
    EXPECT_TRUE(std::isnan(wide(y.host()[0])));
}
TEST_P(Elementwise, Casts) {
    expect_casts<float>();
    expect_casts<bf16>();
}

// From both sides: what is joined, and its parting again.
template <class T>
void expect_columns() {
    struct Widths {
        int64_t N, Da, Db;
    };
    for (const auto [N, Da, Db] :
         {Widths{1, 1, 1}, {3, 17, 1}, {37, 8, 16}, {5, 3, 1601}, {9, 512, 1032}, {300, 8, 7}})
        for (const size_t skip : {0, 1}) {
            const auto a = normal<T>(N * Da, 1), b = normal<T>(N * Db, 2);
            std::vector<T> want;
            for (int64_t n = 0; n < N; ++n) {
                want.insert(want.end(), a.begin() + n * Da, a.begin() + (n + 1) * Da);
                want.insert(want.end(), b.begin() + n * Db, b.begin() + (n + 1) * Db);
            }
            DeviceRows<T> dev_a(a, skip), dev_b(b, skip), y(want.size(), skip),
                a_again(a.size(), skip), b_again(b.size(), skip);
            ASSERT_TRUE(
                ok(cuda::concat_columns(y.data(), dev_a.data(), dev_b.data(), N, Da, Db, {})));
            EXPECT_TRUE(same_bits(y.host(), want)) << N << " x " << Da << " + " << Db;
            ASSERT_TRUE(
                ok(cuda::split_columns(a_again.data(), b_again.data(), y.data(), N, Da, Db, {})));
            EXPECT_TRUE(same_bits(a_again.host(), a)) << N << " x " << Da << " + " << Db;
            EXPECT_TRUE(same_bits(b_again.host(), b)) << N << " x " << Da << " + " << Db;
        }
}
TEST_P(Elementwise, ColumnsJoinAndPart) {
    expect_columns<float>();
    expect_columns<bf16>();
}

TEST_P(Elementwise, NothingToDoAndBadSizes) {
    DeviceRows<float> one(std::vector<float>{7});
    float* const v = one.data();
    EXPECT_TRUE(ok(cuda::add(v, v, v, 0, {})));
    EXPECT_TRUE(ok(cuda::add_accum(v, v, 0, {})));
    EXPECT_TRUE(ok(cuda::cast(v, v, 0, {})));
    EXPECT_TRUE(ok(cuda::concat_columns(v, v, v, 0, 1, 1, {})));
    EXPECT_TRUE(ok(cuda::split_columns(v, v, v, 0, 1, 1, {})));
    EXPECT_EQ(one.host(), std::vector<float>{7});
    EXPECT_EQ(cuda::add(v, v, v, -1, {}).code, kernels::Code::bad_argument);
    EXPECT_EQ(cuda::add_accum(v, v, -1, {}).code, kernels::Code::bad_argument);
    EXPECT_EQ(cuda::cast(v, v, -1, {}).code, kernels::Code::bad_argument);
    EXPECT_EQ(cuda::widen(v, v, -1, {}).code, kernels::Code::bad_argument);
    EXPECT_EQ(cuda::concat_columns(v, v, v, 1, 0, 1, {}).code, kernels::Code::bad_argument);
    EXPECT_EQ(cuda::split_columns(v, v, v, 1, 1, 0, {}).code, kernels::Code::bad_argument);
}

INSTANTIATE_TEST_SUITE_P(Device, Elementwise, testing::ValuesIn(kSchedules), schedule_name);

}  // namespace
}  // namespace fbt::tests
