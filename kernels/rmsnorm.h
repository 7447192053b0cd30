// RMSNorm (arXiv:1910.07467, eq. 4), plain and fused with the scaled residual add.
#pragma once
#include "kernels/types.h"

namespace fbt::kernels {

// Forward
//   rstd[n] = 1/sqrt(mean_d x[n,d]^2 + eps)      y[n,d] = x[n,d] * rstd[n] * gain[d]
// Shapes  x, y [N,D] T row-major; gain [D] A; rstd [N] A, saved for backward, may be null
// Dtypes  T = float with A = float, cpu and cuda also T = bf16, ref also T = A = double.
//         Sums in A, in one fixed order per row.
// Needs   N >= 0, D >= 1.      Errors  bad_argument where Needs is not met
// Alias   y may be x.      Moves  >= 2*N*D*sizeof(T) bytes
FBT_OP(template <class T, class A = accumulate_t<T>>
       Status rmsnorm_forward(T* y, A* rstd, const T* x, const A* gain, int64_t N, int D, A eps,
                              Stream s);)

// Forward of the residual branch (docs/algorithm.md, the stack):
//   y[n,d] = x[n,d] + alpha * branch[n,d] * rstd[n] * gain[d],  rstd of `branch`
// Shapes as above; y may be x or branch.
FBT_OP(template <class T, class A = accumulate_t<T>>
       Status residual_rmsnorm_forward(T* y, A* rstd, const T* x, const T* branch, const A* gain,
                                       A alpha, int64_t N, int D, A eps, Stream s);)

// Backward of both, with scale = 1 or alpha. With g = scale*dy*gain and xhat = x*rstd:
//   dx = rstd*(g - xhat*mean_d(g*xhat))      dgain[d] += scale * sum_n dy[n,d]*xhat[n,d]
// x is the normed input (the branch, in the fused form). dgain sums over rows in chunks of
// kRowChunk, combined in order; scratch has row_chunks(N)*D elements of A.
// Alias   dx may be dy.      Moves  >= 3*N*D*sizeof(T) bytes
FBT_OP(template <class T, class A = accumulate_t<T>>
       Status rmsnorm_backward(T* dx, A* dgain_accum, const T* dy, const T* x, const A* gain,
                               const A* rstd, A scale, int64_t N, int D, A* scratch, Stream s);)

}  // namespace fbt::kernels
