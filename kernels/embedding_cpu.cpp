// Token embedding on CPU threads.
#include <omp.h>

#include "kernels/cpu_math.h"
#include "kernels/embedding.h"

namespace fbt::kernels::cpu {

// y[n,:] = T(w[tokens[n],:])
template <class T, class W>
Status embedding_forward(T* y, const int32_t* tokens, const W* w, int64_t N, int D, Stream s) {
    if (N < 0 || D < 1) return {Code::bad_argument, "embedding_forward needs N >= 0, D >= 1"};
    for_rows(s, N, D, [=](int64_t n) {
        const W* from = w + int64_t(tokens[n]) * D;
        T* to = y + n * D;
#pragma omp simd
        for (int d = 0; d < D; ++d) store(to[d], float(from[d]));
    });
    return {};
}

// dw[tokens[n],:] += dy[n,:], n ascending. A token belongs to one thread, which walks all n: so
// rows of dw are summed in order, without atomics, whatever the number of threads.
template <class T, class A>
Status embedding_backward_accum(A* dw, const T* dy, const int32_t* tokens, int64_t N, int D, int V,
                                int32_t*, Stream s) {
    if (N < 0 || D < 1 || V < 1)
        return {Code::bad_argument, "embedding_backward_accum needs N >= 0 and D, V >= 1"};
    const auto sum = [=](int team, int thread) {
        for (int64_t n = 0; n < N; ++n) {
            if (tokens[n] % team != thread) continue;
            A* to = dw + int64_t(tokens[n]) * D;
            const T* from = dy + n * D;
#pragma omp simd
            for (int d = 0; d < D; ++d) to[d] += A(from[d]);
        }
    };
    const int threads = threads_for_elements(s, N * D);
    if (threads == 1) {
        sum(1, 0);
    } else {
#pragma omp parallel num_threads(threads)
        sum(omp_get_num_threads(), omp_get_thread_num());
    }
    return {};
}

#define FBT_INSTANTIATE(T)                                                                        \
    template Status embedding_forward<T>(T*, const int32_t*, const float*, int64_t, int, Stream); \
    template Status embedding_backward_accum<T, float>(float*, const T*, const int32_t*, int64_t, \
                                                       int, int, int32_t*, Stream);
FBT_INSTANTIATE(float)
FBT_INSTANTIATE(bf16)
template Status embedding_forward<bf16>(bf16*, const int32_t*, const bf16*, int64_t, int, Stream);

}  // namespace fbt::kernels::cpu
