#include "model/core/flops.h"

#include <algorithm>

namespace fbt::model::core {

std::vector<Matrix> row_matrices(const Config& c, bool fused) {
    const int64_t D = c.dim, HC = int64_t(c.heads) * c.head_dim,
                  GC = int64_t(c.kv_heads) * c.head_dim;
    std::vector<Matrix> matrices = {{HC, D, c.layers},             // q
                                    {GC, D, 2 * c.layers},         // k, v
                                    {c.heads, D, c.layers},        // the heads' gates
                                    {D, HC, c.layers},             // o
                                    {c.ffn_dim, D, 2 * c.layers},  // gate, up
                                    {D, c.ffn_dim, c.layers},      // down
                                    {c.vocab_size, D, 1}};         // logits
    if (fused) matrices.push_back({D, D, 2});                      // one [D,2D] of a concatenation
    return matrices;
}

double row_weights(const Config& config, bool fused) {
    double count = 0;
    for (const Matrix& m : row_matrices(config, fused)) count += m.count * double(m.out * m.in);
    return count;
}

namespace {

// sum_{t < n} min(t + 1, window): what the first n positions see.
int64_t visible_pairs(int64_t n, int64_t window) {
    const int64_t growing = std::min(n, window);
    return growing * (growing + 1) / 2 + (n - growing) * window;
}

}  // namespace

double pass_flops(const Config& c, int64_t first, int64_t length) {
    int64_t pairs = 0;
    for (int l = 0; l < c.layers; ++l) {
        const int64_t window = c.is_full_attention(l) ? length : c.window;
        pairs += visible_pairs(length, window) - visible_pairs(first, window);
    }
    return 6.0 * double(length - first) * row_weights(c, first > 0) +
           12.0 * c.heads * c.head_dim * double(pairs);
}

}  // namespace fbt::model::core
