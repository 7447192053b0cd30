// The products through cuBLASLt: against the plain loops where there is a GPU; the emulator has no
// such library and says so.
#include <algorithm>

#include "kernels/matmul.h"
#include "tests/compare.h"
#include "tests/cuda/device.h"

namespace fbt::tests {
namespace {

namespace cuda = kernels::cuda;
namespace ref = kernels::ref;
using kernels::bf16;
using kernels::Code;

class MatmulFast : public ScheduleTest {};

#ifdef FBT_SIMT

TEST_P(MatmulFast, TheEmulatorHasNoLibrary) {
    cuda::MatmulFast* fast;
    const kernels::Status status = cuda::matmul_fast_create(&fast);
    EXPECT_EQ(status.code, Code::unsupported);
    EXPECT_NE(std::string(status.message).find("cuBLASLt"), std::string::npos);
    EXPECT_EQ(fast, nullptr);
    float one = 7;
    EXPECT_EQ(cuda::matmul_forward_fast<float>(fast, &one, &one, &one, 1, 1, 1, {}).code,
              Code::unsupported);
    EXPECT_EQ(cuda::matmul_dw_accum_fast<float>(fast, &one, &one, &one, 1, 1, 1, {}).code,
              Code::unsupported);
    EXPECT_EQ(one, 7);
    cuda::matmul_fast_destroy(fast);
}

#else

// Any order of f32 sums of n products: gamma(n) of sum |a b|; twice that where a tensor core may
// truncate additions.
template <class T>
double sum_error(double n) {
    return std::is_same_v<T, bf16> ? gamma<float>(2 * (n + n / 16 + 1)) : gamma<float>(n);
}

template <class T>
void expect_products(cuda::MatmulFast* fast, int64_t M, int64_t N, int64_t K) {
    const auto x = normal<T>(M * K, 1), dy = normal<T>(M * N, 2);
    const auto w = normal<float>(N * K, 3), start = normal<float>(N * K, 4);
    const auto magnitudes = [](const auto& v) {
        std::vector<double> out;
        for (const auto e : v) out.push_back(std::abs(wide(e)));
        return out;
    };
    const auto largest = [](const auto& v) { return *std::max_element(v.begin(), v.end()); };
    const std::string name =
        std::to_string(M) + " x " + std::to_string(N) + " x " + std::to_string(K);
    DeviceArray<T> dev_x(x), dev_dy(dy), dev_y(M * N), packed(cuda::matmul_packed_size<T>(N, K));
    DeviceArray<float> dev_w(w), dev_dw(start);

    std::vector<double> y(M * N), y_size(M * N);
    const auto rounded = cast<T>(w);
    ASSERT_TRUE(ok(ref::matmul_forward<double>(y.data(), cast<double>(x).data(),
                                               cast<double>(rounded).data(), M, N, K, {})));
    ASSERT_TRUE(ok(ref::matmul_forward<double>(y_size.data(), magnitudes(x).data(),
                                               magnitudes(rounded).data(), M, N, K, {})));
    ASSERT_TRUE(ok(cuda::matmul_pack<T>(packed.data(), dev_w.data(), N, K, false, {})));
    const double store = std::is_same_v<T, bf16> ? unit_roundoff<bf16>() : 0;
    for (int call = 0; call < 2; ++call) {  // the second finds its algorithm
        ASSERT_TRUE(ok(cuda::matmul_forward_fast<T>(fast, dev_y.data(), dev_x.data(), packed.data(),
                                                    M, N, K, {})));
        EXPECT_TRUE(
            close(dev_y.host(), y, sum_error<T>(double(K)) * largest(y_size) * (1 + store), store))
            << name;
    }

    auto dw = cast<double>(start), dw_size = magnitudes(start);
    ASSERT_TRUE(ok(ref::matmul_dw_accum<double>(dw.data(), cast<double>(dy).data(),
                                                cast<double>(x).data(), M, N, K, {})));
    ASSERT_TRUE(ok(ref::matmul_dw_accum<double>(dw_size.data(), magnitudes(dy).data(),
                                                magnitudes(x).data(), M, N, K, {})));
    ASSERT_TRUE(ok(cuda::matmul_dw_accum_fast<T>(fast, dev_dw.data(), dev_dy.data(), dev_x.data(),
                                                 M, N, K, {})));
    EXPECT_TRUE(close(dev_dw.host(), dw, sum_error<T>(double(M + 1)) * largest(dw_size))) << name;
}

TEST_P(MatmulFast, MatchesPlainLoops) {
    cuda::MatmulFast* fast = nullptr;
    ASSERT_TRUE(ok(cuda::matmul_fast_create(&fast)));
    const int64_t shapes[][3] = {
        {1, 1, 1}, {3, 37, 5}, {64, 64, 64}, {130, 129, 250}, {256, 136, 264}};
    for (const auto& [M, N, K] : shapes) {
        expect_products<float>(fast, M, N, K);
        expect_products<bf16>(fast, M, N, K);
    }
    float* none = nullptr;
    EXPECT_TRUE(ok(cuda::matmul_forward_fast<float>(fast, none, none, none, 0, 1, 1, {})));
    EXPECT_TRUE(ok(cuda::matmul_dw_accum_fast<float>(fast, none, none, none, 0, 1, 1, {})));
    EXPECT_EQ(cuda::matmul_forward_fast<float>(fast, none, none, none, 1, 1, 0, {}).code,
              Code::bad_argument);
    EXPECT_EQ(cuda::matmul_dw_accum_fast<float>(fast, none, none, none, -1, 1, 1, {}).code,
              Code::bad_argument);
    cuda::matmul_fast_destroy(fast);
}

#endif

INSTANTIATE_TEST_SUITE_P(Device, MatmulFast, testing::Values(kSchedules[0]), schedule_name);

}  // namespace
}  // namespace fbt::tests
