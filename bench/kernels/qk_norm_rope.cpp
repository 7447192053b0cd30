// RMSNorm of heads, then rotation. As in rmsnorm.cpp, rstd is at most 2 and xhat at most 3.
#include "kernels/qk_norm_rope.h"

#include "bench/kernels/op.h"

namespace fbt::bench {
namespace {

std::shared_ptr<const std::vector<int32_t>> positions_of(const Sizes& m) {
    auto positions = std::make_shared<std::vector<int32_t>>(m.N);
    for (int64_t n = 0; n < m.N; ++n) (*positions)[n] = int32_t(n % m.T);
    return positions;
}

template <class T>
Op forward(const Sizes& m) {
    const int64_t N = m.N, row = int64_t(m.H) * m.C, angles = int64_t(m.T) * m.C / 2;
    const auto positions = positions_of(m);
    return {"qk_norm_rope_forward",
            by({N, m.H, m.C}),
            moved<T>(2.0 * double(N * row)),
            // y, rstd, x, gain, cos, sin: two terms of at most 3
            {in_t(N * row), in_a(N * m.H), in_t(N * row, 0.5, 1.5), in_a(m.C), in_a(angles),
             in_a(angles)},
            {{6 * gamma(m.C + 14)}, {0, gamma(m.C + 10)}},
            FBT_CALL(backend::qk_norm_rope_forward(t(0), a(1), t(2), a(3), a(4), a(5),
                                                   positions->data(), N, m.H, m.C, A(1e-6), s))};
}

// dz is at most 2; so with g = dz*gain, dx = rstd (g - xhat mean(g xhat)), the mean at most 2, and
// dgain has N H terms of at most 6.
template <class T>
Op backward(const Sizes& m) {
    const int64_t N = m.N, row = int64_t(m.H) * m.C, angles = int64_t(m.T) * m.C / 2;
    const auto positions = positions_of(m);
    const double terms = double(N * m.H);
    return {"qk_norm_rope_backward",
            by({N, m.H, m.C}),
            moved<T>(3.0 * double(N * row)),
            // dx, dgain, dy, x, gain, rstd, cos, sin, scratch, y
            {in_t(N * row), in_a(m.C), in_t(N * row), in_t(N * row, 0.5, 1.5), in_a(m.C),
             in_a(N * m.H), in_a(angles), in_a(angles), in_a(row_chunks(N) * m.C), in_t(N * row)},
            {{16 * gamma(2.0 * (m.C + 14))}, {(6 * terms + 1) * gamma(terms + m.C + 14)}},
            FBT_CALL(backend::qk_norm_rope_backward(t(0), a(1), t(2), t(3), a(4), a(5), a(6), a(7),
                                                    positions->data(), N, m.H, m.C, a(8), s)),
            FBT_CALL(backend::qk_norm_rope_forward(t(9), a(5), t(3), a(4), a(6), a(7),
                                                   positions->data(), N, m.H, m.C, A(1e-6), s))};
}

template <class T>
void add(Ops& ops) {
    ops.add<T>(forward<T>(ops.sizes));
    ops.add<T>(backward<T>(ops.sizes));
}

}  // namespace

void add_qk_norm_rope(Ops& ops) {
    add<float>(ops);
    add<bf16>(ops);
}

}  // namespace fbt::bench
