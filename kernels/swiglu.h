// SiLU-gated linear unit (arXiv:2002.05202, eq. 6), the elementwise part.
#pragma once
#include "kernels/types.h"

namespace fbt::kernels {

// Forward   y[i] = silu(gate[i]) * up[i],   silu(a) = a*sigmoid(a)
// Backward  dgate = dy*up*sigmoid(a)*(1 + a*(1 - sigmoid(a)))      dup = dy*silu(a)
// Shapes  all [n] T.
// Dtypes  T = float, cpu and cuda also bf16 (computed in float), ref also double.
// Alias   y may be gate or up; dgate may be gate or dy, dup may be up or dy.      Needs  n >= 0.
// Errors  bad_argument where Needs is not met.
// Moves   forward 3*n*sizeof(T) bytes, backward 5*n*sizeof(T)
FBT_OP(template <class T>
       Status swiglu_forward(T* y, const T* gate, const T* up, int64_t n, Stream s);)
FBT_OP(template <class T> Status swiglu_backward(T* dgate, T* dup, const T* dy, const T* gate,
                                                 const T* up, int64_t n, Stream s);)

}  // namespace fbt::kernels
