// kernels/matmul.cu, emulated, against the plain loops in double.
#include "kernels/matmul.h"

#include <algorithm>

#include "tests/compare.h"
#include "tests/cuda/device.h"

namespace fbt::tests {
namespace {

namespace cuda = kernels::cuda;
namespace ref = kernels::ref;

struct Shape {
    int64_t M, N, K;
};
// On both sides of the tiles' 16, 32 and 64.
const Shape kShapes[] = {{1, 1, 1},    {3, 37, 5},   {16, 64, 32}, {17, 65, 33},
                         {65, 3, 129}, {1, 70, 401}, {70, 130, 64}};

std::vector<double> magnitudes(const std::vector<float>& v) {
    std::vector<double> out(v.size());
    std::transform(v.begin(), v.end(), out.begin(), [](float x) { return std::abs(double(x)); });
    return out;
}

// y = x w^T in double, w as matmul_pack takes it.
std::vector<double> product(const std::vector<double>& x, const std::vector<double>& w, Shape s,
                            bool transposed) {
    std::vector<double> packed(ref::matmul_packed_size<double>(s.N, s.K)), y(s.M * s.N);
    EXPECT_TRUE(ok(ref::matmul_pack<double>(packed.data(), w.data(), s.N, s.K, transposed, {})));
    EXPECT_TRUE(
        ok(ref::matmul_forward<double>(y.data(), x.data(), packed.data(), s.M, s.N, s.K, {})));
    return y;
}

class Weights {
  public:
    Weights(const std::vector<float>& w, int64_t N, int64_t K, bool transposed)
        : packed_(cuda::matmul_packed_size<float>(N, K)) {
        DeviceArray<float> dev_w(w);
        EXPECT_TRUE(
            ok(cuda::matmul_pack<float>(packed_.data(), dev_w.data(), N, K, transposed, {})));
    }
    const float* data() { return packed_.data(); }

  private:
    DeviceArray<float> packed_;
};

class Matmul : public ScheduleTest {};

// K fused multiply-adds in a chain: gamma(K) of sum_k |x||w|.
TEST_P(Matmul, ForwardMatchesPlainLoops) {
    for (const Shape s : kShapes)
        for (const bool transposed : {false, true}) {
            const auto x = normal<float>(s.M * s.K, 1), w = normal<float>(s.N * s.K, 2);
            const auto want = product(cast<double>(x), cast<double>(w), s, transposed),
                       size = product(magnitudes(x), magnitudes(w), s, transposed);
            Weights packed(w, s.N, s.K, transposed);
            DeviceArray<float> dev_x(x), dev_y(s.M * s.N);
            ASSERT_TRUE(ok(cuda::matmul_forward<float>(dev_y.data(), dev_x.data(), packed.data(),
                                                       s.M, s.N, s.K, {})));
            EXPECT_TRUE(
                close(dev_y.host(), want,
                      gamma<float>(double(s.K)) * *std::max_element(size.begin(), size.end())))
                << s.M << " x " << s.N << " x " << s.K << (transposed ? " transposed" : "");
        }
}

// M products in a chain, and the addition to what is there.
TEST_P(Matmul, WeightGradientMatchesPlainLoops) {
    for (const Shape s : kShapes) {
        const auto dy = normal<float>(s.M * s.N, 1), x = normal<float>(s.M * s.K, 2),
                   start = normal<float>(s.N * s.K, 3);
        auto want = cast<double>(start), size = magnitudes(start);
        ASSERT_TRUE(ok(ref::matmul_dw_accum<double>(want.data(), cast<double>(dy).data(),
                                                    cast<double>(x).data(), s.M, s.N, s.K, {})));
        ASSERT_TRUE(ok(ref::matmul_dw_accum<double>(size.data(), magnitudes(dy).data(),
                                                    magnitudes(x).data(), s.M, s.N, s.K, {})));
        DeviceArray<float> dev_dw(start), dev_dy(dy), dev_x(x);
        ASSERT_TRUE(ok(cuda::matmul_dw_accum<float>(dev_dw.data(), dev_dy.data(), dev_x.data(), s.M,
                                                    s.N, s.K, {})));
        EXPECT_TRUE(
            close(dev_dw.host(), want,
                  gamma<float>(double(s.M + 1)) * *std::max_element(size.begin(), size.end())))
            << s.M << " x " << s.N << " x " << s.K;
    }
}

// The row rule: alone (the short tile), among a few and among many, a row has the same bits.
TEST_P(Matmul, RowsDoNotDependOnOtherRows) {
    const int64_t M = 70, N = 67, K = 261;
    const auto x = normal<float>(M * K, 1), w = normal<float>(N * K, 2);
    Weights packed(w, N, K, false);
    DeviceArray<float> dev_x(x), dev_y(M * N);
    ASSERT_TRUE(
        ok(cuda::matmul_forward<float>(dev_y.data(), dev_x.data(), packed.data(), M, N, K, {})));
    const auto y = dev_y.host();
    for (const int64_t rows : {1, 3, 16, 17, 37})
        for (const int64_t first : {int64_t(0), int64_t(5), M - rows}) {
            DeviceArray<float> few(rows * N);
            ASSERT_TRUE(ok(cuda::matmul_forward<float>(few.data(), dev_x.data() + first * K,
                                                       packed.data(), rows, N, K, {})));
            EXPECT_TRUE(same_bits(few.host(), std::vector<float>(y.begin() + first * N,
                                                                 y.begin() + (first + rows) * N)))
                << rows << " rows from " << first;
        }
}

INSTANTIATE_TEST_SUITE_P(Simt, Matmul, testing::ValuesIn(kSchedules), schedule_name);

TEST(MatmulGrid, NoRowsIsNoWork) {
    DeviceArray<float> one(std::vector<float>{7});
    EXPECT_TRUE(ok(cuda::matmul_forward<float>(one.data(), one.data(), one.data(), 0, 1, 1, {})));
    EXPECT_TRUE(ok(cuda::matmul_dw_accum<float>(one.data(), one.data(), one.data(), 0, 1, 1, {})));
    EXPECT_EQ(one.host(), std::vector<float>{7});
    EXPECT_EQ(cuda::matmul_forward<float>(one.data(), one.data(), one.data(), 1, 1, 0, {}).code,
              kernels::Code::bad_argument);
}

// What the hardware would refuse, the emulator refuses too, and the status says so.
TEST(MatmulGrid, AnImpossibleGridIsADeviceError) {
    DeviceArray<float> one(std::vector<float>{7});
    const int64_t N = int64_t(65536) * 64;  // one tile of columns more than gridDim.y allows
    const kernels::Status status =
        cuda::matmul_forward<float>(one.data(), one.data(), one.data(), 1, N, 1, {});
    EXPECT_EQ(status.code, kernels::Code::device_error);
    EXPECT_STREQ(status.message, "invalid launch configuration");
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);  // reported once
}

}  // namespace
}  // namespace fbt::tests
