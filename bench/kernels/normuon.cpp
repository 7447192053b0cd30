// NorMuon of the largest matrix of a block: momentum and step, and what orthogonalisation adds to
// its products.
#include "kernels/normuon.h"

#include "bench/kernels/op.h"

namespace fbt::bench {
namespace {

Op momentum(const Sizes& m) {
    using T = float;
    const int64_t n = int64_t(m.F) * m.D;
    return {"normuon_momentum",
            by({m.F, m.D}),
            moved<T>(3.0 * double(n)),
            {in_a(n), in_a(n)},  // m, grad
            {{2 * gamma(4)}},
            FBT_CALL(backend::normuon_momentum(a(0), a(1), n, 0.95, 0.5, s))};
}

// With o and the start of v in [1/2, 1], v is at least 3/8 and r at most 1.7 and at least 1/2: no
// element of the update exceeds lr * 0.2 * 1.7 / (1/2). Its norm sums F*D terms, all positive.
template <class T>
Op step(const Sizes& m) {
    const int64_t N = m.F, K = m.D, n = N * K;
    const NorMuonStep h{.learning_rate = 0.01, .beta2 = 0.5, .eps = 1e-8, .weight_decay = 0.1};
    const double update = 0.01 * 0.2 * 1.7 / 0.5;
    return {"normuon_step",
            by({N, K}),
            bytes(double(n) * 2 * (sizeof(T) + sizeof(accumulate_t<T>))),
            {in_a(n), in_a(N, 0.5, 1), in_t(n, 0.5, 1), in_a(N + 1)},  // w, v, o, scratch
            {{gamma(4) + update * gamma(double(n + K + 20))}, {0, gamma(double(K + 6))}},
            FBT_CALL(backend::normuon_step(a(0), a(1), t(2), N, K, h, a(3), s))};
}

template <class T>
Op axpby_op(const Sizes& m) {
    const int64_t n = int64_t(m.D) * m.D;
    return {"axpby",
            by({m.D, m.D}),
            moved<T>(3.0 * double(n)),
            {in_t(n), in_t(n)},  // y, x
            {{2 * gamma(3)}},
            FBT_CALL(backend::axpby(t(0), A(0.5), t(1), A(-0.25), n, s))};
}

template <class T>
Op transpose_op(const Sizes& m) {
    const int64_t N = m.F, K = m.D;
    return {"transpose",
            by({N, K}),
            moved<T>(2.0 * double(N * K)),
            {in_t(N * K), in_t(N * K)},  // y, x
            {{0}},
            FBT_CALL(backend::transpose(t(0), t(1), N, K, s))};
}

template <class T>
void add(Ops& ops) {
    ops.add<T>(step<T>(ops.sizes));
    ops.add<T>(axpby_op<T>(ops.sizes));
    ops.add<T>(transpose_op<T>(ops.sizes));
}

}  // namespace

void add_normuon(Ops& ops) {
    ops.add<float>(momentum(ops.sizes));
    add<float>(ops);
    add<bf16>(ops);
}

}  // namespace fbt::bench
