// Elementwise ops on the GPU, bound by memory: a thread moves 16 bytes of an array at a time.
#include <type_traits>

#include "kernels/elementwise.h"
#include "kernels/vector.cuh"

namespace fbt::kernels::cuda {
namespace {

// y = a + b. y may be a or b: a thread reads all its elements before it writes them.
template <class T>
__global__ void __launch_bounds__(kElementThreads)
    add_packs(T* y, const T* a, const T* b, int64_t n, bool aligned) {
    const int64_t i = first_element<T>(), count = n - i;
    if (count <= 0) return;
    const bool whole = aligned && count >= kPack<T>;
    const Pack<T> left = load_pack(a + i, count, whole), right = load_pack(b + i, count, whole);
    Pack<T> sum;
#pragma unroll
    for (int j = 0; j < kPack<T>; ++j) sum.set(j, T(left[j] + right[j]));
    store_pack(y + i, sum, count, whole);
}

// y += x, for what other ranks send: no other kernel computes in double.
__global__ void __launch_bounds__(kElementThreads)
    add_doubles(double* y, const double* x, int64_t n) {
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < n) y[i] += x[i];
}

// y = T(x)
template <class T>
__global__ void __launch_bounds__(kElementThreads)
    cast_packs(T* __restrict__ y, const float* __restrict__ x, int64_t n, bool aligned) {
    const int64_t i = first_element<T>(), count = n - i;
    if (count <= 0) return;
    const bool whole = aligned && count >= kPack<T>;
    const Floats<T> from = load_floats<T>(x + i, count, whole);
    Pack<T> to;
#pragma unroll
    for (int j = 0; j < kPack<T>; ++j) to.set(j, T(from.v[j]));
    store_pack(y + i, to, count, whole);
}

// y = float(x)
template <class T>
__global__ void __launch_bounds__(kElementThreads)
    widen_packs(float* __restrict__ y, const T* __restrict__ x, int64_t n, bool aligned) {
    const int64_t i = first_element<T>(), count = n - i;
    if (count <= 0) return;
    const bool whole = aligned && count >= kPack<T>;
    const Pack<T> from = load_pack(x + i, count, whole);
    Floats<T> to;
#pragma unroll
    for (int j = 0; j < kPack<T>; ++j) to.v[j] = from[j];
    store_floats<T>(y + i, to, count, whole);
}

// Columns move unchanged, in pieces of one element or of 16 bytes. wide[n,:] = [a[n,:] | b[n,:]],
// of Wa and Wb pieces, or the other way.
template <class Piece>
__global__ void __launch_bounds__(kRowThreads)
    concat_columns_row(Piece* __restrict__ wide, const Piece* __restrict__ a,
                       const Piece* __restrict__ b, int64_t N, int64_t Wa, int64_t Wb) {
    const int64_t n = block_row();
    if (n >= N) return;
    for (int64_t w = threadIdx.x; w < Wa + Wb; w += blockDim.x)
        wide[n * (Wa + Wb) + w] = w < Wa ? a[n * Wa + w] : b[n * Wb + w - Wa];
}
template <class Piece>
__global__ void __launch_bounds__(kRowThreads)
    split_columns_row(Piece* __restrict__ a, Piece* __restrict__ b, const Piece* __restrict__ wide,
                      int64_t N, int64_t Wa, int64_t Wb) {
    const int64_t n = block_row();
    if (n >= N) return;
    for (int64_t w = threadIdx.x; w < Wa + Wb; w += blockDim.x)
        (w < Wa ? a[n * Wa + w] : b[n * Wb + w - Wa]) = wide[n * (Wa + Wb) + w];
}

}  // namespace

template <class T>
Status add(T* y, const T* a, const T* b, int64_t n, Stream s) {
    if (n < 0) return {Code::bad_argument, "add needs n >= 0"};
    if (n == 0) return {};
    return launch(add_packs<T>, element_launch<T>(n), s, y, a, b, n, aligned16(y, a, b));
}

template <class T>
Status add_accum(T* y, const T* x, int64_t n, Stream s) {
    if (n < 0) return {Code::bad_argument, "add_accum needs n >= 0"};
    if constexpr (std::is_same_v<T, double>) {
        if (n == 0) return {};
        return launch_blocks(add_doubles, ceil_div(n, kElementThreads), kElementThreads, 0, s, y, x,
                             n);
    } else {
        return add(y, y, x, n, s);
    }
}

template <class T, class A>
Status cast(T* y, const A* x, int64_t n, Stream s) {
    if (n < 0) return {Code::bad_argument, "cast needs n >= 0"};
    if (n == 0) return {};
    return launch(cast_packs<T>, element_launch<T>(n), s, y, x, n, aligned16(y, x));
}

template <class T, class A>
Status widen(A* y, const T* x, int64_t n, Stream s) {
    if (n < 0) return {Code::bad_argument, "widen needs n >= 0"};
    if (n == 0) return {};
    return launch(widen_packs<T>, element_launch<T>(n), s, y, x, n, aligned16(y, x));
}

template <class T>
Status concat_columns(T* y, const T* a, const T* b, int64_t N, int64_t Da, int64_t Db, Stream s) {
    if (N < 0 || Da < 1 || Db < 1)
        return {Code::bad_argument, "concat_columns needs N >= 0 and Da, Db >= 1"};
    if (N == 0) return {};
    return with_pieces<T>(
        whole_packs<T>(Da, y, a, b) && whole_packs<T>(Db), [&]<class Piece>(int elements) {
            const int64_t Wa = Da / elements, Wb = Db / elements;
            return launch(concat_columns_row<Piece>, row_launch(N, Wa + Wb), s,
                          reinterpret_cast<Piece*>(y), reinterpret_cast<const Piece*>(a),
                          reinterpret_cast<const Piece*>(b), N, Wa, Wb);
        });
}

template <class T>
Status split_columns(T* a, T* b, const T* y, int64_t N, int64_t Da, int64_t Db, Stream s) {
    if (N < 0 || Da < 1 || Db < 1)
        return {Code::bad_argument, "split_columns needs N >= 0 and Da, Db >= 1"};
    if (N == 0) return {};
    return with_pieces<T>(
        whole_packs<T>(Da, y, a, b) && whole_packs<T>(Db), [&]<class Piece>(int elements) {
            const int64_t Wa = Da / elements, Wb = Db / elements;
            return launch(split_columns_row<Piece>, row_launch(N, Wa + Wb), s,
                          reinterpret_cast<Piece*>(a), reinterpret_cast<Piece*>(b),
                          reinterpret_cast<const Piece*>(y), N, Wa, Wb);
        });
}

#define FBT_INSTANTIATE(T)                                                                        \
    template Status add_accum<T>(T*, const T*, int64_t, Stream);                                  \
    template Status add<T>(T*, const T*, const T*, int64_t, Stream);                              \
    template Status cast<T>(T*, const float*, int64_t, Stream);                                   \
    template Status widen<T>(float*, const T*, int64_t, Stream);                                  \
    template Status concat_columns<T>(T*, const T*, const T*, int64_t, int64_t, int64_t, Stream); \
    template Status split_columns<T>(T*, T*, const T*, int64_t, int64_t, int64_t, Stream);
FBT_INSTANTIATE(float)
FBT_INSTANTIATE(bf16)
template Status add_accum<double>(double*, const double*, int64_t, Stream);

}  // namespace fbt::kernels::cuda
