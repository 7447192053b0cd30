// Sum of squares, the building block of the global gradient norm.
#pragma once
#include "kernels/types.h"

namespace fbt::kernels {

inline constexpr int64_t kSquareSumChunk = 16384;

// *sum = sum_i x[i]^2, in double: chunks of kSquareSumChunk elements, each backend's own order in a
// chunk and over the chunks being fixed by n, so the result does not depend on the thread count or
// the alignment. A NaN or infinity in x shows in *sum.
// Shapes  x [n] A; sum: one double; scratch: ceil(n / kSquareSumChunk) doubles; device memory.
// Dtypes  A = float; on ref also double.      Alias  none.
// Needs   n >= 0.      Errors  bad_argument for n < 0.      Moves  n*sizeof(A) bytes.
FBT_OP(template <class A>
       Status square_sum(double* sum, const A* x, int64_t n, double* scratch, Stream s);)

}  // namespace fbt::kernels
