// fbt train: settings, progress, metrics, checkpoints, signals around engine::Trainer.
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <optional>

#include "apps/command.h"
#include "apps/corpus.h"
#include "apps/embedded.h"
#include "apps/job.h"
#include "apps/metrics.h"
#include "apps/report.h"
#include "apps/scale.h"
#include "apps/signals.h"
#include "apps/watch.h"
#include "model/engine/trainer.h"
#include "tensor/file.h"

namespace fbt::apps {
namespace {

namespace core = model::core;
namespace engine = model::engine;
namespace fs = std::filesystem;
using nlohmann::json;
using tensor::Error;
using tensor::ErrorKind;

class Train {
  public:
    explicit Train(CLI::App& app);
    int run();

  private:
    // Runs what writes reports, where they are still written.
    using Report = std::function<void(const std::function<void()>&)>;
    int train(Job& job, Console& console, const StopSignals& stop);
    void read_settings(const std::optional<std::string>& checkpoint);
    void compare_with(const std::string& checkpoint) const;
    void check_alike(Job& job, int64_t step) const;
    void describe(Console& console, const engine::MemoryPlan& plan) const;
    std::string line(const Console& console, const engine::StepReport& report,
                     double mean_ms) const;
    json evaluate(const Job& job, Console& console, const StopSignals& stop, core::Model& model,
                  const Corpus& corpus, int64_t step, Watch& watch,
                  std::optional<Verdict::Kind>& said, const Report& report) const;
    void take_vocabulary(const Corpus& corpus);
    int loop(Job& job, Console& console, const StopSignals& stop, const Corpus& corpus,
             core::Model& model, engine::Trainer& trainer) const;
    int plan(Console& console);
    json summary(int64_t step, const std::string& checkpoint) const;
    int longest() const { return *std::max_element(length_.begin(), length_.end()); }
    int64_t end() const {
        return stop_after_ > 0 ? std::min(stop_after_, train_.steps) : train_.steps;
    }
    bool is_due(int64_t every, int64_t step) const {
        return step == train_.steps || (every > 0 && step % every == 0);
    }

