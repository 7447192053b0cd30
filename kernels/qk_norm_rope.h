// Per-head RMSNorm of queries or keys, then rotary position embedding (arXiv:2104.09864, eq. 34,
// in the half-split pairing: the pair is (i, i + C/2)).
#pragma once
#include "kernels/types.h"

namespace fbt::kernels {

// Forward, for each row n and head h, with x = x[n,h,:] and t = positions[n]:
//   rstd = 1/sqrt(mean_c x[c]^2 + eps)        z[c] = x[c] * rstd * gain[c]
//   y[i]       = z[i]*cos[t,i] - z[i+C/2]*sin[t,i]
//   y[i + C/2] = z[i+C/2]*cos[t,i] + z[i]*sin[t,i]            for i < C/2
// Backward rotates dy by -t, then is RMSNorm's backward with the sum over all rows and heads:
//   dgain[c] += sum_{n,h} dz[c]*x[c]*rstd
// Shapes  x, y, dx, dy [N,H,C] T; gain [C] A; cos, sin [max position + 1, C/2] A; rstd [N,H] A
//         (may be null in forward); positions [N]; scratch row_chunks(N)*C elements of A.
// Dtypes  T = float with A = float, cpu and cuda also T = bf16, ref also T = A = double.
//         Sums in A, in one fixed order for each C; dgain over chunks of kRowChunk rows n.
// Needs   N >= 0, H >= 1, C even and <= 256.      Errors  bad_argument where Needs is not met.
// Alias   y may be x; dx may be dy.
// Moves   forward >= 2*N*H*C*sizeof(T) bytes, backward >= 3*N*H*C*sizeof(T)
FBT_OP(template <class T, class A = accumulate_t<T>>
       Status qk_norm_rope_forward(T* y, A* rstd, const T* x, const A* gain, const A* cos,
                                   const A* sin, const int32_t* positions, int64_t N, int H, int C,
                                   A eps, Stream s);)
FBT_OP(template <class T, class A = accumulate_t<T>>
       Status qk_norm_rope_backward(T* dx, A* dgain_accum, const T* dy, const T* x, const A* gain,
                                    const A* rstd, const A* cos, const A* sin,
                                    const int32_t* positions, int64_t N, int H, int C, A* scratch,
                                    Stream s);)

}  // namespace fbt::kernels
