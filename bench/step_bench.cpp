// What a user waits for: training steps, decoding, prefill, and replay of recorded states against
// decoding; with the memory that training takes. Tokens are random; the times do not depend on
// them.
//
//   step_bench [--shape A,B,300M] [--dtype f32] [--device cpu] [--threads N] [--json] [FILTER...]
//
// FILTER is a regular expression over shape/dtype/section, as in  B/f32/train.  bench/README.md
// says how to read the rows.
#include <omp.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <optional>
#include <random>
#include <regex>

#include "bench/ceilings.h"
#include "bench/onednn_matmul.h"
#include "bench/shape.h"
#include "model/core/flops.h"
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
    std::vector<std::string> shapes = {"A", "B", "300M"}, dtypes = {"f32", "bf16"}, filters;
    std::string device = "cpu";
    int threads = omp_get_num_procs();
    bool fast_matmul = false, json = false;
};
Options options;

// One model in one dtype.
struct Case {
    std::string shape;
    DType dtype;
    core::Config model;
    int64_t tokens_per_step = 0;  // 0: not trained

    Case(const std::string& name, DType dtype) : shape(name), dtype(dtype) {
        const nlohmann::json json = shape_named(name);
        model = core::config_from_json(json.at("model"));
        if (json.contains("train")) tokens_per_step = json.at("train").at("tokens_per_step");
    }
    bool on_cpu() const { return options.device == "cpu"; }
    bool wants(const std::string& section) const {
        const std::string name = shape + "/" + tensor::name_of(dtype) + "/" + section;
        return options.filters.empty() ||
               std::ranges::any_of(options.filters, [&](const std::string& filter) {
                   return std::regex_search(name, std::regex(filter));
               });
    }
};

// One row a quantity, printed as it comes.
class Report {
  public:
    void add(const Case& c, const std::string& what, double value, const std::string& unit) {
        const std::string dtype = tensor::name_of(c.dtype);
        rows_.push_back({{"shape", c.shape},
                         {"dtype", dtype},
                         {"what", what},
                         {"value", value},
                         {"unit", unit}});
        if (options.json) return;
        if (rows_.size() == 1)
            std::printf("| shape | dtype | %-50s | %10s | %-13s |\n|---|---|---|---|---|\n", "what",
                        "value", "unit");
        std::printf("| %-5s | %-5s | %-50s | %10.4g | %-13s |\n", c.shape.c_str(), dtype.c_str(),
                    what.c_str(), value, unit.c_str());
        std::fflush(stdout);
    }
    const nlohmann::json& rows() const { return rows_; }

  private:
    nlohmann::json rows_ = nlohmann::json::array();
};

double median(std::vector<double> x) {
    std::ranges::nth_element(x, x.begin() + std::ptrdiff_t(x.size() / 2));
    return x[x.size() / 2];
}

