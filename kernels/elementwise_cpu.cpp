// Elementwise ops, vectorised.
#include <algorithm>

#include "kernels/cpu_tile.h"
#include "kernels/elementwise.h"

namespace fbt::kernels::cpu {

// y = a + b
template <class T>
Status add(T* y, const T* a, const T* b, int64_t n, Stream s) {
    if (n < 0) return {Code::bad_argument, "add needs n >= 0"};
    for_vectors(s, n, [=](int64_t i, int count) {
        store_first(y + i, load_first(a + i, count) + load_first(b + i, count), count);
    });
    return {};
}

// y += x
template <class T>
Status add_accum(T* y, const T* x, int64_t n, Stream s) {
    if (n < 0) return {Code::bad_argument, "add_accum needs n >= 0"};
    return add(y, y, x, n, s);
}

// y = T(x)
template <class T, class A>
Status cast(T* y, const A* x, int64_t n, Stream s) {
    if (n < 0) return {Code::bad_argument, "cast needs n >= 0"};
    for_vectors(s, n,
                [=](int64_t i, int count) { store_first(y + i, load_first(x + i, count), count); });
    return {};
}

// y = A(x)
template <class T, class A>
Status widen(A* y, const T* x, int64_t n, Stream s) {
    if (n < 0) return {Code::bad_argument, "widen needs n >= 0"};
    for_vectors(s, n,
                [=](int64_t i, int count) { store_first(y + i, load_first(x + i, count), count); });
    return {};
}

// y[n,:] = [a[n,:] | b[n,:]]
template <class T>
Status concat_columns(T* y, const T* a, const T* b, int64_t N, int64_t Da, int64_t Db, Stream s) {
    if (N < 0 || Da < 1 || Db < 1)
        return {Code::bad_argument, "concat_columns needs N >= 0 and Da, Db >= 1"};
    for_rows(s, N, Da + Db, [=](int64_t n) {
        std::copy_n(a + n * Da, Da, y + n * (Da + Db));
        std::copy_n(b + n * Db, Db, y + n * (Da + Db) + Da);
    });
    return {};
}

// a[n,:] = y[n,:Da]      b[n,:] = y[n,Da:]
template <class T>
Status split_columns(T* a, T* b, const T* y, int64_t N, int64_t Da, int64_t Db, Stream s) {
    if (N < 0 || Da < 1 || Db < 1)
        return {Code::bad_argument, "split_columns needs N >= 0 and Da, Db >= 1"};
    for_rows(s, N, Da + Db, [=](int64_t n) {
        std::copy_n(y + n * (Da + Db), Da, a + n * Da);
        std::copy_n(y + n * (Da + Db) + Da, Db, b + n * Db);
    });
    return {};
}

#define FBT_INSTANTIATE(T)                                                                        \
    template Status add_accum<T>(T*, const T*, int64_t, Stream);                                  \
    template Status add<T>(T*, const T*, const T*, int64_t, Stream);                              \
    template Status cast<T, float>(T*, const float*, int64_t, Stream);                            \
    template Status widen<T, float>(float*, const T*, int64_t, Stream);                           \
    template Status concat_columns<T>(T*, const T*, const T*, int64_t, int64_t, int64_t, Stream); \
    template Status split_columns<T>(T*, T*, const T*, int64_t, int64_t, int64_t, Stream);
FBT_INSTANTIATE(float)
FBT_INSTANTIATE(bf16)

}  // namespace fbt::kernels::cpu
