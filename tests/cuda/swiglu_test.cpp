// kernels/swiglu.cu against the plain loops in double, on the same (rounded) inputs.
#include "kernels/swiglu.h"

#include "tests/cuda/rows.h"

namespace fbt::tests {
namespace {

namespace cuda = kernels::cuda;
namespace ref = kernels::ref;
using kernels::bf16;

// Around a pack and a block of threads.
const int64_t kSizes[] = {1, 3, 7, 8, 37, 1601, 4096, 4097};

class SwiGlu : public ScheduleTest {};

// Gates from the range where sigmoid bends to where it has long been 0 or 1.
template <class T>
std::vector<T> gates(int64_t n) {
    auto a = normal<T>(n, 1, 3);
    const float far[] = {30.f, -30.f, 87.f, -87.f, 0.f};
    for (int64_t i = 5; i < std::min<int64_t>(n, 10); ++i) a[i] = T(far[i - 5]);
    return a;
}

// exp is within 2 units of the last place, 4 roundings; the sum, the quotient and two products are
// 4 more. Below a = -87 sigmoid is less than 2^-125 and may be 0.
template <class T>
void expect_forward() {
    for (const int64_t n : kSizes) {
        const auto a = gates<T>(n), u = normal<T>(n, 2);
        std::vector<double> want(n);
        ASSERT_TRUE(ok(ref::swiglu_forward(want.data(), cast<double>(a).data(),
                                           cast<double>(u).data(), n, {})));
        DeviceRows<T> gate(a), up(u), y(n);
        ASSERT_TRUE(ok(cuda::swiglu_forward(y.data(), gate.data(), up.data(), n, {})));
        EXPECT_TRUE(close_stored(y.host(), want, 0x1p-110, gamma<float>(8))) << n;
        for (const size_t skip : {0, 1}) {  // y may be either input; alignment changes nothing
            DeviceRows<T> gate_in(a, skip), up_in(u, skip);
            ASSERT_TRUE(ok(cuda::swiglu_forward(gate_in.data(), gate_in.data(), up.data(), n, {})));
            ASSERT_TRUE(ok(cuda::swiglu_forward(up_in.data(), gate.data(), up_in.data(), n, {})));
            EXPECT_TRUE(same_bits(gate_in.host(), y.host())) << n << " skip " << skip;
            EXPECT_TRUE(same_bits(up_in.host(), y.host())) << n << " skip " << skip;
        }
    }
}
TEST_P(SwiGlu, ForwardMatchesPlainLoops) {
    expect_forward<float>();
    expect_forward<bf16>();
}

// With s off by 6 roundings as above: dup has 2 products more. In dgate 1 - s is off by 7 roundings
// of 1, so the bracket, of size at most 1 + |a|, by 2 + 9|a|, and d*u*s by 9.
template <class T>
void expect_backward() {
    for (const int64_t n : kSizes) {
        const auto d = normal<T>(n, 3), a = gates<T>(n), u = normal<T>(n, 2);
        std::vector<double> want_gate(n), want_up(n);
        ASSERT_TRUE(
            ok(ref::swiglu_backward(want_gate.data(), want_up.data(), cast<double>(d).data(),
                                    cast<double>(a).data(), cast<double>(u).data(), n, {})));
        double size = 0;
        for (int64_t i = 0; i < n; ++i)
            size = std::max(size,
                            std::abs(wide(d[i]) * wide(u[i])) * (11 + 18 * std::abs(wide(a[i]))));
        DeviceRows<T> dy(d), gate(a), up(u), dgate(n), dup(n);
        ASSERT_TRUE(ok(cuda::swiglu_backward(dgate.data(), dup.data(), dy.data(), gate.data(),
                                             up.data(), n, {})));
        EXPECT_TRUE(close_stored(dgate.host(), want_gate, gamma<float>(1) * size)) << n;
        EXPECT_TRUE(close_stored(dup.host(), want_up, 0x1p-110, gamma<float>(8))) << n;
        for (const size_t skip : {0, 1}) {
            // dgate may be dy and dup up, or dgate gate and dup dy; alignment changes nothing.
            DeviceRows<T> dy_in(d, skip), up_in(u, skip), gate_in(a, skip), other_dy(d, skip);
            ASSERT_TRUE(ok(cuda::swiglu_backward(dy_in.data(), up_in.data(), dy_in.data(),
                                                 gate.data(), up_in.data(), n, {})));
            ASSERT_TRUE(ok(cuda::swiglu_backward(gate_in.data(), other_dy.data(), other_dy.data(),
                                                 gate_in.data(), up.data(), n, {})));
            for (const auto* got : {&dy_in, &gate_in})
                EXPECT_TRUE(same_bits(got->host(), dgate.host())) << n << " skip " << skip;
            for (const auto* got : {&up_in, &other_dy})
                EXPECT_TRUE(same_bits(got->host(), dup.host())) << n << " skip " << skip;
        }
    }
}
TEST_P(SwiGlu, BackwardMatchesPlainLoops) {
    expect_backward<float>();
    expect_backward<bf16>();
}

TEST_P(SwiGlu, NothingToDoAndBadSizes) {
    DeviceRows<float> one(std::vector<float>{7});
    float* const v = one.data();
    EXPECT_TRUE(ok(cuda::swiglu_forward(v, v, v, 0, {})));
    EXPECT_TRUE(ok(cuda::swiglu_backward(v, v, v, v, v, 0, {})));
    EXPECT_EQ(one.host(), std::vector<float>{7});
    EXPECT_EQ(cuda::swiglu_forward(v, v, v, -1, {}).code, kernels::Code::bad_argument);
    EXPECT_EQ(cuda::swiglu_backward(v, v, v, v, v, -1, {}).code, kernels::Code::bad_argument);
}

INSTANTIATE_TEST_SUITE_P(Device, SwiGlu, testing::ValuesIn(kSchedules), schedule_name);

}  // namespace
}  // namespace fbt::tests