// Seconds of one call, the median of several after one that is not timed.
template <class F>
double median_seconds(F f) {
    constexpr int kRuns = 3;
    f();
    std::vector<double> times;
    for (int i = 0; i < kRuns; ++i) {
        const auto start = std::chrono::steady_clock::now();
        f();
        times.push_back(
            std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    return median(times);
}

Tokens random_tokens(int64_t n, int vocab_size, std::mt19937& random) {
    Tokens tokens(n);
    for (int32_t& t : tokens) t = int32_t(random() % unsigned(vocab_size));
    return tokens;
}

// Sequences of the whole context.
class RandomSource : public data::Source {
  public:
    explicit RandomSource(const core::Config& model) : model_(model) {}
    data::Sequences next(int64_t token_budget) override {
        const int64_t T = model_.context, count = token_budget / T;
        data::Sequences batch;
        batch.tokens = random_tokens(count * T, model_.vocab_size, random_);
        batch.targets = random_tokens(count * T, model_.vocab_size, random_);
        batch.lengths.assign(count, int32_t(T));
        for (int64_t i = 0; i < count; ++i) batch.indices.push_back(position_.index++);
        return batch;
    }
    data::Position position() const override { return position_; }
    void seek(data::Position position) override { position_ = position; }
    int vocab_size() const override { return model_.vocab_size; }

  private:
    core::Config model_;
    std::mt19937 random_{1};
    data::Position position_;
};

// ---- what a model's work is

// FLOPs of a step whose passes compute the positions from plain[k][s] on (all, in pass 1).
double step_flops(const core::Config& c, const core::Batch& batch,
                  const std::vector<std::vector<int32_t>>& plain) {
    double flops = 0;
    for (size_t s = 0; s < batch.lengths.size(); ++s) {
        flops += core::pass_flops(c, 0, batch.lengths[s]);
        for (const std::vector<int32_t>& first : plain)
            flops += core::pass_flops(c, first[s], batch.lengths[s]);
    }
    return flops;
}

// Bytes that one decoding step must read: every weight once, and each sequence's keys and values,
// `length` positions of them.
double decode_bytes(const Case& c, Mode mode, int sequences, int length) {
    const core::Config& m = c.model;
    double numbers = core::row_weights(m, mode != Mode::standard);
    for (int l = 0; l < m.layers; ++l)
        numbers += 2.0 * sequences * m.kv_heads * m.head_dim *
                   (m.is_full_attention(l) ? length : std::min(length, m.window));
    return numbers * double(tensor::size_of(c.dtype));
}

// ---- training

engine::TrainConfig train_config(const Case& c, const std::string& schedule, int64_t steps,
                                 bool mixin) {
    engine::TrainConfig config;
    config.steps = steps;
    config.tokens_per_step = c.tokens_per_step;
    config.schedule = core::PassSchedule::parse(schedule);
    config.mixin = mixin;
    config.fast_matmul = options.fast_matmul;
    return config;
}

// Seconds of one step for each FLOP that it executed.
using Cost = std::vector<double>;

// Steps of each of these pass counts in turn, `rounds` times after one that is not timed, and
// `between` after each turn: what else the machine does falls on all of them alike.
std::map<int, Cost> time_steps(const Case& c, const std::vector<int>& passes, bool mixin,
                               int rounds, const std::function<void()>& between) {
    std::string schedule;
    for (int round = 0; round <= rounds; ++round)
        for (int K : passes) schedule += (schedule.empty() ? "1:" : ",1:") + std::to_string(K);
    Context context(options.device, options.threads);
    core::Model model(context, c.model, c.dtype);
    RandomSource source(c.model), same(c.model);
    const engine::TrainConfig config =
        train_config(c, schedule, (rounds + 1) * int64_t(passes.size()), mixin);
    engine::Trainer trainer(model, source, config, false);
    std::map<int, Cost> costs;
    while (!trainer.done()) {
        const core::Batch batch = same.next(config.tokens_per_step);
        const int64_t step = trainer.step();
        const engine::StepReport report = trainer.advance();
        if (report.skipped)
            throw tensor::Error(tensor::ErrorKind::diverged, "the loss is not finite");
        if (report.passes == passes.back()) between();
        if (step < int64_t(passes.size())) continue;
        const auto plain = core::draw_prefixes(batch, report.passes, mixin, config.seed, step);
        costs[report.passes].push_back(report.milliseconds / 1e3 /
                                       step_flops(c.model, batch, plain));
    }
    return costs;
}

// FLOPs of a step, the mean over many steps' prefixes.
double mean_flops(const Case& c, int passes, bool mixin) {
    const int draws = mixin ? 1000 : 1;
    RandomSource source(c.model);
    core::Batch batch = source.next(c.tokens_per_step);
    double flops = 0;
    for (int step = 0; step < draws; ++step)
        flops += step_flops(c.model, batch, core::draw_prefixes(batch, passes, mixin, 1, step));
    return flops / draws;
}

// Steps of K > 1 differ by their prefixes, and the few that are timed are not the mean: a mean step
// takes the median of the seconds a FLOP times the mean of the FLOPs.
void report_training(const Case& c, Report& report) {
    constexpr int kRounds = 12, kWholeRounds = 3;
    std::optional<OneDnnModel> onednn;
    if (c.on_cpu())
        onednn.emplace(
            core::row_matrices(c.model, false), c.tokens_per_step,
            c.dtype == DType::bf16 ? OneDnnMatmul::DType::bf16 : OneDnnMatmul::DType::f32);
    const std::map<int, Cost> mixed = time_steps(c, {1, 2, 3}, true, kRounds, [&] {
        if (onednn) onednn->time(options.threads);
    });
    const double flops = mean_flops(c, 1, true), seconds = flops * median(mixed.at(1));
    report.add(c, "training step, K = 1", 1e3 * seconds, "ms");
    report.add(c, "training, K = 1", double(c.tokens_per_step) / seconds, "token/s");
    report.add(c, "training, K = 1, rate", flops / seconds / 1e9, "GFLOP/s");
    if (onednn) {
        report.add(c, "oneDNN's packed matmuls of these shapes, rate", onednn->rate() / 1e9,
                   "GFLOP/s");
        report.add(c, "training, K = 1, rate / oneDNN's", flops / seconds / onednn->rate(), "");
    }
    std::map<int, double> ratio;
    for (int K : {2, 3}) {
        const std::string name = "K = " + std::to_string(K) + ", mixin, / K = 1, ";
        const double more = mean_flops(c, K, true);
        ratio[K] = more * median(mixed.at(K)) / seconds;
        report.add(c, name + "time", ratio[K], "");
        report.add(c, name + "FLOPs", more / flops, "");
    }
    report.add(c, "schedule 75:1,22:2,3:3, mixin, / K = 1, time",
               0.75 + 0.22 * ratio[2] + 0.03 * ratio[3], "");
    const std::map<int, Cost> whole = time_steps(c, {1, 3}, false, kWholeRounds, [] {});
    report.add(c, "K = 3, no mixin, / K = 1, time",
               mean_flops(c, 3, false) * median(whole.at(3)) / (flops * median(whole.at(1))), "");
}

// ---- memory

// The most memory that this process has ever had (VmHWM).
int64_t peak_bytes() {
    std::ifstream file("/proc/self/status");
    for (std::string line; std::getline(file, line);)
        if (line.starts_with("VmHWM:")) return std::stoll(line.substr(6)) << 10;
    return 0;
}

// The peak of a process of its own that does only this. A forked process cannot use OpenMP's
// threads if its parent has, so all these come first.
int64_t peak_of(const std::function<void()>& work) {
    int ends[2];
    if (pipe(ends) != 0) throw tensor::Error(tensor::ErrorKind::environment, "no pipe");
    const pid_t child = fork();
    if (child < 0) throw tensor::Error(tensor::ErrorKind::environment, "no process");
    if (child == 0) {
        int64_t peak = 0;
        try {
            work();
            peak = peak_bytes();
        } catch (const tensor::Error& e) {
            std::fprintf(stderr, "step_bench: %s\n", e.what());
        }
        _exit(write(ends[1], &peak, sizeof peak) == sizeof peak ? 0 : 5);
    }
    close(ends[1]);
    int64_t peak = 0;
    const bool complete = read(ends[0], &peak, sizeof peak) == sizeof peak && peak > 0;
    close(ends[0]);
    waitpid(child, nullptr, 0);
    if (!complete)
        throw tensor::Error(tensor::ErrorKind::environment, "a step's memory was not measured");
    return peak;
}

// With mixin every step has other sizes, and the arena keeps blocks of all of them: it takes
// several steps to see the most.
int64_t training_peak(const Case& c, int passes, bool mixin, bool recompute) {
    return peak_of([&] {
        const int steps = passes > 1 && mixin ? 5 : 2;
        Context context(options.device, options.threads);
        core::Model model(context, c.model, c.dtype);
        RandomSource source(c.model);
        engine::Trainer trainer(
            model, source, train_config(c, "1:" + std::to_string(passes), steps, mixin), recompute);
        while (!trainer.done()) trainer.advance();
    });
}

void report_memory(const Case& c, Report& report) {
    const auto add = [&](const std::string& what, int64_t bytes) {
        report.add(c, "peak memory, " + what, double(bytes) / (1 << 20), "MiB");
        return double(bytes);
    };
    const double one = add("K = 1", training_peak(c, 1, true, false));
    const double three = add("K = 3, mixin, recomputed", training_peak(c, 3, true, true));
    add("K = 3, no mixin, recomputed", training_peak(c, 3, false, true));
    report.add(c, "peak memory, K = 3, mixin, recomputed, / K = 1", three / one, "");
}

// ---- inference

// A model with initial weights.
struct Untrained {
    Context context;
    core::Model model;
    explicit Untrained(const Case& c)
        : context(options.device, options.threads), model(context, c.model, c.dtype) {
        model.parameters().initialise(context, c.dtype, 1, false);
    }
};

// From prompts of one token on: the time between two tokens, argmax included, at the median of so
// many positions.
constexpr int kDecoded = 256;

void report_decoding(const Case& c, Untrained& u, Report& report) {
    std::mt19937 random(1);
    for (Mode mode : {Mode::standard, Mode::soft})
        for (int sequences : {1, 16}) {
            std::vector<Tokens> prompts;
            for (int i = 0; i < sequences; ++i)
                prompts.push_back(random_tokens(1, c.model.vocab_size, random));
            engine::GenerateConfig config;
            config.mode = mode;
            // Argmax: from the flat rows of an untrained model a draw would sort half of the
            // vocabulary.
            config.sampling.temperature = 0;
            config.max_tokens = std::min(c.model.context - 1, kDecoded);
            const double bytes = decode_bytes(c, mode, sequences, config.max_tokens / 2);
            const auto bandwidth = [&] {  // before and after: the better one is the bound
                return c.on_cpu() ? read_rate(int64_t(bytes), options.threads) : 0;
            };
            double rate = bandwidth();
            std::vector<double> gaps;
            std::optional<std::chrono::steady_clock::time_point> last;
            engine::generate(u.model, prompts, config, [&](const engine::Rollout& r, int32_t) {
                if (r.prompt != 0) return;
                const auto now = std::chrono::steady_clock::now();
                if (last) gaps.push_back(std::chrono::duration<double>(now - *last).count());
                last = now;
            });
            rate = std::max(rate, bandwidth());
            const double seconds = median(gaps);
            const std::string name = "decoding, " + to_string(mode) + ", " +
                                     std::to_string(sequences) +
                                     (sequences == 1 ? " sequence" : " sequences");
            report.add(c, name, sequences / seconds, "token/s");
            if (!c.on_cpu()) continue;
            report.add(c, name + ", bandwidth bound", sequences * rate / bytes, "token/s");
            report.add(c, name + ", of the bound", 100 * bytes / rate / seconds, "%");
        }
}

// Many requests at once, all that an engine does: 64 prompts of a quarter of the context, of which
// half begin alike, as many tokens sampled of each, at most 16 sequences at a time. Counted are the
// sampled tokens of the whole run.
void report_serving(const Case& c, Untrained& u, Report& report) {
    constexpr int kRequests = 64, kAtOnce = 16;
    const int length = std::max(1, c.model.context / 4);
    for (Mode mode : {Mode::standard, Mode::soft}) {
        std::mt19937 random(1);
        const Tokens common = random_tokens(length / 2, c.model.vocab_size, random);
        const double seconds = median_seconds([&] {
            engine::Engine engine(u.model, {.sequences = kAtOnce});
            for (int i = 0; i < kRequests; ++i) {
                engine::Request request;
                request.tokens = random_tokens(length, c.model.vocab_size, random);
                if (i % 2) std::copy(common.begin(), common.end(), request.tokens.begin());
                request.mode = mode;
                request.sampling.temperature = 0;
                request.max_tokens = length;
                engine.submit(request);
            }
            engine::run(engine);
        });
        report.add(c,
                   "serving, " + to_string(mode) + ", 64 requests of " + std::to_string(length) +
                       " + " + std::to_string(length) + " tokens",
                   kRequests * length / seconds, "token/s");
    }
}

// One prompt of the whole context.
void report_prefill(const Case& c, Untrained& u, Report& report) {
    std::mt19937 random(1);
    const Tokens prompt = random_tokens(c.model.context, c.model.vocab_size, random);
    for (Mode mode : {Mode::standard, Mode::fused}) {
        core::Decoder decoder(u.model, mode);
        const double seconds = median_seconds([&] {
            decoder.drop(decoder.prefill({prompt})[0]);
            u.context.synchronize();
        });
        report.add(c,
                   "prefill, " + to_string(mode) + ", " + std::to_string(prompt.size()) + " tokens",
                   double(prompt.size()) / seconds, "token/s");
    }
}

// The same rollout, a prompt of one token and 512 of its response, rebuilt in three ways: decoded
// again token by token, replayed in one parallel pass from its recorded states, and in three passes
// from its tokens alone. The first two give the same states and cache. The quotients are what
// recording the states, or replaying, saves.
constexpr int kPrompt = 1, kReplayed = 512;

void report_replay(const Case& c, Untrained& u, Report& report) {
    std::mt19937 random(1);
    const Tokens tokens = random_tokens(kPrompt + kReplayed, c.model.vocab_size, random);
    const auto seconds = [&](const std::function<void()>& rebuild) {
        return median_seconds([&] {
            rebuild();
            u.context.synchronize();
        });
    };
    const tensor::Tensor states = core::decode_known(u.model, tokens, kPrompt, Mode::soft).hidden;
    const double decoded =
        seconds([&] { core::decode_known(u.model, tokens, kPrompt, Mode::soft); });
    const double recorded =
        seconds([&] { core::replay_recorded(u.model, tokens, kPrompt, Mode::soft, states); });
    const double passes = seconds([&] {
        core::Replay replay(u.model, tokens, kPrompt, Mode::soft);
        replay.run({.passes = 3});
        replay.trace();
    });
    const std::string name = "replay of " + std::to_string(kReplayed) + " tokens, soft, ";
    report.add(c, name + "recorded states", kReplayed / recorded, "token/s");
    report.add(c, name + "three passes", kReplayed / passes, "token/s");
    report.add(c, "decoding again / recorded states, time", decoded / recorded, "");
    report.add(c, "decoding again / three passes, time", decoded / passes, "");
}

bool same_bits(const tensor::Tensor& a, const tensor::Tensor& b) {
    const auto x = a.to_double(), y = b.to_double();
    return x.size() == y.size() && std::memcmp(x.data(), y.data(), x.size() * sizeof(x[0])) == 0;
}

// Throws if prefill, decoding and replay differ: that they do the same work is what makes their
// times comparable.
void check(const Case& c, Untrained& u) {
    constexpr int kChecked = 70;  // positions at most: beyond one split of keys
    std::mt19937 random(1);
    const Tokens tokens =
        random_tokens(std::min(c.model.context, kChecked), c.model.vocab_size, random);
    const auto need = [](bool same, const std::string& what) {
        if (!same)
            throw tensor::Error(tensor::ErrorKind::internal, what + " differ, nothing was timed");
    };
    for (Mode mode : {Mode::standard, Mode::soft}) {
        const core::Trace decoded = core::decode_known(u.model, tokens, kPrompt, mode);
        const core::Trace replayed =
            core::replay_recorded(u.model, tokens, kPrompt, mode, decoded.hidden);
        bool same = same_bits(decoded.hidden, replayed.hidden);
        for (size_t l = 0; l < decoded.keys.size(); ++l)
            same = same && same_bits(decoded.keys[l], replayed.keys[l]) &&
                   same_bits(decoded.values[l], replayed.values[l]);
        need(same, "replay and decoding in mode " + to_string(mode));
        if (mode != Mode::standard) continue;
        std::vector<tensor::Tensor> states;
        core::Decoder(u.model, mode).prefill({tokens}, &states);
        need(same_bits(decoded.hidden, states[0]), "prefill and decoding");
    }
}

int run_all() {
    std::vector<Case> cases;
    for (const std::string& shape : options.shapes)
        for (const std::string& dtype : options.dtypes)
            cases.emplace_back(shape, dtype == "bf16" ? DType::bf16 : DType::f32);
    if (!options.json)
        std::printf("%s, --device %s, --threads %d\n\n", processor_name().c_str(),
                    options.device.c_str(), options.threads);
    Report report;
    for (const Case& c : cases)
        if (c.tokens_per_step > 0 && c.on_cpu() && c.wants("memory")) report_memory(c, report);
    for (const Case& c : cases) {
        const bool decode = c.wants("decode"), prefill = c.wants("prefill"),
                   replay = c.wants("replay"), serve = c.wants("serve");
        if (decode || prefill || replay || serve) {
            Untrained u(c);
            check(c, u);
            if (decode) report_decoding(c, u, report);
            if (serve) report_serving(c, u, report);
            if (prefill) report_prefill(c, u, report);
            if (replay) report_replay(c, u, report);
        }
        if (c.tokens_per_step > 0 && c.wants("train")) report_training(c, report);
    }
    if (options.json)
        std::printf("%s\n", nlohmann::json({{"processor", processor_name()},
                                            {"device", options.device},
                                            {"threads", options.threads},
                                            {"rows", report.rows()}})
                                .dump(1)
                                .c_str());
    return 0;
}

}  // namespace
}  // namespace fbt::bench

