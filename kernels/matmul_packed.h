// How weights lie once matmul_pack has packed them for CUDA: what the products there agree on.
#pragma once
#include "kernels/types.h"

namespace fbt::kernels::cuda {

// In f32, w^T as [f32_packed_depth(K), f32_packed_columns(N)] row-major: both sizes rounded up to
// whole tiles and filled with zeros, so that the product's loads need no bounds and neighbouring
// threads read neighbouring columns.
inline constexpr int kF32Depth = 32, kF32Width = 64;
FBT_HOST_DEVICE constexpr int64_t f32_packed_depth(int64_t K) {
    return (K + kF32Depth - 1) / kF32Depth * kF32Depth;
}
FBT_HOST_DEVICE constexpr int64_t f32_packed_columns(int64_t N) {
    return (N + kF32Width - 1) / kF32Width * kF32Width;
}

// In bf16, w as [N, bf16_packed_depth(K)] row-major: each row filled up with zeros.
inline constexpr int kBf16Depth = 128;
FBT_HOST_DEVICE constexpr int64_t bf16_packed_depth(int64_t K) {
    return (K + kBf16Depth - 1) / kBf16Depth * kBf16Depth;
}

}  // namespace fbt::kernels::cuda
