// The carried state: gather h_{t-1} for every fused row, and disturb it (docs/algorithm.md).
#pragma once
#include "kernels/philox.h"
#include "kernels/types.h"

namespace fbt::kernels {

// Uniform noise of half-width `half_width` on the carried states, drawn by counter: element (r, d)
// uses philox(key, sequence[r], position[r], d), position being that of the disturbed row, t-1.
// half_width = 0 means none, and then the pointers may be null.
template <class A>
struct Jitter {
    A half_width = 0;
    PhiloxKey key{};
    const int64_t* sequence = nullptr;  // [R] global sequence index
    const int32_t* position = nullptr;  // [R]
};

// Forward   y[r,:] = source(r) + noise[r,:] + jitter(r,:)
//   source[r] >= 0: row source[r] of `previous` (the last pass's suffix states);
//   source[r] <  0: row -1 - source[r] of `first` (pass 1's states, the unchanged prefix).
//   jitter = half_width * (2*uniform_float(bits) - 1), computed in A.
// Backward  dprevious / dfirst [that row] += dy[r,:]
// Shapes  y, dy [R,D] T; first, previous [.,D] T; noise [R,D] A or null (given from outside).
//         An unused source may be null.
// Dtypes  T = float with A = float, cpu and cuda also T = bf16, ref also T = A = double;
//         computed in A, rounded once.      Errors  bad_argument where R or D is out of range.
// Needs   R >= 0, D >= 1; no two r name the same source row.      Alias  none.
// Moves   forward 2*R*D*sizeof(T) bytes, with noise R*D*sizeof(A) more; backward 3*R*D*sizeof(T)
FBT_OP(template <class T, class A = accumulate_t<T>>
       Status carry_forward(T* y, const T* first, const T* previous, const int64_t* source,
                            const A* noise, const Jitter<A>& jitter, int64_t R, int D, Stream s);

       template <class T>
       Status carry_backward_accum(T * dfirst, T* dprevious, const T* dy, const int64_t* source,
                                   int64_t R, int D, Stream s);)

}  // namespace fbt::kernels
