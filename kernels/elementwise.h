// The few elementwise ops that fusion, the tape and mixed precision need.
#pragma once
#include "kernels/types.h"

namespace fbt::kernels {

// Dtypes of all: T = float, cpu and cuda also bf16 (added in float, rounded once), ref also double.
// Errors: bad_argument where a size is out of the range that Needs gives.

// y[i] += x[i]. Shapes [n] T; on cuda also double.      Needs  n >= 0.
// Moves  3*n*sizeof(T) bytes
FBT_OP(template <class T> Status add_accum(T* y, const T* x, int64_t n, Stream s);)

// y[i] = a[i] + b[i]. Shapes [n] T.      Alias  y may be a or b.      Needs  n >= 0.
// Moves  3*n*sizeof(T) bytes
FBT_OP(template <class T> Status add(T* y, const T* a, const T* b, int64_t n, Stream s);)

// y[i] = T(x[i]): gradients, which are summed in A, rounded to the dtype that computes.
// Shapes  y [n] T, x [n] A.      Alias  none.      Needs  n >= 0.
// Moves  n*(sizeof(T) + sizeof(A)) bytes
FBT_OP(template <class T, class A = accumulate_t<T>>
       Status cast(T* y, const A* x, int64_t n, Stream s);)
// The way back, exact: y[i] = A(x[i]), y [n] A, x [n] T, all else as for cast.
FBT_OP(template <class T, class A = accumulate_t<T>>
       Status widen(A* y, const T* x, int64_t n, Stream s);)

// Forward   y[n,:] = [a[n,:] | b[n,:]]        y [N,Da+Db], a [N,Da], b [N,Db] T
// Backward  a[n,:] = y[n,:Da], b[n,:] = y[n,Da:]
// Alias   none.      Needs  N >= 0; Da, Db >= 1.      Moves  2*N*(Da + Db)*sizeof(T) bytes
FBT_OP(template <class T> Status concat_columns(T* y, const T* a, const T* b, int64_t N, int64_t Da,
                                                int64_t Db, Stream s);)
FBT_OP(template <class T>
       Status split_columns(T* a, T* b, const T* y, int64_t N, int64_t Da, int64_t Db, Stream s);)

}  // namespace fbt::kernels
