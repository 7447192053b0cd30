// The tape's sum of gradients, and the rounding of those that were summed in A.
#include "kernels/elementwise.h"

#include "bench/kernels/op.h"

namespace fbt::bench {
namespace {

template <class T>
Op accumulate_op(const Sizes& m) {
    const int64_t n = m.N * m.D;
    return {"add_accum",
            by({m.N, m.D}),
            moved<T>(3.0 * double(n)),
            {in_t(n), in_t(n)},  // y, x
            {{2 * gamma(1)}},
            FBT_CALL(backend::add_accum(t(0), t(1), n, s))};
}

template <class T>
Op cast_op(const Sizes& m) {
    const int64_t n = m.N * m.G * m.C;
    return {"cast",
            by({m.N, int64_t(m.G) * m.C}),
            bytes(double(n) * (sizeof(T) + sizeof(accumulate_t<T>))),
            {in_t(n), in_a(n)},  // y, x
            {{0}},
            FBT_CALL(backend::cast(t(0), a(1), n, s))};
}

template <class T>
void add(Ops& ops) {
    ops.add<T>(accumulate_op<T>(ops.sizes));
    ops.add<T>(cast_op<T>(ops.sizes));
}

}  // namespace

void add_elementwise(Ops& ops) {
    add<float>(ops);
    add<bf16>(ops);
}

}  // namespace fbt::bench
