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
#include "tensor/file.h"

namespace fbt::apps {
namespace {

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
    std::vector<std::string> prompt_texts() const;
    std::vector<int32_t> tokens_of(const std::string& prompt, const Loaded& loaded) const;
    json notes_of(const Rollout& rollout, const Loaded& loaded, bool interrupted) const;

    Settings settings_;
    Machine machine_;
    std::string checkpoint_, prompt_, prompts_, mode_ = "soft", out_;
    int tokens_ = 200, samples_ = 1, top_k_ = 0;
    double temperature_ = 0.8, top_p_ = 1;
    uint64_t seed_ = 1;
    bool states_ = false;
};

Generate::Generate(CLI::App& app) {
    Settings& s = settings_;
    s.add("checkpoint", &checkpoint_,
          "a run (its newest checkpoint), or one step_... folder of it");
    s.add("prompt", &prompt_, "text; of a task's run: token ids with spaces between").any_bytes =
        true;
    s.add("prompts", &prompts_, "file of prompts, one a line, or .jsonl with a \"prompt\" each");
    s.add("mode", &mode_, "standard, soft (the response carries states) or fused (the prompt too)");
    s.add("tokens", &tokens_, "tokens to sample, at most").at_least(1);
    s.add("samples", &samples_, "of each prompt").at_least(1).at_most(1 << 16);
    s.add("temperature", &temperature_, "0: the most probable token")
        .at_least(0)
        .at_most(1e30);  // within float, in which the logits are divided by it
    s.add("top_k", &top_k_, "sample among the k most probable only; 0: all").at_least(0);
    s.add("top_p", &top_p_, "sample among the fewest whose probability reaches this")
        .at_least(1e-30)  // within float, where less would become 0
        .at_most(1);
    s.add("seed", &seed_, "of the samples");
    s.add("out", &out_, "file for the rollouts, FILE.jsonl");
    s.add("states", &states_, "keep top states in FILE.safetensors beside it, for replay");
    machine_.declare(s);
    s.bind(app);
}

std::string text_of(const Rollout& r, int32_t token, const Loaded& loaded) {
    if (loaded.tokenizer) return loaded.tokenizer->piece(token);
    return (r.logprobs.size() == 1 ? "" : " ") + std::to_string(token);
}

std::string response_of(const Rollout& r, const Loaded& loaded) {
    const std::span<const int32_t> sampled = std::span(r.tokens).subspan(size_t(r.prompt_length));
    std::string text;
    if (loaded.tokenizer) {
        model::data::Utf8Stream utf8;
        text = utf8.push(loaded.tokenizer->decode(sampled));
        return text + utf8.finish();
    }
    for (int32_t token : sampled) text += (text.empty() ? "" : " ") + std::to_string(token);
    return text;
}

std::vector<std::string> Generate::prompt_texts() const {
    if (settings_.given("prompt") == settings_.given("prompts"))
        throw Error(ErrorKind::usage, "one of --prompt TEXT and --prompts FILE is needed");
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

json Generate::notes_of(const Rollout& rollout, const Loaded& loaded, bool interrupted) const {
    return {{"text", response_of(rollout, loaded)},
            {"finish", interrupted ? "interrupted" : engine::to_string(rollout.finish)},
            {"seed", seed_},
            {"temperature", temperature_},
            {"top_k", top_k_},
            {"top_p", top_p_}};
}

int Generate::run() {
    const StopSignals stop;
    settings_.take_flags();
    Console console(machine_.json);
    if (checkpoint_.empty()) throw Error(ErrorKind::usage, "--checkpoint RUN is needed");
    if (states_ && out_.empty())
        throw Error(ErrorKind::usage, "--states needs --out FILE.jsonl, to lie beside it");
    if (states_ && machine_.dtype == "f64")
        throw Error(ErrorKind::usage,
                    "--states keeps f32 or bf16 values, so it is not for --dtype f64");
    if (!out_.empty() && !out_.ends_with(".jsonl"))
        throw Error(ErrorKind::usage, "--out is " + tensor::in_quotes(out_) +
                                          ", needed a name that ends with .jsonl");
    if (!out_.empty()) check_output("--out", out_);
    if (states_)
        check_output("--out with --states", fs::path(out_).replace_extension(".safetensors"));
    const tensor::DType dtype = machine_.checked_dtype();
    const std::vector<std::string> texts = prompt_texts();
    engine::GenerateConfig config;
    config.mode = model::core::mode_from(mode_);
    tensor::Context context = machine_.context();
    const Loaded loaded = load(checkpoint_, context, dtype);
    std::vector<std::vector<int32_t>> prompts;
    for (const std::string& text : texts) prompts.push_back(tokens_of(text, loaded));

    config.max_tokens = tokens_;
    config.samples = samples_;
    config.sampling = {float(temperature_), top_k_, float(top_p_)};
    config.seed = seed_;
    config.stop_token = loaded.tokenizer ? loaded.tokenizer->boundary() : -1;
    config.keep_states = states_;

    const bool streams = prompts.size() == 1 && samples_ == 1;
    model::data::Utf8Stream utf8;
    bool begun = false;
    const auto on_token = [&](const Rollout& r, int32_t token) {
        if (!streams) return;
        if (!begun) console.print(texts[0] + (loaded.tokenizer ? "" : " | "));
        begun = true;
        console.print(utf8.push(text_of(r, token, loaded)));
    };
    // Without a reader there is no use for more, unless it goes into a file.
    const auto should_stop = [&] {
        return stop.requested() || (console.reader_left() && out_.empty());
    };
    RolloutFile file;
    file.rollouts = engine::generate(*loaded.model, prompts, config, on_token, should_stop);
    file.dtype = dtype;
    file.weights = model::core::weights_hash(*loaded.model);
    if (streams) console.line(utf8.finish());

    json documents = json::array();
    bool any_interrupted = false;
    for (Rollout& r : file.rollouts) {
        const int sampled = int(r.logprobs.size());
        const bool ended = sampled >= tokens_ ||
                           (sampled > 0 && r.tokens.back() == config.stop_token) ||
                           int(r.tokens.size()) >= loaded.model->config().context;
        any_interrupted = any_interrupted || !ended;
        // An interrupted one has fed its last token already; the file's states end before that.
        if (states_)
            r.states.resize(std::max(size_t(r.prompt_length), r.tokens.size() - 1) *
                            size_t(loaded.model->config().dim));
        file.notes.push_back(notes_of(r, loaded, !ended));
        const std::string finish = file.notes.back()["finish"].get<std::string>();
        const std::string name =
            "prompt " + std::to_string(r.prompt + 1) + ", sample " + std::to_string(r.sample + 1);
        if (!streams)
            console.line(console.paint(Colour::dim, "== " + name + ": " + mode_ + ", " +
                                                        std::to_string(sampled) + " tokens, " +
                                                        finish) +
                         "\n" + texts[size_t(r.prompt)] + (loaded.tokenizer ? "" : " | ") +
                         file.notes.back()["text"].get<std::string>());
        if (ended && r.finish == engine::Finish::context)
            console.warn(name + " stopped after " + std::to_string(sampled) +
                         " tokens: the context of " +
                         std::to_string(loaded.model->config().context) + " is full");
        json document = file.notes.back();
        document["prompt"] = texts[size_t(r.prompt)];
        document["sample"] = r.sample;
        document["mode"] = mode_;
        document["tokens"] = r.tokens;
        document["prompt_length"] = r.prompt_length;
        document["logprobs"] = r.logprobs;
        documents.push_back(document);
    }
    if (!out_.empty()) {
        write_rollouts(out_, file, loaded.model->config());
        console.line("wrote " + out_);
    }
    console.result({{"weights", file.weights}, {"rollouts", documents}});
    if (stop.requested() && any_interrupted) {
        console.warn("stopped by a signal");
        return kStopped;
    }
    return kDone;
}

}  // namespace

Run add_generate(CLI::App& app) {
    CLI::App* command = app.add_subcommand("generate", "Sample from a model in one of three modes");
    auto generate = std::make_shared<Generate>(*command);
    return [generate] { return generate->run(); };
}

}  // namespace fbt::apps
