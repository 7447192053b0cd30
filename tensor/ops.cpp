#include "tensor/ops.h"

#include "kernels/attention.h"
#include "kernels/carry.h"
#include "kernels/cross_entropy.h"
#include "kernels/elementwise.h"
#include "kernels/embedding.h"
#include "kernels/gate.h"
#include "kernels/kv_store.h"
#include "kernels/matmul.h"
#include "kernels/qk_norm_rope.h"
#include "kernels/rmsnorm.h"
#include "kernels/square_sum.h"
#include "kernels/swiglu.h"

namespace fbt::tensor {
namespace {

[[noreturn]] void fail(const char* op, const std::string& what) {
    throw Error(ErrorKind::internal, std::string(op) + ": " + what);
}

void expect(const char* op, const char* argument, const Tensor& t, const Shape& shape,
            DType dtype) {
    if (!t.defined()) fail(op, std::string(argument) + " is undefined");
    if (t.shape() != shape || t.dtype() != dtype)
        fail(op, std::string(argument) + " is " + to_string(t.shape()) + " " + name_of(t.dtype()) +
                     ", needed " + to_string(shape) + " " + name_of(dtype));
}
void expect_optional(const char* op, const char* argument, const Tensor& t, const Shape& shape,
                     DType dtype) {
    if (t.defined()) expect(op, argument, t, shape, dtype);
}
void expect_rank(const char* op, const char* argument, const Tensor& t, size_t rank) {
    if (!t.defined()) fail(op, std::string(argument) + " is undefined");
    if (t.shape().size() != rank)
        fail(op, std::string(argument) + " is " + to_string(t.shape()) + ", needed rank " +
                     std::to_string(rank));
}

void finish(const char* op, const Tensor& t, const kernels::Status& status) {
    if (status.ok()) return;
    const ErrorKind kind = status.code == kernels::Code::bad_argument  ? ErrorKind::internal
                           : status.code == kernels::Code::unsupported ? ErrorKind::usage
                                                                       : ErrorKind::environment;
    throw Error(kind, std::string(op) + " on " + t.context().name() + ", " + to_string(t.shape()) +
                          " " + name_of(t.dtype()) + ": " + status.message);
}

// Calls the kernel of the backend and dtype of `t`. Inside the arguments T is the element type, A
// its accumulation type and `s` the stream. Only ref has kernels in double, and it has none in
// bf16; FBT_DISPATCH_WIDE is for ops on master weights and gradients, which are never bf16.
#ifdef FBT_CUDA
#define FBT_CUDA_CASE(op, ...) \
    case Backend::cuda:        \
        return kernels::cuda::op<T>(__VA_ARGS__);
#else
#define FBT_CUDA_CASE(op, ...)
#endif
#define FBT_DISPATCH_TO(dispatch, t, op, ...)                                            \
    dispatch(#op, t, [&]<class T>(Backend backend, [[maybe_unused]] kernels::Stream s) { \
        using A [[maybe_unused]] = kernels::accumulate_t<T>;                             \
        using Result = decltype(kernels::cuda::op<T>(__VA_ARGS__));                      \
        if constexpr (std::is_same_v<T, double>)                                         \
            return kernels::ref::op<T>(__VA_ARGS__);                                     \
        else                                                                             \
            switch (backend) {                                                           \
                case Backend::ref:                                                       \
                    if constexpr (std::is_same_v<T, float>)                              \
                        return kernels::ref::op<T>(__VA_ARGS__);                         \
                    break;                                                               \
                case Backend::cpu:                                                       \
                    return kernels::cpu::op<T>(__VA_ARGS__);                             \
                    FBT_CUDA_CASE(op, __VA_ARGS__)                                       \
                default:                                                                 \
                    break;                                                               \
            }                                                                            \
        return unsupported<Result>();                                                    \
    })
#define FBT_DISPATCH(t, op, ...) FBT_DISPATCH_TO(dispatch<true>, t, op, __VA_ARGS__)
#define FBT_DISPATCH_WIDE(t, op, ...) FBT_DISPATCH_TO(dispatch<false>, t, op, __VA_ARGS__)

template <class R>
R unsupported() {
    throw Error(ErrorKind::usage, "this build has no CUDA kernels");
}

template <bool HasBf16, class F>
auto dispatch(const char* op, const Tensor& t, F&& call) {
    Context& context = t.context();
    if (t.dtype() == DType::f64 && context.backend() != Backend::ref)
        throw Error(ErrorKind::usage,
                    std::string(op) + ": dtype f64 needs --device ref, not " + context.name());
    if (t.dtype() == DType::bf16 && context.backend() == Backend::ref)
        throw Error(ErrorKind::usage,
                    std::string(op) + ": dtype bf16 needs --device cpu or cuda, not ref");
    context.arena()->memory().queued(op, t.shape());
    auto run = [&] {
        if (t.dtype() == DType::f64)
            return call.template operator()<double>(context.backend(), context.stream());
        if constexpr (HasBf16)
            if (t.dtype() == DType::bf16)
                return call.template operator()<kernels::bf16>(context.backend(), context.stream());
        if (t.dtype() != DType::f32)
            fail(op, std::string("no kernel for dtype ") + name_of(t.dtype()));
        return call.template operator()<float>(context.backend(), context.stream());
    };
    using Result = decltype(run());
    if constexpr (std::is_same_v<Result, kernels::Status>)
        finish(op, t, run());
    else
        return run();
}

Tensor like(const Tensor& t) { return Tensor::empty(t.context(), t.shape(), t.dtype()); }

}  // namespace