int main(int argc, char** argv) {
    using fbt::bench::options;
    CLI::App app("Training steps, decoding, prefill and replay, timed (bench/README.md).");
    app.option_defaults()->always_capture_default();
    app.add_option("filter", options.filters,
                   "regular expressions over shape/dtype/section; the sections are memory, decode, "
                   "serve, prefill, replay, train");
    app.add_option("--shape", options.shapes, "of bench/shapes/ or apps/presets/")
        ->delimiter(',')
        ->allow_extra_args(false);
    app.add_option("--dtype", options.dtypes, "f32, bf16 or both")
        ->delimiter(',')
        ->allow_extra_args(false)
        ->check(CLI::IsMember({"f32", "bf16"}));
    app.add_option("--device", options.device, "cpu or cuda");
    app.add_option("--threads", options.threads, "of the CPU")->check(CLI::PositiveNumber);
    app.add_flag("--fast-matmul", options.fast_matmul, "train with cuBLASLt's products");
    app.add_flag("--json", options.json, "one JSON document instead of tables");
    try {
        app.parse(argc, argv);
        return fbt::bench::run_all();
    } catch (const CLI::ParseError& e) {
        return app.exit(e) == 0 ? 0 : 2;
    } catch (const std::invalid_argument& e) {
        std::fprintf(stderr, "step_bench: %s\n", e.what());
        return 2;
    } catch (const std::regex_error& e) {
        std::fprintf(stderr, "step_bench: a filter is no regular expression: %s\n", e.what());
        return 2;
    } catch (const fbt::tensor::Error& e) {
        std::fprintf(stderr, "step_bench: %s\n", e.what());
        return 5;
    }
}
