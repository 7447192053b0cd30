// Token embedding: a gather of rows, and its gradient, a deterministic sum over equal tokens.
#pragma once
#include "kernels/types.h"

namespace fbt::kernels {

// Forward   y[n,:] = T(w[tokens[n],:])        w is the master copy, or one rounded to T already,
//                                             which gives the same y
// Backward  dw[v,:] += sum over n with tokens[n] = v of dy[n,:]
// Shapes  y, dy [N,D] T; w [V,D] A or T; dw [V,D] A; tokens [N], each in [0,V) (the caller checks);
//         scratch [2*N] int32, used by cuda only, elsewhere it may be null.
// Dtypes  T = float with A = float, cpu and cuda also T = bf16, ref also T = A = double.
//         Sums in A, in an order given by the rows that hold v: ascending n; cuda cuts them into
//         chunks of kRowChunk rows, which 16 sums take in turn, and adds those in order.
// Needs   N >= 0; D, V >= 1; cuda's backward N < 2^31.      Errors  bad_argument where Needs is not
//         met; device_error.      Alias  none.
// Moves   forward N*D*(sizeof(T) + sizeof(A)) bytes; backward N*D*sizeof(T) and 2*D*sizeof(A) for
//         each token that occurs
FBT_OP(template <class T, class W = accumulate_t<T>>
       Status embedding_forward(T* y, const int32_t* tokens, const W* w, int64_t N, int D,
                                Stream s);)
FBT_OP(template <class T, class A = accumulate_t<T>>
       Status embedding_backward_accum(A* dw, const T* dy, const int32_t* tokens, int64_t N, int D,
                                       int V, int32_t* scratch, Stream s);)

}  // namespace fbt::kernels