// ------------------------------------------------------------------------------------- matmul

#ifdef FBT_CUDA
namespace {

// Where the context has it, the vendor's product runs in place of ours: f32 or bf16.
template <class F>
void with_fast_dtype(const char* op, const Tensor& t, F&& call) {
    const kernels::Stream s = t.context().stream();
    finish(op, t,
           t.dtype() == DType::bf16 ? call.template operator()<kernels::bf16>(s)
                                    : call.template operator()<float>(s));
}

}  // namespace
#endif

int64_t matmul_packed_size(Context& context, int64_t N, int64_t K, DType dtype) {
    const Tensor of_dtype = Tensor::empty(context, {0}, dtype);
    return FBT_DISPATCH(of_dtype, matmul_packed_size, N, K);
}

void matmul_pack(PackedMatrix& packed, const Tensor& w, bool transposed, DType dtype) {
    expect_rank("matmul_pack", "w", w, 2);
    expect("matmul_pack", "w", w, w.shape(), accumulate_dtype(dtype));
    packed.N = w.dim(transposed ? 1 : 0);
    packed.K = w.dim(transposed ? 0 : 1);
    Tensor& data = packed.data;
    const int64_t size = matmul_packed_size(w.context(), packed.N, packed.K, dtype);
    if (!data.defined() || data.dtype() != dtype || data.numel() != size)
        data = Tensor::empty(w.context(), {size}, dtype);
    FBT_DISPATCH(data, matmul_pack, data.data<T>(), w.data<A>(), packed.N, packed.K, transposed, s);
}

void matmul_forward(Tensor& y, const Tensor& x, const PackedMatrix& w) {
    expect_rank("matmul_forward", "x", x, 2);
    const int64_t M = x.dim(0);
    expect("matmul_forward", "x", x, {M, w.K}, w.data.dtype());
    expect("matmul_forward", "y", y, {M, w.N}, x.dtype());
#ifdef FBT_CUDA
    if (auto* fast = x.context().fast_matmul())
        return with_fast_dtype("matmul_forward_fast", x, [&]<class T>(kernels::Stream s) {
            return kernels::cuda::matmul_forward_fast<T>(fast, y.data<T>(), x.data<T>(),
                                                         w.data.data<T>(), M, w.N, w.K, s);
        });
#endif
    FBT_DISPATCH(x, matmul_forward, y.data<T>(), x.data<T>(), w.data.data<T>(), M, w.N, w.K, s);
}

Tensor matmul_forward(const Tensor& x, const PackedMatrix& w) {
    expect_rank("matmul_forward", "x", x, 2);
    Tensor y = Tensor::empty(x.context(), {x.dim(0), w.N}, x.dtype());
    matmul_forward(y, x, w);
    return y;
}

