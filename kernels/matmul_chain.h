// y = x w^T as one chain of fused multiply-adds an element, where oneDNN does not qualify.
#pragma once
#include "kernels/types.h"

namespace fbt::kernels::cpu {

//   acc = fma(x[m,k], w[n,k], acc),  k = 0, 1, ..., K-1,
// whatever tile an element is computed in, so the row rule holds by construction. The contract is
// that of kernels/matmul.h.
int64_t chain_packed_size(int64_t N, int64_t K);
Status chain_pack(float* packed, const float* w, int64_t N, int64_t K, bool transposed, Stream s);
Status chain_forward(float* y, const float* x, const float* packed, int64_t M, int64_t N, int64_t K,
                     Stream s);

}  // namespace fbt::kernels::cpu