    Settings settings_;
    Machine machine_;
    core::Config model_;
    engine::TrainConfig train_;
    std::string data_, task_, tokenizer_, schedule_ = "75:1,22:2,3:3";
    std::string preset_, config_, out_;
    int keep_last_ = 3, eval_passes_ = 0;
    std::vector<int> length_, test_lengths_;
    int64_t memory_mib_ = 0, save_every_ = 100, log_every_ = 1, eval_every_ = 0, stop_after_ = 0;
    int64_t eval_sequences_ = 256;
    double comm_timeout_ = 300;
    bool resume_ = false, reproducible_ = false;
    ScalePlan scale_;
};

// The one table of settings. What a run keeps is in the sections "model" and "train"; a resumed run
// may change the changeable ones only.
Train::Train(CLI::App& app) {
    Settings& s = settings_;
    s.section("model");
    model_.vocab_size = 0;
    s.add("vocab_size", &model_.vocab_size, "vocabulary V; 0: the data's").at_least(0);
    s.add("dim", &model_.dim, "width D").at_least(1);
    s.add("layers", &model_.layers, "blocks L").at_least(1);
    s.add("heads", &model_.heads, "query heads H").at_least(1);
    s.add("kv_heads", &model_.kv_heads, "key and value heads G, a divisor of H").at_least(1);
    s.add("head_dim", &model_.head_dim, "head width C, even").at_least(2).at_most(256);
    s.add("ffn_dim", &model_.ffn_dim, "feed-forward width F").at_least(1);
    s.add("context", &model_.context, "longest sequence, in tokens").at_least(1);
    s.add("window", &model_.window, "sliding window of the layers that are not full").at_least(1);
    s.add("full_attention_every", &model_.full_attention_every,
          "each layer of this number has full attention, and the last")
        .at_least(1);
    s.add("rope_theta", &model_.rope_theta, "base of the rotary embedding").above(0);
    s.add("norm_eps", &model_.norm_eps, "epsilon of all RMSNorms").above(0);
    s.add("residual_scale", &model_.residual_scale, "of each branch; 0: 1/sqrt(2L)").at_least(0);
    s.add("fusion", &model_.fusion, "gated_product, concat_projection or linear_addition");

    s.section("train");
    s.add("data", &data_, "data folder (fbt data makes one)");
    s.add("task", &task_, "generated task instead of data: " + task_list());
    s.add("length", &length_,
          "length of a task's sequences, or several to draw each from; none: the context")
        .at_least(1);
    s.add("test_lengths", &test_lengths_,
          "lengths at which fbt eval decodes a task; none: 1, 2 and 4 times the longest --length")
        .at_least(1)
        .at_most(1 << 24)
        .changeable();
    s.add("tokenizer", &tokenizer_, "the data's tokenizer").derived = true;
    s.add("steps", &train_.steps, "updates in all").at_least(1);
    s.add("tokens_per_step", &train_.tokens_per_step, "at most, packed from whole sequences")
        .at_least(1);
    s.add("schedule", &schedule_,
          "passes of each step: phases SHARE:PASSES, or SHARE:PASSES@WEIGHT+PASSES@WEIGHT");
    s.add("feedback_weight", &train_.feedback_weight, "lambda in L_1 + lambda*mean(L_2..L_K)")
        .at_least(0);
    s.add("z_weight", &train_.z_weight, "of the z-loss").at_least(0);
    s.add("jitter", &train_.jitter, "half-width of the noise on carried states").at_least(0);
    s.add("mixin", &train_.mixin, "keep a random plain prefix in feedback passes");
    s.add("learning_rate", &train_.learning_rate, "at its highest").above(0);
    s.add("fusion_rate", &train_.fusion_rate,
          "factor of the learning rate for the fusion's matrices")
        .above(0);
    s.add("warmup", &train_.warmup, "steps until the highest learning rate").at_least(0);
    s.add("decay", &train_.decay, "share of the steps, at the end, that falls to 0")
        .at_least(0)
        .at_most(1);
    s.add("beta1", &train_.adamw.beta1, "AdamW's first decay").at_least(0).at_most(1);
    s.add("beta2", &train_.adamw.beta2, "AdamW's second decay").at_least(0).at_most(1);
    s.add("adam_eps", &train_.adamw.eps, "AdamW's epsilon").above(0);
    s.add("weight_decay", &train_.adamw.weight_decay, "of matrices and the embedding").at_least(0);
    s.add("clip_norm", &train_.adamw.clip_norm, "of the whole gradient; 0: none").at_least(0);
    s.add("seed", &train_.seed, "of every random draw");
    s.add("fast_matmul", &train_.fast_matmul,
          "CUDA: train with cuBLASLt's products, which do not keep the row rule")
        .changeable();
    s.add("zero", &train_.zero,
          "ZeRO's stage among several ranks: 1 shares masters and moments out, 0 keeps all "
          "everywhere; the results are the same")
        .at_least(0)
        .at_most(1)
        .changeable();
    s.add("reproducible", &reproducible_,
          "several GPUs: sum in the order of the ranks, so that runs repeat bit for bit; several "
          "CPUs always do")
        .changeable();
    s.add("max_skipped", &train_.max_skipped, "non-finite steps in a row before giving up")
        .at_least(1);
    s.add("memory_budget", &memory_mib_, "MiB; blocks are recomputed if they do not fit; 0: none")
        .at_least(0)
        .at_most(1 << 30)
        .changeable();
    s.add("save_every", &save_every_, "steps between checkpoints; 0: at the end only")
        .at_least(0)
        .changeable();
    s.add("keep_last", &keep_last_, "checkpoints that stay").at_least(1).changeable();
    s.add("log_every", &log_every_, "steps between lines on the console").at_least(1).changeable();
    s.add("eval_every", &eval_every_, "steps between evaluations; 0: at the end only")
        .at_least(0)
        .changeable();
    s.add("eval_passes", &eval_passes_,
          "passes of an evaluation; 0: two more than the schedule's most, or one without feedback")
        .at_least(0)
        .at_most(1000000)
        .changeable();
    s.add("eval_sequences", &eval_sequences_, "sequences of an evaluation")
        .at_least(1)
        .changeable();
    machine_.declare(s);

    std::string names;
    for (const auto& [name, text] : embedded_presets()) names += (names.empty() ? "" : ", ") + name;
    s.add("preset", &preset_, "settings by name: " + names);
    s.add("config", &config_,
          "settings from a JSON file; they win over the preset, flags over both");
    s.add("out", &out_, "folder of the run: checkpoints, metrics.jsonl, tokenizer");
    s.add("resume", &resume_, "go on from the run's newest checkpoint, with its settings");
    s.add("stop_after", &stop_after_, "save and leave after this step; 0: go to the end")
        .at_least(0);
    s.add("comm_timeout", &comm_timeout_,
          "seconds that a rank waits for the others before it ends them all")
        .at_least(1)
        .at_most(1e6);
    scale_.declare(s);
    s.bind(app);
}

// Defaults (of a resumed run: the checkpoint's settings) < preset < --config < flags.
void Train::read_settings(const std::optional<std::string>& checkpoint) {
    if (checkpoint)
        settings_.take_json(core::load_config(*checkpoint), *checkpoint + "/config.json",
                            ErrorKind::bad_file);
    if (!preset_.empty()) {
        const auto presets = embedded_presets();
        const auto preset = presets.find(preset_);
        if (preset == presets.end()) {
            std::string names;
            for (const auto& [name, text] : presets) names += (names.empty() ? "" : ", ") + name;
            throw Error(ErrorKind::usage, "--preset " + tensor::in_quotes(preset_) +
                                              " is unknown; there are " + names);
        }
        settings_.take_json(json::parse(preset->second), "preset " + preset_);
    }
    if (!config_.empty()) {
        json document;
        try {
            document = json::parse(tensor::read_file(config_));
        } catch (const json::exception& e) {
            throw Error(ErrorKind::bad_file, config_ + " is not JSON: " + e.what());
        }
        settings_.take_json(document, config_);
    }
    settings_.take_flags();

    // A source that is named here replaces one of a preset.
    if (settings_.given("data") && !settings_.given("task")) task_.clear();
    if (settings_.given("task") && !settings_.given("data")) data_.clear();
    if (!data_.empty()) data_ = fs::weakly_canonical(data_).string();
    if (!is_utf8(data_))  // below a folder of such a name
        throw Error(ErrorKind::usage, "--data is " + tensor::in_quotes(data_) +
                                          ", needed a path in UTF-8, to be kept with the run");
    train_.schedule = core::PassSchedule::parse(schedule_);
    train_.memory_budget = memory_mib_ << 20;
    for (const char* key : {"length", "test_lengths"})
        if (settings_.given(key) && !data_.empty())
            throw Error(ErrorKind::usage,
                        "--length and --test-lengths are for tasks; sequences of text are as long "
                        "as the --context");
    if (length_.empty() || !data_.empty()) length_ = {model_.context};
    if (longest() > model_.context)
        throw Error(ErrorKind::usage, "--length " + list_text(length_) +
                                          " is more than the context of " +
                                          std::to_string(model_.context));
    if (train_.adamw.beta1 >= 1 || train_.adamw.beta2 >= 1)
        throw Error(ErrorKind::usage, "--beta1 and --beta2 must be below 1");
}

// A run goes on with the settings that it began with, or it would be another run.
void Train::compare_with(const std::string& checkpoint) const {
    const json before = core::load_config(checkpoint);
    for (const Setting& setting : settings_.all()) {
        if (setting.section.empty() || setting.may_change) continue;
        const json& keys = before.at(setting.section);
        const auto was = keys.find(setting.key);
        if (was != keys.end() && *was != setting.value())
            throw Error(ErrorKind::usage, "cannot resume with another " + setting.key + ": " +
                                              checkpoint + " has " + was->dump() + ", now it is " +
                                              setting.value().dump() +
                                              "; leave it out, or start another run with --out");
    }
}

void Train::describe(Console& console, const engine::MemoryPlan& plan) const {
    for (const char* section : {"model", "train"}) {
        std::string text = section;
        for (const Setting& setting : settings_.all()) {
            if (setting.section != section) continue;
            const std::string value = setting.text();
            if (value.empty()) continue;
            const std::string item = setting.key + " " + value;
            const size_t line_start = text.rfind('\n') + 1;  // 0 without one
            text += text.size() - line_start + item.size() > 96 ? "\n  " : " | ";
            text += item;
        }
        console.line(text);
    }
    console.line("memory plan: " + engine::to_string(plan));
}

// step 12/500 | L1 3.141 L2 3.120 | norm 0.93 | lr 3.0e-04 | 41 ms | 198k tok/s | eta 2m
std::string Train::line(const Console& console, const engine::StepReport& report,
                        double mean_ms) const {
    std::string text = format("step %lld/%lld |", static_cast<long long>(report.step),
                              static_cast<long long>(train_.steps));
    for (size_t k = 0; k < report.pass_loss.size(); ++k)
        text += format(" L%zu %.3f", k + 1, report.pass_loss[k]);
    if (report.spread > 0) text += format(" | spread %.0f %%", 100 * report.spread);
    text += format(" | norm %.2f | lr %.1e | %.0f ms | %s tok/s | eta %s", report.norm,
                   report.learning_rate, report.milliseconds,
                   short_count(double(report.tokens) * 1000 / report.milliseconds).c_str(),
                   short_time(mean_ms * double(train_.steps - report.step) / 1000).c_str());
    if (report.skipped) text += console.paint(Colour::yellow, " | not finite: update skipped");
    return text;
}

json row_of(const engine::StepReport& report, int ranks) {
    json row = {{"step", report.step},        {"passes", report.passes},
                {"loss/total", report.total}, {"norm", report.norm},
                {"lr", report.learning_rate}, {"tokens", report.tokens},
                {"ms", report.milliseconds},  {"ranks", ranks}};
    if (ranks > 1) row["spread"] = report.spread;
    for (size_t k = 0; k < report.pass_loss.size(); ++k)
        row["loss/pass_" + std::to_string(k + 1)] = report.pass_loss[k];
    if (report.skipped) row["skipped"] = true;
    return row;
}

// The row of the evaluation; null when a signal ended it early. `said` is the last verdict that was
// printed.
json Train::evaluate(const Job& job, Console& console, const StopSignals& stop, core::Model& model,
                     const Corpus& corpus, int64_t step, Watch& watch,
                     std::optional<Verdict::Kind>& said, const Report& report) const {
    // Whether iterating holds is seen beyond the passes that were trained.
    const int most = train_.schedule.max_passes();
    const int passes = eval_passes_ > 0 ? eval_passes_ : most > 1 ? most + 2 : 1;
    const PassReport result = report_passes(
        model, corpus,
        corpus.validation(length_, train_.seed, eval_sequences_,
                          std::max<int64_t>(train_.tokens_per_step / job.size(), longest())),
        passes, train_.seed, false, [&] { return stop.requested(); }, &job);
    if (result.stopped) return nullptr;
    json row = {{"step", step}};
    std::string text = format("step %lld/%lld | validation", static_cast<long long>(step),
                              static_cast<long long>(train_.steps));
    for (const core::PassResult& pass : result.passes) {
        row["val/pass_" + std::to_string(pass.pass)] = pass.loss;
        text += format(" L%d %.4f", pass.pass, pass.loss);
    }
    const core::PassResult& last =
        eval_passes_ > 0 ? result.passes.back() : result.passes[most - 1];
    text += corpus.is_text()
                ? format(" | bits/byte at L%d %.4f", last.pass, result.bits_per_byte(last))
                : format(" | accuracy at L%d %.2f %%", last.pass, 100 * last.accuracy);
    report([&] { console.line(text); });
    if (most > 1) {
        const Verdict verdict = watch.judge(result.passes, step);
        row["watch"] = verdict.row();
        if (verdict.kind != Verdict::Kind::early &&
            (said != verdict.kind || step == train_.steps)) {
            said = verdict.kind;
            report([&] {
                console.line(
                    console.paint(verdict.bad() ? Colour::yellow : Colour::none, verdict.text()));
            });
        }
    }
    return row;
}

void Train::take_vocabulary(const Corpus& corpus) {
    if (model_.vocab_size != 0 && model_.vocab_size != corpus.vocab_size())
        throw Error(ErrorKind::usage, "vocab_size is " + std::to_string(model_.vocab_size) +
                                          ", but the data's vocabulary has " +
                                          std::to_string(corpus.vocab_size()) +
                                          "; --vocab-size 0 takes the data's");
    model_.vocab_size = corpus.vocab_size();
    model_.validate();
}

json Train::summary(int64_t step, const std::string& checkpoint) const {
    return {{"run", out_},
            {"step", step},
            {"steps", train_.steps},
            {"finished", step >= train_.steps},
            {"checkpoint", checkpoint}};
}

// Steps, evaluations and checkpoints, in this order within a step: what metrics.jsonl holds up to a
// checkpoint's step is then all that an uninterrupted run would have written. All ranks walk
// through it alike; the leading one reports.
int Train::loop(Job& job, Console& console, const StopSignals& stop, const Corpus& corpus,
                core::Model& model, engine::Trainer& trainer) const {
    // A data folder may have no validation split; that is no reason to lose a training at its end.
    const bool can_evaluate = corpus.validation(length_, train_.seed, 1, longest())().has_value();
    if (!can_evaluate) console.warn("the data has no validation sequences: no evaluations");

    const int64_t start = trainer.step();
    int64_t saved = start > 0 ? start : -1;
    std::optional<Metrics> metrics;
    job.together([&] {
        if (job.leads()) metrics.emplace(out_ + "/metrics.jsonl", start);
    });
    const auto save = [&] {
        job.together([&] {
            if (metrics) metrics->sync();
        });
        job.together([&] { trainer.save(out_, settings_.to_json(), keep_last_); });
        saved = trainer.step();
    };
    // Nowhere to write reports to is no reason to lose what was trained.
    std::optional<Error> lost;
    const Report report = [&](const std::function<void()>& write) {
        if (!metrics || lost) return;
        try {
            write();
        } catch (const Error& error) {
            if (error.kind() != ErrorKind::environment) throw;
            lost = error;
        }
    };
    double mean_ms = 0;  // of the recent steps, for the time that is left
    json last, validation;
    bool cut_short = false;  // a signal ended an evaluation
    Watch watch(train_.schedule, train_.steps, train_.seed);
    std::optional<Verdict::Kind> said;
    const auto evaluate_if_due = [&] {
        if (!can_evaluate || !is_due(eval_every_, trainer.step())) return;
        validation =
            evaluate(job, console, stop, model, corpus, trainer.step(), watch, said, report);
        cut_short = validation.is_null();
        if (!cut_short) report([&] { metrics->append(validation); });
    };
    // What was stopped during an evaluation begins with it.
    const bool evaluated = metrics && metrics->last_kept().contains("val/pass_1") &&
                           metrics->last_kept().at("step") == start;
    if (start > 0 && !job.any(evaluated)) evaluate_if_due();
    while (trainer.step() < end() && !job.any(stop.requested() || lost)) {
        const engine::StepReport step = trainer.advance();
        mean_ms = mean_ms == 0 ? step.milliseconds : 0.95 * mean_ms + 0.05 * step.milliseconds;
        last = row_of(step, job.size());
        report([&] {
            metrics->append(last);
            if (step.skipped || step.step == start + 1 || is_due(log_every_, step.step))
                console.line(line(console, step, mean_ms));
        });
        evaluate_if_due();
        if (is_due(save_every_, step.step) && !job.any(lost.has_value())) save();
    }
    if (job.any(lost.has_value())) {
        std::string where;
        if (saved != trainer.step()) {
            try {
                job.together([&] { trainer.save(out_, settings_.to_json(), keep_last_); });
                where = "; saved " + core::newest_checkpoint(out_).value_or(out_);
            } catch (const Error&) {
                // Whatever came first is most likely the reason.
            }
        }
        job.together([&] {
            if (lost) throw Error(lost->kind(), lost->what() + where);
        });
    }
    if (saved != trainer.step()) save();

    const bool stopped = trainer.step() < end() || cut_short;
    if (job.leads()) {
        const std::string checkpoint = *core::newest_checkpoint(out_);
        console.line((stopped ? "stopped by a signal; saved " : "saved ") + checkpoint +
                     (stopped && trainer.step() < train_.steps ? "; --resume goes on" : ""));
        json result = summary(trainer.step(), checkpoint);
        result["last"] = last;
        result["validation"] = validation;
        console.result(result);
    }
    return stopped ? kStopped : kDone;
}

// Ranks of different programs' settings, or of different folders, would train nonsense together.
void Train::check_alike(Job& job, int64_t step) const {
    std::string text;
    for (const Setting& setting : settings_.all())
        if (!setting.section.empty() && !setting.derived) text += setting.text() + '\n';
    text += std::to_string(end());
    const double mine[] = {double(step),
                           double(tensor::hash(tensor::bytes_of(text)) >> 12)};  // exact in double
    std::vector<double> first(2, 0);
    if (job.leads()) first.assign(mine, mine + 2);
    first = job.sum(first);
    job.together([&] {
        if (mine[1] != first[1])
            throw Error(ErrorKind::usage,
                        "has other settings than rank 0; give every rank the same command");
        if (mine[0] != first[0])
            throw Error(ErrorKind::bad_file,
                        "finds step " + std::to_string(step) + " in " + out_ +
                            ", but rank 0 step " + std::to_string(int64_t(first[0])) +
                            "; the run's folder must be the same for all ranks");
    });
}

int Train::plan(Console& console) {
    read_settings(std::nullopt);
    if (model_.vocab_size == 0 && data_.empty() && task_.empty())
        throw Error(ErrorKind::usage,
                    "--plan needs the size of the vocabulary: --vocab-size, --data or --task");
    if (model_.vocab_size == 0) take_vocabulary(Corpus(data_, task_));
    model_.validate();
    return scale_.run(console, model_, machine_.dtype, train_, longest(), train_.zero);
}

int Train::run() {
    const StopSignals stop;
    const Launch launch = Launch::from_environment();
    std::optional<Error> wrong;  // every rank finds it out, one says it
    try {
        settings_.take_flags();  // which preset, which run
        scale_.check(settings_);
    } catch (const Error& e) {
        wrong = e;
    }
    Console console(machine_.json, launch.rank > 0, launch.size > 1);
    if (scale_.asked && !wrong) return plan(console);
    Job job(launch, comm_timeout_);
    return job.run([&] {
        job.join();
        job.together([&] {
            if (wrong) throw *wrong;
        });
        return train(job, console, stop);
    });
}

int Train::train(Job& job, Console& console, const StopSignals& stop) {
    std::optional<std::string> newest;
    int64_t start = 0;
    job.together([&] {
        if (out_.empty())
            throw Error(ErrorKind::usage, "--out RUN is needed: the folder of the run");
        newest = core::newest_checkpoint(out_);
        if (newest && !resume_)
            throw Error(ErrorKind::usage, out_ + " already holds " +
                                              fs::path(*newest).filename().string() +
                                              "; add --resume to go on, or name another --out");
        read_settings(newest);
        job.check_device(machine_.device);
        if (!newest) return;
        compare_with(*newest);
        start = core::load_state(*newest).step;
    });
    const bool talked = job.talks();
    if (talked) check_alike(job, start);
    if (newest && start >= end()) {
        console.line(format("%s %s: step %lld of %lld; nothing to do", out_.c_str(),
                            start >= train_.steps ? "is finished" : "is that far already",
                            static_cast<long long>(start), static_cast<long long>(train_.steps)));
        console.result(summary(start, *newest));
        return kDone;
    }

    // The device and the plan before the folder: where they cannot do what is asked, nothing is
    // left behind.
    std::optional<Corpus> corpus;
    std::optional<tensor::Context> context;
    std::optional<core::Model> model;
    engine::MemoryPlan plan;
    job.together([&] {
        const tensor::DType dtype = machine_.checked_dtype();
        corpus.emplace(data_, task_);
        take_vocabulary(*corpus);
        corpus->check_lengths(length_);
        if (!test_lengths_.empty()) corpus->check_lengths(test_lengths_);
        if (const int longest = corpus->longest(length_); longest > train_.tokens_per_step)
            throw Error(ErrorKind::usage,
                        "--tokens-per-step is " + std::to_string(train_.tokens_per_step) +
                            ", but there are sequences of " + std::to_string(longest) +
                            " tokens; raise it, or lower the " +
                            (corpus->is_text() ? "--context" : "--length"));
        context.emplace(machine_.device, job.launch().threads(machine_.threads),
                        job.launch().local_rank);
        model.emplace(*context, model_, dtype);
        plan = engine::plan_memory(*model, train_, job.size());
        context->arena()->set_plan(engine::to_string(plan));
        context->set_fast_matmul(train_.fast_matmul);
        context->set_fast_matmul(false);  // until a step wants it
    });
    std::shared_ptr<tensor::Communicator> ranks;
    job.together([&] { ranks = job.connect(*context, reproducible_); });
    if (!talked) check_alike(job, start);
    const auto source = corpus->training(length_, train_.seed);
    std::optional<engine::Trainer> trainer;
    job.together([&] {
        if (job.leads()) {
            std::error_code error;
            fs::create_directories(out_, error);
            if (error)
                throw Error(ErrorKind::environment,
                            "cannot make the folder " + out_ + ": " + error.message());
            if (corpus->is_text()) tokenizer_ = corpus->tokenizer().save(out_);
        }
        describe(console, plan);
        std::string where = format("%s parameters on %s, %d threads",
                                   short_count(double(model->parameters().count())).c_str(),
                                   machine_.device.c_str(), context->threads());
        if (job.size() > 1)
            where += format(", in each of %d ranks over %s", job.size(), ranks->name());
        console.line(where);
        trainer.emplace(*model, *source, train_, plan.recompute, ranks);
        if (newest) {
            trainer->load(*newest);
            console.line("resumed from " + *newest);
        } else if (resume_) {
            console.line(out_ + " holds no complete checkpoint: starting at step 0");
        }
    });
    return loop(job, console, stop, *corpus, *model, *trainer);
}

}  // namespace

Run add_train(CLI::App& app) {
    CLI::App* command = app.add_subcommand(
        "train", "Train a model with multi-pass feedback on text or on a generated task");
    auto train = std::make_shared<Train>(*command);
    return [train] { return train->run(); };
}

}  // namespace fbt::apps
