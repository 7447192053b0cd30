// What a user waits for: training steps, generation, prefill, and replay of recorded states against
// decoding. Tokens are random; the times do not depend on them.
//
//   step_bench [--device=cpu] [--dtype=f32] [--preset=quickstart] [--tokens=N] [--context=N]
//              [--fast-matmul=true] [Google Benchmark's flags]
//
// --tokens and --context replace the preset's tokens a step and length of sequences.
// A line reads  what/shape/threads, median time, spread, tokens/s; a training step also the FLOPs
// that it executed a second (attention's included, recomputation's not) and the share of those of
// whole passes that prefix sharing saved.
#include <algorithm>
#include <cstring>
#include <fstream>
#include <functional>
#include <random>

#include "bench/report.h"
#include "model/core/replay.h"
#include "model/engine/generator.h"
#include "model/engine/trainer.h"

namespace fbt::bench {
namespace {

using namespace model;
using core::Mode;
using tensor::Context;
using tensor::DType;
using Tokens = std::vector<int32_t>;

struct Options {
    std::string device = "cpu", dtype = "f32", preset = "quickstart";
    int64_t tokens = 0, context = 0;
    bool fast_matmul = false;
};
Options options;

// Takes our own flags out of the command line. False: one of them is wrong.
bool take_options(int& argc, char** argv) {
    const std::pair<std::string, std::function<void(const std::string&)>> flags[] = {
        {"--device=", [](const std::string& v) { options.device = v; }},
        {"--dtype=", [](const std::string& v) { options.dtype = v; }},
        {"--preset=", [](const std::string& v) { options.preset = v; }},
        {"--tokens=", [](const std::string& v) { options.tokens = std::stoll(v); }},
        {"--context=", [](const std::string& v) { options.context = std::stoll(v); }},
        {"--fast-matmul=", [](const std::string& v) { options.fast_matmul = v == "true"; }}};
    int kept = 1;
    for (int i = 1; i < argc; ++i) {
        const std::string argument = argv[i];
        const auto flag = std::find_if(std::begin(flags), std::end(flags), [&](const auto& f) {
            return argument.starts_with(f.first);
        });
        if (flag == std::end(flags))
            argv[kept++] = argv[i];
        else
            flag->second(argument.substr(flag->first.size()));
    }
    argc = kept;
    return (options.dtype == "f32" || options.dtype == "bf16") && options.tokens >= 0 &&
           options.context >= 0 && std::ifstream(FBT_PRESETS + options.preset + ".json").good();
}

DType dtype() { return options.dtype == "bf16" ? DType::bf16 : DType::f32; }

// {"model": ..., "train": ...}
const nlohmann::json& preset() {
    static const nlohmann::json json =
        nlohmann::json::parse(std::ifstream(FBT_PRESETS + options.preset + ".json"));
    return json;
}

core::Config model_config() {
    nlohmann::json model = preset().at("model");
    if (options.context > 0) model["context"] = options.context;
    return core::config_from_json(model);
}

int64_t tokens_per_step() {
    return options.tokens > 0 ? options.tokens
                              : preset().at("train").at("tokens_per_step").get<int64_t>();
}

Tokens random_tokens(int64_t n, std::mt19937& random) {
    Tokens tokens(n);
    for (int32_t& t : tokens) t = int32_t(random() % unsigned(model_config().vocab_size));
    return tokens;
}

// Sequences of the whole context.
class RandomSource : public data::Source {
  public:
    data::Sequences next(int64_t token_budget) override {
        const int64_t T = model_config().context, count = token_budget / T;
        data::Sequences batch;
        batch.tokens = random_tokens(count * T, random_);
        batch.targets = random_tokens(count * T, random_);
        batch.lengths.assign(count, int32_t(T));
        for (int64_t i = 0; i < count; ++i) batch.indices.push_back(position_.index++);
        return batch;
    }
    data::Position position() const override { return position_; }
    void seek(data::Position position) override { position_ = position; }
    int vocab_size() const override { return model_config().vocab_size; }

