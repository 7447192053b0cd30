// The multi-pass objective: prefix sharing against whole-sequence evaluation, finite differences of
// the whole, thread count, recomputation.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "nn/optimizer.h"
#include "tests/model/model_test.h"

namespace fbt::tests {
namespace {

using namespace model::core;

// The objective as the paper writes it, without sharing: every pass over whole sequences, one
// sequence at a time, plain embeddings on the prefix and fused inputs after it.
class OwnRows : public nn::KeyValueStore {
  public:
    nn::KeyValues prefix(int) override { return {}; }
    nn::KeyValues join(Tape&, int, const nn::KeyValues&, const nn::KeyValues& own) override {
        return own;
    }
    void keep(int, const nn::KeyValues&) override {}
};

// Returns the loss; `states` becomes each pass's [N*D].
double whole_objective(Model& model, Tape& tape, const Batch& batch, const PassPlan& plan,
                       double lambda, double z_weight,
                       std::vector<std::vector<double>>* states = nullptr) {
    Context& c = model.context();
    const DType a = tensor::accumulate_dtype(model.dtype());
    if (states) states->assign(size_t(plan.passes), {});
    const auto index = [&](int64_t first, int64_t count) {
        std::vector<int64_t> v(count);
        for (int64_t i = 0; i < count; ++i) v[i] = first + i;
        return Tensor::from(c, v, {count});
    };
    const int K = plan.passes, D = model.config().dim;
    int64_t counted = 0;
    for (int32_t t : batch.targets) counted += t >= 0;
    double total = 0;
    int64_t offset = 0;
    for (size_t s = 0; s < batch.lengths.size(); ++s) {
        const int T = batch.lengths[s];
        const std::vector<int32_t> tokens(batch.tokens.begin() + offset,
                                          batch.tokens.begin() + offset + T);
        const std::vector<int32_t> targets(batch.targets.begin() + offset,
                                           batch.targets.begin() + offset + T);
        auto spans = std::make_shared<SpanBatch>();
        spans->add_contiguous(0, T, 0);
        spans->upload(c);
        Var h;
        for (int k = 0; k < K; ++k) {
            Var u = model.embed(tape, Tensor::from(c, tokens, {T}));
            const int p = k == 0 ? T : plan.plain[k - 1][s];
            if (p < T) {
                tensor::CarryNoise noise;
                if (!plan.noise.empty()) {
                    const double* from = plan.noise[k - 1].data() + (offset + p - 1) * D;
                    noise.given = Tensor::from_double(
                        c, std::vector<double>(from, from + int64_t(T - p) * D), {T - p, D}, a);
                }
                const Var carried = autograd::carry(tape, {}, h, index(p - 1, T - p), noise);
                const Var fused = model.fuse(
                    tape, carried,
                    Tensor::from(c, std::vector<int32_t>(tokens.begin() + p, tokens.end()),
                                 {T - p}));
                u = autograd::join_rows(tape, T, u, index(0, p), index(0, p), fused,
                                        index(p, T - p));
            }
            h = model.stack(tape, u, spans, std::make_shared<OwnRows>());
            if (states) {
                const std::vector<double> rows = h.value().to_double();
                (*states)[k].insert((*states)[k].end(), rows.begin(), rows.end());
            }
            const double w = (k == 0 ? 1 : lambda / (K - 1)) / double(counted);
            const auto out =
                model.classify(tape, h, Tensor::from(c, targets, {T}),
                               Tensor::from_double(c, std::vector<double>(T, w), {T}, a), z_weight);
            const std::vector<double> ce = out.ce.to_double(), lse = out.lse.to_double();
            for (int t = 0; t < T; ++t)
                if (targets[t] >= 0) total += w * (ce[t] + z_weight * lse[t] * lse[t]);
        }
        offset += T;
    }
    return total;
}

std::vector<std::vector<double>> gradients(Model& model) {
    std::vector<std::vector<double>> out;
    for (nn::Parameter& p : model.parameters().all()) out.push_back(p.weight().grad.to_double());
    return out;
}

TEST(Objective, PrefixSharingEqualsWholeEvaluation) {
    Context c("ref", 2);
    for (Fusion fusion :
         {Fusion::gated_product, Fusion::concat_projection, Fusion::linear_addition})
        for (int K : {1, 2, 3, 5}) {
            Config config = small_config();
            config.fusion = fusion;
            config.window = 4;
            Model model(c, config, DType::f64);
            randomise(model, true);
            const Batch batch = random_batch({9, 1, 5, 70}, config.vocab_size, 5);
            PassPlan plan;
            plan.passes = K;
            plan.plain = draw_prefixes(batch, K, true, 3, 7);
            if (K == 5) plan.plain[1] = {9, 1, 5, 70};  // one pass that is all plain
            for (int k = 0; k < K - 1; ++k)
                plan.noise.push_back(
                    normal<double>(batch.tokens.size() * size_t(config.dim), 40 + k, 0.02));
            const double lambda = 0.7, z = 1e-3;

            model.parameters().zero_gradients();
            Tape shared(true);
            const double loss = objective(model, shared, batch, plan, {lambda, z}).total;
            shared.backward();
            const auto got = gradients(model);

            model.parameters().zero_gradients();
            Tape whole(true);
            const double expected = whole_objective(model, whole, batch, plan, lambda, z);
            whole.backward();
            const auto want = gradients(model);

            EXPECT_NEAR(loss, expected, 1e-10);
            for (size_t i = 0; i < got.size(); ++i)
                EXPECT_TRUE(close(got[i], want[i], 1e-10))
                    << model.parameters().all()[i].name() << ", K = " << K;
        }
}

// Forward, sharing is exact: by the row rule no state changes a bit.
TEST(Objective, PrefixSharingKeepsEveryBitOfTheStates) {
    Context c("cpu", 2);
    for (DType dtype : {DType::f32, DType::bf16}) {
        Model model(c, small_config(), dtype);
        randomise(model, false);
        const Batch batch = random_batch({9, 1, 150}, model.config().vocab_size, 5);
        PassPlan plan;
        plan.passes = 3;
        plan.plain = {{4, 1, 80}, {1, 1, 7}};
        for (int k = 0; k < 2; ++k)
            plan.noise.push_back(
                normal<double>(batch.tokens.size() * size_t(model.config().dim), 40 + k, 0.02));
        Tape tape(false);
        const Objective shared = objective(model, tape, batch, plan, {.keep_states = true});
        std::vector<std::vector<double>> whole;
        const double total = whole_objective(model, tape, batch, plan, 1, 0, &whole);
        EXPECT_NEAR(shared.total, total, 1e-12 * total);  // the same terms, another order
        for (int k = 0; k < 3; ++k)
            EXPECT_TRUE(same_bits(shared.states[k].to_double(), whole[k]))
                << tensor::name_of(dtype) << ", pass " << k + 1;
    }
}

// d total / d parameter along random directions, by central differences. h = 1e-5 and an O(1)
// third derivative leave about 1e-9 of truncation and 1e-11 of rounding.
TEST(Objective, GradientsEqualFiniteDifferences) {
    Context c("ref", 2);
    for (Fusion fusion :
         {Fusion::gated_product, Fusion::concat_projection, Fusion::linear_addition}) {
        Config config = small_config();
        config.fusion = fusion;
        config.layers = 2;
        config.window = 3;
        Model model(c, config, DType::f64);
        randomise(model, true);
        const Batch batch = random_batch({6, 1, 8}, config.vocab_size, 11);
        PassPlan plan;
        plan.passes = 3;
        plan.plain = {{2, 1, 3}, {1, 1, 6}};
        plan.jitter = 0.02;
        plan.seed = 5;
        const ObjectiveConfig settings{0.5, 1e-3};
        model.parameters().zero_gradients();
        Tape tape(true);
        objective(model, tape, batch, plan, settings);
        tape.backward();
        unsigned seed = 100;
        for (nn::Parameter& p : model.parameters().all()) {
            const Tensor& w = p.weight().value;
            const std::vector<double> direction = normal<double>(w.numel(), seed++),
                                      gradient = p.weight().grad.to_double();
            double slope = 0;
            for (size_t i = 0; i < direction.size(); ++i) slope += direction[i] * gradient[i];
            const auto at = [&](double step) {
                for (size_t i = 0; i < direction.size(); ++i)
                    w.data<double>()[i] += step * direction[i];
                p.updated();
                Tape plain(false);
                return objective(model, plain, batch, plan, settings).total;
            };
            const double h = 1e-5, up = at(h), down = at(-2 * h);
            at(h);
            EXPECT_NEAR((up - down) / (2 * h), slope, 1e-6 * (1 + std::abs(slope))) << p.name();
        }
    }
}

// A training step on the cpu: some sequences longer than several key splits, and more rows than
// one chunk of a weight gradient sums.
struct Step {
    Objective objective;
    std::vector<std::vector<double>> numbers;  // gradients, updated weights, states
};

Step cpu_step(DType dtype, int passes, int threads, bool recompute) {
    Context c("cpu", threads);
    const Config config = small_config();
    Model model(c, config, dtype);
    randomise(model, true);
    nn::AdamW optimizer(model.parameters(), {});
    const Batch batch = random_batch({400, 77, 150, 3}, config.vocab_size, 21);
    PassPlan plan;
    plan.passes = passes;
    plan.plain = draw_prefixes(batch, passes, true, 1, 2);
    plan.jitter = 0.02;
    Tape tape(true);
    Step step{objective(model, tape, batch, plan, {.recompute = recompute, .keep_states = true}),
              {}};
    tape.backward();
    step.numbers = gradients(model);
    const std::vector<double> squares = optimizer.gradient_squares();
    optimizer.step(1e-2, std::sqrt(std::accumulate(squares.begin(), squares.end(), 0.0)));
    for (nn::Parameter& p : model.parameters().all())
        step.numbers.push_back(p.weight().value.to_double());
    for (Tensor& t : step.objective.states)  // the context goes away
        step.numbers.push_back(t.to_double());
    step.objective.states.clear();
    return step;
}

void expect_same(const Step& a, const Step& b) {
    EXPECT_EQ(a.objective.total, b.objective.total);
    EXPECT_EQ(a.objective.pass_loss, b.objective.pass_loss);
    ASSERT_EQ(a.numbers.size(), b.numbers.size());
    for (size_t i = 0; i < a.numbers.size(); ++i)
        EXPECT_TRUE(same_bits(a.numbers[i], b.numbers[i])) << i;
}

class TrainingStep : public testing::TestWithParam<DType> {};

TEST_P(TrainingStep, DoesNotDependOnTheThreadCount) {
    const Step one = cpu_step(GetParam(), 3, 1, false);
    for (int threads : {2, 3, 5}) {
        SCOPED_TRACE(threads);
        expect_same(cpu_step(GetParam(), 3, threads, false), one);
    }
}
TEST_P(TrainingStep, DoesNotDependOnRecomputation) {
    for (int passes : {1, 3}) {
        SCOPED_TRACE(passes);
        expect_same(cpu_step(GetParam(), passes, 2, false), cpu_step(GetParam(), passes, 2, true));
    }
}
INSTANTIATE_TEST_SUITE_P(Dtypes, TrainingStep, testing::Values(DType::f32, DType::bf16),
                         [](const auto& info) { return tensor::name_of(info.param); });

TEST(Objective, FusionHasNoGradientPathWithOnePass) {
    Context c("ref", 1);
    Model model(c, small_config(), DType::f64);
    randomise(model, true);
    model.parameters().zero_gradients();
    Tape tape(true);
    objective(model, tape, random_batch({5}, 23, 1), {}, {});
    tape.backward();
    for (nn::Parameter& p : model.parameters().all())
        EXPECT_EQ(p.weight().reached, !p.name().starts_with("feedback.")) << p.name();
}

TEST(Objective, PrefixesAreUniformAndOneWithoutMixin) {
    Batch batch;
    batch.lengths.assign(4000, 7);
    for (int64_t i = 0; i < 4000; ++i) batch.indices.push_back(i);
    std::vector<int> count(8, 0);
    for (const auto& pass : draw_prefixes(batch, 3, true, 1, 1))
        for (int32_t p : pass) {
            ASSERT_GE(p, 1);
            ASSERT_LE(p, 7);
            ++count[p];
        }
    // 8000 draws over 7 values: mean 1143, standard deviation 31; five of them
    for (int v = 1; v <= 7; ++v) EXPECT_NEAR(count[v], 8000 / 7.0, 5 * 31.3) << v;
    for (const auto& pass : draw_prefixes(batch, 3, false, 1, 1))
        EXPECT_TRUE(std::all_of(pass.begin(), pass.end(), [](int p) { return p == 1; }));
}

// Jitter is drawn by sequence and position, so packing the batch differently changes nothing.
TEST(Objective, JitterDoesNotDependOnPacking) {
    Context c("cpu", 1);
    Model model(c, small_config(), DType::f32);
    randomise(model, false);
    const Batch both = random_batch({9, 6}, 23, 3);
    Batch second = both;
    second.tokens.erase(second.tokens.begin(), second.tokens.begin() + 9);
    second.targets.erase(second.targets.begin(), second.targets.begin() + 9);
    second.lengths = {6};
    second.indices = {both.indices[1]};
    PassPlan plan;
    plan.passes = 3;
    plan.jitter = 0.1;
    plan.plain = {{4, 2}, {1, 3}};
    PassPlan alone = plan;
    alone.plain = {{2}, {3}};
    Tape tape(false);
    const Objective a = objective(model, tape, both, plan, {.keep_states = true});
    const Objective b = objective(model, tape, second, alone, {.keep_states = true});
    for (int k = 0; k < 3; ++k)
        EXPECT_TRUE(
            same_bits(a.states[k].rows(9, 6).to_vector<float>(), b.states[k].to_vector<float>()));
}

}  // namespace
}  // namespace fbt::tests
