// The gather of rows, and its gradient, of random tokens.
#include "kernels/embedding.h"

#include <set>

#include "bench/kernels/op.h"

namespace fbt::bench {
namespace {

template <class T>
Op forward(const Sizes& m) {
    const int64_t N = m.N, D = m.D;
    const auto tokens = random_tokens(N, m.V);
    return {"embedding_forward",
            by({N, D}),
            bytes(double(N * D) * (sizeof(T) + sizeof(accumulate_t<T>))),
            {in_t(N * D), in_a(int64_t(m.V) * D)},  // y, w
            {{0}},
            FBT_CALL(backend::embedding_forward(t(0), tokens->data(), a(1), N, int(D), s))};
}

// No token occurs more than N times.
template <class T>
Op backward(const Sizes& m) {
    const int64_t N = m.N, D = m.D;
    const auto tokens = random_tokens(N, m.V);
    const size_t distinct = std::set<int32_t>(tokens->begin(), tokens->end()).size();
    return {"embedding_backward_accum",
            by({N, D}),
            bytes(double(N * D) * sizeof(T) +
                  2.0 * double(distinct) * double(D) * sizeof(accumulate_t<T>)),
            {in_a(int64_t(m.V) * D), in_t(N * D)},  // dw, dy
            {{double(N + 1) * gamma(double(N + 1))}},
            FBT_CALL(backend::embedding_backward_accum(a(0), t(1), tokens->data(), N, int(D), m.V,
                                                       nullptr, s))};
}

template <class T>
void add(Ops& ops) {
    ops.add<T>(forward<T>(ops.sizes));
    ops.add<T>(backward<T>(ops.sizes));
}

}  // namespace

void add_embedding(Ops& ops) {
    add<float>(ops);
    add<bf16>(ops);
}

}  // namespace fbt::bench
