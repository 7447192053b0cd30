// Matrix products of linear layers, in the row rule: sums over K run in one order for every M, so
// a row of y has the same bits whatever the other rows are and however many there are.
#pragma once
#include <span>

#include "kernels/types.h"

namespace fbt::kernels {

// Weights are packed once per update into the layout that the backend's product wants.
//   transposed = false:  w [N,K] row-major (a layer's [out, in]); y = x w^T is its forward.
//   transposed = true:   w [K,N] row-major; y = x w. So dx = dy W, with W [out, in], is
//                        matmul_forward on W packed transposed with N = in, K = out.
// w is the master copy, in accumulate_t<T>: it is rounded to T on the way. packed has
// matmul_packed_size<T>(N, K) elements, aligned to 16 bytes; it must not alias w.
//
// Forward:  y[m,n] = sum_k x[m,k] * w[n,k]
// Shapes  x [M,K] T, y [M,N] T, row-major; packed as above.
// Dtypes  T = float, ref also T = double, cpu and cuda also T = bf16; sums in accumulate_t<T>, in
//         the same order over k for every M; one rounding to T.
// Alias   none.      Needs  M >= 0, N, K >= 1.
// Moves   (M*K + N*K + M*N) * sizeof(T) bytes, 2*M*N*K FLOPs.
//
// Weight gradient:  dw[n,k] += sum_m dy[m,n] * x[m,k]
// Shapes  dw [N,K] A, dy [M,N] T, x [M,K] T. Rows are summed in fixed chunks, in order, so dw does
//         not depend on the thread count.
// Errors  bad_argument for sizes; cuda: unsupported beyond 2^31 - 1 tiles of outputs.
// Moves   (M*N + M*K) * sizeof(T) + 2*N*K*sizeof(A) bytes, 2*M*N*K FLOPs.
FBT_OP(template <class T> int64_t matmul_packed_size(int64_t N, int64_t K);

       template <class T> Status matmul_pack(T * packed, const accumulate_t<T>* w, int64_t N,
                                             int64_t K, bool transposed, Stream s);

       template <class T> Status matmul_forward(T * y, const T* x, const T* packed, int64_t M,
                                                int64_t N, int64_t K, Stream s);

       template <class T, class A = accumulate_t<T>>
       Status matmul_dw_accum(A * dw, const T* dy, const T* x, int64_t M, int64_t N, int64_t K,
                              Stream s);)

// Products of one x with several weights: those that matmul_forward gives one by one, but the cpu
// reads x and starts its threads once for all of them, which decoding feels.
template <class T>
struct MatmulOutput {
    T* y;             // [M,N]
    const T* packed;  // as packed by matmul_pack
    int64_t N;
};
namespace cpu {
template <class T>
Status matmul_forward_each(std::span<const MatmulOutput<T>> outputs, const T* x, int64_t M,
                           int64_t K, Stream s);
}

// The same products through cuBLASLt, for training on CUDA: faster, and outside the row rule (the
// algorithm, and with it the order of sums, depends on M).
//   matmul_forward_fast   as matmul_forward, on the same packed weights (so dx, too)
//   matmul_dw_accum_fast  as matmul_dw_accum
// Dtypes  T = float (no TF32) or bf16; sums in f32.
// MatmulFast holds the library's handle, a workspace of 32 MiB on the current device and the
// algorithm chosen for each shape seen; it serves one stream at a time, and nothing else is
// allocated. Destroy it when its work is done; null is allowed.
// Errors  bad_argument for sizes; unsupported in the emulator, which has no cuBLASLt, and for
//         shapes that it declines; device_error with the library's reason.
namespace cuda {

struct MatmulFast;
Status matmul_fast_create(MatmulFast** fast);
void matmul_fast_destroy(MatmulFast* fast);

template <class T>
Status matmul_forward_fast(MatmulFast* fast, T* y, const T* x, const T* packed, int64_t M,
                           int64_t N, int64_t K, Stream s);
template <class T>
Status matmul_dw_accum_fast(MatmulFast* fast, float* dw, const T* dy, const T* x, int64_t M,
                            int64_t N, int64_t K, Stream s);

}  // namespace cuda

}  // namespace fbt::kernels