std::vector<Tensor> matmul_forward(const Tensor& x, const std::vector<const PackedMatrix*>& ws) {
    std::vector<Tensor> ys;
    ys.reserve(ws.size());
    if (x.context().backend() != Backend::cpu) {
        for (const PackedMatrix* w : ws) ys.push_back(matmul_forward(x, *w));
        return ys;
    }
    expect_rank("matmul_forward", "x", x, 2);
    const int64_t M = x.dim(0), K = x.dim(1);
    for (const PackedMatrix* w : ws) {
        expect("matmul_forward", "x", x, {M, w->K}, w->data.dtype());
        ys.push_back(Tensor::empty(x.context(), {M, w->N}, x.dtype()));
    }
    dispatch<true>("matmul_forward", x, [&]<class T>(Backend, kernels::Stream s) {
        if constexpr (std::is_same_v<T, double>) {
            return kernels::Status{};  // not on the cpu, as dispatch has said
        } else {
            std::vector<kernels::MatmulOutput<T>> outputs;
            outputs.reserve(ws.size());
            for (size_t i = 0; i < ws.size(); ++i)
                outputs.push_back({ys[i].data<T>(), ws[i]->data.data<T>(), ws[i]->N});
            return kernels::cpu::matmul_forward_each<T>(outputs, x.data<T>(), M, K, s);
        }
    });
    return ys;
}

void matmul_dw_accum(Tensor& dw, const Tensor& dy, const Tensor& x) {
    expect_rank("matmul_dw_accum", "dy", dy, 2);
    const int64_t M = dy.dim(0), N = dy.dim(1), K = x.dim(1);
    expect("matmul_dw_accum", "x", x, {M, K}, dy.dtype());
    expect("matmul_dw_accum", "dw", dw, {N, K}, accumulate_dtype(dy.dtype()));
#ifdef FBT_CUDA
    if (auto* fast = dy.context().fast_matmul())
        return with_fast_dtype("matmul_dw_accum_fast", dy, [&]<class T>(kernels::Stream s) {
            return kernels::cuda::matmul_dw_accum_fast<T>(fast, dw.data<float>(), dy.data<T>(),
                                                          x.data<T>(), M, N, K, s);
        });
#endif
    FBT_DISPATCH(dy, matmul_dw_accum, dw.data<A>(), dy.data<T>(), x.data<T>(), M, N, K, s);
}

// ---------------------------------------------------------------------------------- embedding

Tensor embedding_forward(const Tensor& tokens, const Tensor& w, DType dtype) {
    expect_rank("embedding_forward", "w", w, 2);
    if (w.dtype() != dtype) expect("embedding_forward", "w", w, w.shape(), accumulate_dtype(dtype));
    expect("embedding_forward", "tokens", tokens, {tokens.numel()}, DType::i32);
    Tensor y = Tensor::empty(w.context(), {tokens.numel(), w.dim(1)}, dtype);
    if (w.dtype() == dtype) {
        FBT_DISPATCH(y, embedding_forward, y.data<T>(), tokens.data<int32_t>(), w.data<T>(),
                     y.dim(0), int(w.dim(1)), s);
        return y;
    }
    FBT_DISPATCH(y, embedding_forward, y.data<T>(), tokens.data<int32_t>(), w.data<A>(), y.dim(0),
                 int(w.dim(1)), s);
    return y;
}

void embedding_backward_accum(Tensor& dw, const Tensor& dy, const Tensor& tokens) {
    const int64_t N = tokens.numel(), V = dw.dim(0), D = dw.dim(1);
    expect("embedding_backward_accum", "dy", dy, {N, D}, dy.dtype());
    expect("embedding_backward_accum", "dw", dw, {V, D}, accumulate_dtype(dy.dtype()));
    Tensor scratch = Tensor::empty(dy.context(), {2 * N}, DType::i32);
    FBT_DISPATCH(dy, embedding_backward_accum, dw.data<A>(), dy.data<T>(), tokens.data<int32_t>(),
                 N, int(D), int(V), scratch.data<int32_t>(), s);
}

// ------------------------------------------------------------------------------------ rmsnorm

