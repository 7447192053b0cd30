// fbt generate: prompts in, text on stdout as it comes, rollouts into files.
#include <algorithm>
#include <charconv>
#include <filesystem>
#include <memory>

#include "apps/command.h"
#include "apps/rollouts.h"
#include "apps/run_folder.h"
#include "apps/signals.h"
#include "model/core/checkpoint.h"
#include "model/core/replay.h"
#include "tensor/file.h"

namespace fbt::apps {
namespace {

namespace core = model::core;
namespace engine = model::engine;
namespace fs = std::filesystem;
using engine::Rollout;
using nlohmann::json;
using tensor::Error;
using tensor::ErrorKind;

class Generate {
  public:
    explicit Generate(CLI::App& app);
    int run();

  private:
    // A sequence that is asked for: its request, how it is shown, and its numbers in the file.
    struct Job {
        engine::Request request;
        std::string prompt;
        int sample = 0;
        json settings;      // of its sampling, for the file
        Rollout before;     // that it goes on with
        bool done = false;  // nothing can follow that
        int64_t id = -1;    // in the engine
        Rollout rollout;
    };

    static std::string name_of(const Job& job);
    static std::string shown_prompt(const Job& job, const Loaded& loaded);
    void check_flags() const;
    std::vector<std::string> prompt_texts() const;
    std::vector<int32_t> tokens_of(const std::string& prompt, const Loaded& loaded) const;
    engine::Request request_of(int prompt, core::Mode mode, const Loaded& loaded) const;
    std::vector<Job> new_jobs(const std::vector<std::string>& texts, const Loaded& loaded) const;
    std::vector<Job> continued_jobs(Console& console, const Loaded& loaded,
                                    const engine::ShouldStop& should_stop);
    void take_states(engine::Request& request, const Rollout& before, const Loaded& loaded,
                     const engine::ShouldStop& should_stop) const;
    bool compare_with_exact(Console& console, std::vector<Job>& jobs, const Loaded& loaded,
                            const engine::ShouldStop& should_stop) const;
    int report(Console& console, std::vector<Job>& jobs, const Loaded& loaded,
               const engine::Engine::Counts& counts, bool interrupted, bool signalled) const;

