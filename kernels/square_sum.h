// Sum of squares, the building block of the global gradient norm.
#pragma once
#include "kernels/types.h"

namespace fbt::kernels {

inline constexpr int64_t kSquareSumChunk = 16384;

// *sum = sum_i x[i]^2, in double: chunks of kSquareSumChunk elements, combined in order, so the
// result does not depend on the thread count. A NaN or infinity in x shows in *sum.
// Shapes  x [n] A; sum: one double; scratch: ceil(n / kSquareSumChunk) doubles; device memory.
FBT_HOST_OP(square_sum, template <class A> Status square_sum(double* sum, const A* x, int64_t n,
                                                             double* scratch, Stream s);)

}  // namespace fbt::kernels
