// The formula of docs/scale.md against numbers worked out by hand, against the plan of one process,
// and in its limits.
#include "model/engine/scale.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "model/core/flops.h"
#include "model/engine/share.h"
#include "tests/model/model_test.h"

namespace fbt::tests {
namespace {

using namespace model::core;
using namespace model::engine;

// Matrices: embedding 20; q 16, k 8, v 8, gate 8, o 16, feed-forward 3 times 12; fusion 2 times 16:
// 144 numbers. Gains: 6 of 4 and 2 of 2: 28.
Config tiny() {
    Config c;
    c.vocab_size = 5;
    c.dim = 4;
    c.layers = 1;
    c.heads = 2;
    c.kv_heads = 1;
    c.head_dim = 2;
    c.ffn_dim = 3;
    c.context = 3;
    return c;
}

TrainConfig of_tokens(int64_t tokens, const std::string& schedule, bool mixin = false) {
    TrainConfig train;
    train.tokens_per_step = tokens;
    train.schedule = PassSchedule::parse(schedule);
    train.mixin = mixin;
    return train;
}

// One operation or byte a second wherever nothing else is said.
const Cluster kSlow = {.rate = 1,
                       .bandwidth = 1,
                       .node = 2,
                       .inside = 10,
                       .across = 3,
                       .hop_inside = 1,
                       .hop_across = 100};

// Sums of a few numbers, in another order than here.
void expect_near(double got, double want) { EXPECT_NEAR(got, want, 1e-12 * std::abs(want)); }

// 8 sequences of 3 tokens on 2 nodes of 2. A row meets 92 weights of the block and 20 of the
// classifier; 6 pairs see each other, in 2 heads of 2 channels: 6*3*112 + 12*4*6 = 2304.
// A collective takes 2 steps inside, 1 across, and 3/4 of its bytes at min(10, 2*3) a second.
TEST(Scale, EqualsNumbersWorkedOutByHand) {
    Context context("cpu", 1);
    Model model(context, tiny(), DType::f32);
    const TrainConfig train = of_tokens(24, "1:1");
    const StepPlan plan = plan_step(model, train, 3, kSlow, 4);
    EXPECT_EQ(plan.sequences, 8);
    EXPECT_EQ(plan.idle, 0);
    EXPECT_EQ(plan.flops, 8 * 2304);
    EXPECT_EQ(plan.compute, 2 * 2304);
    EXPECT_EQ(plan.mean_load, 1);
    const double embedding = 102 + 4 * 20 / 8.0, block = 102 + 4 * 152 / 8.0;
    expect_near(plan.communication, 2 * embedding + 2 * block + 2 * 102);
    expect_near(plan.exposed, plan.communication);  // a single block has nothing beside it
    EXPECT_EQ(plan.sent, (4 + 4) * 172 * 3 / 4);
    // Largest first, the parts get 20+12+8, 16+16, 16+12+8 and 16+12+8; all 28 gains are
    // everybody's. Of the embedding all but its owner have a table.
    EXPECT_EQ(plan.state, 4 * 172 + 12 * (40 + 28) + 4 * 20 + 8 * 144);
    EXPECT_EQ(plan.update, 32 * 68 + 4 * 172 + 12 * 144);
    const double alone = 8 * 2304 + 36 * 172 + 12 * 144;
    expect_near(plan.efficiency, alone / (4 * plan.seconds()));

    const StepPlan everywhere = plan_step(model, train, 3, kSlow, 4, {.zero = 0});
    EXPECT_EQ(everywhere.sent, plan.sent);
    EXPECT_EQ(everywhere.state, 16 * 172 + 8 * 144);
    EXPECT_EQ(everywhere.update, 36 * 172 + 12 * 144);
    expect_near(everywhere.communication, 2 * embedding + 2 * block);  // every rank has the norm

    const StepPlan two = plan_step(model, train, 3, kSlow, 4, {.zero = 2, .even = true});
    EXPECT_EQ(two.state, 16 * 43 + 4 * 20 + 8 * 144);

    Model narrow(context, tiny(), DType::bf16);
    EXPECT_EQ(plan_step(narrow, train, 3, kSlow, 4).sent, (4 + 2) * 172 * 3 / 4);
    EXPECT_EQ(plan_step(narrow, train, 3, kSlow, 4, {.gradient_bytes = 2}).sent,
              (2 + 2) * 172 * 3 / 4);
    EXPECT_EQ(plan_step(narrow, train, 3, kSlow, 4).state, 4 * 172 + 12 * 68 + 2 * 20 + 4 * 144);
}

// Inside a node 1 step and half of the bytes, across 1 step and half of that half.
TEST(Scale, HierarchicalReductionByHand) {
    Context context("cpu", 1);
    Model model(context, tiny(), DType::f32);
    const StepPlan plan =
        plan_step(model, of_tokens(24, "1:1"), 3, kSlow, 4, {.hierarchical = true});
    const auto seconds = [](double bytes) { return 1 + bytes / 2 / 10 + 100 + bytes / 4 / 3; };
    expect_near(plan.communication, 2 * (seconds(4 * 20) + seconds(4 * 152)) + 2 * seconds(0));
}

// Two ranks with one sequence: half of the work each, and 3 rows' keys and values of 2 channels go
// out and come back in f32, at 10 bytes a second.
TEST(Scale, ASharedSequenceByHand) {
    Context context("cpu", 1);
    Model model(context, tiny(), DType::f32);
    const TrainConfig train = of_tokens(3, "1:1");
    const StepPlan whole = plan_step(model, train, 3, kSlow, 2);
    const StepPlan plan = plan_step(model, train, 3, kSlow, 2, {.ranks_per_sequence = 2});
    EXPECT_EQ(whole.idle, 1);
    EXPECT_EQ(whole.mean_load, 0.5);
    EXPECT_EQ(plan.idle, 0);
    EXPECT_EQ(plan.compute, 2304 / 2);
    expect_near(plan.communication, whole.communication + 2 * (1 + 3 * 4 * 4 / 2 / 10.0));
    expect_near(plan.sent, whole.sent + 2 * 3 * 4 * 4 / 2.0);
    // One row of its own, and the keys and values of two others.
    EXPECT_EQ(plan.activations,
              plan_activations(tiny(), DType::f32, of_tokens(1, "1:1"), false) + 2 * 4 * 4);
}

// One process's plan counts tensor by tensor; packed matrices have no padding on `ref`.
TEST(Scale, OneRankIsThePlanOfOneProcess) {
    Context context("ref");
    for (const DType dtype : {DType::f32, DType::f64})
        for (const bool mixin : {false, true})
            for (const int zero : {0, 1, 2}) {
                Model model(context, small_config(), dtype);
                const TrainConfig train = of_tokens(8 * 50, "1:1,1:3", mixin);
                const MemoryPlan memory = plan_memory(model, train);
                Cluster cluster = kSlow;
                const StepPlan plan = plan_step(model, train, 50, cluster, 1, {.zero = zero});
                EXPECT_EQ(plan.state, double(memory.parameters));
                EXPECT_EQ(int64_t(plan.activations), memory.activations);
                EXPECT_FALSE(plan.recompute);
                EXPECT_EQ(plan.communication, 0);
                EXPECT_EQ(plan.exposed, 0);
                EXPECT_EQ(plan.sent, 0);
                expect_near(plan.compute, plan.flops);
                expect_near(plan.efficiency, 1);

                // A byte less than it takes: blocks are computed again, a third of their work.
                cluster.memory = plan.state + plan.activations - 1;
                const StepPlan again = plan_step(model, train, 50, cluster, 1, {.zero = zero});
                EXPECT_TRUE(again.recompute && again.fits);
                EXPECT_EQ(int64_t(again.activations), memory.recomputed);
                EXPECT_GT(again.compute, plan.compute);
                EXPECT_LT(again.compute, plan.compute * 4 / 3);
                EXPECT_LT(again.efficiency, 1);
                cluster.memory = again.state + again.activations - 1;
                EXPECT_FALSE(plan_step(model, train, 50, cluster, 1).fits);
            }
}

// What is computed hides what is sent, but for the embedding and the bucket beside it, each way.
TEST(Scale, OverlapInItsLimits) {
    Context context("cpu", 1);
    Config c = small_config();
    Model model(context, c, DType::f32);
    const TrainConfig train = of_tokens(16 * 50, "1:1");
    Cluster cluster = {.rate = 1, .node = 8, .inside = 1, .across = 1};
    const double numbers = double(model.parameters().count()), V = 23.0 * 24;
    for (const int zero : {0, 1}) {
        for (const int bucket : {1, 2, 3, 7}) {
            const double buckets = bucket == 1 ? 3 : bucket == 2 ? 2 : 1;
            cluster.inside = 1e30;  // as fast as light
            EXPECT_LT(plan_step(model, train, 50, cluster, 8, {.zero = zero}).exposed, 1e-20);
            cluster.inside = 1e6;
            const double end = 2 * 4 * V * 7 / 8 / 1e6, rest = 2 * 4 * (numbers - V) * 7 / 8 / 1e6;
            cluster.rate = 1;  // slow work hides all that it can
            const StepPlan slow =
                plan_step(model, train, 50, cluster, 8, {.zero = zero, .bucket = bucket});
            expect_near(slow.communication, end + rest);
            expect_near(slow.exposed, end + rest / buckets);
            cluster.rate = 1e40;  // and what takes no time, nothing
            const StepPlan fast =
                plan_step(model, train, 50, cluster, 8, {.zero = zero, .bucket = bucket});
            expect_near(fast.exposed, end + rest);
        }
    }
    // Between them: a bucket's 2/3 of the blocks' work on the way back, 1/3 on the way there.
    cluster.rate = 1e12;
    const double work = 2 * (pass_flops(c, 0, 50) - 6.0 * 50 * V) / 3 / cluster.rate,
                 wire = 4 * (numbers - V) / 3 * 7 / 8 / 1e6, end = 4 * V * 7 / 8 / 1e6;
    ASSERT_GT(wire, work);
    const StepPlan plan = plan_step(model, train, 50, cluster, 8);
    expect_near(plan.exposed, 2 * (end + wire) + 2 * (2 * wire - work));
    // Blocks that are computed again hide half as much again on the way back.
    cluster.memory = plan.state + plan.activations - 1;
    expect_near(plan_step(model, train, 50, cluster, 8).exposed,
                2 * (end + wire) + 2 * (2 * wire - work * 4 / 3));
}

// Without mixin every sequence costs the same; with it, those that wait for the longest suffix of a
// few wait for nearly a whole one.
TEST(Scale, WholeSequencesSetThePace) {
    Context context("cpu", 1);
    const Config c = small_config();
    Model model(context, c, DType::f32);
    const double plain = pass_flops(c, 0, 50), fused = pass_flops(c, 1, 50);
    for (const int ranks : {1, 2, 3, 7, 8, 9, 64}) {
        const StepPlan plan = plan_step(model, of_tokens(8 * 50 + 49, "1:2"), 50, kSlow, ranks);
        expect_near(plan.compute, (8 + ranks - 1) / ranks * (plain + fused));
        EXPECT_EQ(plan.idle, std::max(0, ranks - 8));
        expect_near(plan.mean_load, 8.0 / ranks / ((8 + ranks - 1) / ranks));
    }
    // The mean suffix is a half; the most of 64 has a share of 64/65 of the length.
    double mean = 0;
    for (int first = 1; first <= 50; ++first) mean += pass_flops(c, first, 50) / 50;
    const StepPlan one = plan_step(model, of_tokens(64 * 50, "1:2", true), 50, kSlow, 1);
    const StepPlan each = plan_step(model, of_tokens(64 * 50, "1:2", true), 50, kSlow, 64);
    // 4,096 draws of a share whose deviation is sqrt(1/12): five of the mean's, 0.023 of `fused`.
    EXPECT_NEAR(one.compute / 64, plain + mean, 0.023 * fused);
    EXPECT_EQ(one.flops, each.flops);
    // 64 draws of a largest share whose deviation is 1/66: five of the mean's, and 1/50 of
    // rounding.
    EXPECT_NEAR(each.compute, plain + fused * 64 / 65, (5.0 / 66 / 8 + 0.02) * fused);
}

// As many sequences as are drawn at all: one step, dealt here once more.
TEST(Scale, DealsSequencesByTheirWork) {
    Context context("cpu", 1);
    const Config c = small_config();
    Model model(context, c, DType::f32);
    Batch batch;
    batch.lengths.assign(4096, 50);
    for (int s = 0; s < 4096; ++s) batch.indices.push_back(s);
    const TrainConfig train = of_tokens(4096 * 50, "1:3", true);
    const auto plain = draw_prefixes(batch, 3, true, train.seed, 0);
    std::vector<double> costs;
    for (int s = 0; s < 4096; ++s)
        costs.push_back(pass_flops(c, 0, 50) + pass_flops(c, plain[0][s], 50) +
                        pass_flops(c, plain[1][s], 50));
    const std::vector<int> dealt = deal(costs, 1000);
    std::vector<double> loads(1000, 0.0);
    for (int s = 0; s < 4096; ++s) loads[dealt[s]] += costs[s];
    EXPECT_EQ(plan_step(model, train, 50, kSlow, 1000).compute, *std::ranges::max_element(loads));
}

TEST(Scale, IsMonotone) {
    Context context("cpu", 1);
    Config c = small_config();
    c.layers = 5;
    Model model(context, c, DType::bf16);
    const TrainConfig train = of_tokens(64 * 50, "75:1,22:2,3:3", true);
    const Cluster base = {.rate = 1e9,
                          .memory = 1e9,
                          .bandwidth = 1e9,
                          .node = 8,
                          .inside = 1e8,
                          .across = 1e7,
                          .hop_inside = 1e-6,
                          .hop_across = 1e-5};
    StepPlan before = plan_step(model, train, 50, base, 1);
    for (int ranks = 2; ranks <= 1024; ranks *= 2) {
        const StepPlan plan = plan_step(model, train, 50, base, ranks);
        EXPECT_LE(plan.compute, before.compute * (1 + 1e-12)) << ranks;
        EXPECT_LE(plan.update, before.update) << ranks;
        EXPECT_GT(plan.communication, before.communication) << ranks;
        EXPECT_GT(plan.sent, before.sent) << ranks;
        EXPECT_LE(plan.state, before.state) << ranks;
        EXPECT_LE(plan.activations, before.activations) << ranks;
        EXPECT_LT(plan.efficiency, before.efficiency) << ranks;
        EXPECT_GT(plan.efficiency, 0) << ranks;
        EXPECT_LE(plan.exposed, plan.communication * (1 + 1e-12)) << ranks;
        expect_near(plan.flops, before.flops);
        const auto with = [&](auto change) {
            Cluster other = base;
            change(other);
            return plan_step(model, train, 50, other, ranks).seconds();
        };
        EXPECT_LT(with([](Cluster& x) { x.rate *= 2; }), plan.seconds());
        EXPECT_LT(with([](Cluster& x) { x.bandwidth *= 2; }), plan.seconds());
        EXPECT_GT(with([](Cluster& x) { x.inside /= 100; }), plan.seconds());
        if (ranks > 8) {
            EXPECT_GT(with([](Cluster& x) { x.across /= 2; }), plan.seconds());
            EXPECT_GT(with([](Cluster& x) { x.hop_across *= 2; }), plan.seconds());
        }
        // A larger batch is never less efficient where nothing has to be computed again.
        const StepPlan larger =
            plan_step(model, of_tokens(1024 * 50, "75:1,22:2,3:3", true), 50, base, ranks);
        EXPECT_FALSE(larger.recompute);
        EXPECT_GT(larger.efficiency, plan.efficiency) << ranks;
        before = plan;
    }
}

TEST(Scale, RefusesWhatIsNoBatch) {
    Context context("cpu", 1);
    Model model(context, tiny(), DType::f32);
    for (const int64_t tokens : {int64_t(2), int64_t(3) * (kMostSequences + 1)}) try {
            plan_step(model, of_tokens(tokens, "1:1"), 3, kSlow, 2);
            ADD_FAILURE() << tokens;
        } catch (const tensor::Error& error) {
            EXPECT_EQ(error.kind(), tensor::ErrorKind::usage);
            EXPECT_NE(std::string(error.what()).find(std::to_string(tokens)), std::string::npos);
        }
}

// Against the steps of a long run. Phases of whole steps are exact, and 10,000 draws of a mixture
// are within five deviations, 0.025.
TEST(PassSchedule, SharesAreThoseOfItsSteps) {
    for (const char* text : {"1:1", "75:1,22:2,3:3", "1:2,3:1,1:2", "1:1@3+4@1", "1:2,1:1@1+2@3"}) {
        const PassSchedule schedule = PassSchedule::parse(text);
        constexpr int kSteps = 10000;
        std::map<int, double> counted;
        for (int step = 0; step < kSteps; ++step)
            counted[schedule.passes_at(step, kSteps, 1)] += 1.0 / kSteps;
        const std::map<int, double> shares = schedule.shares();
        ASSERT_EQ(shares.size(), counted.size()) << text;
        double sum = 0;
        for (const auto& [passes, share] : shares) {
            const bool drawn = std::string(text).find('@') != std::string::npos;
            EXPECT_NEAR(share, counted.at(passes), drawn ? 0.025 : 1e-9) << text << " " << passes;
            sum += share;
        }
        EXPECT_NEAR(sum, 1, 1e-12);
    }
}

}  // namespace
}  // namespace fbt::tests
