// The carried state: every row of a feedback pass but each sequence's first, half of them from
// pass 1, with jitter (whose random numbers, not the moved bytes, take the time).
#include "kernels/carry.h"

#include "bench/kernels/op.h"

namespace fbt::bench {
namespace {

struct Rows {
    std::vector<int64_t> source, sequence;
    std::vector<int32_t> position;
};
std::shared_ptr<const Rows> rows_of(const Sizes& m) {
    auto rows = std::make_shared<Rows>();
    for (int64_t row = 0; row < m.N; ++row) {
        const int32_t t = int32_t(row % m.T);
        if (t + 1 == m.T) continue;  // no row carries the last state
        rows->source.push_back(t < m.T / 2 ? -1 - row : row);
        rows->sequence.push_back(row / m.T);
        rows->position.push_back(t);
    }
    return rows;
}

template <class T>
Op forward(const Sizes& m) {
    const auto rows = rows_of(m);
    const int64_t R = int64_t(rows->source.size()), D = m.D;
    const PhiloxKey key = philox_key(1, Draw::jitter);
    return {
        "carry_forward",
        by({R, D}),
        moved<T>(2.0 * double(R * D)),
        {in_t(R * D), in_t(m.N * D), in_t(m.N * D)},  // y, first, previous
        {{2 * gamma(4)}},
        FBT_CALL(backend::carry_forward(
            t(0), t(1), t(2), rows->source.data(), static_cast<const A*>(nullptr),
            Jitter<A>{A(0.02), key, rows->sequence.data(), rows->position.data()}, R, int(D), s))};
}

template <class T>
Op backward(const Sizes& m) {
    const auto rows = rows_of(m);
    const int64_t R = int64_t(rows->source.size()), D = m.D;
    return {"carry_backward_accum",
            by({R, D}),
            moved<T>(3.0 * double(R * D)),
            {in_t(m.N * D), in_t(m.N * D), in_t(R * D)},  // dfirst, dprevious, dy
            {{2 * gamma(1)}, {2 * gamma(1)}},
            FBT_CALL(backend::carry_backward_accum(t(0), t(1), t(2), rows->source.data(), R, int(D),
                                                   s))};
}

template <class T>
void add(Ops& ops) {
    ops.add<T>(forward<T>(ops.sizes));
    ops.add<T>(backward<T>(ops.sizes));
}

}  // namespace

void add_carry(Ops& ops) {
    add<float>(ops);
    add<bf16>(ops);
}

}  // namespace fbt::bench
