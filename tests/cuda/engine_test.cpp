// The whole engine on a CUDA device: golden files, the row rule, training beside the CPU.
#include <filesystem>
#include <optional>

#include "model/core/audit.h"
#include "model/core/evaluate.h"
#include "model/core/probe.h"
#include "model/core/replay.h"
#include "model/data/tasks.h"
#include "model/engine/generator.h"
#include "model/engine/trainer.h"
#include "tests/cuda/device.h"
#include "tests/model/model_test.h"

namespace fbt::tests {
namespace {

using namespace model::core;

class CudaEngine : public testing::TestWithParam<DType> {
  protected:
    void SetUp() override {
        skip_without_device();
        if (!IsSkipped()) context.emplace(kDevice);
    }
    std::optional<Context> context;
};

// Every quantity with a bound in this dtype, gradients included; in f32 also rollouts and replays.
TEST_P(CudaEngine, GoldenFiles) {
    int files = 0;
    for (const auto& entry : std::filesystem::directory_iterator(FBT_SOURCE_DIR "/tests/golden")) {
        if (entry.path().extension() != ".safetensors") continue;
        ++files;
        const Audit a = audit(*context, entry.path(), GetParam());
        for (const AuditRow& row : a.rows)
            EXPECT_TRUE(row.ok) << entry.path().filename() << " " << row.quantity << ": "
                                << row.error << ", bound " << row.bound;
    }
    EXPECT_EQ(files, 7);
}

constexpr int T = 3 * kernels::kKeyBlock + 5;  // beyond three splits; the window starts inside one

// Decoding = prefill = training's forward, by memcmp.
TEST_P(CudaEngine, DecodingEqualsPrefillEqualsTraining) {
    Model model(*context, small_config(), GetParam());
    randomise(model, false);
    const std::vector<int32_t> tokens = random_tokens(T, model.config().vocab_size, 7);
    const Rows decoded = rows_of(decode_known(model, tokens, 66, Mode::standard));
    expect_same(rows_of(decode_known(model, tokens, T, Mode::standard)), decoded);

    Batch batch = random_batch({3, T, 10}, model.config().vocab_size, 9);
    std::copy(tokens.begin(), tokens.end(), batch.tokens.begin() + 3);
    Tape tape(false);
    const Objective training = objective(model, tape, batch, {}, {.keep_states = true});
    EXPECT_TRUE(same_bits(training.states[0].rows(3, T).to_double(), decoded.hidden));
}

// One parallel pass from the recorded states is the rollout; one wrong bit among them shows.
TEST_P(CudaEngine, RecordedStatesRebuildTheRolloutBitForBit) {
    Model model(*context, small_config(), GetParam());
    randomise(model, false);
    const std::vector<int32_t> tokens = random_tokens(T, model.config().vocab_size, 7);
    for (Mode mode : {Mode::soft, Mode::fused}) {
        const int P = mode == Mode::soft ? 1 : 64;
        const Trace rollout = decode_known(model, tokens, P, mode);
        const Rows want = rows_of(rollout);
        expect_same(rows_of(replay_recorded(model, tokens, P, mode, rollout.hidden)), want);

        std::vector<double> states = want.hidden;
        states[100 * model.config().dim] += 1;
        const Tensor wrong =
            Tensor::from_double(*context, states, rollout.hidden.shape(), GetParam());
        EXPECT_FALSE(
            same_bits(rows_of(replay_recorded(model, tokens, P, mode, wrong)).hidden, want.hidden));
    }
}

// Recorded steps (CUDA graphs) of changing batches give what a sequence alone gives.
TEST_P(CudaEngine, DecodingDoesNotDependOnTheBatch) {
    Model model(*context, small_config(), GetParam());
    randomise(model, false);
    const int P = 20, end = 90;
    std::vector<int32_t> tokens = random_tokens(end, model.config().vocab_size, 7);
    const Rows alone = rows_of(decode_known(model, tokens, P, Mode::soft));
    Decoder decoder(model, Mode::soft);
    std::vector<int> ids = decoder.prefill(
        {random_tokens(60, 23, 1), {tokens.begin(), tokens.begin() + P}, random_tokens(1, 23, 2)});
    const int64_t D = model.config().dim;
    std::vector<double> hidden(alone.hidden.begin(), alone.hidden.begin() + P * D);
    for (int t = P; t < end; ++t) {
        std::vector<int> now = {ids[1]};
        std::vector<int32_t> next = {tokens[t]};
        if (t % 3) {
            now.push_back(ids[0]);
            next.push_back(int32_t(t % 23));
        }
        if (t % 4 == 0) {
            now.push_back(ids[2]);
            next.push_back(int32_t(t % 7));
        }
        const std::vector<double> row = decoder.step(now, next).rows(0, 1).to_double();
        hidden.insert(hidden.end(), row.begin(), row.end());
    }
    EXPECT_TRUE(same_bits(hidden, alone.hidden));
}

// Prompts in pieces beside decoding, all modes in one batch, samples that share pages, and too few
// pages for all: what each sequence gives alone.
TEST_P(CudaEngine, ServingDoesNotDependOnCompanyOrPages) {
    Model model(*context, small_config(), GetParam());
    randomise(model, false);
    std::vector<model::engine::Request> requests(3);
    for (size_t i = 0; i < 3; ++i) {
        requests[i].mode = std::vector{Mode::soft, Mode::fused, Mode::standard}[i];
        requests[i].tokens = random_tokens(std::vector{60, 9, 62}[i], 23, unsigned(i));
        requests[i].seed = i;
        requests[i].max_tokens = 7;
        requests[i].keep_states = true;
    }
    std::vector<model::engine::Rollout> alone;
    for (const model::engine::Request& request : requests)
        for (int i = 0; i < 2; ++i) {
            model::engine::Engine engine(model);
            model::engine::Request one = request;
            one.stream += uint64_t(i);
            engine.submit(one);
            model::engine::run(engine);
            alone.push_back(engine.take(0));
        }
    model::engine::Engine engine(model, {.sequences = 6, .rows = 25, .pages = 3});
    for (const model::engine::Request& request : requests) engine.submit(request, 2);
    model::engine::run(engine);
    for (size_t i = 0; i < 6; ++i) {
        const model::engine::Rollout r = engine.take(int64_t(i));
        EXPECT_EQ(r.tokens, alone[i].tokens) << i;
        EXPECT_EQ(r.logprobs, alone[i].logprobs) << i;
        EXPECT_TRUE(same_bits(std::vector<double>(r.states.begin(), r.states.end()),
                              {alone[i].states.begin(), alone[i].states.end()}))
            << i;
    }
    EXPECT_GT(engine.counts().preempted, 0);
    EXPECT_GT(engine.counts().rebuilt, 0);
    EXPECT_EQ(engine.store().held(), 0);
}

// Sequences come and go between the steps, also right before the step that is recorded.
TEST_P(CudaEngine, SequencesJoinBetweenSteps) {
    Model model(*context, small_config(), GetParam());
    randomise(model, false);
    const int P = 5, end = P + 12;
    const std::vector<int32_t> tokens = random_tokens(end, model.config().vocab_size, 7);
    const Rows alone = rows_of(decode_known(model, tokens, P, Mode::soft));
    Decoder decoder(model, Mode::soft);
    std::vector<Tensor> head;
    const int id = decoder.prefill({{tokens.begin(), tokens.begin() + P}}, &head)[0];
    std::vector<double> hidden = head[0].to_double();
    for (int t = P; t < end; ++t) {
        const int other = decoder.prefill({random_tokens(7 * t, 23, unsigned(t))})[0];
        const std::vector<double> row = decoder.step({id}, {tokens[t]}).to_double();
        hidden.insert(hidden.end(), row.begin(), row.end());
        if (t % 2) decoder.drop(other);
    }
    EXPECT_TRUE(same_bits(hidden, alone.hidden));
}

// Steps that hand out the residual stream, and so are not recorded, between steps that are.
TEST_P(CudaEngine, QueryStreamsAreSoftDecoding) {
    Model model(*context, small_config(), GetParam());
    randomise(model, false);
    const Batch batch = random_batch({9, 4, 9}, model.config().vocab_size, 7);
    const std::vector<float> last =
        query_streams(model, batch, Prefill::recurrent)[size_t(model.config().layers)];
    const Tensor x = Tensor::from_double(*context, {last.begin(), last.end()},
                                         {3, model.config().dim}, GetParam());
    Tensor top = Tensor::empty(*context, x.shape(), GetParam()), rstd;
    tensor::rmsnorm_forward(top, rstd, x, model.parameters().at("final_norm.gain").weight().value,
                            model.config().norm_eps);
    int first = 0;
    for (int s = 0; s < 3; ++s) {
        const int T = batch.lengths[s];
        const Trace trace = decode_known(
            model, {batch.tokens.begin() + first, batch.tokens.begin() + first + T}, 1, Mode::soft);
        EXPECT_TRUE(same_bits(top.rows(s, 1).to_double(), trace.hidden.rows(T - 1, 1).to_double()))
            << s;
        first += T;
    }
}

// Twenty steps with one to three passes beside the CPU in f32 and the plain loops in f64. How far
// f32 is off depends on the order of sums, so the device may be off by 4 times the worst of the
// CPU's steps; to first order errors grow with the unit roundoff, so bf16 by 2^16 times as much.
TEST_P(CudaEngine, TrainingFollowsTheCpu) {
    struct Steps {
        std::vector<double> losses, norms;
    };
    const auto train = [](Context& c, DType dtype) {
        Config config = small_config();
        config.vocab_size = 4;
        config.layers = 2;
        model::engine::TrainConfig t;
        t.steps = 20;
        t.tokens_per_step = 64;
        t.schedule = PassSchedule::parse("1:1,1:2,1:3");
        t.warmup = 2;
        const auto source = model::data::make_task("parity", {16}, 1);
        Model model(c, config, dtype);
        model::engine::Trainer trainer(model, *source, t, false);
        Steps out;
        while (!trainer.done()) {
            const auto report = trainer.advance();
            out.losses.push_back(report.total);
            out.norms.push_back(report.norm);
        }
        return out;
    };
    Context cpu_context("cpu", 1), ref_context("ref");
    const Steps exact = train(ref_context, DType::f64), cpu = train(cpu_context, DType::f32),
                device = train(*context, GetParam());
    const double scale = GetParam() == DType::f32 ? 4 : 4 * 0x1p16;
    const auto worst = [](const std::vector<double>& a, const std::vector<double>& b) {
        double most = 0;
        for (size_t i = 0; i < a.size(); ++i) most = std::max(most, std::abs(a[i] / b[i] - 1));
        return most;
    };
    EXPECT_TRUE(close(device.losses, exact.losses, 0, scale * worst(cpu.losses, exact.losses)));
    EXPECT_TRUE(close(device.norms, exact.norms, 0, scale * worst(cpu.norms, exact.norms)));
}

INSTANTIATE_TEST_SUITE_P(Dtypes, CudaEngine, testing::Values(DType::f32, DType::bf16),
                         [](const auto& info) { return tensor::name_of(info.param); });

}  // namespace
}  // namespace fbt::tests