void rmsnorm_forward(Tensor& y, Tensor& rstd, const Tensor& x, const Tensor& gain, double eps) {
    expect_rank("rmsnorm_forward", "x", x, 2);
    const int64_t N = x.dim(0), D = x.dim(1);
    const DType a = accumulate_dtype(x.dtype());
    expect("rmsnorm_forward", "y", y, {N, D}, x.dtype());
    expect("rmsnorm_forward", "gain", gain, {D}, a);
    expect_optional("rmsnorm_forward", "rstd", rstd, {N}, a);
    FBT_DISPATCH(x, rmsnorm_forward, y.data<T>(), rstd.data<A>(), x.data<T>(), gain.data<A>(), N,
                 int(D), A(eps), s);
}

void residual_rmsnorm_forward(Tensor& y, Tensor& rstd, const Tensor& x, const Tensor& branch,
                              const Tensor& gain, double alpha, double eps) {
    expect_rank("residual_rmsnorm_forward", "x", x, 2);
    const int64_t N = x.dim(0), D = x.dim(1);
    const DType a = accumulate_dtype(x.dtype());
    expect("residual_rmsnorm_forward", "y", y, {N, D}, x.dtype());
    expect("residual_rmsnorm_forward", "branch", branch, {N, D}, x.dtype());
    expect("residual_rmsnorm_forward", "gain", gain, {D}, a);
    expect_optional("residual_rmsnorm_forward", "rstd", rstd, {N}, a);
    FBT_DISPATCH(x, residual_rmsnorm_forward, y.data<T>(), rstd.data<A>(), x.data<T>(),
                 branch.data<T>(), gain.data<A>(), A(alpha), N, int(D), A(eps), s);
}

Tensor rmsnorm_backward(Tensor& dgain, const Tensor& dy, const Tensor& x, const Tensor& gain,
                        const Tensor& rstd, double scale) {
    expect_rank("rmsnorm_backward", "x", x, 2);
    const int64_t N = x.dim(0), D = x.dim(1);
    const DType a = accumulate_dtype(x.dtype());
    expect("rmsnorm_backward", "dy", dy, {N, D}, x.dtype());
    expect("rmsnorm_backward", "rstd", rstd, {N}, a);
    Tensor sink = dgain.defined() ? dgain : Tensor::zeros(x.context(), {D}, a);
    expect("rmsnorm_backward", "dgain", sink, {D}, a);
    Tensor dx = like(x);
    Tensor scratch = Tensor::empty(x.context(), {kernels::row_chunks(N) * D}, a);
    FBT_DISPATCH(x, rmsnorm_backward, dx.data<T>(), sink.data<A>(), dy.data<T>(), x.data<T>(),
                 gain.data<A>(), rstd.data<A>(), A(scale), N, int(D), scratch.data<A>(), s);
    return dx;
}

// ------------------------------------------------------------------------------- qk_norm_rope

void qk_norm_rope_forward(Tensor& y, Tensor& rstd, const Tensor& x, const Tensor& gain,
                          const Tensor& cos, const Tensor& sin, const Tensor& positions,
                          double eps) {
    expect_rank("qk_norm_rope_forward", "x", x, 3);
    const int64_t N = x.dim(0), H = x.dim(1), C = x.dim(2);
    const DType a = accumulate_dtype(x.dtype());
    expect("qk_norm_rope_forward", "y", y, x.shape(), x.dtype());
    expect("qk_norm_rope_forward", "gain", gain, {C}, a);
    expect("qk_norm_rope_forward", "sin", sin, cos.shape(), a);
    expect("qk_norm_rope_forward", "cos", cos, {cos.dim(0), C / 2}, a);
    expect("qk_norm_rope_forward", "positions", positions, {N}, DType::i32);
    expect_optional("qk_norm_rope_forward", "rstd", rstd, {N, H}, a);
    FBT_DISPATCH(x, qk_norm_rope_forward, y.data<T>(), rstd.data<A>(), x.data<T>(), gain.data<A>(),
                 cos.data<A>(), sin.data<A>(), positions.data<int32_t>(), N, int(H), int(C), A(eps),
                 s);
}

