// The residual stream at every depth, by memcmp against computations that do not use it, and the
// cross-validated probe.
#include "model/core/probe.h"

#include <algorithm>
#include <map>
#include <set>

#include "tests/data/files.h"
#include "tests/model/model_test.h"

namespace fbt::tests {
namespace {

using namespace model::core;
using tensor::ErrorKind;

using Streams = std::vector<std::vector<float>>;

class QueryStreams : public testing::Test {
  protected:
    QueryStreams() : model(context, small_config(), DType::f32) { randomise(model, false); }

    Tensor rmsnorm(const Tensor& x, const char* gain) {
        Tensor y = Tensor::empty(context, x.shape(), x.dtype()), rstd;
        tensor::rmsnorm_forward(y, rstd, x, model.parameters().at(gain).weight().value,
                                model.config().norm_eps);
        return y;
    }
    Tensor embedding(const std::vector<int32_t>& tokens) {
        return tensor::embedding_forward(Tensor::from(context, tokens, {int64_t(tokens.size())}),
                                         model.parameters().at("embed.weight").weight().value,
                                         DType::f32);
    }
    std::vector<float> row(const std::vector<float>& stream, size_t s) const {
        const int64_t D = model.config().dim;
        return {stream.begin() + int64_t(s) * D, stream.begin() + int64_t(s + 1) * D};
    }
    // The top state that a stream's last depth belongs to.
    std::vector<float> top(const Streams& streams, size_t s) {
        return rmsnorm(Tensor::from(context, row(streams.back(), s), {1, model.config().dim}),
                       "final_norm.gain")
            .to_vector<float>();
    }
    // Row s of every depth.
    void expect_same_rows(const Streams& got, size_t s, const Streams& want, size_t t) const {
        ASSERT_EQ(got.size(), want.size());
        for (size_t l = 0; l < got.size(); ++l)
            EXPECT_TRUE(same_bits(row(got[l], s), row(want[l], t)))
                << "depth " << l << ", sequence " << s;
    }
    static Batch one_of(const Batch& batch, size_t s) {
        int64_t first = 0;
        for (size_t i = 0; i < s; ++i) first += batch.lengths[i];
        Batch out;
        out.lengths = {batch.lengths[s]};
        out.indices = {batch.indices[s]};
        out.tokens.assign(batch.tokens.begin() + first,
                          batch.tokens.begin() + first + batch.lengths[s]);
        out.targets.assign(out.tokens.size(), -1);
        return out;
    }

