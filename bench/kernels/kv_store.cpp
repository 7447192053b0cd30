// Rows of keys to their slots of a store: each is read and written, or also added.
#include "kernels/kv_store.h"

#include "bench/kernels/op.h"

namespace fbt::bench {
namespace {

template <class T>
Op copy(const Sizes& m) {
    const int64_t N = m.N, W = int64_t(m.G) * m.C;
    const auto slots = shuffled(N);
    return {"copy_rows",
            by({N, W}),
            moved<T>(2.0 * double(N * W)),
            {in_t(N * W), in_t(N * W)},  // dst, src
            {{0}},
            FBT_CALL(backend::copy_rows(t(0), slots->data(), t(1),
                                        static_cast<const int64_t*>(nullptr), N, W, s))};
}

template <class T>
Op accumulate_rows(const Sizes& m) {
    const int64_t N = m.N, W = int64_t(m.G) * m.C;
    const auto slots = shuffled(N);
    return {"copy_rows_accum",
            by({N, W}),
            moved<T>(3.0 * double(N * W)),
            {in_t(N * W), in_t(N * W)},  // dst, src
            {{2 * gamma(1)}},
            FBT_CALL(backend::copy_rows_accum(t(0), slots->data(), t(1),
                                              static_cast<const int64_t*>(nullptr), N, W, s))};
}

template <class T>
void add(Ops& ops) {
    ops.add<T>(copy<T>(ops.sizes));
    ops.add<T>(accumulate_rows<T>(ops.sizes));
}

}  // namespace

void add_kv_store(Ops& ops) {
    add<float>(ops);
    add<bf16>(ops);
}

}  // namespace fbt::bench