    Settings settings_;
    Machine machine_;
    std::string checkpoint_, prompt_, prompts_, continue_, mode_ = "soft", out_;
    int tokens_ = 200, samples_ = 1, top_k_ = 0, passes_ = 3, sequences_ = 64, pages_ = 0;
    double temperature_ = 0.8, top_p_ = 1;
    uint64_t seed_ = 1;
    bool states_ = false, cache_ = false;
};

Generate::Generate(CLI::App& app) {
    Settings& s = settings_;
    s.add("checkpoint", &checkpoint_,
          "a run (its newest checkpoint), or one step_... folder of it");
    s.add("prompt", &prompt_, "text; of a task's run: token ids with spaces between").any_bytes =
        true;
    s.add("prompts", &prompts_, "file of prompts, one a line, or .jsonl with a \"prompt\" each");
    s.add("continue", &continue_,
          "file of rollouts to go on with: --tokens more of each, with its own mode, settings and "
          "seed, from its recorded states, or else from its tokens by --passes");
    s.add(
         "passes", &passes_,
         "of replay, from which --continue goes on where no states were recorded or this is given; "
         "says how many tokens agree with exact decoding")
        .at_least(2);
    s.add("mode", &mode_, "standard, soft (the response carries states) or fused (the prompt too)");
    s.add("tokens", &tokens_, "tokens to sample, at most").at_least(1);
    s.add("samples", &samples_, "of each prompt").at_least(1).at_most(1 << 16);
    s.section("sampling");
    s.add("temperature", &temperature_, "0: the most probable token")
        .at_least(0)
        .at_most(1e30);  // within float, in which the logits are divided by it
    s.add("top_k", &top_k_, "sample among the k most probable only; 0: all").at_least(0);
    s.add("top_p", &top_p_, "sample among the fewest whose probability reaches this")
        .at_least(1e-30)  // within float, where less would become 0
        .at_most(1);
    s.add("seed", &seed_, "of the samples");
    s.section("");
    s.add("out", &out_, "file for the rollouts, FILE.jsonl");
    s.add("states", &states_, "keep top states in FILE.safetensors beside it, for replay");
    s.add("cache", &cache_, "keep the keys and values there too");
    s.add("sequences", &sequences_, "decoded at once, at most").at_least(1).at_most(1 << 16);
    s.add("pages", &pages_,
          "of 64 positions each, that the cache may hold; the youngest sequences wait while they "
          "are too few (0: as many as needed)")
        .at_least(0)
        .at_most(1 << 24);
    machine_.declare(s);
    s.bind(app);
}

constexpr int kRows = 1024;  // of a call of the engine

// A sampled token as it is streamed; `first` of its response.
std::string text_of(int32_t token, bool first, const Loaded& loaded) {
    if (loaded.tokenizer) return loaded.tokenizer->piece(token);
    return (first ? "" : " ") + std::to_string(token);
}

std::string text_of(std::span<const int32_t> tokens, const Loaded& loaded) {
    std::string text;
    if (loaded.tokenizer) {
        model::data::Utf8Stream utf8;
        text = utf8.push(loaded.tokenizer->decode(tokens));
        return text + utf8.finish();
    }
    for (int32_t token : tokens) text += (text.empty() ? "" : " ") + std::to_string(token);
    return text;
}

std::string Generate::name_of(const Job& job) {
    return "prompt " + std::to_string(job.request.prompt + 1) + ", sample " +
           std::to_string(job.sample + 1);
}

// Before its response.
std::string Generate::shown_prompt(const Job& job, const Loaded& loaded) {
    return job.prompt + (loaded.tokenizer ? "" : " | ");
}

std::vector<std::string> Generate::prompt_texts() const {
    if (settings_.given("prompt")) {
        if (prompt_.empty())
            throw Error(ErrorKind::usage, "--prompt is empty; expected at least one character");
        return {prompt_};
    }
    std::vector<std::string> out;
    const std::string text = tensor::read_file(prompts_);
    for (size_t at = 0; at < text.size();) {
        const size_t end = std::min(text.find('\n', at), text.size());
        std::string line = text.substr(at, end - at);
        at = end + 1;
        const std::string where = prompts_ + " line " + std::to_string(out.size() + 1);
        if (prompts_.ends_with(".jsonl")) {
            const json row = json::parse(line, nullptr, false);
            if (!row.is_object() || !row.contains("prompt") || !row["prompt"].is_string())
                throw Error(ErrorKind::bad_file,
                            where + " is not a JSON object with a \"prompt\" string: " +
                                tensor::in_quotes(line));
            line = row["prompt"].get<std::string>();
        }
        if (line.empty()) throw Error(ErrorKind::bad_file, where + " is an empty prompt");
        out.push_back(line);
    }
    if (out.empty()) throw Error(ErrorKind::bad_file, prompts_ + " holds no prompt");
    return out;
}

// A document begins with the boundary token, and so does a prompt. Tasks have neither.
std::vector<int32_t> Generate::tokens_of(const std::string& prompt, const Loaded& loaded) const {
    std::vector<int32_t> tokens;
    if (loaded.tokenizer) {
        tokens = loaded.tokenizer->encode(prompt);
        tokens.insert(tokens.begin(), loaded.tokenizer->boundary());
        return tokens;
    }
    const char* at = prompt.data();
    const char* const end = at + prompt.size();
    while (at != end) {
        if (*at == ' ') {
            ++at;
            continue;
        }
        int32_t token = 0;
        const auto [stop, error] = std::from_chars(at, end, token);
        if (error != std::errc() || (stop != end && *stop != ' '))
            throw Error(
                ErrorKind::usage,
                "this run is a task's, so its prompt is token ids with spaces between, not " +
                    tensor::in_quotes(prompt));
        tokens.push_back(token);
        at = stop;
    }
    return tokens;
}

void Generate::check_flags() const {
    const auto refuse = [](const std::string& what) { throw Error(ErrorKind::usage, what); };
    if (checkpoint_.empty()) refuse("--checkpoint RUN is needed");
    int given = 0;
    for (const char* key : {"prompt", "prompts", "continue"}) given += settings_.given(key);
    if (given != 1)
        refuse("one of --prompt TEXT, --prompts FILE and --continue FILE.jsonl is needed");
    if (settings_.given("continue"))
        for (const Setting& s : settings_.all())
            if (settings_.given(s.key) &&
                (s.section == "sampling" || s.key == "mode" || s.key == "samples"))
                refuse(s.flag() + " is the rollout's own with --continue");
    if (settings_.given("passes") && !settings_.given("continue"))
        refuse("--passes is for --continue");
    const bool keeps = states_ || cache_;
    if (keeps && out_.empty())
        refuse(std::string(states_ ? "--states" : "--cache") +
               " needs --out FILE.jsonl, to lie beside it");
    if (keeps && machine_.dtype == "f64")
        refuse(std::string(states_ ? "--states" : "--cache") +
               " keeps f32 or bf16 values, so it is not for --dtype f64");
    if (out_.empty()) return;
    if (!out_.ends_with(".jsonl"))
        refuse("--out is " + tensor::in_quotes(out_) + ", needed a name that ends with .jsonl");
    check_output("--out", out_);
    if (keeps)
        check_output(states_ ? "--out with --states" : "--out with --cache",
                     fs::path(out_).replace_extension(".safetensors"));
}

engine::Request Generate::request_of(int prompt, core::Mode mode, const Loaded& loaded) const {
    engine::Request request;
    request.prompt = prompt;
    request.mode = mode;
    request.sampling = {float(temperature_), top_k_, float(top_p_)};
    request.seed = seed_;
    request.stream = uint64_t(prompt) << 32;
    if (loaded.tokenizer) request.stop_tokens = {loaded.tokenizer->boundary()};
    request.keep_states = states_;
    request.keep_cache = cache_;
    return request;
}

std::vector<Generate::Job> Generate::new_jobs(const std::vector<std::string>& texts,
                                              const Loaded& loaded) const {
    std::vector<Job> jobs;
    for (size_t p = 0; p < texts.size(); ++p)
        for (int sample = 0; sample < samples_; ++sample) {
            Job job;
            job.prompt = texts[p];
            job.sample = sample;
            job.request = request_of(int(p), core::mode_from(mode_), loaded);
            job.request.tokens = tokens_of(texts[p], loaded);
            job.request.max_tokens = tokens_;
            job.settings = settings_.to_json()["sampling"];
            jobs.push_back(std::move(job));
        }
    return jobs;
}

// The states that a rollout goes on from: the recorded ones, or those of all passes but the last,
// which the engine runs.
void Generate::take_states(engine::Request& request, const Rollout& before, const Loaded& loaded,
                           const engine::ShouldStop& should_stop) const {
    core::Model& model = *loaded.model;
    const int P = before.prompt_length;
    const std::vector<int32_t> fed(before.tokens.begin(), before.tokens.end() - 1);
    if (int(fed.size()) <= P || before.mode == core::Mode::standard) return;
    request.approximate = before.states.empty() || settings_.given("passes");
    if (!request.approximate) {
        request.states = states_of(before, model);
        return;
    }
    if (states_ || cache_)  // said before the work
        throw Error(ErrorKind::usage,
                    "prompt " + std::to_string(before.prompt + 1) + ", sample " +
                        std::to_string(before.sample + 1) +
                        " goes on from passes, whose states are no record of it: leave " +
                        (states_ ? "--states" : "--cache") + " out");
    core::Replay replay(model, fed, P, before.mode);
    do replay.next();  // what is exact no pass changes, and after a signal there is no use for any
    while (replay.passes() < passes_ - 1 && !replay.exact() && !should_stop());
    request.states = replay.trace().hidden;
}

std::vector<Generate::Job> Generate::continued_jobs(Console& console, const Loaded& loaded,
                                                    const engine::ShouldStop& should_stop) {
    const core::Config& config = loaded.model->config();
    const RolloutFile before = read_rollouts(continue_, config);
    check_origin(before, continue_, loaded);
    if (states_ || cache_) check_places(before, continue_);
    std::vector<Job> jobs;
    for (size_t i = 0; i < before.rollouts.size(); ++i) {
        const Rollout& r = before.rollouts[i];
        const std::string where = continue_ + " rollout " + std::to_string(i + 1);
        json sampling;
        for (const char* key : {"temperature", "top_k", "top_p", "seed"}) {
            if (!before.notes[i].contains(key))
                throw Error(ErrorKind::bad_file, where + " lacks the key \"" + key +
                                                     "\", a setting that it was sampled with");
            sampling[key] = before.notes[i][key];
        }
        settings_.take_json({{"sampling", sampling}}, where, ErrorKind::bad_file);
        Job job;
        job.settings = sampling;
        job.sample = r.sample;
        job.before = r;
        job.prompt = text_of(
            std::span(r.tokens).first(size_t(r.prompt_length)).subspan(loaded.tokenizer ? 1 : 0),
            loaded);
        job.request = request_of(r.prompt, r.mode, loaded);
        job.request.stream += uint64_t(r.sample);
        job.request.tokens = r.tokens;
        job.request.prompt_length = r.prompt_length;
        job.request.logprobs = r.logprobs;
        job.request.max_tokens = int(r.logprobs.size()) + tokens_;
        const std::vector<int32_t>& stop = job.request.stop_tokens;
        const bool stopped = !r.logprobs.empty() && !stop.empty() && r.tokens.back() == stop[0];
        job.done = stopped || int(r.tokens.size()) >= config.context;
        if (job.done) {
            job.before.finish = stopped ? engine::Finish::stop : engine::Finish::context;
            if (!states_) job.before.states.clear();
            if (!cache_) job.before.keys = job.before.values = {};
            console.warn(name_of(job) + " is left as it is: " +
                         (stopped
                              ? std::string("it ended its text")
                              : "the context of " + std::to_string(config.context) + " is full"));
        } else {
            take_states(job.request, r, loaded, should_stop);
        }
        jobs.push_back(std::move(job));
    }
    return jobs;
}

// What goes on from a replay, beside what goes on from the very states of the rollout. False: was
// told to stop before it knew.
bool Generate::compare_with_exact(Console& console, std::vector<Job>& jobs, const Loaded& loaded,
                                  const engine::ShouldStop& should_stop) const {
    engine::Engine exact(*loaded.model, {sequences_, kRows, pages_});
    const auto ask = [&](const Job& job, bool recorded) {
        engine::Request request = job.request;
        request.approximate = request.keep_states = request.keep_cache = false;
        const std::vector<int32_t> fed(request.tokens.begin(), request.tokens.end() - 1);
        request.states =
            recorded ? states_of(job.before, *loaded.model)
                     : core::decode_known(*loaded.model, fed, request.prompt_length, request.mode)
                           .hidden;
        return exact.submit(request);
    };
    std::vector<std::pair<Job*, int64_t>> asked;
    for (Job& job : jobs) {
        if (!job.request.approximate) continue;
        if (should_stop()) return false;
        asked.emplace_back(&job, ask(job, !job.before.states.empty()));
    }
    if (asked.empty()) return true;
    engine::run(exact, {}, should_stop);
    for (auto& [job, id] : asked)  // a record that is wrong is none
        if (exact.rollout(id).finish == engine::Finish::mismatch) id = ask(*job, false);
    engine::run(exact, {}, should_stop);
    if (should_stop()) return false;
    for (auto& [job, id] : asked) {
        const std::vector<int32_t>&a = job->rollout.tokens, &b = exact.rollout(id).tokens;
        const size_t from = job->request.tokens.size(), end = std::min(a.size(), b.size());
        int64_t agree = 0, first = -1;
        for (size_t i = from; i < end; ++i) {
            if (a[i] == b[i])
                ++agree;
            else if (first < 0)
                first = int64_t(i - from);
        }
        const int64_t n = int64_t(a.size() - from);
        job->settings["agree"] = agree;
        job->settings["agree_first"] = first < 0 ? agree : first;
        console.line(name_of(*job) + ": " + std::to_string(agree) + " of " + std::to_string(n) +
                     " tokens agree with exact decoding, the first " +
                     std::to_string(first < 0 ? agree : first) + " without a difference");
    }
    return true;
}

int Generate::run() {
    const StopSignals stop;
    settings_.take_flags();
    Console console(machine_.json);
    check_flags();
    const tensor::DType dtype = machine_.checked_dtype();
    const std::vector<std::string> texts =
        settings_.given("continue") ? std::vector<std::string>() : prompt_texts();
    core::mode_from(mode_);
    tensor::Context context = machine_.context();
    const Loaded loaded = load(checkpoint_, context, dtype);
    // Without a reader there is no use for more, unless it goes into a file.
    const auto should_stop = [&] {
        return stop.requested() || (console.reader_left() && out_.empty());
    };
    std::vector<Job> jobs = settings_.given("continue")
                                ? continued_jobs(console, loaded, should_stop)
                                : new_jobs(texts, loaded);

    engine::Engine engine(*loaded.model, {sequences_, kRows, pages_});
    for (size_t i = 0; i < jobs.size(); ++i) {
        Job& job = jobs[i];
        if (job.done) continue;
        const bool sample = !settings_.given("continue") && job.sample > 0;  // of the one before
        job.id = sample ? jobs[i - 1].id + 1
                        : engine.submit(job.request, settings_.given("continue") ? 1 : samples_);
    }
    const bool streams = jobs.size() == 1;
    model::data::Utf8Stream utf8;
    bool begun = false;
    const auto on_token = [&](const Rollout& r, int32_t token) {
        if (!streams) return;
        if (!begun) {
            console.print(shown_prompt(jobs[0], loaded));
            const int before = int(jobs[0].request.logprobs.size());
            for (int i = 0; i < before; ++i)
                console.print(
                    utf8.push(text_of(r.tokens[size_t(r.prompt_length + i)], i == 0, loaded)));
        }
        begun = true;
        console.print(utf8.push(text_of(token, r.logprobs.size() == 1, loaded)));
    };
    engine::run(engine, on_token, should_stop);
    if (begun) console.line(utf8.finish());
    for (Job& job : jobs) {
        job.rollout = job.done ? job.before : engine.take(job.id);
        job.rollout.sample = job.sample;
    }
    const bool compared = compare_with_exact(console, jobs, loaded, should_stop);
    return report(console, jobs, loaded, engine.counts(), !compared, stop.requested());
}

// Writes what was asked for, and says what became of every sequence.
int Generate::report(Console& console, std::vector<Job>& jobs, const Loaded& loaded,
                     const engine::Engine::Counts& counts, bool interrupted, bool signalled) const {
    RolloutFile file;
    file.dtype = loaded.model->dtype();
    file.weights = core::weights_hash(*loaded.model);
    json documents = json::array();
    bool mismatch = false;
    std::string diverged;
    for (Job& job : jobs) {
        Rollout& r = job.rollout;
        json note = job.settings;
        note["text"] = text_of(std::span(r.tokens).subspan(size_t(r.prompt_length)), loaded);
        note["finish"] = to_string(r.finish);
        const int sampled = int(r.logprobs.size());
        if (jobs.size() > 1)  // one was streamed
            console.line(console.paint(Colour::dim, "== " + name_of(job) + ": " +
                                                        to_string(r.mode) + ", " +
                                                        std::to_string(sampled) + " tokens, " +
                                                        to_string(r.finish)) +
                         "\n" + shown_prompt(job, loaded) + note["text"].get<std::string>());
        switch (r.finish) {
            case engine::Finish::context:
                if (job.done) break;  // said already
                console.warn(name_of(job) + " stopped after " + std::to_string(sampled) +
                             " tokens: the context of " +
                             std::to_string(loaded.model->config().context) + " is full");
                break;
            case engine::Finish::interrupted:
                interrupted = true;
                break;
            case engine::Finish::mismatch:
                console.warn(name_of(job) + " is left as it was: its recorded state of position " +
                             std::to_string(r.mismatch) +
                             " is not what the model computes; --passes 3 goes on from its tokens "
                             "alone");
                mismatch = true;
                break;
            case engine::Finish::overflow:
                diverged = name_of(job) + ", after " + std::to_string(sampled) +
                           " tokens: the next one's log-probability is no finite number; the "
                           "model's weights are too large for --dtype " +
                           machine_.dtype;
                break;
            default:
                break;
        }
        json document = note;
        document["prompt"] = job.prompt;
        document["sample"] = r.sample;
        document["mode"] = to_string(r.mode);
        document["tokens"] = r.tokens;
        document["prompt_length"] = r.prompt_length;
        document["logprobs"] = r.logprobs;
        documents.push_back(document);
        file.notes.push_back(std::move(note));
        file.rollouts.push_back(std::move(r));
    }
    if (!out_.empty()) {
        write_rollouts(out_, file, loaded.model->config());
        console.line("wrote " + out_);
    }
    console.result({{"weights", file.weights},
                    {"rollouts", documents},
                    {"engine",
                     {{"calls", counts.steps},
                      {"positions", counts.rows},
                      {"reused", counts.reused},
                      {"preempted", counts.preempted},
                      {"rebuilt", counts.rebuilt}}}});
    if (!diverged.empty()) throw Error(ErrorKind::diverged, diverged);
    if (interrupted && signalled) {  // or whoever read the text has left
        console.warn("stopped by a signal");
        return kStopped;
    }
    return mismatch ? kCheckFailed : kDone;
}

}  // namespace

Run add_generate(CLI::App& app) {
    CLI::App* command = app.add_subcommand("generate", "Sample from a model in one of three modes");
    auto generate = std::make_shared<Generate>(*command);
    return [generate] { return generate->run(); };
}

}  // namespace fbt::apps
