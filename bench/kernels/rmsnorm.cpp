// RMSNorm: x is read and y written, and what else an op takes of that size. Where x is at least 1/2
// and below 3/2, rstd is at most 2 and xhat at most 3.
#include "kernels/rmsnorm.h"

#include "bench/kernels/op.h"

namespace fbt::bench {
namespace {

template <class T>
Op forward(const Sizes& m) {
    const int64_t N = m.N, D = m.D;
    return {"rmsnorm_forward",
            by({N, D}),
            moved<T>(2.0 * double(N * D)),
            {in_t(N * D), in_a(N), in_t(N * D), in_a(D)},  // y, rstd, x, gain
            {{0, gamma(double(D + 10))}, {0, gamma(double(D + 10))}},
            FBT_CALL(backend::rmsnorm_forward(t(0), a(1), t(2), a(3), N, int(D), A(1e-6), s))};
}

template <class T>
Op residual_forward(const Sizes& m) {
    const int64_t N = m.N, D = m.D;
    return {"residual_rmsnorm_forward",
            by({N, D}),
            moved<T>(3.0 * double(N * D)),
            // y, rstd, x, branch, gain
            {in_t(N * D), in_a(N), in_t(N * D), in_t(N * D, 0.5, 1.5), in_a(D)},
            {{4 * gamma(double(D + 12))}, {0, gamma(double(D + 10))}},
            FBT_CALL(backend::residual_rmsnorm_forward(t(0), a(1), t(2), t(3), a(4), A(0.35), N,
                                                       int(D), A(1e-6), s))};
}

template <class T>
Op backward(const Sizes& m) {
    const int64_t N = m.N, D = m.D;
    return {"rmsnorm_backward",
            by({N, D}),
            moved<T>(3.0 * double(N * D)),
            // dx, dgain, dy, x, gain, rstd, scratch, y
            {in_t(N * D), in_a(D), in_t(N * D), in_t(N * D, 0.5, 1.5), in_a(D), in_a(N),
             in_a(row_chunks(N) * D), in_t(N * D)},
            // dx = rstd (g - xhat mean(g xhat)), the mean at most 1;  dgain: N terms of at most 3
            {{8 * gamma(2.0 * double(D + 10))}, {double(3 * N + 1) * gamma(double(N + D + 10))}},
            FBT_CALL(backend::rmsnorm_backward(t(0), a(1), t(2), t(3), a(4), a(5), A(1), N, int(D),
                                               a(6), s)),
            FBT_CALL(backend::rmsnorm_forward(t(7), a(5), t(3), a(4), N, int(D), A(1e-6), s))};
}

template <class T>
void add(Ops& ops) {
    ops.add<T>(forward<T>(ops.sizes));
    ops.add<T>(residual_forward<T>(ops.sizes));
    ops.add<T>(backward<T>(ops.sizes));
}

}  // namespace

void add_rmsnorm(Ops& ops) {
    add<float>(ops);
    add<bf16>(ops);
}

}  // namespace fbt::bench