Tensor qk_norm_rope_backward(Tensor& dgain, const Tensor& dy, const Tensor& x, const Tensor& gain,
                             const Tensor& rstd, const Tensor& cos, const Tensor& sin,
                             const Tensor& positions) {
    const int64_t N = x.dim(0), H = x.dim(1), C = x.dim(2);
    const DType a = accumulate_dtype(x.dtype());
    expect("qk_norm_rope_backward", "dy", dy, x.shape(), x.dtype());
    expect("qk_norm_rope_backward", "rstd", rstd, {N, H}, a);
    Tensor sink = dgain.defined() ? dgain : Tensor::zeros(x.context(), {C}, a);
    expect("qk_norm_rope_backward", "dgain", sink, {C}, a);
    Tensor dx = like(x);
    Tensor scratch = Tensor::empty(x.context(), {kernels::row_chunks(N) * C}, a);
    FBT_DISPATCH(x, qk_norm_rope_backward, dx.data<T>(), sink.data<A>(), dy.data<T>(), x.data<T>(),
                 gain.data<A>(), rstd.data<A>(), cos.data<A>(), sin.data<A>(),
                 positions.data<int32_t>(), N, int(H), int(C), scratch.data<A>(), s);
    return dx;
}

// ---------------------------------------------------------------------------------- attention

void attention_forward(Tensor& o, Tensor& lse, const Tensor& q, const Tensor& k, const Tensor& v,
                       const SpanBatch& spans, int window, double scale) {
    expect_rank("attention_forward", "q", q, 3);
    expect_rank("attention_forward", "k", k, 3);
    const int64_t N = q.dim(0), H = q.dim(1), C = q.dim(2), G = k.dim(1);
    expect("attention_forward", "q", q, {spans.rows(), H, C}, q.dtype());
    expect("attention_forward", "k", k, {k.dim(0), G, C}, q.dtype());
    expect("attention_forward", "v", v, k.shape(), q.dtype());
    expect("attention_forward", "o", o, q.shape(), q.dtype());
    expect_optional("attention_forward", "lse", lse, {N, H}, accumulate_dtype(q.dtype()));
    const int64_t size =
        FBT_DISPATCH(q, attention_scratch_size, spans.table(), int(H), int(G), int(C), window);
    Tensor scratch;
    if (size > 0) scratch = Tensor::empty(q.context(), {size}, accumulate_dtype(q.dtype()));
    FBT_DISPATCH(q, attention_forward, o.data<T>(), lse.data<A>(), q.data<T>(), k.data<T>(),
                 v.data<T>(), spans.table(), int(H), int(G), int(C), window, A(scale),
                 scratch.data<A>(), s);
}

void attention_backward(Tensor& dq, Tensor& dk, Tensor& dv, const Tensor& dout, const Tensor& q,
                        const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse,
                        const SpanBatch& spans, int window, double scale) {
    const int64_t N = q.dim(0), H = q.dim(1), C = q.dim(2), G = k.dim(1);
    const DType a = accumulate_dtype(q.dtype());
    expect("attention_backward", "dout", dout, q.shape(), q.dtype());
    expect("attention_backward", "dq", dq, q.shape(), q.dtype());
    expect("attention_backward", "dk", dk, k.shape(), a);
    expect("attention_backward", "dv", dv, k.shape(), a);
    expect("attention_backward", "lse", lse, {N, H}, a);
    Tensor delta = Tensor::empty(q.context(), {N, H}, a);
    FBT_DISPATCH(q, attention_backward, dq.data<T>(), dk.data<A>(), dv.data<A>(), delta.data<A>(),
                 dout.data<T>(), q.data<T>(), k.data<T>(), v.data<T>(), o.data<T>(), lse.data<A>(),
                 spans.table(), int(H), int(G), int(C), window, A(scale), s);
}

// ------------------------------------------------------------------------------ gates, swiglu

Tensor gate_forward(const Tensor& x, const Tensor& g) {
    expect_rank("gate_forward", "x", x, 2);
    expect("gate_forward", "g", g, {x.dim(0)}, x.dtype());
    Tensor y = like(x);
    FBT_DISPATCH(x, gate_forward, y.data<T>(), x.data<T>(), g.data<T>(), x.dim(0), int(x.dim(1)),
                 s);
    return y;
}

