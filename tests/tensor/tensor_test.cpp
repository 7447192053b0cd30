#include "tensor/tensor.h"

#include "tensor/ops.h"
#include "tests/compare.h"

namespace fbt::tests {
namespace {

using tensor::Context;
using tensor::DType;
using tensor::Error;
using tensor::ErrorKind;
using tensor::Tensor;

// Runs f and returns the kind and text of the Error it throws.
template <class F>
std::pair<ErrorKind, std::string> error_of(F&& f) {
    try {
        f();
    } catch (const Error& e) {
        return {e.kind(), e.what()};
    }
    return {ErrorKind::internal, "nothing was thrown"};
}

TEST(Tensor, RoundTripViewAndRows) {
    Context c("cpu", 1);
    const Tensor t = Tensor::from(c, std::vector<float>{1, 2, 3, 4, 5, 6}, {3, 2});
    EXPECT_EQ(t.rows(1, 2).to_vector<float>(), (std::vector<float>{3, 4, 5, 6}));
    EXPECT_EQ(t.view({2, 3}).rows(1, 1).to_vector<float>(), (std::vector<float>{4, 5, 6}));
    EXPECT_EQ(t.rows(3, 0).numel(), 0);
    EXPECT_THROW(t.rows(2, 2), Error);
    EXPECT_THROW(t.view({4}), Error);
    EXPECT_THROW(t.data<double>(), Error);
    Tensor u = Tensor::zeros(c, {2, 2}, DType::f32);
    u.copy_from(t.rows(1, 2));
    EXPECT_EQ(u.to_double(), (std::vector<double>{3, 4, 5, 6}));
    EXPECT_THROW(u.copy_from(t), Error);
}

TEST(Arena, ReusesReleasedBlocksAndCounts) {
    Context c("cpu", 1);
    void* first;
    {
        const Tensor t = Tensor::empty(c, {1000}, DType::f32);
        first = t.raw();
        EXPECT_EQ(reinterpret_cast<uintptr_t>(first) % 64, 0u);
        EXPECT_GE(c.arena()->in_use(), 4000u);
    }
    EXPECT_EQ(c.arena()->in_use(), 0u);
    EXPECT_GE(c.arena()->peak(), 4000u);
    EXPECT_EQ(Tensor::empty(c, {1001}, DType::f32).raw(), first);  // the same rounded size
}

TEST(Arena, SaysWhenMemoryIsOut) {
    Context c("cpu", 1);
    const auto [kind, text] = error_of([&] { Tensor::empty(c, {int64_t(1) << 50}, DType::f32); });
    EXPECT_EQ(kind, ErrorKind::environment);
    EXPECT_NE(text.find("out of memory"), std::string::npos) << text;
}

TEST(Context, UnknownDevicesListTheKnown) {
    const auto [kind, text] = error_of([] { Context c("gpu"); });
    EXPECT_EQ(kind, ErrorKind::usage);
    EXPECT_NE(text.find("cpu, ref"), std::string::npos) << text;
}

TEST(Ops, MistakesNameOpArgumentShapeAndDtype) {
    Context c("cpu", 1);
    Tensor x = Tensor::zeros(c, {3, 5}, DType::f32), y = Tensor::zeros(c, {3, 5}, DType::f32);
    Tensor gain = Tensor::zeros(c, {4}, DType::f32), rstd;
    const auto [kind, text] = error_of([&] { tensor::rmsnorm_forward(y, rstd, x, gain, 1e-6); });
    EXPECT_EQ(kind, ErrorKind::internal);
    EXPECT_NE(text.find("rmsnorm_forward: gain is [4] f32, needed [5] f32"), std::string::npos)
        << text;
}

TEST(Ops, DoubleNeedsTheRefDevice) {
    Context c("cpu", 1);
    const Tensor a = Tensor::zeros(c, {3}, DType::f64);
    const auto [kind, text] = error_of([&] { tensor::add(a, a); });
    EXPECT_EQ(kind, ErrorKind::usage);
    EXPECT_NE(text.find("--device ref"), std::string::npos) << text;
}

TEST(Ops, Bf16IsNotForTheRefDevice) {
    Context cpu("cpu", 1), ref("ref");
    const Tensor a = Tensor::from_double(cpu, {1, 2, 3}, {3}, DType::bf16);
    EXPECT_EQ(tensor::add(a, a).to_double(), (std::vector<double>{2, 4, 6}));
    const Tensor b = Tensor::zeros(ref, {3}, DType::bf16);
    const auto [kind, text] = error_of([&] { tensor::add(b, b); });
    EXPECT_EQ(kind, ErrorKind::usage);
    EXPECT_NE(text.find("needs --device cpu or cuda"), std::string::npos) << text;
}

TEST(SpanBatch, SlotsFollowTheBlocks) {
    tensor::SpanBatch spans;
    spans.add(63, 3, {640, 64});  // positions 63, 64, 65 over two scattered blocks
    spans.add_contiguous(0, 2, 7);
    EXPECT_EQ(spans.own_slots(), (std::vector<int64_t>{703, 64, 65, 7, 8}));
    EXPECT_EQ(spans.positions(), (std::vector<int32_t>{63, 64, 65, 0, 1}));
    EXPECT_THROW(spans.add(100, 1, {0}), Error);
}

}  // namespace
}  // namespace fbt::tests