  private:
    std::mt19937 random_{1};
    data::Position position_;
};

// A model with initial weights, for inference.
struct Untrained {
    Context context;
    core::Model model;
    explicit Untrained(int threads)
        : context(options.device, threads), model(context, model_config(), dtype()) {
        model.parameters().initialise(context, dtype(), 1, false);
    }
};

int threads_of(const benchmark::State& state) { return int(state.range(0)); }

void count_tokens(benchmark::State& state, int64_t tokens_a_call) {
    state.counters["token/s"] =
        benchmark::Counter(double(tokens_a_call), benchmark::Counter::kIsIterationInvariantRate);
}

// FLOPs of a step whose passes compute the positions from plain[k][s] on (all, in pass 1): 6 for
// each weight and row (2 forward, 4 backward), 12 for each channel, query head and visible pair.
double step_flops(const core::Config& c, const core::Batch& batch,
                  const std::vector<std::vector<int32_t>>& plain) {
    const double D = c.dim, HC = double(c.heads) * c.head_dim, GC = double(c.kv_heads) * c.head_dim;
    const double block = 2 * D * HC + 2 * D * GC + D * c.heads + 3 * D * c.ffn_dim;
    const double fusion = 2 * D * D;  // of each of the three kinds
    double flops = 0;
    for (size_t k = 0; k <= plain.size(); ++k)
        for (size_t s = 0; s < batch.lengths.size(); ++s) {
            const int T = batch.lengths[s], first = k == 0 ? 0 : plain[k - 1][s];
            flops += 6.0 * (T - first) *
                     (c.layers * block + double(c.vocab_size) * D + (k > 0 ? fusion : 0));
            for (int l = 0; l < c.layers; ++l) {
                const int window = c.is_full_attention(l) || c.window == 0 ? T : c.window;
                for (int t = first; t < T; ++t) flops += 12 * HC * std::min(t + 1, window);
            }
        }
    return flops;
}

// A whole step: batch, K passes forward, backward, update. Tokens are the batch's, whatever K is.
void train_step(benchmark::State& state, int passes, bool mixin) {
    Context context(options.device, threads_of(state));
    core::Model model(context, model_config(), dtype());
    RandomSource source;
    const nlohmann::json& train = preset().at("train");
    engine::TrainConfig config;
    config.tokens_per_step = tokens_per_step();
    config.fast_matmul = options.fast_matmul;
    config.schedule = core::PassSchedule::parse("1:" + std::to_string(passes));
    config.jitter = train.at("jitter");
    config.mixin = mixin;
    engine::Trainer trainer(model, source, config, false);
    trainer.advance();  // its memory is the arena's from here on
    RandomSource same;  // the trainer's batches again, to count their work
    double executed = 0, whole = 0;
    const auto count = [&](int64_t step, bool timed) {
        const core::Batch batch = same.next(config.tokens_per_step);
        const auto plain = core::draw_prefixes(batch, passes, mixin, config.seed, step);
        if (!timed) return;
        executed += step_flops(model.config(), batch, plain);
        whole += step_flops(model.config(), batch,
                            core::draw_prefixes(batch, passes, false, config.seed, step));
    };
    count(0, false);
    for (auto _ : state) {
        const int64_t step = trainer.step();
        if (trainer.advance().skipped) {
            state.SkipWithError("the loss is not finite");
            break;
        }
        state.PauseTiming();
        count(step, true);
        state.ResumeTiming();
    }
    count_tokens(state, config.tokens_per_step);
    state.counters["FLOP/s"] = benchmark::Counter(executed, benchmark::Counter::kIsRate);
    if (passes > 1) state.counters["% shared"] = 100 * (1 - executed / whole);
}

// From prompts of one token to the context's end: the steps of decoding, sampling included.
void generate(benchmark::State& state, int sequences, Mode mode) {
    Untrained u(threads_of(state));
    std::mt19937 random(1);
    std::vector<Tokens> prompts;
    for (int i = 0; i < sequences; ++i) prompts.push_back(random_tokens(1, random));
    engine::GenerateConfig config;
    config.mode = mode;
    config.max_tokens = model_config().context - 1;
    for (auto _ : state) benchmark::DoNotOptimize(engine::generate(u.model, prompts, config));
    count_tokens(state, int64_t(sequences) * config.max_tokens);
}

// One prompt of the whole context.
void prefill(benchmark::State& state, Mode mode) {
    Untrained u(threads_of(state));
    std::mt19937 random(1);
    const Tokens prompt = random_tokens(model_config().context, random);
    core::Decoder decoder(u.model, mode);
    for (auto _ : state) decoder.drop(decoder.prefill({prompt})[0]);
    count_tokens(state, int64_t(prompt.size()));
}

// The same rollout, a prompt of one token and its response, rebuilt in two ways: decoded again
// token by token, and replayed in one parallel pass from its recorded states. Both give the states
// and the cache. The quotient of the two rates is what recording the states saves.
constexpr int kPrompt = 1;

void decode_rollout(benchmark::State& state, Mode mode) {
    Untrained u(threads_of(state));
    std::mt19937 random(1);
    const Tokens tokens = random_tokens(model_config().context, random);
    for (auto _ : state)
        benchmark::DoNotOptimize(core::decode_known(u.model, tokens, kPrompt, mode));
    count_tokens(state, int64_t(tokens.size()));
}

void replay_rollout(benchmark::State& state, Mode mode) {
    Untrained u(threads_of(state));
    std::mt19937 random(1);
    const Tokens tokens = random_tokens(model_config().context, random);
    const tensor::Tensor states = core::decode_known(u.model, tokens, kPrompt, mode).hidden;
    for (auto _ : state)
        benchmark::DoNotOptimize(core::replay_recorded(u.model, tokens, kPrompt, mode, states));
    count_tokens(state, int64_t(tokens.size()));
}

bool same_bits(const tensor::Tensor& a, const tensor::Tensor& b) {
    const auto x = a.to_double(), y = b.to_double();
    return x.size() == y.size() && std::memcmp(x.data(), y.data(), x.size() * sizeof(x[0])) == 0;
}

// Empty, or what is wrong: that prefill, decoding and replay do the same work is what makes their
// times comparable.
constexpr int kChecked = 256;  // positions at most: beyond several splits of keys
std::string check() {
    Untrained u(2);
    std::mt19937 random(1);
    const Tokens tokens = random_tokens(std::min(model_config().context, kChecked), random);
    for (Mode mode : {Mode::standard, Mode::soft}) {
        const core::Trace decoded = core::decode_known(u.model, tokens, kPrompt, mode);
        const core::Trace replayed =
            core::replay_recorded(u.model, tokens, kPrompt, mode, decoded.hidden);
        bool same = same_bits(decoded.hidden, replayed.hidden);
        for (size_t l = 0; l < decoded.keys.size(); ++l)
            same = same && same_bits(decoded.keys[l], replayed.keys[l]) &&
                   same_bits(decoded.values[l], replayed.values[l]);
        if (!same) return "replay and decoding differ in mode " + to_string(mode);
        if (mode != Mode::standard) continue;
        std::vector<tensor::Tensor> states;
        core::Decoder(u.model, mode).prefill({tokens}, &states);
        if (!same_bits(decoded.hidden, states[0])) return "prefill and decoding differ";
    }
    return "";
}

template <class F>
void add(const std::string& name, F f) {
    auto* b = benchmark::RegisterBenchmark(name.c_str(), f)->ArgName("threads")->UseRealTime();
    b->Arg(1);
    if (options.device == "cpu") b->Arg(2);
}

int run_all(int argc, char** argv) {
    if (const std::string error = check(); !error.empty()) {
        std::fprintf(stderr, "step_bench: %s, nothing was timed\n", error.c_str());
        return 1;
    }
    for (int passes : {1, 2, 3})
        for (bool mixin : {false, true}) {
            if (passes == 1 && mixin) continue;  // one pass has nothing to mix in
            add("train_step/K" + std::to_string(passes) + (mixin ? "/mixin" : ""),
                [=](benchmark::State& state) { train_step(state, passes, mixin); });
        }
    for (Mode mode : {Mode::standard, Mode::soft})
        for (int sequences : {1, 16})
            add("generate/" + to_string(mode) + "/sequences" + std::to_string(sequences),
                [=](benchmark::State& state) { generate(state, sequences, mode); });
    for (Mode mode : {Mode::standard, Mode::fused})
        add("prefill/" + to_string(mode), [=](benchmark::State& state) { prefill(state, mode); });
    add("decode_rollout/soft", [](benchmark::State& state) { decode_rollout(state, Mode::soft); });
    add("replay_rollout/soft", [](benchmark::State& state) { replay_rollout(state, Mode::soft); });
    return run(argc, argv);
}

}  // namespace
}  // namespace fbt::bench

int main(int argc, char** argv) {
    if (!fbt::bench::take_options(argc, argv)) {
        std::fprintf(stderr, "step_bench: wrong --dtype, --preset, --tokens or --context\n");
        return 2;
    }
    try {
        return fbt::bench::run_all(argc, argv);
    } catch (const fbt::tensor::Error& e) {
        std::fprintf(stderr, "step_bench: %s\n", e.what());
        return 5;
    }
}
