// The carried state in plain loops.
#include "kernels/carry.h"

namespace fbt::kernels::ref {

// y[r,:] = source(r) + noise[r,:] + half_width*(2*uniform(r,:) - 1)
template <class T, class A>
Status carry_forward(T* y, const T* first, const T* previous, const int64_t* source, const A* noise,
                     const Jitter<A>& jitter, int64_t R, int D, Stream) {
    if (R < 0 || D < 1) return {Code::bad_argument, "carry_forward needs R >= 0, D >= 1"};
    for (int64_t r = 0; r < R; ++r) {
        const T* from = source[r] >= 0 ? previous + source[r] * D : first + (-1 - source[r]) * D;
        for (int d = 0; d < D; ++d) {
            A value = A(from[d]);
            if (noise) value += noise[r * D + d];
            if (jitter.half_width != 0) {
                const uint32_t bits = philox_bits(jitter.key, uint64_t(jitter.sequence[r]),
                                                  uint32_t(jitter.position[r]), uint32_t(d));
                value += jitter.half_width * (2 * A(uniform_float(bits)) - 1);
            }
            y[r * D + d] = T(value);
        }
    }
    return {};
}

// d source(r) += dy[r,:]
template <class T>
Status carry_backward_accum(T* dfirst, T* dprevious, const T* dy, const int64_t* source, int64_t R,
                            int D, Stream) {
    if (R < 0 || D < 1) return {Code::bad_argument, "carry_backward_accum needs R >= 0, D >= 1"};
    for (int64_t r = 0; r < R; ++r) {
        T* to = source[r] >= 0 ? dprevious + source[r] * D : dfirst + (-1 - source[r]) * D;
        for (int d = 0; d < D; ++d) to[d] += dy[r * D + d];
    }
    return {};
}

#define FBT_INSTANTIATE(T, A)                                                             \
    template Status carry_forward<T, A>(T*, const T*, const T*, const int64_t*, const A*, \
                                        const Jitter<A>&, int64_t, int, Stream);          \
    template Status carry_backward_accum<T>(T*, T*, const T*, const int64_t*, int64_t, int, Stream);
FBT_INSTANTIATE(float, float)
FBT_INSTANTIATE(double, double)

}  // namespace fbt::kernels::ref
