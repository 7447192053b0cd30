// The classifier's row function: cross-entropy and z-loss of rows of logits. The caller computes
// logits in chunks of rows, so that N x V of them never exist at once. Decoding's
// log-probabilities are -ce of the same function.
#pragma once
#include "kernels/types.h"

namespace fbt::kernels {

// Forward   lse[n] = log sum_v exp(logits[n,v])      ce[n] = lse[n] - logits[n, targets[n]]
//           ce[n] = 0 where targets[n] < 0 (ignored); lse is computed for every row.
// Backward, of sum_n weight[n]*(ce[n] + z_weight*lse[n]^2), rows with targets[n] < 0 counting zero:
//   dlogits[n,v] = weight[n] * ((1 + 2*z_weight*lse[n])*exp(logits[n,v] - lse[n])
//                               - [v == targets[n]])
// Shapes  logits, dlogits [N,V] T; ce, lse, weight [N] A; targets [N], each < V.
// Dtypes  T = float with A = float, cpu and cuda also T = bf16, ref also T = A = double.
//         Sums in A, one fixed order per row.
// Needs   N >= 0, V >= 1.      Errors  bad_argument where N or V is out of that range.
// Alias   dlogits may be logits.
// Moves   forward N*V*sizeof(T) bytes, backward 2*N*V*sizeof(T).
FBT_OP(template <class T, class A = accumulate_t<T>>
       Status cross_entropy_forward(A* ce, A* lse, const T* logits, const int32_t* targets,
                                    int64_t N, int V, Stream s);)
FBT_OP(template <class T, class A = accumulate_t<T>>
       Status cross_entropy_backward(T* dlogits, const T* logits, const A* lse,
                                     const int32_t* targets, const A* weight, A z_weight, int64_t N,
                                     int V, Stream s);)

}  // namespace fbt::kernels