void gate_backward(Tensor& dx, Tensor& dg, const Tensor& dy, const Tensor& x, const Tensor& g) {
    expect("gate_backward", "dy", dy, x.shape(), x.dtype());
    dx = like(x);
    dg = like(g);
    FBT_DISPATCH(x, gate_backward, dx.data<T>(), dg.data<T>(), dy.data<T>(), x.data<T>(),
                 g.data<T>(), x.dim(0), int(x.dim(1)), s);
}

Tensor swiglu_forward(const Tensor& gate, const Tensor& up) {
    expect("swiglu_forward", "up", up, gate.shape(), gate.dtype());
    Tensor y = like(gate);
    FBT_DISPATCH(gate, swiglu_forward, y.data<T>(), gate.data<T>(), up.data<T>(), gate.numel(), s);
    return y;
}

void swiglu_backward(Tensor& dgate, Tensor& dup, const Tensor& dy, const Tensor& gate,
                     const Tensor& up) {
    expect("swiglu_backward", "dy", dy, gate.shape(), gate.dtype());
    dgate = like(gate);
    dup = like(up);
    FBT_DISPATCH(gate, swiglu_backward, dgate.data<T>(), dup.data<T>(), dy.data<T>(),
                 gate.data<T>(), up.data<T>(), gate.numel(), s);
}

// -------------------------------------------------------------------------------------- carry

Tensor carry_forward(const Tensor& first, const Tensor& previous, const Tensor& source,
                     const CarryNoise& noise) {
    const Tensor& any = first.defined() ? first : previous;
    expect_rank("carry_forward", "first or previous", any, 2);
    const int64_t R = source.numel(), D = any.dim(1);
    expect("carry_forward", "source", source, {R}, DType::i64);
    const DType a = accumulate_dtype(any.dtype());
    expect_optional("carry_forward", "given noise", noise.given, {R, D}, a);
    if (noise.half_width != 0) {
        expect("carry_forward", "noise sequence", noise.sequence, {R}, DType::i64);
        expect("carry_forward", "noise position", noise.position, {R}, DType::i32);
    }
    Tensor y = Tensor::empty(any.context(), {R, D}, any.dtype());
    FBT_DISPATCH(any, carry_forward, y.data<T>(), first.data<T>(), previous.data<T>(),
                 source.data<int64_t>(), noise.given.data<A>(),
                 kernels::Jitter<A>{A(noise.half_width), noise.key, noise.sequence.data<int64_t>(),
                                    noise.position.data<int32_t>()},
                 R, int(D), s);
    return y;
}

void carry_backward_accum(Tensor& dfirst, Tensor& dprevious, const Tensor& dy,
                          const Tensor& source) {
    expect("carry_backward_accum", "source", source, {dy.dim(0)}, DType::i64);
    FBT_DISPATCH(dy, carry_backward_accum, dfirst.data<T>(), dprevious.data<T>(), dy.data<T>(),
                 source.data<int64_t>(), dy.dim(0), int(dy.dim(1)), s);
}

// ------------------------------------------------------------------------------ cross-entropy

void cross_entropy_forward(Tensor& ce, Tensor& lse, const Tensor& logits, const Tensor& targets) {
    const int64_t N = logits.dim(0), V = logits.dim(1);
    const DType a = accumulate_dtype(logits.dtype());
    expect("cross_entropy_forward", "ce", ce, {N}, a);
    expect("cross_entropy_forward", "lse", lse, {N}, a);
    expect("cross_entropy_forward", "targets", targets, {N}, DType::i32);
    FBT_DISPATCH(logits, cross_entropy_forward, ce.data<A>(), lse.data<A>(), logits.data<T>(),
                 targets.data<int32_t>(), N, int(V), s);
}

void cross_entropy_backward(Tensor& dlogits, const Tensor& logits, const Tensor& lse,
                            const Tensor& targets, const Tensor& weight, double z_weight) {
    const int64_t N = logits.dim(0), V = logits.dim(1);
    expect("cross_entropy_backward", "dlogits", dlogits, logits.shape(), logits.dtype());
    expect("cross_entropy_backward", "weight", weight, {N}, accumulate_dtype(logits.dtype()));
    FBT_DISPATCH(logits, cross_entropy_backward, dlogits.data<T>(), logits.data<T>(), lse.data<A>(),
                 targets.data<int32_t>(), weight.data<A>(), A(z_weight), N, int(V), s);
}

