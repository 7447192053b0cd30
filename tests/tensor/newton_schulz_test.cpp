#include "tensor/newton_schulz.h"

#include "tests/tensor/newton_schulz_cases.h"

namespace fbt::tests {
namespace {

// The polynomial's own promise, on a fine geometric grid of singular values.
TEST(NewtonSchulz, FiveIterationsBringSingularValuesNearOne) {
    const int points = 100000;
    for (int i = 0; i <= points; ++i) {
        const double s = std::pow(0.002, double(i) / points), t = five_iterations(s);
        ASSERT_GT(t, 0.68) << s;
        ASSERT_LT(t, s < 0.01 ? 1.21 : 1.14) << s;
    }
}

TEST(NewtonSchulz, MatchesTheSingularValueDecomposition) {
    tensor::Context ref("ref"), cpu("cpu", 2);
    for (const Size size : kSmall) {
        check_newton_schulz<double>(ref, size);
        check_newton_schulz<float>(ref, size);
        check_newton_schulz<float>(cpu, size);
    }
    for (const Size size : {Size{64, 40}, Size{37, 67}, Size{33, 33}})
        check_newton_schulz<double>(ref, size);
}

TEST(NewtonSchulz, ZeroStaysZeroAndNanShows) {
    tensor::Context cpu("cpu", 1);
    const auto zero = tensor::Tensor::zeros(cpu, {3, 5}, tensor::DType::f32);
    EXPECT_EQ(tensor::newton_schulz(zero, tensor::DType::f32).to_double(),
              std::vector<double>(15, 0));
    std::vector<float> values(15, 1.f);
    values[7] = NAN;
    const auto bad = tensor::Tensor::from(cpu, values, {3, 5});
    for (double x : tensor::newton_schulz(bad, tensor::DType::f32).to_double())
        EXPECT_TRUE(std::isnan(x));
    EXPECT_THROW(tensor::newton_schulz(zero.view({15}), tensor::DType::f32), tensor::Error);
}

}  // namespace
}  // namespace fbt::tests
