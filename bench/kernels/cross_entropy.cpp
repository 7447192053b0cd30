// Cross-entropy: the logits are read; backward also writes as many.
#include "kernels/cross_entropy.h"

#include "bench/kernels/op.h"

namespace fbt::bench {
namespace {

// Of log sum_v exp(logit), logits at most 1.
double lse_error(int V) { return gamma(V + 12) + gamma(4) * (3 + std::log(double(V))); }

template <class T>
Op forward(const Sizes& m) {
    const int64_t N = logit_rows(m);
    const auto targets = random_tokens(N, m.V);
    return {"cross_entropy_forward",
            by({N, m.V}),
            moved<T>(double(N * m.V)),
            {in_a(N), in_a(N), in_t(N * m.V)},  // ce, lse, logits
            {{lse_error(m.V)}, {lse_error(m.V)}},
            FBT_CALL(backend::cross_entropy_forward(a(0), a(1), t(2), targets->data(), N, m.V, s))};
}

template <class T>
Op backward(const Sizes& m) {
    const int64_t N = logit_rows(m);
    const auto targets = random_tokens(N, m.V);
    return {"cross_entropy_backward",
            by({N, m.V}),
            moved<T>(2.0 * double(N * m.V)),
            // dlogits, logits, lse, weight, ce
            {in_t(N * m.V), in_t(N * m.V), in_a(N), in_a(N), in_a(N)},
            {{2 * (lse_error(m.V) + gamma(12) * (3 + std::log(double(m.V))))}},
            FBT_CALL(backend::cross_entropy_backward(t(0), t(1), a(2), targets->data(), a(3),
                                                     A(1e-4), N, m.V, s)),
            FBT_CALL(backend::cross_entropy_forward(a(4), a(2), t(1), targets->data(), N, m.V, s))};
}

template <class T>
void add(Ops& ops) {
    ops.add<T>(forward<T>(ops.sizes));
    ops.add<T>(backward<T>(ops.sizes));
}

}  // namespace

void add_cross_entropy(Ops& ops) {
    add<float>(ops);
    add<bf16>(ops);
}

}  // namespace fbt::bench
