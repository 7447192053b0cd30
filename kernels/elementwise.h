// The few elementwise ops that fusion and the tape need.
#pragma once
#include "kernels/types.h"

namespace fbt::kernels {

// y[i] += x[i]. Shapes [n] T.
FBT_HOST_OP(add_accum, template <class T> Status add_accum(T* y, const T* x, int64_t n, Stream s);)

// y[i] = a[i] + b[i]. Shapes [n] T; y may be a or b.
FBT_HOST_OP(add, template <class T> Status add(T* y, const T* a, const T* b, int64_t n, Stream s);)

// Forward   y[n,:] = [a[n,:] | b[n,:]]        y [N,Da+Db], a [N,Da], b [N,Db] T
// Backward  a[n,:] = y[n,:Da], b[n,:] = y[n,Da:]
FBT_HOST_OP(concat_columns,
            template <class T> Status concat_columns(T* y, const T* a, const T* b, int64_t N,
                                                     int64_t Da, int64_t Db, Stream s);)
FBT_HOST_OP(split_columns,
            template <class T> Status split_columns(T* a, T* b, const T* y, int64_t N, int64_t Da,
                                                    int64_t Db, Stream s);)

}  // namespace fbt::kernels
