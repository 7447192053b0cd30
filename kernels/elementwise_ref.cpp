// Elementwise ops in plain loops.
#include "kernels/elementwise.h"

namespace fbt::kernels::ref {

// y += x
template <class T>
Status add_accum(T* y, const T* x, int64_t n, Stream) {
    if (n < 0) return {Code::bad_argument, "add_accum needs n >= 0"};
    for (int64_t i = 0; i < n; ++i) y[i] += x[i];
    return {};
}

// y = a + b
template <class T>
Status add(T* y, const T* a, const T* b, int64_t n, Stream) {
    if (n < 0) return {Code::bad_argument, "add needs n >= 0"};
    for (int64_t i = 0; i < n; ++i) y[i] = a[i] + b[i];
    return {};
}

// y = T(x)
template <class T, class A>
Status cast(T* y, const A* x, int64_t n, Stream) {
    if (n < 0) return {Code::bad_argument, "cast needs n >= 0"};
    for (int64_t i = 0; i < n; ++i) y[i] = T(x[i]);
    return {};
}

// y = A(x)
template <class T, class A>
Status widen(A* y, const T* x, int64_t n, Stream) {
    if (n < 0) return {Code::bad_argument, "widen needs n >= 0"};
    for (int64_t i = 0; i < n; ++i) y[i] = A(x[i]);
    return {};
}

// y[n,:] = [a[n,:] | b[n,:]]
template <class T>
Status concat_columns(T* y, const T* a, const T* b, int64_t N, int64_t Da, int64_t Db, Stream) {
    if (N < 0 || Da < 1 || Db < 1)
        return {Code::bad_argument, "concat_columns needs N >= 0 and Da, Db >= 1"};
    for (int64_t n = 0; n < N; ++n) {
        for (int64_t d = 0; d < Da; ++d) y[n * (Da + Db) + d] = a[n * Da + d];
        for (int64_t d = 0; d < Db; ++d) y[n * (Da + Db) + Da + d] = b[n * Db + d];
    }
    return {};
}

// a[n,:] = y[n,:Da]      b[n,:] = y[n,Da:]
template <class T>
Status split_columns(T* a, T* b, const T* y, int64_t N, int64_t Da, int64_t Db, Stream) {
    if (N < 0 || Da < 1 || Db < 1)
        return {Code::bad_argument, "split_columns needs N >= 0 and Da, Db >= 1"};
    for (int64_t n = 0; n < N; ++n) {
        for (int64_t d = 0; d < Da; ++d) a[n * Da + d] = y[n * (Da + Db) + d];
        for (int64_t d = 0; d < Db; ++d) b[n * Db + d] = y[n * (Da + Db) + Da + d];
    }
    return {};
}

#define FBT_INSTANTIATE(T)                                                                        \
    template Status add_accum<T>(T*, const T*, int64_t, Stream);                                  \
    template Status add<T>(T*, const T*, const T*, int64_t, Stream);                              \
    template Status cast<T>(T*, const accumulate_t<T>*, int64_t, Stream);                         \
    template Status widen<T>(accumulate_t<T>*, const T*, int64_t, Stream);                        \
    template Status concat_columns<T>(T*, const T*, const T*, int64_t, int64_t, int64_t, Stream); \
    template Status split_columns<T>(T*, T*, const T*, int64_t, int64_t, int64_t, Stream);
FBT_INSTANTIATE(float)
FBT_INSTANTIATE(double)

}  // namespace fbt::kernels::ref
