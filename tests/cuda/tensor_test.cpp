// The device layer: a context with its streams and arena, tensors in device memory, a few ops
// dispatched to their CUDA kernels, against the ref backend; recordings.
#include <numeric>

#include "tensor/graph.h"
#include "tensor/ops.h"
#include "tests/compare.h"
#include "tests/cuda/device.h"
#ifdef FBT_SIMT
#include "kernels/gpu.h"
#endif

namespace fbt::tests {
namespace {

using tensor::Context;
using tensor::DType;
using tensor::Tensor;

class CudaTensors : public testing::Test {
  protected:
    void SetUp() override {
        skip_without_device();
        if (!IsSkipped()) device.emplace(kDevice);
    }
    std::optional<Context> device;
    Context ref{"ref"};
    Tensor random(Context& c, tensor::Shape shape, unsigned seed) {
        return Tensor::from(c, normal<float>(tensor::numel_of(shape), seed), shape);
    }
};

TEST_F(CudaTensors, MemoryRoundTrip) {
    EXPECT_EQ(device->backend(), tensor::Backend::cuda);
    EXPECT_NE(device->stream().handle, nullptr);
    const Tensor t = random(*device, {5, 3}, 1);
    EXPECT_TRUE(same_bits(t.to_vector<float>(), normal<float>(15, 1)));
    EXPECT_EQ(Tensor::zeros(*device, {7}, DType::f32).to_vector<float>(), std::vector<float>(7, 0));
    Tensor copy = Tensor::empty(*device, {2, 3}, DType::f32);
    copy.copy_from(t.rows(3, 2));
    EXPECT_TRUE(same_bits(copy.to_vector<float>(), t.rows(3, 2).to_vector<float>()));
    EXPECT_GT(device->arena()->in_use(), 0u);
}

TEST_F(CudaTensors, Matmul) {
    const int M = 37, N = 5, K = 67;
    const auto product = [&](Context& c) {
        tensor::PackedMatrix w;
        tensor::matmul_pack(w, random(c, {N, K}, 2), false, DType::f32);
        return tensor::matmul_forward(random(c, {M, K}, 1), w).to_vector<float>();
    };
    // Both sum K products of standard normal numbers: |a||b| summed is below 2K.
    EXPECT_TRUE(close(product(*device), product(ref), 2 * 2 * K * gamma<float>(K)));
}

TEST_F(CudaTensors, RmsNorm) {
    const int N = 9, D = 101;
    const auto normed = [&](Context& c) {
        Tensor y = Tensor::empty(c, {N, D}, DType::f32), rstd = Tensor::empty(c, {N}, DType::f32);
        tensor::rmsnorm_forward(y, rstd, random(c, {N, D}, 1), random(c, {D}, 2), 1e-6);
        return y.to_vector<float>();
    };
    EXPECT_TRUE(close(normed(*device), normed(ref), 1e-6, 2 * gamma<float>(D)));
}

TEST_F(CudaTensors, CarryWithJitter) {
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
    EXPECT_TRUE(close(carried(*device), carried(ref), 1e-6));
}

TEST_F(CudaTensors, Bf16) {
    const Tensor x =
        Tensor::from_double(*device, {1, 1 + 0x1p-9, 1 + 0x1p-8 + 0x1p-20, -3}, {4}, DType::bf16);
    EXPECT_EQ(x.to_double(), (std::vector<double>{1, 1, 1 + 0x1p-7, -3}));
    const Tensor wide = Tensor::from(*device, std::vector<float>{1, 1 + 0x1p-9f, 5}, {3});
    EXPECT_EQ(tensor::cast(wide, DType::bf16).to_double(), (std::vector<double>{1, 1, 5}));
    EXPECT_EQ(tensor::cast(wide, DType::f32).raw(), wide.raw());
}

// More than the staging memory holds, in both directions.
TEST_F(CudaTensors, LargeCopies) {
    std::vector<int32_t> values(40 << 18);
    std::iota(values.begin(), values.end(), 1);
    const int64_t n = int64_t(values.size());
    EXPECT_EQ(Tensor::from(*device, values, {n}).to_vector<int32_t>(), values);
}

// Memory is reused while the device still works on what was there before.
TEST_F(CudaTensors, UploadsWaitForTheLastUserOfTheirMemory) {
    Tensor sum = Tensor::zeros(*device, {1000}, DType::f32);
    for (int i = 0; i < 100; ++i)
        tensor::add_accum(sum, Tensor::from(*device, std::vector<float>(1000, float(i)), {1000}));
    EXPECT_EQ(sum.to_vector<float>(), std::vector<float>(1000, 4950));
    Tensor again = Tensor::from(*device, std::vector<float>(1000, 1), {1000});
    for (int i = 0; i < 5; ++i) {  // into memory that the queue uses
        again.copy_in(std::vector<float>(1000, float(i)).data(), 4000);
        tensor::add_accum(sum, again);
    }
    EXPECT_EQ(sum.to_vector<float>(), std::vector<float>(1000, 4960));
}

TEST_F(CudaTensors, GraphReplaysOnNewInputs) {
    Tensor in = Tensor::zeros(*device, {64}, DType::f32),
           out = Tensor::zeros(*device, {64}, DType::f32);
    tensor::Graph graph;
    int ran = 0;
    for (int i = 1; i <= 5; ++i) {
        in.copy_in(std::vector<float>(64, float(i)).data(), 64 * sizeof(float));
        graph.run(*device, [&] {
            ++ran;
            const Tensor twice = tensor::add(in, in);
            tensor::add_accum(out, tensor::add(twice, in));
        });
        // Others may use the arena in between.
        const Tensor noise = tensor::add(in, in);
        EXPECT_EQ(out.to_vector<float>(), std::vector<float>(64, 3.f * float(i * (i + 1)) / 2))
            << i;
    }
    EXPECT_EQ(ran, 2);
    EXPECT_TRUE(graph.recorded());
}

// An upload's memory goes back while a graph is recorded: it is used again before the graph runs.
TEST_F(CudaTensors, UploadsDroppedWhileRecording) {
    Tensor out = Tensor::zeros(*device, {64}, DType::f32);
    Tensor kept;
    tensor::Graph graph;
    for (int i = 1; i <= 4; ++i) {
        kept = Tensor::from(*device, std::vector<float>(64, float(i)), {64});
        tensor::add_accum(out, kept);
        graph.run(*device, [&] {
            kept = {};
            tensor::add_accum(out, tensor::add(out, out));
        });
        const Tensor next = Tensor::from(*device, std::vector<float>(64, 1), {64});
        tensor::add_accum(out, next);
    }
    // x -> 3 (x + i) + 1
    EXPECT_EQ(out.to_vector<float>(), std::vector<float>(64, 214));
}

// Neither is in a graph, where it would happen once.
TEST_F(CudaTensors, HostMemoryIsRefusedWhileRecording) {
    Tensor device_side = Tensor::zeros(*device, {64}, DType::f32);
    const std::vector<float> ones(64, 1);
    const std::function<void()> works[] = {[&] { device_side.copy_in(ones.data(), 256); },
                                           [&] { (void)Tensor::from(*device, ones, {64}); },
                                           [&] { (void)device_side.to_vector<float>(); }};
    for (const auto& work : works) {
        tensor::Graph graph;
        graph.run(*device, work);
        try {
            graph.run(*device, work);
            ADD_FAILURE() << "nothing was thrown";
        } catch (const tensor::Error& e) {
            EXPECT_EQ(e.kind(), tensor::ErrorKind::internal);
            EXPECT_NE(std::string(e.what()).find("recorded"), std::string::npos) << e.what();
        }
        EXPECT_FALSE(graph.recorded());
        // The device goes on.
        device_side.copy_in(ones.data(), 256);
        EXPECT_EQ(tensor::add(device_side, device_side).to_vector<float>(),
                  std::vector<float>(64, 2));
    }
}

#ifdef FBT_SIMT  // a GPU that has failed stays so until the process ends
// One error, said once: what is destroyed on the way out has nothing to add.
TEST_F(CudaTensors, AFailedDeviceIsReportedOnce) {
    {
        const Tensor x = Tensor::zeros(*device, {64}, DType::f32);
        const Tensor upload = random(*device, {64}, 1);
        tensor::Graph graph;
        for (int i = 0; i < 2; ++i) graph.run(*device, [&] { (void)tensor::add(x, x); });
        device->arena()->memory().zero(x.raw(), size_t(1) << 20);  // past its end
        try {
            (void)x.to_vector<float>();
            ADD_FAILURE() << "nothing was thrown";
        } catch (const tensor::Error& e) {
            EXPECT_EQ(e.kind(), tensor::ErrorKind::environment);
        }
    }
    device.reset();
    simt::clear_failure();
}
#endif

// Each has streams and memory of its own; tensors and recordings may outlive them.
TEST_F(CudaTensors, TwoContextsEndInAnyOrder) {
    std::optional<Context> other(std::in_place, kDevice);
    Tensor x = random(*device, {64}, 1), y = random(*other, {64}, 1);
    tensor::Graph graph;
    for (int i = 0; i < 3; ++i) {
        tensor::add_accum(x, tensor::add(x, x));
        graph.run(*other, [&] { tensor::add_accum(y, tensor::add(y, y)); });
    }
    EXPECT_TRUE(same_bits(x.to_vector<float>(), y.to_vector<float>()));
    tensor::add_accum(y, tensor::add(y, y));  // still queued when its context goes
    other.reset();
    y = {};
    EXPECT_EQ(tensor::add(x, x).numel(), 64);
    device->synchronize();
}

#ifdef FBT_SIMT
TEST_F(CudaTensors, OneOfSeveralDevices) {
    EXPECT_EQ(Context(kDevice, 1, 3).device(), 0) << "the only one serves every local rank";
    EXPECT_EQ(tensor::cuda_devices().size(), 1u);
    simt::set_device_count(2);
    EXPECT_EQ(tensor::cuda_devices().size(), 2u);
    {
        Context second(kDevice, 1, 1);
        int current = -1;
        EXPECT_EQ(cudaGetDevice(&current), cudaSuccess);
        EXPECT_EQ(current, 1);
        EXPECT_EQ(second.device(), 1);
        const Tensor x = random(second, {64}, 1);
        EXPECT_TRUE(same_bits(x.to_vector<float>(), normal<float>(64, 1)));
    }
    try {
        Context fourth(kDevice, 1, 3);
        ADD_FAILURE() << "nothing was thrown";
    } catch (const tensor::Error& e) {
        EXPECT_EQ(e.kind(), tensor::ErrorKind::usage);
        EXPECT_NE(std::string(e.what()).find("local rank 3 needs 4 GPUs, 2 are visible"),
                  std::string::npos)
            << e.what();
    }
    EXPECT_FALSE(tensor::cuda_device(-1).usable);
    EXPECT_EQ(Context(kDevice).device(), 0);  // and the thread's, again
    simt::set_device_count(1);
}
#endif

TEST_F(CudaTensors, OutOfMemoryTellsThePlan) {
    device->arena()->set_plan("everything 3 MiB");
    try {
        Tensor::empty(*device, {int64_t(1) << 50}, DType::u8);
        ADD_FAILURE() << "nothing was thrown";
    } catch (const tensor::Error& e) {
        EXPECT_EQ(e.kind(), tensor::ErrorKind::environment);
        for (const char* part : {"out of memory", "everything 3 MiB", "--tokens-per-step"})
            EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
    }
}

#ifdef FBT_SIMT
__global__ void half_a_block_waits() {
    if (threadIdx.x < 16) __syncthreads();
}

// The kernel fails late. The message says where and what was queued, and the tensors that the error
// passes on its way are released in peace.
TEST_F(CudaTensors, AFailedKernelIsReportedByTheNextReading) {
    try {
        const Tensor x = random(*device, {3, 5}, 1), y = tensor::add(x, x);
        ASSERT_TRUE(ok(
            kernels::cuda::launch(half_a_block_waits, {.grid = 1, .block = 32}, device->stream())));
        y.to_vector<float>();
        ADD_FAILURE() << "nothing was thrown";
    } catch (const tensor::Error& e) {
        EXPECT_EQ(e.kind(), tensor::ErrorKind::environment);
        for (const char* part : {"tensor_test.cpp", "thread", "queued last: add, [3,5]"})
            EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
    }
    simt::clear_failure();
}
#endif

}  // namespace
}  // namespace fbt::tests