// ------------------------------------------------------------------------ optimiser, sampling

void adamw_step(Tensor& w, Tensor& m, Tensor& v, const Tensor& grad, const kernels::AdamWStep& h) {
    expect("adamw_step", "grad", grad, w.shape(), w.dtype());
    expect("adamw_step", "m", m, w.shape(), w.dtype());
    expect("adamw_step", "v", v, w.shape(), w.dtype());
    FBT_DISPATCH_WIDE(w, adamw_step, w.data<T>(), m.data<T>(), v.data<T>(), grad.data<T>(),
                      w.numel(), h, s);
}

void normuon_momentum(Tensor& m, const Tensor& grad, double beta1, double grad_scale) {
    expect("normuon_momentum", "grad", grad, m.shape(), m.dtype());
    FBT_DISPATCH_WIDE(m, normuon_momentum, m.data<T>(), grad.data<T>(), m.numel(), beta1,
                      grad_scale, s);
}

void normuon_step(Tensor& w, Tensor& v, const Tensor& o, const kernels::NorMuonStep& h) {
    expect_rank("normuon_step", "o", o, 2);
    const int64_t N = o.dim(0), K = o.dim(1);
    const DType a = accumulate_dtype(o.dtype());
    expect("normuon_step", "w", w, {N, K}, a);
    expect("normuon_step", "v", v, {N}, a);
    Tensor scratch = Tensor::empty(o.context(), {N + 1}, a);
    FBT_DISPATCH(o, normuon_step, w.data<A>(), v.data<A>(), o.data<T>(), N, K, h, scratch.data<A>(),
                 s);
}

Tensor frobenius_normalize(const Tensor& x, DType dtype) {
    expect("frobenius_normalize", "x", x, x.shape(), accumulate_dtype(dtype));
    const int64_t chunks = (x.numel() + kernels::kSquareSumChunk - 1) / kernels::kSquareSumChunk;
    Tensor sum = Tensor::empty(x.context(), {1}, DType::f64);
    Tensor scratch = Tensor::empty(x.context(), {chunks}, DType::f64);
    FBT_DISPATCH_WIDE(x, square_sum, sum.data<double>(), x.data<T>(), x.numel(),
                      scratch.data<double>(), s);
    Tensor y = Tensor::empty(x.context(), x.shape(), dtype);
    FBT_DISPATCH(y, frobenius_normalize, y.data<T>(), x.data<A>(), sum.data<double>(), x.numel(),
                 s);
    return y;
}

void axpby(Tensor& y, double alpha, const Tensor& x, double beta) {
    expect("axpby", "x", x, y.shape(), y.dtype());
    FBT_DISPATCH(y, axpby, y.data<T>(), A(alpha), x.data<T>(), A(beta), y.numel(), s);
}

Tensor transpose(const Tensor& x) {
    expect_rank("transpose", "x", x, 2);
    Tensor y = Tensor::empty(x.context(), {x.dim(1), x.dim(0)}, x.dtype());
    FBT_DISPATCH(x, transpose, y.data<T>(), x.data<T>(), x.dim(0), x.dim(1), s);
    return y;
}

std::vector<double> square_sums(const std::vector<Tensor>& tensors) {
    if (tensors.empty()) return {};
    Context& context = tensors[0].context();
    Tensor sums = Tensor::empty(context, {int64_t(tensors.size())}, DType::f64);
    double* sum = sums.data<double>();
    for (const Tensor& x : tensors) {
        const int64_t chunks =
            (x.numel() + kernels::kSquareSumChunk - 1) / kernels::kSquareSumChunk;
        Tensor scratch = Tensor::empty(context, {chunks}, DType::f64);
        FBT_DISPATCH_WIDE(x, square_sum, sum, x.data<T>(), x.numel(), scratch.data<double>(), s);
        ++sum;
    }
    return sums.to_vector<double>();
}

