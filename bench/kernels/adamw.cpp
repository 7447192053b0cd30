// AdamW on the largest matrix, in float in every dtype: w, m, v and the gradient are read, the
// first three written.
#include "kernels/adamw.h"

#include "bench/kernels/op.h"

namespace fbt::bench {

void add_adamw(Ops& ops) {
    using T = float;
    const int64_t n = int64_t(ops.sizes.D) * std::max(ops.sizes.F, ops.sizes.V);
    const AdamWStep h{1e-3, 0.9, 0.95, 1e-8, 0.01, 1, 10};
    // sqrt(v) stays above 0.48 and |m|/(1 - 0.9^10) below 1.6, so an update is below 4 * 1e-3.
    ops.add<T>({"adamw_step",
                by({n}),
                moved<T>(7.0 * double(n)),
                {in_a(n), in_a(n), in_a(n, 0.25, 1), in_a(n)},  // w, m, v, grad
                {{gamma(4) + 4e-3 * gamma(40)}, {2 * gamma(4)}, {0, gamma(6)}},
                FBT_CALL(backend::adamw_step(a(0), a(1), a(2), a(3), n, h, s))});
}

}  // namespace fbt::bench
