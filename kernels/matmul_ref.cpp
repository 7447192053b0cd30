// Matrix products as plain loops; "packed" is simply w as [N,K].
#include "kernels/matmul.h"

namespace fbt::kernels::ref {

template <class T>
int64_t matmul_packed_size(int64_t N, int64_t K) {
    return N * K;
}

template <class T>
Status matmul_pack(T* packed, const accumulate_t<T>* w, int64_t N, int64_t K, bool transposed,
                   Stream) {
    if (N < 1 || K < 1) return {Code::bad_argument, "matmul_pack needs N, K >= 1"};
    for (int64_t n = 0; n < N; ++n)
        for (int64_t k = 0; k < K; ++k)
            packed[n * K + k] = transposed ? w[k * N + n] : w[n * K + k];
    return {};
}

// y[m,n] = sum_k x[m,k] * w[n,k]
template <class T>
Status matmul_forward(T* y, const T* x, const T* packed, int64_t M, int64_t N, int64_t K, Stream) {
    if (M < 0 || N < 1 || K < 1)
        return {Code::bad_argument, "matmul_forward needs M >= 0 and N, K >= 1"};
    for (int64_t m = 0; m < M; ++m)
        for (int64_t n = 0; n < N; ++n) {
            accumulate_t<T> sum = 0;
            for (int64_t k = 0; k < K; ++k) sum += x[m * K + k] * packed[n * K + k];
            y[m * N + n] = T(sum);
        }
    return {};
}

// dw[n,k] += sum_m dy[m,n] * x[m,k]
template <class T, class A>
Status matmul_dw_accum(A* dw, const T* dy, const T* x, int64_t M, int64_t N, int64_t K, Stream) {
    if (M < 0 || N < 1 || K < 1)
        return {Code::bad_argument, "matmul_dw_accum needs M >= 0 and N, K >= 1"};
    for (int64_t n = 0; n < N; ++n)
        for (int64_t k = 0; k < K; ++k) {
            A sum = 0;
            for (int64_t m = 0; m < M; ++m) sum += A(dy[m * N + n]) * A(x[m * K + k]);
            dw[n * K + k] += sum;
        }
    return {};
}

#define INSTANTIATE(T)                                                                            \
    template int64_t matmul_packed_size<T>(int64_t, int64_t);                                     \
    template Status matmul_pack<T>(T*, const accumulate_t<T>*, int64_t, int64_t, bool, Stream);   \
    template Status matmul_forward<T>(T*, const T*, const T*, int64_t, int64_t, int64_t, Stream); \
    template Status matmul_dw_accum<T, T>(T*, const T*, const T*, int64_t, int64_t, int64_t,      \
                                          Stream);
INSTANTIATE(float)
INSTANTIATE(double)
#undef INSTANTIATE

}  // namespace fbt::kernels::ref
