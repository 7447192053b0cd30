#include "nn/block.h"

#include <cmath>

namespace fbt::nn {

RopeTable::RopeTable(Context& context, int positions, int head_dim, double theta, DType dtype) {
    const int half = head_dim / 2;
    std::vector<double> c(size_t(positions) * half), s(c.size());
    for (int i = 0; i < half; ++i) {
        const double frequency = std::pow(theta, -double(i) / half);
        for (int t = 0; t < positions; ++t) {
            c[size_t(t) * half + i] = std::cos(t * frequency);
            s[size_t(t) * half + i] = std::sin(t * frequency);
        }
    }
    const DType a = tensor::accumulate_dtype(dtype);
    cos = Tensor::from_double(context, c, {positions, half}, a);
    sin = Tensor::from_double(context, s, {positions, half}, a);
}

Attention::Attention(ParameterSet& p, const std::string& prefix, const BlockShape& shape)
    : shape_(shape),
      q_(p.add(prefix + "q.weight", {shape.heads * shape.head_dim, shape.dim}, Role::matrix)),
      k_(p.add(prefix + "k.weight", {shape.kv_heads * shape.head_dim, shape.dim}, Role::matrix)),
      v_(p.add(prefix + "v.weight", {shape.kv_heads * shape.head_dim, shape.dim}, Role::matrix)),
      gate_(p.add(prefix + "gate.weight", {shape.heads, shape.dim}, Role::matrix)),
      q_norm_(p.add(prefix + "q_norm.gain", {shape.head_dim}, Role::gain)),
      k_norm_(p.add(prefix + "k_norm.gain", {shape.head_dim}, Role::gain)),
      o_(p.add(prefix + "o.weight", {shape.dim, shape.heads * shape.head_dim}, Role::matrix)) {}

Var Attention::forward(Tape& tape, const Var& x, const SpanCall& call, int layer,
                       const KeyValues& prefix, KeyValues& own) const {
    const int64_t N = x.value().dim(0), H = shape_.heads, G = shape_.kv_heads, C = shape_.head_dim;
    const std::vector<Var> projected =
        autograd::linear(tape, x, {&q_.weight(), &k_.weight(), &v_.weight(), &gate_.weight()});
    const auto heads = [&](int i, int64_t n) {
        return autograd::view(tape, projected[i], {N, n, C});
    };
    const auto rotated = [&](const Var& y, Parameter& gain) {
        return autograd::qk_norm_rope(tape, y, gain.weight(), call.rope->cos, call.rope->sin,
                                      call.spans->device_positions(), shape_.norm_eps);
    };
    const Var q = rotated(heads(0, H), q_norm_);
    own = {rotated(heads(1, G), k_norm_), heads(2, G)};
    const KeyValues all = call.store->join(tape, layer, prefix, own);
    Var o = autograd::attention(tape, q, all.k, all.v, call.spans, shape_.window);
    o = autograd::gate(tape, o, projected[3]);
    return autograd::linear(tape, autograd::view(tape, o, {N, H * C}), o_.weight());
}

SwiGLU::SwiGLU(ParameterSet& p, const std::string& prefix, const BlockShape& shape)
    : gate_(p.add(prefix + "gate.weight", {shape.ffn_dim, shape.dim}, Role::matrix)),
      up_(p.add(prefix + "up.weight", {shape.ffn_dim, shape.dim}, Role::matrix)),
      down_(p.add(prefix + "down.weight", {shape.dim, shape.ffn_dim}, Role::matrix)) {}

Var SwiGLU::forward(Tape& tape, const Var& x) const {
    const std::vector<Var> both = autograd::linear(tape, x, {&gate_.weight(), &up_.weight()});
    return autograd::linear(tape, autograd::swiglu(tape, both[0], both[1]), down_.weight());
}

Block::Block(ParameterSet& p, const std::string& prefix, const BlockShape& shape)
    : shape_(shape),
      attn_norm_(p.add(prefix + "attn_norm.gain", {shape.dim}, Role::gain)),
      attention_(p, prefix + "attn.", shape),
      attn_out_norm_(p.add(prefix + "attn_out_norm.gain", {shape.dim}, Role::gain)),
      mlp_norm_(p.add(prefix + "mlp_norm.gain", {shape.dim}, Role::gain)),
      mlp_(p, prefix + "mlp.", shape),
      mlp_out_norm_(p.add(prefix + "mlp_out_norm.gain", {shape.dim}, Role::gain)) {}

std::vector<Var> Block::run(Tape& tape, const Var& x, const SpanCall& call, int layer,
                            const KeyValues& prefix) const {
    const double eps = shape_.norm_eps;
    KeyValues own;
    Var branch = autograd::rmsnorm(tape, x, attn_norm_.weight(), eps);
    branch = attention_.forward(tape, branch, call, layer, prefix, own);
    const Var y =
        autograd::residual_rmsnorm(tape, x, branch, attn_out_norm_.weight(), shape_.alpha, eps);
    branch = mlp_.forward(tape, autograd::rmsnorm(tape, y, mlp_norm_.weight(), eps));
    return {autograd::residual_rmsnorm(tape, y, branch, mlp_out_norm_.weight(), shape_.alpha, eps),
            own.k, own.v};
}

Var Block::forward(Tape& tape, const Var& x, const SpanCall& call, int layer,
                   bool recompute) const {
    const KeyValues prefix = call.store->prefix(layer);
    std::vector<Var> out;
    if (recompute)
        out = autograd::recompute(tape, {x, prefix.k, prefix.v},
                                  [this, call, layer](Tape& t, const std::vector<Var>& in) {
                                      return run(t, in[0], call, layer, {in[1], in[2]});
                                  });
    else
        out = run(tape, x, call, layer, prefix);
    call.store->keep(layer, {out[1], out[2]});
    return out[0];
}

}  // namespace fbt::nn
