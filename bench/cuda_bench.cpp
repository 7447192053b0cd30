// CUDA kernels on a GPU, at the shapes of the 1B model: what they reach of ceilings measured in the
// same run, which are copying within the device's memory and cuBLASLt's matrix product.
//
// Times are by the device's clock; the peak is the ceiling. Correctness is the tests' business
// (tests/cuda).
#include <cuda_runtime_api.h>

#include <functional>
#include <map>

#include "bench/report.h"
#include "kernels/adamw.h"
#include "kernels/attention.h"
#include "kernels/carry.h"
#include "kernels/cross_entropy.h"
#include "kernels/matmul.h"
#include "kernels/qk_norm_rope.h"
#include "kernels/rmsnorm.h"
#include "kernels/swiglu.h"
#include "tensor/span_batch.h"

namespace fbt::bench {
namespace {

using namespace kernels;
using tensor::Context;
using tensor::DType;
using tensor::SpanBatch;
using tensor::Tensor;

enum class Unit { byte, flop };
std::map<Unit, double> ceilings;  // a second

struct Op {
    std::string name;
    Unit unit;
    double work;
    std::function<Status(Stream)> call;
};

void check(cudaError_t e) {
    if (e != cudaSuccess) throw std::runtime_error(cudaGetErrorString(e));
}

// Timed by events around as many calls as fill a millisecond or so: launches overlap with kernels,
// as they do in a step.
void time_op(benchmark::State& state, Context& context, const Op& op) {
    const Stream stream = context.stream();
    const auto queue = static_cast<cudaStream_t>(stream.handle);
    cudaEvent_t begin, end;
    check(cudaEventCreate(&begin));
    check(cudaEventCreate(&end));
    const auto milliseconds = [&](int calls) {
        check(cudaEventRecord(begin, queue));
        for (int i = 0; i < calls; ++i)
            if (const Status s = op.call(stream); !s.ok()) throw std::runtime_error(s.message);
        check(cudaEventRecord(end, queue));
        check(cudaEventSynchronize(end));
        float ms = 0;
        check(cudaEventElapsedTime(&ms, begin, end));
        return double(ms);
    };
    milliseconds(1);
    const int calls = std::clamp(int(1 / milliseconds(1)), 1, 100);
    double best = 1e30;
    for (auto _ : state) {
        const double seconds = milliseconds(calls) / 1e3 / calls;
        state.SetIterationTime(seconds);
        best = std::min(best, seconds);
    }
    check(cudaEventDestroy(begin));
    check(cudaEventDestroy(end));
    const double rate = op.work / best;
    const bool is_ceiling = op.name.starts_with("ceiling");
    if (is_ceiling) ceilings[op.unit] = std::max(ceilings[op.unit], rate);
    state.counters[op.unit == Unit::byte ? "B/s" : "FLOP/s"] =
        benchmark::Counter(op.work, benchmark::Counter::kIsIterationInvariantRate);
    if (!is_ceiling && ceilings.contains(op.unit))
        state.counters["% of peak"] = 100 * rate / ceilings[op.unit];
}

// Small values everywhere: no kernel's time depends on them, unless they are NaN.
Tensor filled(Context& c, tensor::Shape shape, DType dtype) {
    Tensor t = Tensor::empty(c, std::move(shape), dtype);
    std::vector<double> row(size_t(std::min<int64_t>(t.numel(), 1 << 16)));
    for (size_t i = 0; i < row.size(); ++i) row[i] = double(i * 2654435761u % 2001) / 1000 - 1;
    const Tensor part = Tensor::from_double(c, row, {int64_t(row.size())}, dtype);
    const Tensor flat = t.view({t.numel()});
    for (int64_t at = 0; at < t.numel(); at += part.numel()) {
        const int64_t n = std::min(part.numel(), t.numel() - at);
        flat.rows(at, n).copy_from(part.rows(0, n));
    }
    return t;
}

// The 1B model (apps/presets/paper-1b.json), two sequences of 8,192 tokens.
constexpr int64_t N = 16384;
constexpr int D = 1536, H = 16, G = 8, C = 96, F = 6656, V = 100352, kWindow = 2048;

template <class T>
void add_rows(std::vector<Op>& ops, Context& c, DType dtype) {
    const double size = sizeof(T);
    const std::string end = std::string("/") + tensor::name_of(dtype);
    const auto make = [&](tensor::Shape shape) { return filled(c, std::move(shape), dtype); };
    const auto wide = [&](tensor::Shape shape) { return filled(c, std::move(shape), DType::f32); };
    const Tensor x = make({N, D}), y = make({N, D}), z = make({N, D}), gain = wide({D}),
                 dgain = wide({D}), rstd = wide({N}), scratch = wide({row_chunks(N), D});
    ops.push_back({"rmsnorm_forward/16384x1536" + end, Unit::byte, 2 * N * D * size, [=](Stream s) {
                       return cuda::rmsnorm_forward<T, float>(y.data<T>(), rstd.data<float>(),
                                                              x.data<T>(), gain.data<float>(), N, D,
                                                              1e-6f, s);
                   }});
    ops.push_back(
        {"residual_rmsnorm_forward/16384x1536" + end, Unit::byte, 3 * N * D * size, [=](Stream s) {
             return cuda::residual_rmsnorm_forward<T, float>(
                 z.data<T>(), rstd.data<float>(), x.data<T>(), y.data<T>(), gain.data<float>(),
                 0.1f, N, D, 1e-6f, s);
         }});
    ops.push_back(
        {"rmsnorm_backward/16384x1536" + end, Unit::byte, 3 * N * D * size, [=](Stream s) {
             return cuda::rmsnorm_backward<T, float>(
                 z.data<T>(), dgain.data<float>(), y.data<T>(), x.data<T>(), gain.data<float>(),
                 rstd.data<float>(), 1e-6f, N, D, scratch.data<float>(), s);
         }});
    const Tensor a = make({N, F}), b = make({N, F}), o = make({N, F});
    ops.push_back(
        {"swiglu_forward/16384x6656" + end, Unit::byte, 3.0 * N * F * size, [=](Stream s) {
             return cuda::swiglu_forward<T>(o.data<T>(), a.data<T>(), b.data<T>(), N * F, s);
         }});
    ops.push_back(
        {"swiglu_backward/16384x6656" + end, Unit::byte, 5.0 * N * F * size, [=](Stream s) {
             return cuda::swiglu_backward<T>(a.data<T>(), b.data<T>(), o.data<T>(), a.data<T>(),
                                             b.data<T>(), N * F, s);
         }});
    std::vector<int64_t> rows(N), sequence(N, 3);
    std::vector<int32_t> position(N);
    for (int64_t i = 0; i < N; ++i) {
        rows[i] = i;
        position[i] = int32_t(i);
    }
    const Tensor source = Tensor::from(c, rows, {N}), sequences = Tensor::from(c, sequence, {N}),
                 positions = Tensor::from(c, position, {N});
    ops.push_back(
        {"carry_forward/16384x1536/jitter" + end, Unit::byte, 2.0 * N * D * size, [=](Stream s) {
             const Jitter<float> jitter{0.02f, philox_key(1, Draw::jitter),
                                        sequences.data<int64_t>(), positions.data<int32_t>()};
             return cuda::carry_forward<T, float>(y.data<T>(), nullptr, x.data<T>(),
                                                  source.data<int64_t>(), nullptr, jitter, N, D, s);
         }});
    const Tensor q = make({N, H, C}), turned = make({N, H, C}), angle = wide({N, C / 2}),
                 head_gain = wide({C}), head_rstd = wide({N, H});
    ops.push_back({"qk_norm_rope_forward/16384x16x96" + end, Unit::byte, 2.0 * N * H * C * size,
                   [=](Stream s) {
                       return cuda::qk_norm_rope_forward<T, float>(
                           turned.data<T>(), head_rstd.data<float>(), q.data<T>(),
                           head_gain.data<float>(), angle.data<float>(), angle.data<float>(),
                           positions.data<int32_t>(), N, H, C, 1e-6f, s);
                   }});
    constexpr int64_t kRows = 256;  // logits that exist at a time
    const Tensor logits = make({kRows, V}), ce = wide({kRows}), lse = wide({kRows});
    const Tensor targets = Tensor::from(c, std::vector<int32_t>(kRows, 5), {kRows});
    ops.push_back({"cross_entropy_forward/256x100352" + end, Unit::byte, double(kRows) * V * size,
                   [=](Stream s) {
                       return cuda::cross_entropy_forward<T, float>(
                           ce.data<float>(), lse.data<float>(), logits.data<T>(),
                           targets.data<int32_t>(), kRows, V, s);
                   }});
}

void add_attention(std::vector<Op>& ops, Context& c, int64_t rows, int T, int heads, int kv_heads,
                   int width, int window) {
    const auto spans = std::make_shared<SpanBatch>();
    for (int64_t at = 0; at < rows; at += T) spans->add_contiguous(0, T, at);
    spans->upload(c);
    double pairs = 0;
    for (int t = 0; t < T; ++t) pairs += window > 0 ? std::min(t + 1, window) : t + 1;
    const double flops = 4.0 * width * heads * pairs * double(rows / T);
    const Tensor q = filled(c, {rows, heads, width}, DType::bf16),
                 o = filled(c, q.shape(), DType::bf16),
                 k = filled(c, {rows, kv_heads, width}, DType::bf16),
                 v = filled(c, k.shape(), DType::bf16), dq = filled(c, q.shape(), DType::bf16),
                 dk = filled(c, k.shape(), DType::f32), dv = filled(c, k.shape(), DType::f32),
                 lse = filled(c, {rows, heads}, DType::f32),
                 delta = filled(c, lse.shape(), DType::f32);
    const float scale = 1 / std::sqrt(float(width));
    const std::string shape = "/T" + std::to_string(T) + "/H" + std::to_string(heads) + "/C" +
                              std::to_string(width) +
                              (window ? "/window" + std::to_string(window) : "") + "/bf16";
    ops.push_back({"attention_forward" + shape, Unit::flop, flops, [=](Stream s) {
                       return cuda::attention_forward<bf16, float>(
                           o.data<bf16>(), lse.data<float>(), q.data<bf16>(), k.data<bf16>(),
                           v.data<bf16>(), spans->table(), heads, kv_heads, width, window, scale,
                           nullptr, s);
                   }});
    ops.push_back({"attention_backward" + shape, Unit::flop, 2.5 * flops, [=](Stream s) {
                       return cuda::attention_backward<bf16, float>(
                           dq.data<bf16>(), dk.data<float>(), dv.data<float>(), delta.data<float>(),
                           o.data<bf16>(), q.data<bf16>(), k.data<bf16>(), v.data<bf16>(),
                           o.data<bf16>(), lse.data<float>(), spans->table(), heads, kv_heads,
                           width, window, scale, s);
                   }});
}

// The next position of one sequence, of T stored; another at each call, so that its keys and values
// come from memory, not from the L2 cache.
void add_decoding(std::vector<Op>& ops, Context& c, int T, int heads, int kv_heads, int width,
                  int window) {
    constexpr int kSequences = 8;
    std::vector<std::shared_ptr<SpanBatch>> spans;
    for (int i = 0; i < kSequences; ++i) {
        spans.push_back(std::make_shared<SpanBatch>());
        spans.back()->add_contiguous(T - 1, 1, int64_t(i) * T);
        spans.back()->upload(c);
    }
    const int64_t scratch_size =
        cuda::attention_scratch_size<bf16>(spans[0]->table(), heads, kv_heads, width, window);
    const Tensor q = filled(c, {1, heads, width}, DType::bf16),
                 o = filled(c, q.shape(), DType::bf16),
                 k = filled(c, {int64_t(kSequences) * T, kv_heads, width}, DType::bf16),
                 v = filled(c, k.shape(), DType::bf16),
                 scratch = Tensor::empty(c, {scratch_size}, DType::f32);
    const double bytes = 4.0 * width * kv_heads * (window > 0 ? std::min(T, window) : T);
    ops.push_back({"attention_forward/1of" + std::to_string(T) + "/H" + std::to_string(heads) +
                       "/C" + std::to_string(width) +
                       (window ? "/window" + std::to_string(window) : "") + "/bf16",
                   Unit::byte, bytes, [=, next = 0](Stream s) mutable {
                       next = (next + 1) % kSequences;
                       return cuda::attention_forward<bf16, float>(
                           o.data<bf16>(), nullptr, q.data<bf16>(), k.data<bf16>(), v.data<bf16>(),
                           spans[size_t(next)]->table(), heads, kv_heads, width, window,
                           1 / std::sqrt(float(width)), scratch.data<float>(), s);
                   }});
}

void add_matmul(std::vector<Op>& ops, Context& c, int64_t M, int64_t n, int64_t k) {
    const Tensor x = filled(c, {M, k}, DType::bf16), y = filled(c, {M, n}, DType::bf16),
                 dw = filled(c, {n, k}, DType::f32),
                 packed = filled(c, {cuda::matmul_packed_size<bf16>(n, k)}, DType::bf16);
    const std::string shape =
        "/" + std::to_string(M) + "x" + std::to_string(n) + "x" + std::to_string(k) + "/bf16";
    const double flops = 2.0 * double(M) * double(n) * double(k);
    const bool decoding = M <= 16;  // then the weights are all there is to move
    ops.push_back({"matmul_forward" + shape, decoding ? Unit::byte : Unit::flop,
                   decoding ? 2.0 * double(n) * double(k) : flops, [=](Stream s) {
                       return cuda::matmul_forward<bf16>(y.data<bf16>(), x.data<bf16>(),
                                                         packed.data<bf16>(), M, n, k, s);
                   }});
    if (decoding) return;
    ops.push_back({"matmul_dw_accum" + shape, Unit::flop, flops, [=](Stream s) {
                       return cuda::matmul_dw_accum<bf16, float>(dw.data<float>(), y.data<bf16>(),
                                                                 x.data<bf16>(), M, n, k, s);
                   }});
}

// cuBLASLt's product, the ceiling of ours.
void add_fast_matmul(std::vector<Op>& ops, Context& c, const std::string& name, int64_t M,
                     int64_t n, int64_t k) {
    c.set_fast_matmul(true);
    const Tensor x = filled(c, {M, k}, DType::bf16), y = filled(c, {M, n}, DType::bf16),
                 packed = filled(c, {cuda::matmul_packed_size<bf16>(n, k)}, DType::bf16);
    ops.push_back({name + "/" + std::to_string(M) + "x" + std::to_string(n) + "x" +
                       std::to_string(k) + "/bf16",
                   Unit::flop, 2.0 * double(M) * double(n) * double(k), [=, &c](Stream s) {
                       return cuda::matmul_forward_fast<bf16>(c.fast_matmul(), y.data<bf16>(),
                                                              x.data<bf16>(), packed.data<bf16>(),
                                                              M, n, k, s);
                   }});
}

int run_all(int argc, char** argv) {
    if (const tensor::CudaDevice device = tensor::cuda_device(); !device.usable) {
        std::fprintf(stderr, "cuda_bench: no CUDA device: %s\n", device.description.c_str());
        return 5;
    }
    const Arguments arguments(argc, argv);
    Context c("cuda");
    if (!arguments.json) std::printf("%s\n\n", tensor::cuda_device().description.c_str());
    std::vector<Op> ops;
    const Tensor from = filled(c, {int64_t(1) << 28}, DType::f32),
                 to = filled(c, from.shape(), DType::f32);
    ops.push_back({"ceiling/copy_1GiB/f32", Unit::byte, 2.0 * double(from.bytes()), [=](Stream s) {
                       check(cudaMemcpyAsync(to.raw(), from.raw(), from.bytes(),
                                             cudaMemcpyDeviceToDevice,
                                             static_cast<cudaStream_t>(s.handle)));
                       return Status{};
                   }});
    add_fast_matmul(ops, c, "ceiling/cublaslt", 8192, 8192, 8192);
    add_rows<float>(ops, c, DType::f32);
    add_rows<bf16>(ops, c, DType::bf16);
    const Tensor w = filled(c, {1 << 26}, DType::f32), m = filled(c, w.shape(), DType::f32),
                 v = Tensor::zeros(c, w.shape(), DType::f32), g = filled(c, w.shape(), DType::f32);
    ops.push_back({"adamw_step/64Mi/f32", Unit::byte, 7.0 * double(w.bytes()), [=](Stream s) {
                       return cuda::adamw_step<float>(w.data<float>(), m.data<float>(),
                                                      v.data<float>(), g.data<float>(), w.numel(),
                                                      {1e-4, 0.9, 0.95, 1e-8, 0.1, 1, 10}, s);
                   }});
    for (const auto& [n, k] : {std::pair{D, D}, {F, D}, {D, F}, {V, D}}) {
        add_matmul(ops, c, n == V ? 4096 : N, n, k);
        add_fast_matmul(ops, c, "matmul_forward_fast", n == V ? 4096 : N, n, k);
        add_matmul(ops, c, 1, n, k);
    }
    add_matmul(ops, c, 8192, 8192, 8192);
    add_attention(ops, c, N, 8192, H, G, C, 0);
    add_attention(ops, c, N, 8192, H, G, C, kWindow);
    add_attention(ops, c, N, 8192, 16, 16, 128, 0);
    add_attention(ops, c, N, 8192, 16, 16, 64, 0);
    add_decoding(ops, c, 8192, H, G, C, 0);
    add_decoding(ops, c, 8192, H, G, C, kWindow);
    for (const Op& op : ops) {
        const std::string name = op.name + "/cuda";
        benchmark::RegisterBenchmark(name.c_str(), [&](benchmark::State& state) {
            time_op(state, c, op);
        })->UseManualTime();
    }
    return run(argv[0], arguments, {{"device", tensor::cuda_device().description}});
}

}  // namespace
}  // namespace fbt::bench

int main(int argc, char** argv) { return fbt::bench::run_all(argc, argv); }
