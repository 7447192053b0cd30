// The device layer on the emulated GPU: a context with its stream and arena, tensors in device
// memory, and three ops dispatched to their CUDA kernels, against the ref backend.
#include <gtest/gtest.h>

#include "tensor/ops.h"
#include "tests/compare.h"

namespace fbt::tests {
namespace {

using tensor::Context;
using tensor::DType;
using tensor::Tensor;

class SimtTensors : public testing::Test {
  protected:
    Context simt{"simt"}, ref{"ref"};
    Tensor random(Context& c, tensor::Shape shape, unsigned seed) {
        return Tensor::from(c, normal<float>(tensor::numel_of(shape), seed), shape);
    }
};

TEST_F(SimtTensors, MemoryRoundTrip) {
    EXPECT_EQ(simt.backend(), tensor::Backend::cuda);
    EXPECT_NE(simt.stream().handle, nullptr);
    const Tensor t = random(simt, {5, 3}, 1);
    EXPECT_TRUE(same_bits(t.to_vector<float>(), normal<float>(15, 1)));
    EXPECT_EQ(Tensor::zeros(simt, {7}, DType::f32).to_vector<float>(), std::vector<float>(7, 0));
    Tensor copy = Tensor::empty(simt, {2, 3}, DType::f32);
    copy.copy_from(t.rows(3, 2));
    EXPECT_TRUE(same_bits(copy.to_vector<float>(), t.rows(3, 2).to_vector<float>()));
    EXPECT_GT(simt.arena()->in_use(), 0u);
}

TEST_F(SimtTensors, Matmul) {
    const int M = 37, N = 5, K = 67;
    const auto product = [&](Context& c) {
        tensor::PackedMatrix w;
        tensor::matmul_pack(w, random(c, {N, K}, 2), false);
        return tensor::matmul_forward(random(c, {M, K}, 1), w).to_vector<float>();
    };
    // Both sum K products of standard normal numbers: |a||b| summed is below 2K.
    EXPECT_TRUE(close(product(simt), product(ref), 2 * 2 * K * gamma<float>(K)));
}

TEST_F(SimtTensors, RmsNorm) {
    const int N = 9, D = 101;
    const auto normed = [&](Context& c) {
        Tensor y = Tensor::empty(c, {N, D}, DType::f32), rstd = Tensor::empty(c, {N}, DType::f32);
        tensor::rmsnorm_forward(y, rstd, random(c, {N, D}, 1), random(c, {D}, 2), 1e-6);
        return y.to_vector<float>();
    };
    EXPECT_TRUE(close(normed(simt), normed(ref), 1e-6, 2 * gamma<float>(D)));
}

TEST_F(SimtTensors, CarryWithJitter) {
    const int R = 3, D = 33;
    const auto carried = [&](Context& c) {
        tensor::CarryNoise noise;
        noise.half_width = 0.25;
        noise.key = kernels::philox_key(7, kernels::Draw::jitter, 1, 2);
        noise.sequence = Tensor::from(c, std::vector<int64_t>{4, 4, int64_t(1) << 40}, {R});
        noise.position = Tensor::from(c, std::vector<int32_t>{0, 8, 1000}, {R});
        return tensor::carry_forward(random(c, {4, D}, 1), random(c, {2, D}, 2),
                                     Tensor::from(c, std::vector<int64_t>{-1, 1, -4}, {R}), noise)
            .to_vector<float>();
    };
    EXPECT_TRUE(close(carried(simt), carried(ref), 1e-6));
}

TEST_F(SimtTensors, AnOpWithoutKernelSaysSo) {
    const Tensor x = random(simt, {4}, 1);
    try {
        tensor::swiglu_forward(x, x);
        ADD_FAILURE() << "nothing was thrown";
    } catch (const tensor::Error& e) {
        EXPECT_EQ(e.kind(), tensor::ErrorKind::usage);
        EXPECT_NE(std::string(e.what()).find("has no CUDA kernel"), std::string::npos) << e.what();
    }
}

}  // namespace
}  // namespace fbt::tests
