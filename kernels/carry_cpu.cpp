// The carried state, rows spread over threads.
#include <algorithm>

#include "kernels/carry.h"
#include "kernels/cpu_tile.h"

namespace fbt::kernels::cpu {
namespace {

constexpr int kColumns = 64;  // of a row, taken together: the counters of their noise side by side

// v[d] += half_width*(2*uniform(first + d) - 1) for d < count, at most kColumns
template <class A>
void disturb(A* v, int first, int count, A half_width, PhiloxKey key, uint64_t sequence,
             uint32_t position) {
    uint32_t bits[kColumns];
#pragma omp simd
    for (int j = 0; j < kColumns / 4; ++j) {
        const Philox4 drawn = philox_four(key, sequence, position, uint32_t(first / 4 + j));
        for (int i = 0; i < 4; ++i) bits[4 * j + i] = drawn.v[i];
    }
#pragma omp simd
    for (int d = 0; d < count; ++d) v[d] += half_width * (2 * uniform_float(bits[d]) - 1);
}

}  // namespace

// y[r,:] = source(r) + noise[r,:] + half_width*(2*uniform(r,:) - 1), rounded to T once
template <class T, class A>
Status carry_forward(T* y, const T* first, const T* previous, const int64_t* source, const A* noise,
                     const Jitter<A>& jitter, int64_t R, int D, Stream s) {
    if (R < 0 || D < 1) return {Code::bad_argument, "carry_forward needs R >= 0, D >= 1"};
    for_rows(s, R, D, [=](int64_t r) {
        const T* from = source[r] >= 0 ? previous + source[r] * D : first + (-1 - source[r]) * D;
        T* y_row = y + r * D;
        if (!noise && jitter.half_width == 0) {
            std::copy_n(from, D, y_row);
            return;
        }
        for (int d0 = 0; d0 < D; d0 += kColumns) {
            const int count = std::min(D - d0, kColumns);
            A v[kColumns];
#pragma omp simd
            for (int d = 0; d < count; ++d) v[d] = A(from[d0 + d]);
            if (noise) {
                const A* added = noise + r * D + d0;
#pragma omp simd
                for (int d = 0; d < count; ++d) v[d] += added[d];
            }
            if (jitter.half_width != 0)
                disturb(v, d0, count, jitter.half_width, jitter.key, uint64_t(jitter.sequence[r]),
                        uint32_t(jitter.position[r]));
#pragma omp simd
            for (int d = 0; d < count; ++d) store(y_row[d0 + d], v[d]);
        }
    });
    return {};
}

// d source(r) += dy[r,:]
template <class T>
Status carry_backward_accum(T* dfirst, T* dprevious, const T* dy, const int64_t* source, int64_t R,
                            int D, Stream s) {
    if (R < 0 || D < 1) return {Code::bad_argument, "carry_backward_accum needs R >= 0, D >= 1"};
    for_rows(s, R, D, [=](int64_t r) {
        T* to = source[r] >= 0 ? dprevious + source[r] * D : dfirst + (-1 - source[r]) * D;
        const T* from = dy + r * D;
        for_vectors(D, [=](int64_t d, int count) {
            store_first(to + d, load_first(to + d, count) + load_first(from + d, count), count);
        });
    });
    return {};
}

#define FBT_INSTANTIATE(T)                                                                        \
    template Status carry_forward<T, float>(T*, const T*, const T*, const int64_t*, const float*, \
                                            const Jitter<float>&, int64_t, int, Stream);          \
    template Status carry_backward_accum<T>(T*, T*, const T*, const int64_t*, int64_t, int, Stream);
FBT_INSTANTIATE(float)
FBT_INSTANTIATE(bf16)

}  // namespace fbt::kernels::cpu
