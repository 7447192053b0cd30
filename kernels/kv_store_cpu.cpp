// Moving rows in and out of key/value stores, rows spread over threads.
#include <algorithm>

#include "kernels/cpu_math.h"
#include "kernels/kv_store.h"

namespace fbt::kernels::cpu {

// dst[dst_rows[n],:] = src[src_rows[n],:]
template <class T>
Status copy_rows(T* dst, const int64_t* dst_rows, const T* src, const int64_t* src_rows, int64_t N,
                 int64_t W, Stream s) {
    if (N < 0 || W < 1) return {Code::bad_argument, "copy_rows needs N >= 0, W >= 1"};
    for_rows(s, N, W, [=](int64_t n) {
        std::copy_n(src + (src_rows ? src_rows[n] : n) * W, W,
                    dst + (dst_rows ? dst_rows[n] : n) * W);
    });
    return {};
}

// dst[dst_rows[n],:] += src[src_rows[n],:]
template <class T>
Status copy_rows_accum(T* dst, const int64_t* dst_rows, const T* src, const int64_t* src_rows,
                       int64_t N, int64_t W, Stream s) {
    if (N < 0 || W < 1) return {Code::bad_argument, "copy_rows_accum needs N >= 0, W >= 1"};
    for_rows(s, N, W, [=](int64_t n) {
        T* to = dst + (dst_rows ? dst_rows[n] : n) * W;
        const T* from = src + (src_rows ? src_rows[n] : n) * W;
#pragma omp simd
        for (int64_t w = 0; w < W; ++w) store(to[w], float(to[w]) + float(from[w]));
    });
    return {};
}

#define FBT_INSTANTIATE(T)                                                                       \
    template Status copy_rows<T>(T*, const int64_t*, const T*, const int64_t*, int64_t, int64_t, \
                                 Stream);                                                        \
    template Status copy_rows_accum<T>(T*, const int64_t*, const T*, const int64_t*, int64_t,    \
                                       int64_t, Stream);
FBT_INSTANTIATE(float)
FBT_INSTANTIATE(bf16)

}  // namespace fbt::kernels::cpu
