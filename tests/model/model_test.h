// A small model and batches for the tests of model/.
#pragma once
#include "model/core/decode.h"
#include "model/core/objective.h"
#include "tests/compare.h"

namespace fbt::tests {

inline model::core::Config small_config() {
    model::core::Config c;
    c.vocab_size = 23;
    c.dim = 24;
    c.layers = 3;
    c.heads = 4;
    c.kv_heads = 2;
    c.head_dim = 6;
    c.ffn_dim = 37;
    c.context = 400;
    c.window = 70;  // starts inside a split
    c.full_attention_every = 3;
    return c;
}

// Generic values, gains included, so that nothing hides behind a 1.
inline void randomise(model::core::Model& model, bool trained) {
    unsigned seed = 1;
    for (nn::Parameter& p : model.parameters().all()) {
        const int64_t n = tensor::numel_of(p.shape());
        std::vector<double> v = normal<double>(n, seed++);
        for (double& x : v)
            x = p.role() == nn::Role::gain ? 1 + 0.1 * x : x / std::sqrt(double(p.shape().back()));
        p.set(model.context(), v, model.dtype(), trained);
    }
}

inline std::vector<int32_t> random_tokens(int n, int vocab, unsigned seed) {
    std::mt19937 g(seed);
    std::vector<int32_t> t(n);
    for (int32_t& x : t) x = int32_t(g() % unsigned(vocab));
    return t;
}

inline model::core::Batch random_batch(const std::vector<int32_t>& lengths, int vocab,
                                       unsigned seed) {
    model::core::Batch b;
    b.lengths = lengths;
    int n = 0;
    for (size_t s = 0; s < lengths.size(); ++s) {
        n += lengths[s];
        b.indices.push_back(int64_t(100 + s));
    }
    b.tokens = random_tokens(n, vocab, seed);
    b.targets = random_tokens(n, vocab, seed + 1);
    if (n > 2) b.targets[2] = -1;
    return b;
}

// States, keys and values of one sequence, on the host; in double, which holds every dtype exactly.
struct Rows {
    std::vector<double> hidden, keys, values;
};

inline Rows rows_of(const model::core::Trace& trace) {
    Rows out{trace.hidden.to_double(), {}, {}};
    for (size_t l = 0; l < trace.keys.size(); ++l) {
        const auto k = trace.keys[l].to_double(), v = trace.values[l].to_double();
        out.keys.insert(out.keys.end(), k.begin(), k.end());
        out.values.insert(out.values.end(), v.begin(), v.end());
    }
    return out;
}

inline void expect_same(const Rows& got, const Rows& want) {
    EXPECT_TRUE(same_bits(got.hidden, want.hidden));
    EXPECT_TRUE(same_bits(got.keys, want.keys));
    EXPECT_TRUE(same_bits(got.values, want.values));
}

}  // namespace fbt::tests
