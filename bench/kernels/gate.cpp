// Attention's gate, one for each head of a row. A sigmoid takes ten roundings.
#include "kernels/gate.h"

#include "bench/kernels/op.h"

namespace fbt::bench {
namespace {

template <class T>
Op forward(const Sizes& m) {
    const int64_t n = m.N * m.H;
    return {"gate_forward",
            by({m.N, m.H, m.C}),
            moved<T>((2.0 * m.C + 1) * double(n)),
            {in_t(n * m.C), in_t(n * m.C), in_t(n)},  // y, x, g
            {{0, gamma(12)}},
            FBT_CALL(backend::gate_forward(t(0), t(1), t(2), n, m.C, s))};
}

// dg: a sum of C products of at most 1, times at most 1/4.
template <class T>
Op backward(const Sizes& m) {
    const int64_t n = m.N * m.H;
    return {"gate_backward",
            by({m.N, m.H, m.C}),
            moved<T>((3.0 * m.C + 2) * double(n)),
            {in_t(n * m.C), in_t(n), in_t(n * m.C), in_t(n * m.C), in_t(n)},  // dx, dg, dy, x, g
            {{0, gamma(12)}, {m.C / 4.0 * gamma(m.C + 26)}},
            FBT_CALL(backend::gate_backward(t(0), t(1), t(2), t(3), t(4), n, m.C, s))};
}

template <class T>
void add(Ops& ops) {
    ops.add<T>(forward<T>(ops.sizes));
    ops.add<T>(backward<T>(ops.sizes));
}

}  // namespace

void add_gate(Ops& ops) {
    add<float>(ops);
    add<bf16>(ops);
}

}  // namespace fbt::bench
