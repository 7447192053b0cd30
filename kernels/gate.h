// Sigmoid gates: attention's one gate a head, and the fusion's gated product (paper eq. 4).
#pragma once
#include "kernels/types.h"

namespace fbt::kernels {

// Forward   y[n,c] = x[n,c] * sigmoid(g[n])
// Backward  dx[n,c] = dy[n,c] * sigmoid(g[n])
//           dg[n] = sigmoid(g)(1 - sigmoid(g)) * sum_c dy[n,c]*x[n,c]
// Shapes  x, y, dx, dy [N,C] T; g, dg [N] T. The head gate has N = rows*H; the fusion C = 1.
// Dtypes  T = float, cpu and cuda also bf16, ref also double; computed and summed in float, in one
//         fixed order for each C.      Errors  bad_argument where Needs is not met.
// Alias   y may be x; dx may be dy.      Needs  N >= 0, C >= 1.
// Moves   forward (2*C + 1)*N*sizeof(T) bytes, backward (3*C + 2)*N*sizeof(T)
FBT_OP(template <class T>
       Status gate_forward(T* y, const T* x, const T* g, int64_t N, int C, Stream s);)
FBT_OP(template <class T> Status gate_backward(T* dx, T* dg, const T* dy, const T* x, const T* g,
                                               int64_t N, int C, Stream s);)

}  // namespace fbt::kernels
