// The layers of the stack (the paper's appendix A). Each takes rows of packed spans [N, D].
#pragma once
#include <memory>

#include "nn/key_values.h"
#include "nn/parameter.h"

namespace fbt::nn {

using autograd::Tape;
using autograd::Var;

// RoPE's angles, computed in double: cos and sin of t * theta^(-2i/C), [positions, C/2].
struct RopeTable {
    Tensor cos, sin;
    RopeTable(Context& context, int positions, int head_dim, double theta, DType dtype);
};

struct BlockShape {
    int dim, heads, kv_heads, head_dim, ffn_dim;
    int window;    // 0: full attention
    double alpha;  // of the residual adds
    double norm_eps;
};

// What every layer of one call shares.
struct SpanCall {
    std::shared_ptr<const tensor::SpanBatch> spans;
    const RopeTable* rope;
    std::shared_ptr<KeyValueStore> store;
};

// q, k = rope(rmsnorm_C(W x));  o = attention(q, k, v) * sigmoid(gate x), one gate a head;  W_o o
class Attention {
  public:
    Attention(ParameterSet& parameters, const std::string& prefix, const BlockShape& shape);
    // Also gives the span's own keys and values.
    Var forward(Tape& tape, const Var& x, const SpanCall& call, int layer, const KeyValues& prefix,
                KeyValues& own) const;

  private:
    BlockShape shape_;
    Parameter &q_, &k_, &v_, &gate_, &q_norm_, &k_norm_, &o_;
};

// W_down (silu(W_gate x) * W_up x)
class SwiGLU {
  public:
    SwiGLU(ParameterSet& parameters, const std::string& prefix, const BlockShape& shape);
    Var forward(Tape& tape, const Var& x) const;

  private:
    Parameter &gate_, &up_, &down_;
};

// x += alpha * norm(attention(norm(x)));  x += alpha * norm(mlp(norm(x)))
class Block {
  public:
    Block(ParameterSet& parameters, const std::string& prefix, const BlockShape& shape);
    // recompute: keep only the inputs and the own keys and values, and run again on the way back.
    Var forward(Tape& tape, const Var& x, const SpanCall& call, int layer, bool recompute) const;

  private:
    std::vector<Var> run(Tape& tape, const Var& x, const SpanCall& call, int layer,
                         const KeyValues& prefix) const;
    BlockShape shape_;
    Parameter& attn_norm_;
    Attention attention_;
    Parameter &attn_out_norm_, &mlp_norm_;
    SwiGLU mlp_;
    Parameter& mlp_out_norm_;
};

}  // namespace fbt::nn
