// kernels/gate.cu against the plain loops in double, on the same (rounded) inputs.
#include "kernels/gate.h"

#include "tests/cuda/rows.h"

namespace fbt::tests {
namespace {

namespace cuda = kernels::cuda;
namespace ref = kernels::ref;
using kernels::bf16;

struct Shape {
    int64_t N;
    int C;
};
// C = 1 is elementwise; otherwise 1 to 32 lanes have a row, some of them several packs.
const Shape kShapes[] = {{1, 1},   {4097, 1}, {3, 2},   {37, 8},  {67, 37},
                         {19, 96}, {5, 128},  {3, 256}, {2, 1601}};

class Gate : public ScheduleTest {};

// sigmoid: exp is within 2 units of the last place, 4 roundings, the sum and the quotient are 2
// more; then a product.
template <class T>
void expect_forward(Shape shape) {
    const auto [N, C] = shape;
    const auto x = normal<T>(N * C, 1), g = normal<T>(N, 2, 3);
    std::vector<double> want(N * C);
    ASSERT_TRUE(ok(
        ref::gate_forward(want.data(), cast<double>(x).data(), cast<double>(g).data(), N, C, {})));
    DeviceRows<T> dev_x(x), dev_g(g), y(N * C);
    ASSERT_TRUE(ok(cuda::gate_forward(y.data(), dev_x.data(), dev_g.data(), N, C, {})));
    EXPECT_TRUE(close_stored(y.host(), want, 0, gamma<float>(7))) << N << " x " << C;
    for (const size_t skip : {0, 1}) {  // y may be x; aligned or not
        DeviceRows<T> in(x, skip), gates(g, skip);
        ASSERT_TRUE(ok(cuda::gate_forward(in.data(), in.data(), gates.data(), N, C, {})));
        EXPECT_TRUE(same_bits(in.host(), y.host())) << N << " x " << C << " skip " << skip;
    }
}
TEST_P(Gate, ForwardMatchesPlainLoops) {
    for (const Shape shape : kShapes) {
        expect_forward<float>(shape);
        expect_forward<bf16>(shape);
    }
}

// dx as above. dg: the sum of C products is off by gamma(C) of the sum of their sizes S; s by 6
// roundings, 1 - s by 7, two products: all within gamma(C + 15) S, because s and 1 - s are at
// most 1.
template <class T>
void expect_backward(Shape shape) {
    const auto [N, C] = shape;
    const auto x = normal<T>(N * C, 1), dy = normal<T>(N * C, 3), g = normal<T>(N, 2, 3);
    std::vector<double> want_dx(N * C), want_dg(N);
    ASSERT_TRUE(ok(ref::gate_backward(want_dx.data(), want_dg.data(), cast<double>(dy).data(),
                                      cast<double>(x).data(), cast<double>(g).data(), N, C, {})));
    double size = 0;
    for (int64_t n = 0; n < N; ++n) {
        double sum = 0;
        for (int c = 0; c < C; ++c) sum += std::abs(wide(dy[n * C + c]) * wide(x[n * C + c]));
        size = std::max(size, sum);
    }
    DeviceRows<T> dev_x(x), dev_dy(dy), dev_g(g), dx(N * C), dg(N);
    ASSERT_TRUE(ok(cuda::gate_backward(dx.data(), dg.data(), dev_dy.data(), dev_x.data(),
                                       dev_g.data(), N, C, {})));
    EXPECT_TRUE(close_stored(dx.host(), want_dx, 0, gamma<float>(7))) << N << " x " << C;
    EXPECT_TRUE(close_stored(dg.host(), want_dg, gamma<float>(C + 15) * size)) << N << " x " << C;
    for (const size_t skip : {0, 1}) {  // dx may be dy; aligned or not
        DeviceRows<T> in(dy, skip), xs(x, skip), gates(g, skip), dgates(N, skip);
        ASSERT_TRUE(ok(cuda::gate_backward(in.data(), dgates.data(), in.data(), xs.data(),
                                           gates.data(), N, C, {})));
        EXPECT_TRUE(same_bits(in.host(), dx.host())) << N << " x " << C << " skip " << skip;
        EXPECT_TRUE(same_bits(dgates.host(), dg.host())) << N << " x " << C << " skip " << skip;
    }
}
TEST_P(Gate, BackwardMatchesPlainLoops) {
    for (const Shape shape : kShapes) {
        expect_backward<float>(shape);
        expect_backward<bf16>(shape);
    }
}

// The row rule: alone or among others, a row has the same bits.
template <class T>
void expect_rows_apart(int C) {
    const int64_t N = 37;
    const auto x = normal<T>(N * C, 1), dy = normal<T>(N * C, 3), g = normal<T>(N, 2);
    DeviceRows<T> dev_x(x), dev_dy(dy), dev_g(g), y(N * C), dx(N * C), dg(N), row(C), one(1);
    ASSERT_TRUE(ok(cuda::gate_forward(y.data(), dev_x.data(), dev_g.data(), N, C, {})));
    ASSERT_TRUE(ok(cuda::gate_backward(dx.data(), dg.data(), dev_dy.data(), dev_x.data(),
                                       dev_g.data(), N, C, {})));
    for (int64_t n : {int64_t(0), int64_t(5), N - 1}) {
        ASSERT_TRUE(
            ok(cuda::gate_forward(row.data(), dev_x.data() + n * C, dev_g.data() + n, 1, C, {})));
        EXPECT_TRUE(same_bits(row.host(), row_of(y.host(), n, C))) << C;
        ASSERT_TRUE(ok(cuda::gate_backward(row.data(), one.data(), dev_dy.data() + n * C,
                                           dev_x.data() + n * C, dev_g.data() + n, 1, C, {})));
        EXPECT_TRUE(same_bits(row.host(), row_of(dx.host(), n, C))) << C;
        EXPECT_TRUE(same_bits(one.host(), row_of(dg.host(), n, 1))) << C;
    }
}
TEST_P(Gate, RowsDoNotDependOnOtherRows) {
    for (const int C : {1, 37, 96, 1601}) {
        expect_rows_apart<float>(C);
        expect_rows_apart<bf16>(C);
    }
}

TEST_P(Gate, NoRowsIsNoWork) {
    DeviceRows<float> one(std::vector<float>{7});
    float* const v = one.data();
    EXPECT_TRUE(ok(cuda::gate_forward(v, v, v, 0, 1, {})));
    EXPECT_TRUE(ok(cuda::gate_backward(v, v, v, v, v, 0, 3, {})));
    EXPECT_EQ(one.host(), std::vector<float>{7});
    EXPECT_EQ(cuda::gate_forward(v, v, v, 1, 0, {}).code, kernels::Code::bad_argument);
    EXPECT_EQ(cuda::gate_backward(v, v, v, v, v, -1, 1, {}).code, kernels::Code::bad_argument);
}

INSTANTIATE_TEST_SUITE_P(Device, Gate, testing::ValuesIn(kSchedules), schedule_name);

}  // namespace
}  // namespace fbt::tests
