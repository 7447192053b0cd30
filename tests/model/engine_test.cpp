// Generation, evaluation, schedules, optimiser and trainer.
#include <cmath>
#include <filesystem>
#include <limits>

#include "model/core/evaluate.h"
#include "model/core/schedule.h"
#include "model/data/tasks.h"
#include "model/engine/generator.h"
#include "model/engine/trainer.h"
#include "tests/model/model_test.h"

namespace fbt::tests {
namespace {

using namespace model::core;
using namespace model::engine;
using tensor::Error;

TEST(Schedule, PhasesFollowTheirShares) {
    const auto s = PassSchedule::parse("75:1,22:2,3:3");
    EXPECT_EQ(s.max_passes(), 3);
    std::vector<int> count(4, 0);
    for (int i = 0; i < 200; ++i) ++count[s.passes_at(i, 200, 1)];
    EXPECT_EQ(count, (std::vector<int>{0, 150, 44, 6}));
    EXPECT_EQ(s.passes_at(0, 1, 1), 1);
    EXPECT_EQ(s.passes_at(149, 200, 1), 1);
    EXPECT_EQ(s.passes_at(150, 200, 1), 2);
    EXPECT_EQ(s.passes_at(199, 200, 1), 3);
}

TEST(Schedule, MixturesAreDrawnByStep) {
    const auto s = PassSchedule::parse("1:1@3+4@1");
    int fours = 0;
    for (int i = 0; i < 4000; ++i) {
        const int k = s.passes_at(i, 4000, 9);
        ASSERT_TRUE(k == 1 || k == 4);
        EXPECT_EQ(k, s.passes_at(i, 4000, 9));
        fours += k == 4;
    }
    EXPECT_NEAR(fours, 1000, 5 * std::sqrt(4000 * 0.25 * 0.75));  // five standard deviations
}

TEST(Schedule, RejectsWhatIsNone) {
    for (const char* text : {"", "75", "75:", ":1", "75:0", "-1:2", "75:1,", "1:1@", "1:2@0",
                             "1:1+", "1:x", "nan:1", "1:1@1@1", "1:1.5"})
        EXPECT_THROW(PassSchedule::parse(text), Error) << text;
}

TEST(Wsd, WarmsUpHoldsAndDecays) {
    EXPECT_DOUBLE_EQ(nn::wsd_schedule(0, 100, 10, 0.25), 0.1);
    EXPECT_DOUBLE_EQ(nn::wsd_schedule(9, 100, 10, 0.25), 1);
    EXPECT_DOUBLE_EQ(nn::wsd_schedule(75, 100, 10, 0.25), 1);
    EXPECT_DOUBLE_EQ(nn::wsd_schedule(99, 100, 10, 0.25), 0.04);
    EXPECT_DOUBLE_EQ(nn::wsd_schedule(5, 10, 0, 0), 1);
}

TEST(Config, UnknownKeysAndBadValuesAreErrors) {
    using nlohmann::json;
    EXPECT_NO_THROW(config_from_json(to_json(Config())));
    for (const char* text :
         {R"({"dims": 3})", R"({"dim": 0})", R"({"dim": "x"})", R"({"heads": 3, "kv_heads": 2})",
          R"({"head_dim": 7})", R"({"head_dim": 258})", R"({"fusion": "sum"})", R"([])",
          R"({"norm_eps": 0})", R"({"dim": 1e300})", R"({"dim": 2147483647})",
          R"({"layers": 4294967297})", R"({"dim": 8.5})"})
        EXPECT_THROW(config_from_json(json::parse(text)), Error) << text;
}

class Engine : public testing::Test {
  protected:
    Engine() : context("cpu", 2), model(context, config(), DType::f32) { randomise(model, false); }
    static Config config() {
        Config c = small_config();
        c.context = 60;
        return c;
    }
    Context context;
    Model model;
};

TEST_F(Engine, SamplesDoNotDependOnCompany) {
    GenerateConfig g;
    g.mode = Mode::soft;
    g.max_tokens = 30;
    g.samples = 3;
    const std::vector<std::vector<int32_t>> prompts = {{1, 2, 3}, {4}, random_tokens(40, 23, 1)};
    const auto all = generate(model, prompts, g);
    ASSERT_EQ(all.size(), 9u);
    const auto alone = generate(model, {prompts[0]}, g);
    for (int s = 0; s < 3; ++s) {
        EXPECT_EQ(alone[s].tokens, all[s].tokens);
        EXPECT_EQ(alone[s].logprobs, all[s].logprobs);
    }
    EXPECT_NE(all[0].tokens, all[1].tokens);
    // Neighbours that end early move a sequence to another row: prompt 1 beside a long prompt 0.
    const auto beside_short = generate(model, {prompts[1], prompts[0]}, g);
    const auto beside_long = generate(model, {prompts[2], prompts[0]}, g);
    for (int s = 3; s < 6; ++s) EXPECT_EQ(beside_long[s].tokens, beside_short[s].tokens);
    g.samples = 1;
    EXPECT_EQ(generate(model, prompts, g)[1].tokens, all[3].tokens);
    EXPECT_LT(beside_long[0].tokens.size() - prompts[2].size(), 30u);
    EXPECT_EQ(all[6].finish, Finish::context);  // 40 + 30 > 60
    EXPECT_EQ(all[6].tokens.size(), 60u);
    EXPECT_EQ(all[0].finish, Finish::length);
}

TEST_F(Engine, FirstTokenAndLogprobsAgreeWithScoring) {
    GenerateConfig g;
    g.max_tokens = 12;
    g.keep_states = true;
    std::vector<std::vector<int32_t>> first;
    for (Mode mode : {Mode::standard, Mode::soft, Mode::fused}) {
        g.mode = mode;
        const Rollout r = generate(model, {{5, 6, 7, 8}}, g)[0];
        const std::vector<int32_t> fed(r.tokens.begin(), r.tokens.end() - 1);
        const Trace trace = decode_known(model, fed, 4, mode);
        EXPECT_TRUE(same_bits(r.states, trace.hidden.to_vector<float>()));
        const int64_t n = 12, V = 23;
        const Tensor logits = model.logits(trace.hidden.rows(3, n));
        Tensor ce = Tensor::empty(context, {n}, DType::f32);
        Tensor lse = Tensor::empty(context, {n}, DType::f32);
        tensor::cross_entropy_forward(
            ce, lse, logits,
            Tensor::from(context, std::vector<int32_t>(r.tokens.begin() + 4, r.tokens.end()), {n}));
        std::vector<double> want = ce.to_double();
        for (double& x : want) x = -x;
        EXPECT_EQ(r.logprobs, want);
        first.push_back({r.tokens[4]});
        (void)V;
    }
    EXPECT_EQ(first[0], first[1]);  // standard and soft share the prefill
}

TEST_F(Engine, GreedyIsTheArgmaxAndStopTokensStop) {
    GenerateConfig g;
    g.mode = Mode::standard;
    g.sampling.temperature = 0;
    g.max_tokens = 5;
    const Rollout r = generate(model, {{1}}, g)[0];
    g.stop_token = r.tokens[2];
    const Rollout stopped = generate(model, {{1}}, g)[0];
    EXPECT_EQ(stopped.finish, Finish::stop);
    EXPECT_EQ(stopped.tokens.back(), r.tokens[2]);
    EXPECT_LE(stopped.tokens.size(), 3u);
}

TEST_F(Engine, BadPromptsAreErrors) {
    const GenerateConfig g;
    for (const auto& prompt :
         std::vector<std::vector<int32_t>>{{}, {23}, {-1}, random_tokens(60, 23, 1)})
        EXPECT_THROW(generate(model, {prompt}, g), Error);
}

// Gives these rows the targets that a plain pass predicts.
void make_right(Model& model, Batch& batch, const std::vector<size_t>& rows) {
    Tape tape(false);
    const Objective o = objective(model, tape, batch, {}, {.keep_states = true});
    const std::vector<double> logits = model.logits(o.states[0]).to_double();
    const auto V = model.config().vocab_size;
    for (size_t row : rows) {
        const auto z = logits.begin() + int64_t(row) * V;
        batch.targets[row] = int32_t(std::max_element(z, z + V) - z);
    }
}

// Shares of right answers, and the loss beyond what passes have made exact, from a pass's states.
void expect_scores(const PassResult& result, const Tensor& states, Model& model,
                   const Batch& batch) {
    const std::vector<double> logits = model.logits(states).to_double();
    const size_t V = size_t(model.config().vocab_size);
    double right = 0, last = 0, unsettled = 0;
    int targets = 0, unsettled_targets = 0;
    size_t row = 0;
    for (int length : batch.lengths) {
        bool last_right = false;
        for (int t = 0; t < length; ++t, ++row) {
            const int target = batch.targets[row];
            if (target < 0) continue;
            const double* z = logits.data() + row * V;
            last_right = std::max_element(z, z + V) == z + target;
            right += last_right;
            ++targets;
            double sum = 0;
            for (size_t v = 0; v < V; ++v) sum += std::exp(z[v] - z[target]);
            if (t < result.pass) continue;
            unsettled += std::log(sum);
            ++unsettled_targets;
        }
        last += last_right;
    }
    EXPECT_EQ(result.targets, targets);
    EXPECT_EQ(result.sequences, int64_t(batch.lengths.size()));
    EXPECT_DOUBLE_EQ(result.accuracy, right / targets);
    EXPECT_DOUBLE_EQ(result.last, last / double(batch.lengths.size()));
    // Cross-entropies in f32, of sums of 23 terms, against double: 32 roundings of size 1 to 8.
    EXPECT_NEAR(result.unsettled, unsettled / unsettled_targets, 32 * 8 * 0x1p-24);
}

TEST_F(Engine, EvaluationEqualsTheObjective) {
    Batch batch = random_batch({30, 1, 8}, 23, 3);
    // Targets that pass 1 gets right at some positions, so that accuracies are not all 0.
    make_right(model, batch, {0, 11, 29, 30, 31});
    int given = 0;
    const auto results = evaluate(
        model, [&]() { return given++ == 0 ? std::optional(batch) : std::nullopt; }, 5, 1, true);
    PassPlan plan;
    plan.passes = 5;
    plan.plain.assign(4, {1, 1, 1});
    Tape tape(false);
    const Objective o = objective(model, tape, batch, plan, {.keep_states = true});
    ASSERT_EQ(results.size(), 5u);
    EXPECT_TRUE(std::isnan(results[0].change));
    for (int k = 0; k < 5; ++k) {
        EXPECT_NEAR(results[k].loss, o.pass_loss[k], 1e-12);  // the same terms, another order
        expect_scores(results[k], o.states[k], model, batch);
        if (k == 0) continue;
        double d = 0, n = 0;
        const auto now = o.states[k].to_double(), before = o.states[k - 1].to_double();
        const int64_t D = 24;
        int64_t row = 0;
        for (int length : {30, 1, 8})
            for (int t = 0; t < length; ++t, ++row)
                for (int64_t i = row * D; t >= k + 1 && i < (row + 1) * D; ++i) {
                    d += (now[i] - before[i]) * (now[i] - before[i]);
                    n += now[i] * now[i];
                }
        EXPECT_NEAR(results[k].change, std::sqrt(d / n), 1e-9);
        EXPECT_NE(results[k].permuted, results[k].loss);
        EXPECT_NE(results[k].mean, results[k].loss);
    }
}

TEST_F(Engine, AShortSequenceIsAllSettled) {
    const Batch batch = random_batch({3, 2}, 23, 3);
    int given = 0;
    const auto results = evaluate(
        model, [&]() { return given++ == 0 ? std::optional(batch) : std::nullopt; }, 4, 1, false);
    EXPECT_FALSE(std::isnan(results[1].change));  // position 2 of the first
    EXPECT_TRUE(std::isnan(results[1].unsettled)) << "its target is ignored";
    EXPECT_TRUE(std::isnan(results[2].change));
    EXPECT_TRUE(std::isnan(results[2].unsettled));
    EXPECT_EQ(results[3].loss, results[2].loss) << "nothing is left to compute anew";
}

TEST_F(Engine, InputScalesCompareRows) {
    const Batch batch = random_batch({9, 1, 4}, 23, 3);
    const InputScales scales = input_scales(model, batch);
    // Row by row: tokens after each sequence's first, and the plain states before them.
    Tape tape(false);
    const Objective o = objective(model, tape, batch, {}, {.keep_states = true});
    double plain = 0, fused = 0, cosine = 0;
    int count = 0, row = 0;
    for (int length : batch.lengths)
        for (int t = 0; t < length; ++t, ++row) {
            if (t == 0) continue;
            const Tensor token =
                Tensor::from(context, std::vector<int32_t>{batch.tokens[row]}, {1});
            const auto e = model.embed(tape, token).value().to_double();
            const auto u = model.fuse(tape, tape.constant(o.states[0].rows(row - 1, 1)), token)
                               .value()
                               .to_double();
            double ee = 0, uu = 0, eu = 0;
            for (size_t d = 0; d < e.size(); ++d) {
                ee += e[d] * e[d];
                uu += u[d] * u[d];
                eu += e[d] * u[d];
            }
            plain += ee / 24;
            fused += uu / 24;
            cosine += eu / std::sqrt(ee * uu);
            ++count;
        }
    ASSERT_EQ(count, 11);
    EXPECT_NEAR(scales.plain, std::sqrt(plain / count), 1e-12);
    EXPECT_NEAR(scales.fused, std::sqrt(fused / count), 1e-12);
    EXPECT_NEAR(scales.cosine, cosine / count, 1e-12);
    EXPECT_GT(scales.fused, 0);
}

TEST_F(Engine, DecodeAccuracyCountsTheArgmax) {
    Batch batch = random_batch({20, 7}, 23, 4);
    // Targets that are the argmax of the soft recurrence everywhere but at one position.
    const auto fill = [&](int offset, int length) {
        const std::vector<int32_t> tokens(batch.tokens.begin() + offset,
                                          batch.tokens.begin() + offset + length);
        const Tensor h = decode_known(model, tokens, 1, Mode::soft).hidden;
        const auto best = tensor::sample(model.logits(h),
                                         std::vector<kernels::Sampling>(length, {.temperature = 0}),
                                         std::vector<float>(length, 0));
        std::copy(best.begin(), best.end(), batch.targets.begin() + offset);
    };
    fill(0, 20);
    fill(20, 7);
    batch.targets[26] = (batch.targets[26] + 1) % 23;
    // The same whether both sequences are one batch or two.
    const auto part = [&](int offset, int length) {
        const auto cut = [&](const std::vector<int32_t>& all) {
            return std::vector<int32_t>(all.begin() + offset, all.begin() + offset + length);
        };
        return Batch{cut(batch.tokens), cut(batch.targets), {length}, {0}};
    };
    for (std::vector<Batch> batches : {std::vector{batch}, std::vector{part(20, 7), part(0, 20)}}) {
        const auto next = [&]() -> std::optional<Batch> {
            if (batches.empty()) return std::nullopt;
            Batch last = batches.back();
            batches.pop_back();
            return last;
        };
        const Accuracy a = decode_accuracy(model, next, Mode::soft);
        EXPECT_EQ(a.targets, 27);
        EXPECT_EQ(a.sequences, 2);
        EXPECT_DOUBLE_EQ(a.all, 26 / 27.0);
        EXPECT_DOUBLE_EQ(a.last, 0.5);
    }
}

TrainConfig train_config() {
    TrainConfig t;
    t.steps = 12;
    t.tokens_per_step = 64;
    t.schedule = PassSchedule::parse("1:1,1:2,1:3");
    t.warmup = 2;
    return t;
}

TEST(Trainer, LearnsAndResumesBitForBit) {
    Context context("cpu", 2);
    Config config = small_config();
    config.vocab_size = 4;
    const auto folder = std::filesystem::temp_directory_path() / "fbt_trainer_test";
    std::filesystem::remove_all(folder);

    auto source = model::data::make_task("parity", {16}, 1);
    Model whole(context, config, DType::f32);
    Trainer a(whole, *source, train_config(), false);
    std::vector<double> losses;
    while (!a.done()) losses.push_back(a.advance().total);

    auto again = model::data::make_task("parity", {16}, 1);
    Model half(context, config, DType::f32);
    Trainer b(half, *again, train_config(), false);
    for (int i = 0; i < 5; ++i) EXPECT_EQ(b.advance().total, losses[i]);
    b.save(folder, {{"model", to_json(config)}, {"train", nlohmann::json::object()}}, 2);

    auto third = model::data::make_task("parity", {16}, 1);
    Model rest(context, config, DType::f32);
    Trainer c(rest, *third, train_config(), false);
    c.load(find_checkpoint(folder));
    EXPECT_EQ(c.step(), 5);
    for (int i = 5; i < 12; ++i) EXPECT_EQ(c.advance().total, losses[i]);
    EXPECT_EQ(weights_hash(rest), weights_hash(whole));
    EXPECT_NE(weights_hash(half), weights_hash(whole));
    std::filesystem::remove_all(folder);
}

TEST(Trainer, ParameterWithoutAPathKeepsEverything) {
    Context context("cpu", 2);
    Config config = small_config();
    config.vocab_size = 4;
    TrainConfig t = train_config();
    t.schedule = PassSchedule::parse("1:1");
    auto source = model::data::make_task("parity", {16}, 1);
    Model model(context, config, DType::f32);
    Trainer trainer(model, *source, t, false);
    const auto before = model.parameters().at("feedback.state.weight").weight().value.to_double();
    const auto other = model.parameters().at("layers.0.attn.q.weight").weight().value.to_double();
    trainer.advance();
    EXPECT_EQ(model.parameters().at("feedback.state.weight").weight().value.to_double(), before);
    EXPECT_NE(model.parameters().at("layers.0.attn.q.weight").weight().value.to_double(), other);
}

// AdamW's first update is the learning rate times a sign, nearly: four times the rate moves a
// matrix of the fusion four times as far, and nothing else.
TEST(Trainer, FusionRateIsOfTheFusionAlone) {
    Context context("cpu", 2);
    Config config = small_config();
    config.vocab_size = 4;
    const auto moved = [&](double rate, const std::string& name) {
        TrainConfig t = train_config();
        t.schedule = PassSchedule::parse("1:2");
        t.adamw.weight_decay = 0;
        t.fusion_rate = rate;
        auto source = model::data::make_task("parity", {16}, 1);
        Model model(context, config, DType::f32);
        Trainer trainer(model, *source, t, false);
        const auto value = [&] { return model.parameters().at(name).weight().value.to_double(); };
        std::vector<double> before = value();
        trainer.advance();
        const std::vector<double> after = value();
        for (size_t i = 0; i < before.size(); ++i) before[i] = after[i] - before[i];
        return before;
    };
    for (const char* name : {"feedback.state.weight", "feedback.gate.weight"}) {
        const std::vector<double> once = moved(1, name), four = moved(4, name);
        double largest = 0;
        for (size_t i = 0; i < once.size(); ++i) {
            largest = std::max(largest, std::abs(once[i]));
            // Both are differences of f32 weights below 2.
            EXPECT_NEAR(four[i], 4 * once[i], 8 * 0x1p-24) << name << " " << i;
        }
        EXPECT_GT(largest, 1e-4);
    }
    EXPECT_EQ(moved(1, "layers.0.attn.q.weight"), moved(4, "layers.0.attn.q.weight"));
    EXPECT_EQ(moved(1, "embed.weight"), moved(4, "embed.weight"));
}

TEST(Trainer, NonFiniteGradientsSkipThenStop) {
    Context context("cpu", 2);
    Config config = small_config();
    config.vocab_size = 4;
    TrainConfig t = train_config();
    t.max_skipped = 3;
    auto source = model::data::make_task("parity", {16}, 1);
    Model model(context, config, DType::f32);
    Trainer trainer(model, *source, t, false);
    nn::Parameter& gain = model.parameters().at("final_norm.gain");
    gain.weight().value.data<float>()[3] = NAN;
    const std::string hash = weights_hash(model);
    for (int i = 0; i < 3; ++i) EXPECT_TRUE(trainer.advance().skipped);
    EXPECT_EQ(weights_hash(model), hash);
    try {
        trainer.advance();
        ADD_FAILURE() << "did not stop";
    } catch (const Error& e) {
        EXPECT_EQ(e.kind(), tensor::ErrorKind::diverged);
    }
}

TEST(MemoryPlan, ChoosesRecomputationByBudget) {
    Context context("cpu", 1);
    Model model(context, Config(), DType::f32);
    TrainConfig t = train_config();
    t.tokens_per_step = 4096;
    const MemoryPlan free = plan_memory(model, t);
    EXPECT_FALSE(free.recompute);
    EXPECT_LT(free.recomputed, free.activations / 2);
    t.memory_budget = free.parameters + free.activations;
    EXPECT_FALSE(plan_memory(model, t).recompute);
    --t.memory_budget;
    EXPECT_TRUE(plan_memory(model, t).recompute);
    t.memory_budget = free.parameters + free.recomputed;
    EXPECT_TRUE(plan_memory(model, t).recompute);
    --t.memory_budget;
    EXPECT_THROW(plan_memory(model, t), Error);
    t.tokens_per_step = std::numeric_limits<int64_t>::max();  // no wrapping around
    t.memory_budget = int64_t(1) << 40;
    EXPECT_THROW(plan_memory(model, t), Error);
}

// Peaks of a training step, in bytes: what is planned, and what the arena saw.
struct Peaks {
    double planned, measured;
};
Peaks peaks(const Config& config, TrainConfig train, DType dtype, bool recompute) {
    Context context("cpu", 2);
    Model model(context, config, dtype);
    const MemoryPlan plan = plan_memory(model, train);
    auto source = model::data::make_task("parity", {config.context}, 1);
    Trainer trainer(model, *source, train, recompute);
    trainer.advance();
    return {double(plan.parameters + (recompute ? plan.recomputed : plan.activations)),
            double(context.arena()->peak())};
}

struct MemoryCase {
    const char* name;
    int vocab, dim, layers, heads, kv_heads, head_dim, ffn_dim, context;
    int64_t tokens;
    Fusion fusion = Fusion::gated_product;
};
void PrintTo(const MemoryCase& c, std::ostream* out) { *out << c.name; }

class MemoryPlanCase : public testing::TestWithParam<MemoryCase> {
  protected:
    MemoryPlanCase() {
        const MemoryCase& c = GetParam();
        config.vocab_size = c.vocab;
        config.dim = c.dim;
        config.layers = c.layers;
        config.heads = c.heads;
        config.kv_heads = c.kv_heads;
        config.head_dim = c.head_dim;
        config.ffn_dim = c.ffn_dim;
        config.context = c.context;
        config.fusion = c.fusion;
        train = train_config();
        train.tokens_per_step = c.tokens;
        train.mixin = false;
    }
    Config config;
    TrainConfig train;
};

// A tenth is promised. Half of it is what the arena may add here by rounding small blocks up.
TEST_P(MemoryPlanCase, IsNearThePeak) {
    for (DType dtype : {DType::f32, DType::bf16})
        for (int passes : {1, 2, 3})
            for (bool recompute : {false, true}) {
                train.schedule = PassSchedule::parse("1:" + std::to_string(passes));
                const Peaks p = peaks(config, train, dtype, recompute);
                EXPECT_NEAR(p.measured / p.planned, 1, 0.05)
                    << tensor::name_of(dtype) << " K = " << passes << " recompute " << recompute
                    << ": " << p.measured << " of " << p.planned;
            }
}

TEST_P(MemoryPlanCase, HoldsWhateverPrefixesAreDrawn) {
    train.mixin = true;
    train.schedule = PassSchedule::parse("1:3");
    for (bool recompute : {false, true}) {
        const Peaks p = peaks(config, train, DType::bf16, recompute);
        EXPECT_LT(p.measured, 1.05 * p.planned) << recompute;
    }
    Context context("cpu", 1);
    Model model(context, config, DType::bf16);
    train.tokens_per_step = 1000 * config.context;  // so many that few deviations are planned
    const MemoryPlan drawn = plan_memory(model, train);
    train.mixin = false;
    const MemoryPlan whole = plan_memory(model, train);
    EXPECT_NEAR(double(drawn.activations) / double(whole.activations), 2 / 3., 0.1);
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, MemoryPlanCase,
    testing::Values(MemoryCase{"tiny", 4, 24, 3, 4, 2, 6, 37, 16, 320},
                    MemoryCase{"odd", 301, 72, 2, 3, 1, 22, 101, 37, 407,
                               Fusion::concat_projection},
                    MemoryCase{"heads", 64, 32, 2, 16, 16, 16, 8, 32, 256,
                               Fusion::linear_addition},  // where attention's gradients are most
                    MemoryCase{"vocabulary", 4096, 64, 2, 4, 4, 16, 176, 64, 256},
                    MemoryCase{"quickstart", 257, 128, 4, 4, 2, 32, 352, 128, 512}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace fbt::tests
