// Counted FLOPs against a plain loop over positions.
#include "model/core/flops.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "model/core/model.h"
#include "tests/model/model_test.h"

namespace fbt::tests {
namespace {

using namespace model::core;

// Every number is a whole one below 2^53, so that sums in any order are the same.
double by_loop(const Config& c, int first, int length) {
    const double D = c.dim, F = c.ffn_dim, HC = c.heads * c.head_dim, GC = c.kv_heads * c.head_dim;
    double flops = 0;
    for (int t = first; t < length; ++t) {
        flops += 6 * D * c.vocab_size;
        if (first > 0) flops += 6 * 2 * D * D;
        for (int l = 0; l < c.layers; ++l) {
            flops += 6 * D * (HC + GC + GC + c.heads + HC + 3 * F);
            const int window = c.is_full_attention(l) ? length : c.window;
            for (int seen = 0; seen <= t; ++seen) flops += seen > t - window ? 12 * HC : 0;
        }
    }
    return flops;
}

TEST(Flops, EqualAPlainLoop) {
    Config c = small_config();
    int compared = 0;
    for (int window : {1, 2, 70, 200, 1000})
        for (int full_every : {1, 2, 3, 9})
            for (int length : {1, 69, 70, 71, 201})
                for (int first : {0, 1, 37, 69, 70, 71, 200, 201}) {
                    if (first > length) continue;
                    c.window = window;
                    c.full_attention_every = full_every;
                    EXPECT_EQ(pass_flops(c, first, length), by_loop(c, first, length))
                        << window << " " << full_every << " " << length << " " << first;
                    ++compared;
                }
    EXPECT_EQ(compared, 5 * 4 * (2 + 4 + 5 + 6 + 8));
}

// What rows are multiplied by is all of a model but its gains, whatever the fusion.
TEST(Flops, CountTheModelsOwnMatrices) {
    Context context("cpu", 1);
    for (Fusion fusion :
         {Fusion::gated_product, Fusion::concat_projection, Fusion::linear_addition}) {
        Config c = small_config();
        c.fusion = fusion;
        Model model(context, c, DType::f32);
        double matrices = 0, of_fusion = 0;
        for (const nn::Parameter& p : model.parameters().all()) {
            if (p.role() == nn::Role::gain) continue;
            matrices += double(tensor::numel_of(p.shape()));
            if (p.name().starts_with("feedback.")) of_fusion += double(tensor::numel_of(p.shape()));
        }
        EXPECT_EQ(row_weights(c, true), matrices) << to_string(fusion);
        EXPECT_EQ(row_weights(c, false), matrices - of_fusion) << to_string(fusion);
    }
}

}  // namespace
}  // namespace fbt::tests
