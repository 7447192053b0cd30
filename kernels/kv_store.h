// Moving rows in and out of key/value stores: writing new keys at their slots, copying a plain
// prefix from pass 1, forking a page, reading a cache back.
#pragma once
#include "kernels/types.h"

namespace fbt::kernels {

// copy_rows        dst[dst_rows[n],:]  = src[src_rows[n],:]
// copy_rows_accum  dst[dst_rows[n],:] += src[src_rows[n],:]
// A null index means row n. Shapes  dst, src [.,W] T; indices [N] on the device.
// Dtypes  T = float, cpu and cuda also bf16 (added in float, rounded once), ref also double.
// Needs   N >= 0, W >= 1; no two n name the same dst row.      Errors  bad_argument where N or W
//         is out of range.      Alias  dst and src may be one store if no row is both.
// Moves   copy 2*N*W*sizeof(T) bytes, accumulate 3*N*W*sizeof(T)
FBT_OP(template <class T> Status copy_rows(T* dst, const int64_t* dst_rows, const T* src,
                                           const int64_t* src_rows, int64_t N, int64_t W,
                                           Stream s);)
FBT_OP(template <class T> Status copy_rows_accum(T* dst, const int64_t* dst_rows, const T* src,
                                                 const int64_t* src_rows, int64_t N, int64_t W,
                                                 Stream s);)

}  // namespace fbt::kernels
