// The sum of squares of the largest matrix's gradient, which is float in every dtype.
#include "kernels/square_sum.h"

#include "bench/kernels/op.h"

namespace fbt::bench {

void add_square_sum(Ops& ops) {
    using T = float;
    const int64_t n = int64_t(ops.sizes.D) * std::max(ops.sizes.F, ops.sizes.V);
    const auto scratch = std::make_shared<std::vector<double>>(ceil_div(n, kSquareSumChunk) + 1);
    // The sum goes to scratch's first element, and from there, as a T, to an array.
    const auto sum = [scratch](auto* out, Status status) {
        *out = std::remove_pointer_t<decltype(out)>(scratch->front());
        return status;
    };
    ops.add<T>({"square_sum",
                by({n}),
                moved<T>(double(n)),
                {in_a(1), in_a(n)},  // sum, x
                {{0, gamma(2)}},     // in double; rounded once here
                FBT_CALL(sum(
                    a(0), backend::square_sum(scratch->data(), a(1), n, scratch->data() + 1, s)))});
}

}  // namespace fbt::bench