std::vector<int32_t> sample(const Tensor& logits, const std::vector<kernels::Sampling>& settings,
                            const std::vector<float>& uniform) {
    const int64_t N = logits.dim(0), V = logits.dim(1);
    if (int64_t(settings.size()) != N || int64_t(uniform.size()) != N)
        fail("sample", std::to_string(settings.size()) + " settings and " +
                           std::to_string(uniform.size()) + " uniforms for " + std::to_string(N) +
                           " rows");
    finish("sample", logits, kernels::sample_arguments(settings.data(), N, int(V)));
    Context& c = logits.context();
    Tensor tokens = Tensor::empty(c, {N}, DType::i32);
    Tensor scratch = Tensor::empty(c, {N, V}, DType::i32);
    Tensor u = Tensor::from(c, uniform, {N});
    Tensor set = Tensor::empty(c, {N * int64_t(sizeof(kernels::Sampling))}, DType::u8);
    set.copy_in(settings.data(), settings.size() * sizeof(kernels::Sampling));
    const auto* p = reinterpret_cast<const kernels::Sampling*>(set.raw());
    FBT_DISPATCH(logits, sample, tokens.data<int32_t>(), logits.data<T>(), p, u.data<float>(), N,
                 int(V), scratch.data<int32_t>(), s);
    return tokens.to_vector<int32_t>();
}

// --------------------------------------------------------------------------- rows, elementwise

void copy_rows(Tensor& dst, const Tensor& dst_rows, const Tensor& src, const Tensor& src_rows,
               int64_t count) {
    if (count == 0) return;
    const int64_t W = dst.numel() / dst.dim(0);
    FBT_DISPATCH(dst, copy_rows, dst.data<T>(), dst_rows.data<int64_t>(), src.data<T>(),
                 src_rows.data<int64_t>(), count, W, s);
}

void copy_rows_accum(Tensor& dst, const Tensor& dst_rows, const Tensor& src, const Tensor& src_rows,
                     int64_t count) {
    if (count == 0) return;
    const int64_t W = dst.numel() / dst.dim(0);
    FBT_DISPATCH(dst, copy_rows_accum, dst.data<T>(), dst_rows.data<int64_t>(), src.data<T>(),
                 src_rows.data<int64_t>(), count, W, s);
}

Tensor cast(const Tensor& x, DType dtype) {
    if (x.dtype() == dtype) return x;
    expect("cast", "x", x, x.shape(), accumulate_dtype(dtype));
    Tensor y = Tensor::empty(x.context(), x.shape(), dtype);
    FBT_DISPATCH(y, cast, y.data<T>(), x.data<A>(), x.numel(), s);
    return y;
}

Tensor widen(const Tensor& x) {
    if (x.dtype() == accumulate_dtype(x.dtype())) return x;
    Tensor y = Tensor::empty(x.context(), x.shape(), accumulate_dtype(x.dtype()));
    FBT_DISPATCH(x, widen, y.data<A>(), x.data<T>(), x.numel(), s);
    return y;
}

void add_accum(Tensor& y, const Tensor& x) {
    expect("add_accum", "x", x, y.shape(), y.dtype());
    FBT_DISPATCH(y, add_accum, y.data<T>(), x.data<T>(), y.numel(), s);
}

Tensor add(const Tensor& a, const Tensor& b) {
    expect("add", "b", b, a.shape(), a.dtype());
    Tensor y = like(a);
    FBT_DISPATCH(y, add, y.data<T>(), a.data<T>(), b.data<T>(), y.numel(), s);
    return y;
}

Tensor concat_columns(const Tensor& a, const Tensor& b) {
    expect_rank("concat_columns", "a", a, 2);
    expect("concat_columns", "b", b, {a.dim(0), b.dim(1)}, a.dtype());
    Tensor y = Tensor::empty(a.context(), {a.dim(0), a.dim(1) + b.dim(1)}, a.dtype());
    FBT_DISPATCH(y, concat_columns, y.data<T>(), a.data<T>(), b.data<T>(), a.dim(0), a.dim(1),
                 b.dim(1), s);
    return y;
}

void split_columns(Tensor& a, Tensor& b, const Tensor& y) {
    expect("split_columns", "y", y, {a.dim(0), a.dim(1) + b.dim(1)}, a.dtype());
    FBT_DISPATCH(y, split_columns, a.data<T>(), b.data<T>(), y.data<T>(), a.dim(0), a.dim(1),
                 b.dim(1), s);
}

}  // namespace fbt::tensor