    Context context{"cpu", 2};
    Model model;
};

// Each depth from the one below by a block that is made here, with the model's values.
TEST_F(QueryStreams, DepthsAreWhatTheBlocksGive) {
    const Config& c = model.config();
    const std::vector<int32_t> lengths = {37, 1, 131};
    const std::vector<int32_t> tokens = random_tokens(169, c.vocab_size, 3);
    auto store = std::make_shared<PagedStore>(model);
    auto spans = std::make_shared<SpanBatch>();
    for (int32_t T : lengths) {
        PagedStore::Pages pages;
        store->reserve(pages, 0, T);
        PagedStore::add_span(*spans, pages, 0, T);
    }
    const Tensor without = advance(model, store, spans, tokens);
    std::vector<Tensor> depths = {without};  // what was there goes
    const Tensor h = advance(model, store, spans, tokens, {}, &depths);
    EXPECT_TRUE(same_bits(h.to_vector<float>(), without.to_vector<float>()));
    ASSERT_EQ(int(depths.size()), c.layers + 1);
    EXPECT_TRUE(same_bits(depths[0].to_vector<float>(),
                          rmsnorm(embedding(tokens), "input_norm.gain").to_vector<float>()));
    EXPECT_TRUE(same_bits(rmsnorm(depths.back(), "final_norm.gain").to_vector<float>(),
                          h.to_vector<float>()));

    const nn::RopeTable rope(context, 131, c.head_dim, c.rope_theta, DType::f32);
    store->begin(Tensor::from(context, spans->own_slots(), {169}));
    for (int l = 0; l < c.layers; ++l) {
        nn::ParameterSet parameters;
        const nn::Block block(parameters, "layers." + std::to_string(l) + ".",
                              {c.dim, c.heads, c.kv_heads, c.head_dim, c.ffn_dim,
                               c.is_full_attention(l) ? 0 : c.window, c.alpha(), c.norm_eps});
        for (nn::Parameter& p : parameters.all())
            p.set(context, model.parameters().at(p.name()).weight().value.to_double(), DType::f32,
                  false);
        Tape tape(false);
        const Var next =
            block.forward(tape, tape.constant(depths[l]), {spans, &rope, store}, l, false);
        EXPECT_TRUE(same_bits(depths[l + 1].to_vector<float>(), next.value().to_vector<float>()))
            << "block " << l + 1;
        EXPECT_FALSE(same_bits(depths[l + 1].to_vector<float>(), depths[l].to_vector<float>()));
    }
}

TEST_F(QueryStreams, StandardIsThePrefillsLastPosition) {
    const Batch batch = random_batch({37, 1, 131, 64}, model.config().vocab_size, 5);
    const Streams streams = query_streams(model, batch, Prefill::standard);
    ASSERT_EQ(int(streams.size()), model.config().layers + 1);
    for (size_t s = 0; s < batch.lengths.size(); ++s) {
        const Batch one = one_of(batch, s);
        const int T = one.lengths[0];
        EXPECT_TRUE(same_bits(
            row(streams[0], s),
            rmsnorm(embedding({one.tokens.back()}), "input_norm.gain").to_vector<float>()));
        const Trace trace = decode_known(model, one.tokens, T, Mode::standard);
        EXPECT_TRUE(same_bits(top(streams, s), trace.hidden.rows(T - 1, 1).to_vector<float>()));
    }
}

// One step: soft decoding after a plain prompt of T-1 tokens; recurrent: after one of a single
// token.
TEST_F(QueryStreams, FusedPrefillsAreSoftDecoding) {
    const Batch batch = random_batch({37, 2, 131, 64, 3, 37}, model.config().vocab_size, 5);
    const Streams standard = query_streams(model, batch, Prefill::standard);
    for (Prefill prefill : {Prefill::one_step, Prefill::recurrent}) {
        const Streams streams = query_streams(model, batch, prefill);
        ASSERT_EQ(int(streams.size()), model.config().layers + 1);
        for (size_t s = 0; s < batch.lengths.size(); ++s) {
            const Batch one = one_of(batch, s);
            const int T = one.lengths[0];
            const Trace trace = decode_known(model, one.tokens,
                                             prefill == Prefill::recurrent ? 1 : T - 1, Mode::soft);
            EXPECT_TRUE(same_bits(top(streams, s), trace.hidden.rows(T - 1, 1).to_vector<float>()))
                << "sequence " << s;
            Tape tape(false);
            const Var fused =
                model.fuse(tape, tape.constant(trace.hidden.rows(T - 2, 1)),
                           Tensor::from(context, std::vector<int32_t>{one.tokens.back()}, {1}));
            EXPECT_TRUE(same_bits(row(streams[0], s),
                                  rmsnorm(fused.value(), "input_norm.gain").to_vector<float>()));
            EXPECT_FALSE(same_bits(top(streams, s), top(standard, s)));
        }
    }
}

TEST_F(QueryStreams, ShortSequencesAgree) {
    const Batch batch = random_batch({2, 1, 2, 3}, model.config().vocab_size, 6);
    const Streams standard = query_streams(model, batch, Prefill::standard);
    const Streams one_step = query_streams(model, batch, Prefill::one_step);
    const Streams recurrent = query_streams(model, batch, Prefill::recurrent);
    for (size_t s : {0, 2}) expect_same_rows(recurrent, s, one_step, s);
    expect_same_rows(one_step, 1, standard, 1);
    expect_same_rows(recurrent, 1, standard, 1);
    EXPECT_FALSE(same_bits(row(recurrent.back(), 3), row(one_step.back(), 3)));  // three differ
}

// More positions than are computed together, so that the batch is cut into groups.
TEST_F(QueryStreams, BatchesGiveTheBitsOfEachAlone) {
    std::vector<int32_t> lengths;
    for (int s = 0; s < 150; ++s) lengths.push_back(1 + s * 7 % 11);
    lengths[60] = 130;
    const Batch batch = random_batch(lengths, model.config().vocab_size, 8);
    for (Prefill prefill : {Prefill::standard, Prefill::one_step, Prefill::recurrent}) {
        const Streams together = query_streams(model, batch, prefill);
        for (size_t s = 0; s < lengths.size(); ++s)
            expect_same_rows(together, s, query_streams(model, one_of(batch, s), prefill), 0);
    }
}

TEST_F(QueryStreams, EmptySequencesAreRefused) {
    Batch batch = random_batch({3, 0, 2}, model.config().vocab_size, 8);
    EXPECT_TRUE(throws(ErrorKind::usage, {"sequence 1", "empty"},
                       [&] { query_streams(model, batch, Prefill::recurrent); }));
    batch = {};
    for (const std::vector<float>& stream : query_streams(model, batch, Prefill::one_step))
        EXPECT_TRUE(stream.empty());
}

// What a probe is given: standard normal noise, `copies` rows a group.
struct Table {
    int64_t width;
    std::vector<float> features;
    std::vector<int32_t> labels;
    std::vector<int64_t> groups;

