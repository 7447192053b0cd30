// The ops that a model is made of, each with its rule. Formulas, shapes and sources are in the
// contract headers of kernels/; activations are [N, ...] rows of packed spans.
#pragma once
#include "autograd/tape.h"

namespace fbt::autograd {

// y = x W^T. x [N,in], w [out,in]; or one y for each of several w of the same width.
Var linear(Tape& tape, const Var& x, Weight& w);
std::vector<Var> linear(Tape& tape, const Var& x, const std::vector<Weight*>& ws);

// y[n] = w[tokens[n]]. tokens [N] i32, w [V,D].
Var embedding(Tape& tape, const Tensor& tokens, Weight& w);

// x [N,D], gain [D].
Var rmsnorm(Tape& tape, const Var& x, Weight& gain, double eps);

// x + alpha * rmsnorm(branch). x, branch [N,D], gain [D].
Var residual_rmsnorm(Tape& tape, const Var& x, const Var& branch, Weight& gain, double alpha,
                     double eps);

// x [N,H,C]; cos, sin [positions, C/2]; positions [N] i32.
Var qk_norm_rope(Tape& tape, const Var& x, Weight& gain, const Tensor& cos, const Tensor& sin,
                 const Tensor& positions, double eps);

// q [N,H,C] against the key store k, v [rows,G,C] that `spans` addresses. `spans` is shared
// because the rule needs it on the way back.
Var attention(Tape& tape, const Var& q, const Var& k, const Var& v,
              const std::shared_ptr<const tensor::SpanBatch>& spans, int window);

// x * sigmoid(g), g broadcast over x's last dimension: x [N,H,C], g [N,H], or both [N,D].
Var gate(Tape& tape, const Var& x, const Var& g);

// silu(gate) * up, both [N,F].
Var swiglu(Tape& tape, const Var& gate, const Var& up);

// a + b, equal shapes; [a | b] of a [N,A] and b [N,B]; the same elements in another shape.
Var add(Tape& tape, const Var& a, const Var& b);
Var concat_columns(Tape& tape, const Var& a, const Var& b);
Var view(Tape& tape, const Var& x, tensor::Shape shape);

// The carried states of fused rows (kernels/carry.h); first or previous may be undefined.
Var carry(Tape& tape, const Var& first, const Var& previous, const Tensor& source,
          const tensor::CarryNoise& noise);

// A key store of `rows` rows joined from a prefix, of which `prefix_src` goes to `prefix_dst`, and
// a span's own rows, which go to `own_dst`. The prefix's gradient flows into pass 1.
Var join_rows(Tape& tape, int64_t rows, const Var& prefix, const Tensor& prefix_src,
              const Tensor& prefix_dst, const Var& own, const Tensor& own_dst);

// Cross-entropy over the tied embedding, the root of the way back:
//   logits = h E^T      loss = sum_n weight[n] * (ce[n] + z_weight * lse[n]^2)
// Logits exist in chunks of kLogitRows rows only. When the tape records, the gradients of h and E
// are made chunk by chunk at once, since the loss is the root and its own gradient is 1.
// Returns ce and lse [N], accumulate dtype.
inline constexpr int64_t kLogitRows = 256;
struct Classified {
    Tensor ce, lse;
};
Classified classifier(Tape& tape, const Var& h, Weight& embedding, const Tensor& targets,
                      const Tensor& weight, double z_weight);

}  // namespace fbt::autograd
