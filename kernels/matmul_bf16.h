// Matrix products in bf16 on the CPU: how operands are cut and packed around kernels/bf16_dot.h.
// The contract is that of kernels/matmul.h; which tile kernel runs is an argument, so that tests
// can try each.
#pragma once
#include "kernels/bf16_dot.h"
#include "kernels/matmul.h"

namespace fbt::kernels::cpu {

// Packed weights are the tile product's b, the same for every kernel.
int64_t bf16_packed_size(int64_t N, int64_t K);
Status bf16_pack(bf16* packed, const float* w, int64_t N, int64_t K, bool transposed, Stream s);

Status bf16_forward(const DotKernel& kernel, std::span<const MatmulOutput<bf16>> outputs,
                    const bf16* x, int64_t M, int64_t K, Stream s);

// Rows m are summed in chunks of kDwChunk: dw += each chunk's sums, in order.
Status bf16_dw_accum(const DotKernel& kernel, float* dw, const bf16* dy, const bf16* x, int64_t M,
                     int64_t N, int64_t K, Stream s);

}  // namespace fbt::kernels::cpu
