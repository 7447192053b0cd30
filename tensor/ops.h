// Ops on tensors: arguments checked, memory for scratch found, the backend's kernel called.
// Formulas and shapes are in the contract header of the same name in kernels/. Outputs come first.
// Every function throws Error(internal) naming op, argument, shape and dtype when a contract is
// broken, and Error(environment) when the device fails.
#pragma once
#include <vector>

#include "kernels/adamw.h"
#include "kernels/normuon.h"
#include "kernels/philox.h"
#include "kernels/sampling.h"
#include "tensor/span_batch.h"
#include "tensor/tensor.h"

namespace fbt::tensor {

// The dtype of sums, saved statistics and parameter gradients beside activations of type t.
constexpr DType accumulate_dtype(DType t) { return t == DType::f64 ? DType::f64 : DType::f32; }

// A matrix [N,K] in the layout that its backend's product wants (kernels/matmul.h).
struct PackedMatrix {
    Tensor data;
    int64_t N = 0, K = 0;
};
int64_t matmul_packed_size(Context& context, int64_t N, int64_t K, DType dtype);  // elements
// Packs w [N,K], or, transposed, w [K,N], for products in `dtype`; w has its accumulate dtype.
// Reuses `packed`'s memory when the sizes agree.
void matmul_pack(PackedMatrix& packed, const Tensor& w, bool transposed, DType dtype);
Tensor matmul_forward(const Tensor& x, const PackedMatrix& w);  // x [M,K] -> [M,N]
// One product for each w, the same as one by one.
std::vector<Tensor> matmul_forward(const Tensor& x, const std::vector<const PackedMatrix*>& ws);
void matmul_forward(Tensor& y, const Tensor& x, const PackedMatrix& w);
void matmul_dw_accum(Tensor& dw, const Tensor& dy, const Tensor& x);

// w in `dtype` or in its accumulate dtype.
Tensor embedding_forward(const Tensor& tokens, const Tensor& w, DType dtype);
void embedding_backward_accum(Tensor& dw, const Tensor& dy, const Tensor& tokens);

// rstd may be undefined when no backward follows.
void rmsnorm_forward(Tensor& y, Tensor& rstd, const Tensor& x, const Tensor& gain, double eps);
void residual_rmsnorm_forward(Tensor& y, Tensor& rstd, const Tensor& x, const Tensor& branch,
                              const Tensor& gain, double alpha, double eps);
// dgain may be undefined: the gain's gradient is then dropped.
Tensor rmsnorm_backward(Tensor& dgain, const Tensor& dy, const Tensor& x, const Tensor& gain,
                        const Tensor& rstd, double scale);

// cos and sin [positions, C/2].
void qk_norm_rope_forward(Tensor& y, Tensor& rstd, const Tensor& x, const Tensor& gain,
                          const Tensor& cos, const Tensor& sin, const Tensor& positions,
                          double eps);
Tensor qk_norm_rope_backward(Tensor& dgain, const Tensor& dy, const Tensor& x, const Tensor& gain,
                             const Tensor& rstd, const Tensor& cos, const Tensor& sin,
                             const Tensor& positions);

void attention_forward(Tensor& o, Tensor& lse, const Tensor& q, const Tensor& k, const Tensor& v,
                       const SpanBatch& spans, int window, double scale);
void attention_backward(Tensor& dq, Tensor& dk, Tensor& dv, const Tensor& dout, const Tensor& q,
                        const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse,
                        const SpanBatch& spans, int window, double scale);

// x [N,C], g [N].
Tensor gate_forward(const Tensor& x, const Tensor& g);
void gate_backward(Tensor& dx, Tensor& dg, const Tensor& dy, const Tensor& x, const Tensor& g);

Tensor swiglu_forward(const Tensor& gate, const Tensor& up);
void swiglu_backward(Tensor& dgate, Tensor& dup, const Tensor& dy, const Tensor& gate,
                     const Tensor& up);

// Disturbance of the carried states: drawn by counter, or given from outside, or neither.
struct CarryNoise {
    double half_width = 0;
    kernels::PhiloxKey key{};
    Tensor sequence;  // [R] i64 global sequence index
    Tensor position;  // [R] i32 position of the disturbed row
    Tensor given;     // [R,D] accumulate dtype, or undefined
};
// first or previous may be undefined when no source names it.
Tensor carry_forward(const Tensor& first, const Tensor& previous, const Tensor& source,
                     const CarryNoise& noise);
void carry_backward_accum(Tensor& dfirst, Tensor& dprevious, const Tensor& dy,
                          const Tensor& source);

void cross_entropy_forward(Tensor& ce, Tensor& lse, const Tensor& logits, const Tensor& targets);
void cross_entropy_backward(Tensor& dlogits, const Tensor& logits, const Tensor& lse,
                            const Tensor& targets, const Tensor& weight, double z_weight);

void adamw_step(Tensor& w, Tensor& m, Tensor& v, const Tensor& grad, const kernels::AdamWStep& h);
void normuon_momentum(Tensor& m, const Tensor& grad, double beta1, double grad_scale);
// w, o [N,K], v [N].
void normuon_step(Tensor& w, Tensor& v, const Tensor& o, const kernels::NorMuonStep& h);
// x, in the accumulate dtype of `dtype`, divided by its Frobenius norm and rounded.
Tensor frobenius_normalize(const Tensor& x, DType dtype);
void axpby(Tensor& y, double alpha, const Tensor& x, double beta);
Tensor transpose(const Tensor& x);  // [N,K] -> [K,N]
// sum of x^2 for each; the device is read once, after all of them.
std::vector<double> square_sums(const std::vector<Tensor>& tensors);

std::vector<int32_t> sample(const Tensor& logits, const std::vector<kernels::Sampling>& settings,
                            const std::vector<float>& uniform);

// Row indices are i64 tensors on the device; an undefined one means row n.
void copy_rows(Tensor& dst, const Tensor& dst_rows, const Tensor& src, const Tensor& src_rows,
               int64_t count);
void copy_rows_accum(Tensor& dst, const Tensor& dst_rows, const Tensor& src, const Tensor& src_rows,
                     int64_t count);

// x, in the accumulate dtype of `dtype`, rounded to it; x itself where that is the same.
Tensor cast(const Tensor& x, DType dtype);
// x in its accumulate dtype; x itself where that is the same.
Tensor widen(const Tensor& x);

void add_accum(Tensor& y, const Tensor& x);
Tensor add(const Tensor& a, const Tensor& b);
Tensor concat_columns(const Tensor& a, const Tensor& b);
void split_columns(Tensor& a, Tensor& b, const Tensor& y);

}  // namespace fbt::tensor
