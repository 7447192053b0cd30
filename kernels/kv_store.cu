// Rows in and out of key/value stores on the GPU: lanes along a row, 16 bytes each where rows are
// whole packs.
#include "kernels/kv_store.h"
#include "kernels/vector.cuh"

namespace fbt::kernels::cuda {
namespace {

// dst[dst_rows[n],:] = src[src_rows[n],:], rows of W pieces
template <class Piece>
__global__ void __launch_bounds__(kRowThreads)
    copy_rows_row(Piece* dst, const int64_t* __restrict__ dst_rows, const Piece* src,
                  const int64_t* __restrict__ src_rows, int64_t N, int64_t W) {
    const int64_t n = block_row();
    if (n >= N) return;
    Piece* const to = dst + (dst_rows ? dst_rows[n] : n) * W;
    const Piece* const from = src + (src_rows ? src_rows[n] : n) * W;
    for (int64_t w = threadIdx.x; w < W; w += blockDim.x) to[w] = from[w];
}

// dst[dst_rows[n],:] += src[src_rows[n],:]
template <class T>
__global__ void __launch_bounds__(kRowThreads)
    copy_rows_accum_row(T* dst, const int64_t* __restrict__ dst_rows, const T* src,
                        const int64_t* __restrict__ src_rows, int64_t N, int64_t W, bool whole) {
    const int64_t n = block_row();
    if (n >= N) return;
    T* const to = dst + (dst_rows ? dst_rows[n] : n) * W;
    const T* const from = src + (src_rows ? src_rows[n] : n) * W;
    for (int64_t w = threadIdx.x * kPack<T>; w < W; w += blockDim.x * kPack<T>) {
        const Pack<T> before = load_pack(to + w, W - w, whole),
                      added = load_pack(from + w, W - w, whole);
        Pack<T> sum;
#pragma unroll
        for (int j = 0; j < kPack<T>; ++j) sum.set(j, T(before[j] + added[j]));
        store_pack(to + w, sum, W - w, whole);
    }
}

}  // namespace

template <class T>
Status copy_rows(T* dst, const int64_t* dst_rows, const T* src, const int64_t* src_rows, int64_t N,
                 int64_t W, Stream s) {
    if (N < 0 || W < 1) return {Code::bad_argument, "copy_rows needs N >= 0, W >= 1"};
    if (N == 0) return {};
    return with_pieces<T>(whole_packs<T>(W, dst, src), [&]<class Piece>(int elements) {
        return launch(copy_rows_row<Piece>, row_launch(N, W / elements), s,
                      reinterpret_cast<Piece*>(dst), dst_rows, reinterpret_cast<const Piece*>(src),
                      src_rows, N, W / elements);
    });
}

template <class T>
Status copy_rows_accum(T* dst, const int64_t* dst_rows, const T* src, const int64_t* src_rows,
                       int64_t N, int64_t W, Stream s) {
    if (N < 0 || W < 1) return {Code::bad_argument, "copy_rows_accum needs N >= 0, W >= 1"};
    if (N == 0) return {};
    return launch(copy_rows_accum_row<T>, row_launch(N, ceil_div(W, kPack<T>)), s, dst, dst_rows,
                  src, src_rows, N, W, whole_packs<T>(W, dst, src));
}

#define FBT_INSTANTIATE(T)                                                                       \
    template Status copy_rows<T>(T*, const int64_t*, const T*, const int64_t*, int64_t, int64_t, \
                                 Stream);                                                        \
    template Status copy_rows_accum<T>(T*, const int64_t*, const T*, const int64_t*, int64_t,    \
                                       int64_t, Stream);
FBT_INSTANTIATE(float)
FBT_INSTANTIATE(bf16)

}  // namespace fbt::kernels::cuda
