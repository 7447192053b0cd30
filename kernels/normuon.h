// NorMuon (arXiv:2510.05491, algorithm 1): momentum, orthogonalised as in Muon (tensor/
// newton_schulz.h), then every row (neuron) divided by the root of its own second moment, and the
// whole rescaled to a fixed root mean square. And the elementwise parts of the orthogonalisation.
// No optimiser uses these ops yet.
#pragma once
#include "kernels/types.h"

namespace fbt::kernels {

// Dtypes of all: A = float, with T = float or, on cpu and cuda, bf16; on ref also T = A = double.
// Errors: bad_argument where a size is out of the range that Needs gives.

// The momentum, which is not Nesterov's:   m = beta1*m + (1-beta1)*grad*grad_scale
// Shapes  m, grad [n].      Alias  none.      Needs  n >= 0.      Moves  3*n*sizeof(A) bytes.
FBT_OP(template <class A> Status normuon_momentum(A* m, const A* grad, int64_t n, double beta1,
                                                  double grad_scale, Stream s);)

struct NorMuonStep {
    double learning_rate, beta2, eps, weight_decay;
};

// The step, o being the orthogonalised momentum:
//   v[n] = beta2*v[n] + (1-beta2)*mean_k o[n,k]^2        r[n,k] = o[n,k] / (sqrt(v[n]) + eps)
//   w = w*(1 - lr*weight_decay) - lr * 0.2*sqrt(N*K)/||r||_F * r        0 for r = 0
// so that the step's root mean square is 0.2*lr, about that of Adam's.
// Shapes  w [N,K] A, v [N] A, o [N,K] T; scratch [N+1] A.      Alias  none.
// Needs   N, K >= 0; eps > 0. Sums run in one order, fixed by N and K.
// Moves   N*K*(2*sizeof(T) + 2*sizeof(A)) bytes.
FBT_OP(template <class T, class A = accumulate_t<T>>
       Status normuon_step(A* w, A* v, const T* o, int64_t N, int64_t K, const NorMuonStep& h,
                           A* scratch, Stream s);)

// y[i] = x[i] / (sqrt(*square_sum) + 1e-7): the Frobenius norm, from square_sum.h, becomes 1.
// Shapes  y [n] T, x [n] A; square_sum: one double in the device's memory.      Alias  none.
// Needs   n >= 0.      Moves  n*(sizeof(T) + sizeof(A)) bytes.
inline constexpr double kNormEps = 1e-7;
FBT_OP(template <class T, class A = accumulate_t<T>>
       Status frobenius_normalize(T* y, const A* x, const double* square_sum, int64_t n, Stream s);)

// y[i] = alpha*x[i] + beta*y[i]
// Shapes  x, y [n] T.      Alias  none.      Needs  n >= 0.      Moves  3*n*sizeof(T) bytes.
FBT_OP(template <class T, class A = accumulate_t<T>>
       Status axpby(T* y, A alpha, const T* x, A beta, int64_t n, Stream s);)

// y[k,n] = x[n,k]
// Shapes  x [N,K], y [K,N] T.      Alias  none.      Needs  N, K >= 0.
// Moves   2*N*K*sizeof(T) bytes.
FBT_OP(template <class T> Status transpose(T* y, const T* x, int64_t N, int64_t K, Stream s);)

}  // namespace fbt::kernels
