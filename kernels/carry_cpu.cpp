// The carried state, rows spread over threads.
#include <algorithm>

#include "kernels/carry.h"
#include "kernels/cpu_math.h"

namespace fbt::kernels::cpu {
namespace {

// y[d] += half_width*(2*uniform - 1), columns in blocks whose counters run side by side
template <class A>
void disturb(A* y, int D, A half_width, PhiloxKey key, uint64_t sequence, uint32_t position) {
    constexpr int kCounters = 16;
    for (int d0 = 0; d0 < D; d0 += 4 * kCounters) {
        uint32_t bits[4 * kCounters];
#pragma omp simd
        for (int j = 0; j < kCounters; ++j) {
            const Philox4 drawn = philox_four(key, sequence, position, uint32_t(d0 / 4 + j));
            for (int i = 0; i < 4; ++i) bits[4 * j + i] = drawn.v[i];
        }
        const int count = std::min(D - d0, 4 * kCounters);
#pragma omp simd
        for (int d = 0; d < count; ++d) y[d0 + d] += half_width * (2 * uniform_float(bits[d]) - 1);
    }
}

}  // namespace

// y[r,:] = source(r) + noise[r,:] + half_width*(2*uniform(r,:) - 1)
template <class T, class A>
Status carry_forward(T* y, const T* first, const T* previous, const int64_t* source, const A* noise,
                     const Jitter<A>& jitter, int64_t R, int D, Stream s) {
    if (R < 0 || D < 1) return {Code::bad_argument, "carry_forward needs R >= 0, D >= 1"};
    for_rows(s, R, D, [=](int64_t r) {
        T* y_row = y + r * D;
        std::copy_n(source[r] >= 0 ? previous + source[r] * D : first + (-1 - source[r]) * D, D,
                    y_row);
        if (noise) {
            const A* noise_row = noise + r * D;
#pragma omp simd
            for (int d = 0; d < D; ++d) y_row[d] += noise_row[d];
        }
        if (jitter.half_width != 0)
            disturb(y_row, D, jitter.half_width, jitter.key, uint64_t(jitter.sequence[r]),
                    uint32_t(jitter.position[r]));
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
#pragma omp simd
        for (int d = 0; d < D; ++d) to[d] += from[d];
    });
    return {};
}

template Status carry_forward<float, float>(float*, const float*, const float*, const int64_t*,
                                            const float*, const Jitter<float>&, int64_t, int,
                                            Stream);
template Status carry_backward_accum<float>(float*, float*, const float*, const int64_t*, int64_t,
                                            int, Stream);

}  // namespace fbt::kernels::cpu
