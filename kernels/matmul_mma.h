// matmul in bf16 on tensor cores: what matmul.h promises of cuda, for T = bf16. Sizes are checked
// by the caller.
#pragma once
#include "kernels/types.h"

namespace fbt::kernels::cuda {

Status mma_pack(bf16* packed, const float* w, int64_t N, int64_t K, bool transposed, Stream s);
Status mma_forward(bf16* y, const bf16* x, const bf16* packed, int64_t M, int64_t N, int64_t K,
                   Stream s);
Status mma_dw_accum(float* dw, const bf16* dy, const bf16* x, int64_t M, int64_t N, int64_t K,
                    Stream s);

}  // namespace fbt::kernels::cuda
