// SwiGLU: two arrays in and one out, or three in and two out. A sigmoid takes ten roundings.
#include "kernels/swiglu.h"

#include "bench/kernels/op.h"

namespace fbt::bench {
namespace {

template <class T>
Op forward(const Sizes& m) {
    const int64_t n = m.N * m.F;
    return {"swiglu_forward",          by({m.N, m.F}),
            moved<T>(3.0 * double(n)), {in_t(n), in_t(n), in_t(n)},  // y, gate, up
            {{0, gamma(12)}},          FBT_CALL(backend::swiglu_forward(t(0), t(1), t(2), n, s))};
}

template <class T>
Op backward(const Sizes& m) {
    const int64_t n = m.N * m.F;
    return {"swiglu_backward",
            by({m.N, m.F}),
            moved<T>(5.0 * double(n)),
            {in_t(n), in_t(n), in_t(n), in_t(n), in_t(n)},  // dgate, dup, dy, gate, up
            {{2 * gamma(26)}, {0, gamma(12)}},
            FBT_CALL(backend::swiglu_backward(t(0), t(1), t(2), t(3), t(4), n, s))};
}

template <class T>
void add(Ops& ops) {
    ops.add<T>(forward<T>(ops.sizes));
    ops.add<T>(backward<T>(ops.sizes));
}

}  // namespace

void add_swiglu(Ops& ops) {
    add<float>(ops);
    add<bf16>(ops);
}

}  // namespace fbt::bench