    float& at(size_t r, int64_t d) { return features[int64_t(r) * width + d]; }
    ProbeResult probed(double l2, int folds = 4, uint64_t seed = 1) const {
        return probe(features, width, labels, groups, l2, folds, seed);
    }
};
Table noise(int64_t rows, int64_t width, int classes, int copies, unsigned seed) {
    Table out{width, normal<float>(size_t(rows * width), seed), {}, {}};
    out.labels = random_tokens(int(rows), classes, seed + 1);
    for (int64_t r = 0; r < rows; ++r) out.groups.push_back(1000 + r / copies);
    return out;
}
// Each class's rows around a point of their own, ten deviations away.
Table separable(int64_t rows, unsigned seed) {
    Table out = noise(rows, 5, 3, 2, seed);
    for (size_t r = 0; r < out.labels.size(); ++r) {
        out.at(r, out.labels[r]) += 20;
        out.labels[r] = std::array{-7, 0, 1'000'000'007}[size_t(out.labels[r])];
    }
    return out;
}
// Five deviations of the share of n fair draws.
double five_deviations(double chance, int64_t n) {
    return 5 * std::sqrt(chance * (1 - chance) / double(n));
}

TEST(Probe, SeparatesWhatIsSeparable) {
    const Table rows = separable(150, 1);
    const ProbeResult result = rows.probed(0.1);
    EXPECT_EQ(result.accuracy, 1);
    EXPECT_EQ(result.folds, std::vector<double>(4, 1));
}

TEST(Probe, IsAtChanceOnRandomLabels) {
    for (int classes : {2, 5}) {
        const ProbeResult result = noise(1600, 7, classes, 1, 2).probed(1);
        EXPECT_NEAR(result.accuracy, 1. / classes, five_deviations(1. / classes, 1600));
        // Folds of equal groups are equally large, and their mean is over rows.
        ASSERT_EQ(result.folds.size(), 4u);
        double mean = 0;
        for (double f : result.folds) mean += f / 4;
        EXPECT_NEAR(result.accuracy, mean, 1e-12);
    }
}

// A group's rows are copies with one random label. Whoever has seen one of them knows the others:
// there are more columns than groups, so that any labels can be learnt by heart.
TEST(Probe, NeverTrainsOnTheGroupsItIsAskedAbout) {
    constexpr int64_t G = 200, copies = 4;
    Table rows = noise(G * copies, G + 20, 2, copies, 3);
    for (size_t r = 0; r < rows.labels.size(); ++r) {
        const size_t first = r / copies * copies;
        for (int64_t d = 0; d < rows.width; ++d) rows.at(r, d) = rows.at(first, d);
        rows.labels[r] = rows.labels[first];
    }
    EXPECT_NEAR(rows.probed(1e-3).accuracy, 0.5, five_deviations(0.5, G));
    // With a group for each row, all but the 1.6 % whose copies happen to share their fold.
    for (size_t r = 0; r < rows.groups.size(); ++r) rows.groups[r] = int64_t(r);
    EXPECT_GT(rows.probed(1e-3).accuracy, 0.9);
}

// A plain minimiser of probe.h's objective, leaving out each group in turn, in ascending order.
ProbeResult plain_probe(Table rows, double l2) {
    const std::set<int64_t> groups(rows.groups.begin(), rows.groups.end());
    const std::set<int32_t> classes(rows.labels.begin(), rows.labels.end());
    const int64_t D = rows.width;
    ProbeResult out;
    for (int64_t held_out : groups) {
        std::vector<std::vector<double>> x(rows.labels.size(), std::vector<double>(D + 1, 1));
        for (int64_t d = 0; d < D; ++d) {
            double n = 0, sum = 0, squares = 0;
            for (size_t r = 0; r < x.size(); ++r)
                if (rows.groups[r] != held_out) n += 1, sum += rows.at(r, d);
            for (size_t r = 0; r < x.size(); ++r)
                if (rows.groups[r] != held_out) squares += std::pow(rows.at(r, d) - sum / n, 2);
            for (size_t r = 0; r < x.size(); ++r)
                x[r][d] = (rows.at(r, d) - sum / n) / std::sqrt(squares / n);
        }
        std::map<int32_t, std::vector<double>> w;
        for (int32_t c : classes) {
            double curvature = l2;  // of the objective, at most
            for (const auto& row : x)
                for (double v : row) curvature += v * v / 4;
            w[c].assign(D + 1, 0);
            for (int step = 0; step < 3000; ++step) {
                std::vector<double> gradient = w[c];
                for (double& g : gradient) g *= l2;
                for (size_t r = 0; r < x.size(); ++r) {
                    if (rows.groups[r] == held_out) continue;
                    const double y = rows.labels[r] == c ? 1 : -1;
                    double z = 0;
                    for (int64_t d = 0; d <= D; ++d) z += w[c][d] * x[r][d];
                    for (int64_t d = 0; d <= D; ++d)
                        gradient[d] -= y * x[r][d] / (1 + std::exp(y * z));
                }
                for (int64_t d = 0; d <= D; ++d) w[c][d] -= gradient[d] / curvature;
            }
        }
        double right = 0, n = 0;
        for (size_t r = 0; r < x.size(); ++r) {
            if (rows.groups[r] != held_out) continue;
            const auto score = [&](int32_t c) {
                double z = 0;
                for (int64_t d = 0; d <= D; ++d) z += w[c][d] * x[r][d];
                return z;
            };
            const int32_t best = *std::ranges::max_element(classes, {}, score);
            right += best == rows.labels[r];
            n += 1;
        }
        out.folds.push_back(right / n);
        out.accuracy += right / double(rows.labels.size());
    }
    return out;
}

// Overlapping classes and groups of unequal sizes, columns of unequal scales, and groups that lie
// apart, so that l2 and what the columns are standardised by both count.
TEST(Probe, MinimisesTheObjectiveItStates) {
    Table rows = noise(120, 3, 8, 24, 4);
    for (size_t r = 0; r < rows.labels.size(); ++r) {
        rows.labels[r] = std::max(rows.labels[r] - 5, 0);  // 0 six times in eight
        rows.at(r, rows.labels[r]) += 1;
        rows.at(r, 0) += 1.5f * float(rows.groups[r] - 1000);
        rows.at(r, 1) *= 100;
        if (r >= 90) rows.groups[r] = 1004;
    }
    std::set<std::vector<double>> seen;
    for (double l2 : {0.01, 30., 1000.}) {
        ProbeResult result = rows.probed(l2, 5);
        ProbeResult want = plain_probe(rows, l2);
        EXPECT_NEAR(result.accuracy, want.accuracy, 1e-12) << l2;
        std::ranges::sort(result.folds);  // which fold holds which group is drawn
        std::ranges::sort(want.folds);
        EXPECT_EQ(result.folds, want.folds) << l2;
        seen.insert(want.folds);
    }
    EXPECT_EQ(seen.size(), 3u);  // l2 matters here
}

TEST(Probe, ScalesDoNotMatter) {
    const Table rows = noise(200, 3, 3, 5, 6);
    Table scaled = rows;
    for (size_t r = 0; r < rows.labels.size(); ++r) {
        scaled.at(r, 0) *= 0x1p100f;
        scaled.at(r, 2) *= 0x1p-100f;
    }
    EXPECT_EQ(scaled.probed(1).folds, rows.probed(1).folds);
}

// Columns that are constant everywhere, or but for one group, which are constant to the fold that
// is trained without it.
TEST(Probe, ConstantColumnsSayNothing) {
    const Table rows = separable(150, 7);
    Table wider{rows.width + 3, {}, rows.labels, rows.groups};
    for (size_t r = 0; r < rows.labels.size(); ++r) {
        wider.features.insert(wider.features.end(), rows.features.begin() + int64_t(r) * rows.width,
                              rows.features.begin() + int64_t(r + 1) * rows.width);
        wider.features.insert(wider.features.end(),
                              {0.1f, 3e38f, rows.groups[r] == 1003 ? -3e38f : 3e38f});
    }
    EXPECT_EQ(wider.probed(0.1).accuracy, 1);
    Table nothing{2, {}, random_tokens(150, 3, 9), rows.groups};
    nothing.labels.resize(150);
    for (int r = 0; r < 150; ++r) nothing.features.insert(nothing.features.end(), {0.1f, 3e38f});
    // Only the bias is left: the answer is the training rows' most frequent class.
    for (int r = 0; r < 120; ++r) nothing.labels[size_t(r)] = 2;
    EXPECT_EQ(nothing.probed(0.1).accuracy, double(std::ranges::count(nothing.labels, 2)) / 150);
}

// Only one group has the second class: without it there is nothing to learn that class from.
TEST(Probe, AFoldMayHaveOneClassToLearnFrom) {
    Table rows = noise(40, 2, 2, 10, 12);
    for (size_t r = 0; r < rows.labels.size(); ++r) {
        rows.labels[r] = rows.groups[r] == 1002 ? -3 : 4;
        rows.at(r, 0) += rows.groups[r] == 1002 ? 20 : 0;
    }
    ProbeResult result = rows.probed(0.1);
    EXPECT_EQ(result.accuracy, 0.75);
    std::ranges::sort(result.folds);
    EXPECT_EQ(result.folds, (std::vector<double>{0, 1, 1, 1}));
}

TEST(Probe, FoldsFollowTheSeedAndTheGroupsAlone) {
    const Table rows = noise(300, 4, 2, 3, 10);
    const std::vector<double> folds = rows.probed(1).folds;
    EXPECT_EQ(rows.probed(1).folds, folds);
    EXPECT_NE(rows.probed(1, 4, 2).folds, folds);
    EXPECT_EQ(rows.probed(1, 7).folds.size(), 7u);
}

TEST(Probe, RefusesWhatItCannotUse) {
    const Table good = noise(12, 3, 2, 3, 11);
    const auto refuses = [&](std::initializer_list<const char*> words, auto&& change, double l2 = 1,
                             int folds = 4) {
        Table rows = good;
        change(rows);
        return throws(ErrorKind::usage, words, [&] { rows.probed(l2, folds); });
    };
    const auto nothing = [](Table&) {};
    EXPECT_EQ(good.probed(1).folds.size(), 4u);
    EXPECT_TRUE(refuses({"4 groups for 5 folds"}, nothing, 1, 5));
    EXPECT_TRUE(refuses({"folds is 1"}, nothing, 1, 1));
    for (double l2 : {0., -1., std::nan(""), HUGE_VAL})
        EXPECT_TRUE(refuses({"l2 is"}, nothing, l2)) << l2;
    EXPECT_TRUE(refuses({"35 features of width 3"}, [](Table& r) { r.features.pop_back(); }));
    EXPECT_TRUE(refuses({"11 labels"}, [](Table& r) { r.labels.pop_back(); }));
    EXPECT_TRUE(refuses({"11 groups"}, [](Table& r) { r.groups.pop_back(); }));
    EXPECT_TRUE(refuses({"width 0"}, [](Table& r) { r.width = 0; }));
    EXPECT_TRUE(refuses({"all 12 labels are 3"}, [](Table& r) { r.labels.assign(12, 3); }));
    EXPECT_TRUE(refuses({"0 groups"}, [](Table& r) { r = {3, {}, {}, {}}; }));
    for (float bad : {float(NAN), HUGE_VALF, -HUGE_VALF})
        EXPECT_TRUE(
            refuses({"feature 2 of row 11", "finite"}, [&](Table& r) { r.at(11, 2) = bad; }));
}

}  // namespace
}  // namespace fbt::tests
