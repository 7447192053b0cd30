// Moving rows in and out of key/value stores in plain loops.
#include "kernels/kv_store.h"

namespace fbt::kernels::ref {

// dst[dst_rows[n],:] = src[src_rows[n],:]
template <class T>
Status copy_rows(T* dst, const int64_t* dst_rows, const T* src, const int64_t* src_rows, int64_t N,
                 int64_t W, Stream) {
    if (N < 0 || W < 1) return {Code::bad_argument, "copy_rows needs N >= 0, W >= 1"};
    for (int64_t n = 0; n < N; ++n) {
        const int64_t to = dst_rows ? dst_rows[n] : n, from = src_rows ? src_rows[n] : n;
        for (int64_t w = 0; w < W; ++w) dst[to * W + w] = src[from * W + w];
    }
    return {};
}

// dst[dst_rows[n],:] += src[src_rows[n],:]
template <class T>
Status copy_rows_accum(T* dst, const int64_t* dst_rows, const T* src, const int64_t* src_rows,
                       int64_t N, int64_t W, Stream) {
    if (N < 0 || W < 1) return {Code::bad_argument, "copy_rows_accum needs N >= 0, W >= 1"};
    for (int64_t n = 0; n < N; ++n) {
        const int64_t to = dst_rows ? dst_rows[n] : n, from = src_rows ? src_rows[n] : n;
        for (int64_t w = 0; w < W; ++w) dst[to * W + w] += src[from * W + w];
    }
    return {};
}

#define FBT_INSTANTIATE(T)                                                                       \
    template Status copy_rows<T>(T*, const int64_t*, const T*, const int64_t*, int64_t, int64_t, \
                                 Stream);                                                        \
    template Status copy_rows_accum<T>(T*, const int64_t*, const T*, const int64_t*, int64_t,    \
                                       int64_t, Stream);
FBT_INSTANTIATE(float)
FBT_INSTANTIATE(double)

}  // namespace fbt::kernels::ref
