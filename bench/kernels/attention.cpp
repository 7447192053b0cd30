// Attention where every row of a sequence of T sees itself and all before it, and where one row
// sees all T (decoding).
#include "kernels/attention.h"

#include "bench/kernels/op.h"

namespace fbt::bench {
namespace {

double visible_pairs(const Sizes& m) { return double(m.N) * (m.T + 1) / 2; }

struct Spans {
    std::vector<Span> spans;
    std::vector<int64_t> blocks;
    SpanTable table;
};
// Of each sequence the last `count` positions.
std::shared_ptr<const Spans> spans_of(const Sizes& m, int count) {
    auto all = std::make_shared<Spans>();
    for (int64_t row = 0; row < m.N; row += m.T) {
        all->spans.push_back({row / m.T * count, int64_t(all->blocks.size()), m.T - count, count});
        for (int t = 0; t < m.T; t += kKeyBlock) all->blocks.push_back(row + t);
    }
    const auto sequences = int32_t(all->spans.size());
    all->table = {all->spans.data(),         all->blocks.data(), sequences, count, m.T,
                  int64_t(sequences) * count};
    return all;
}

// Rounding errors of attention where queries and keys are at most 1/2 and all else at most 1.
// Scores are then at most S = sqrt(C)/4, and p[t,s] <= exp(2S)/(t+1): a row's p add up to 1, and a
// column's, over the H/G heads that share a key head, to at most H/G exp(2S) (1 + log T).
// In bf16 p and ds are rounded for the products they enter, and backward takes a rounded o.
template <class T>
struct AttentionError {
    double scale, o, lse, dq, dk, dv;
    explicit AttentionError(const Sizes& m) {
        const double C = m.C, Ts = m.T, S = std::sqrt(C) / 4, heads = m.H / m.G;
        scale = 1 / std::sqrt(C);
        const double score = gamma(C + 1) * S;
        // exp(score - max), rescaled in each split, over a sum of Ts such
        const double splits = Ts / kKeyBlock + 2;
        const double weight = std::expm1(
            2 * ((2 * score + gamma(1) * (2 * S + 3)) * splits + gamma(Ts + 3 * splits)));
        o = weight + gamma(Ts) + 2 * kRounding<T>;
        lse = weight + gamma(2) * (S + std::log(Ts)) + kRounding<T>;
        // p = exp(score - lse), relative;  ds = p (dp - delta), both at most C, relative to p
        const double p =
            std::expm1(score + lse + gamma(3) * (1 + 2 * S + std::log(Ts))) + kRounding<T>;
        const double ds =
            2 * C * p + 2 * C * gamma(C + 2) + C * (o + kRounding<T>)+2 * C * kRounding<T>;
        const double column = heads * std::exp(2 * S) * (1 + std::log(Ts)), terms = heads * Ts;
        dq = scale / 2 * (ds + 2 * C * gamma(Ts + 2));
        dk = scale / 2 * column * (ds + 2 * C * gamma(terms + 2));
        dv = column * (p + gamma(terms));
    }
};

std::string shape_of(const Sizes& m) {
    return by({m.N / m.T, m.T}) + "_H" + std::to_string(m.H) + "_G" + std::to_string(m.G) + "_C" +
           std::to_string(m.C);
}

// Two products of C multiply-adds for each visible pair and head: q.k and p v.
template <class T>
Op forward(const Sizes& m) {
    const auto spans = spans_of(m, m.T);
    const AttentionError<T> error(m);
    const Array queries = in_t(m.N * m.H * m.C, -0.5, 0.5), keys = in_t(m.N * m.G * m.C, -0.5, 0.5);
    const Array values = in_t(keys.count), statistic = in_a(m.N * m.H);
    return {"attention_forward",
            shape_of(m),
            flops(4.0 * m.C * m.H * visible_pairs(m)),
            {queries, statistic, queries, keys, values},  // o, lse, q, k, v
            {{error.o}, {error.lse}},
            FBT_CALL(backend::attention_forward(t(0), a(1), t(2), t(3), t(4), spans->table, m.H,
                                                m.G, m.C, 0, A(error.scale), nullptr, s))};
}

// One position of each sequence: keys and values are all there is to move.
template <class T>
Op decode(const Sizes& m) {
    const auto spans = spans_of(m, 1);
    const AttentionError<T> error(m);
    const int64_t rows = spans->table.rows;
    const Array queries = in_t(rows * m.H * m.C, -0.5, 0.5),
                keys = in_t(m.N * m.G * m.C, -0.5, 0.5), values = in_t(keys.count);
    return {"attention_decode",
            shape_of(m),
            moved<T>(2.0 * double(keys.count + queries.count)),
            {queries, queries, keys, values},  // o, q, k, v
            {{error.o}},
            FBT_CALL(backend::attention_forward(t(0), static_cast<A*>(nullptr), t(1), t(2), t(3),
                                                spans->table, m.H, m.G, m.C, 0, A(error.scale),
                                                nullptr, s))};
}

// Five products: q.k and dout.v again, then dv, dq and dk.
template <class T>
Op backward(const Sizes& m) {
    const auto spans = spans_of(m, m.T);
    const AttentionError<T> error(m);
    const Array queries = in_t(m.N * m.H * m.C, -0.5, 0.5), keys = in_t(m.N * m.G * m.C, -0.5, 0.5);
    const Array outputs = in_t(queries.count), values = in_t(keys.count),
                statistic = in_a(m.N * m.H), sums = in_a(keys.count);
    return {"attention_backward",
            shape_of(m),
            flops(10.0 * m.C * m.H * visible_pairs(m)),
            {queries, sums, sums, statistic,                       // dq, dk, dv, delta
             outputs, queries, keys, values, outputs, statistic},  // dout, q, k, v, o, lse
            {{error.dq}, {error.dk}, {error.dv}},
            FBT_CALL(backend::attention_backward(t(0), a(1), a(2), a(3), t(4), t(5), t(6), t(7),
                                                 t(8), a(9), spans->table, m.H, m.G, m.C, 0,
                                                 A(error.scale), s)),
            FBT_CALL(backend::attention_forward(t(8), a(9), t(5), t(6), t(7), spans->table, m.H,
                                                m.G, m.C, 0, A(error.scale), nullptr, s))};
}

template <class T>
void add(Ops& ops) {
    ops.add<T>(forward<T>(ops.sizes));
    ops.add<T>(backward<T>(ops.sizes));
    ops.add<T>(decode<T>(ops.sizes));
}

}  // namespace

void add_attention(Ops& ops) {
    add<float>(ops);
    add<bf16>(ops);
}

}  // namespace fbt::bench
