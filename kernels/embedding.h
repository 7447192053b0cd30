// Token embedding: a gather of rows, and its gradient, a deterministic sum over equal tokens.
#pragma once
#include "kernels/types.h"

namespace fbt::kernels {

// Forward   y[n,:] = w[tokens[n],:]
// Backward  dw[v,:] += sum over n with tokens[n] = v, in ascending n, of dy[n,:]
// Shapes  y, dy [N,D] T; w [V,D] T; dw [V,D] A; tokens [N], each in [0,V) (the caller checks).
// Needs   N >= 0; D, V >= 1.      Alias  none.
FBT_HOST_OP(embedding_forward,
            template <class T> Status embedding_forward(T* y, const int32_t* tokens, const T* w,
                                                        int64_t N, int D, Stream s);)
FBT_HOST_OP(embedding_backward_accum,
            template <class T, class A = accumulate_t<T>>
            Status embedding_backward_accum(A* dw, const T* dy, const int32_t* tokens, int64_t N,
                                            int D, int V, Stream s);)

}  // namespace fbt::kernels
