// The inner product of bf16 matmuls: a tile of float sums over packed operands. Each kernel is one
// instruction set; which of them the processor has is found out at run time.
#pragma once
#include <span>

#include "kernels/types.h"

namespace fbt::kernels::cpu {

// Both operands hold k in pairs, which is how the instructions want them, and are filled up with
// zeros to whole blocks of kDotDepth. A panel of b is kDotColumns columns.
//   a  [depth/kDotDepth][rows][kDotDepth]        rows: the kernel's
//   b  [panels][depth/2][kDotColumns][2]
inline constexpr int kDotDepth = 32, kDotColumns = 16;
constexpr int64_t dot_depth(int64_t K) { return ceil_div(K, kDotDepth) * kDotDepth; }

// out[r,c] = (add ? out[r,c] : 0) + sum_k a[r,k]*b[k,c]    r < rows, c < 16*panels
//   stride  of rows of out; panel: of panels of b, in elements
//   rows    1 to DotKernel::rows; a has that many all the same, and out room for them
//   panels  1 to DotKernel::panels
//   ahead   next_panels panels, 0 to DotKernel::panels, that the next calls will take for b: a
//           kernel may ask memory for them while it computes
// An element is one chain of sums over ascending k, the same whatever row and panel it stands in,
// and wherever the range of k is cut into calls (at multiples of kDotDepth): the row rule.
using DotTile = void (*)(float* out, int64_t stride, const bf16* a, const bf16* b, int64_t panel,
                         int64_t depth, int rows, int panels, bool add, const bf16* ahead,
                         int next_panels);

struct DotKernel {
    const char* name;  // amx, avx512_bf16 or fma
    int rows, panels;  // of a full tile
    DotTile multiply;
    // The same bits for products of at most few_rows rows (decoding), where b comes from memory and
    // is used once. Here a's `rows` are the call's.
    int few_rows = 0;
    DotTile few = nullptr;
};

// No kernel's tile is larger.
inline constexpr int kDotMaxRows = 32, kDotMaxPanels = 4;

// The kernels that this processor runs, fastest first. The last needs nothing.
std::span<const DotKernel> dot_kernels();

}  // namespace fbt::kernels::cpu
