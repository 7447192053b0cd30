// Replay (the paper's figure 8): rollouts rebuilt from their tokens in n passes, and from recorded
// states in one. The error falls to a floor, the rounding that circulates in the recurrence; the
// first n - 1 positions are exact for any weights; recorded states leave no error at all.
#include <algorithm>

#include "apps/corpus.h"
#include "apps/experiment.h"
#include "model/core/replay.h"
#include "model/engine/generator.h"

namespace fbt::apps {
namespace {

namespace core = model::core;
namespace engine = model::engine;
using tensor::Tensor;

constexpr int kPrompt = 16, kSamples = 4;
constexpr int kShown[] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96};

// keys/N, values/N, kl/N, logprob/N, argmax/N and prefix/N, N passes or "recorded": means over the
// samples, of the prefix the smallest.
void measure(Experiment& lab, TrainedRun& run, core::Model& model) {
    const Corpus corpus(lab.config().data, "");
    const int T = model.config().context;
    const core::Batch text = *corpus.validation({T}, run.seed, 1, T)();
    engine::GenerateConfig config;
    config.samples = kSamples;
    config.max_tokens = T;
    config.sampling.temperature = 0.8f;
    config.seed = run.seed;
    config.keep_states = true;
    const std::vector<int32_t> prompt(text.tokens.begin(), text.tokens.begin() + kPrompt);
    const auto add = [&](const std::string& key, double value, bool smallest) {
        nlohmann::json& slot = run.measured[key];
        if (smallest)
            slot = slot.is_null() ? value : std::min(slot.get<double>(), value);
        else
            slot = (slot.is_null() ? 0.0 : slot.get<double>()) + value / kSamples;
    };
    for (const engine::Rollout& r : engine::generate(model, {prompt}, config)) {
        lab.check_stop();
        const std::vector<int32_t> fed(r.tokens.begin(), r.tokens.end() - 1);
        const std::vector<int32_t> next(r.tokens.begin() + kPrompt + 1, r.tokens.end());
        const core::Trace own = core::decode_known(model, fed, kPrompt, r.mode);
        const auto compare = [&](const std::string& name, const core::Trace& replayed) {
            const core::ReplayError e = core::compare(model, own, replayed, kPrompt, next);
            add("keys/" + name, e.keys, false);
            add("values/" + name, e.values, false);
            add("argmax/" + name, e.argmax, false);
            add("kl/" + name, e.kl, false);
            add("logprob/" + name, e.logprob, false);
            add("prefix/" + name, double(e.prefix), true);
        };
        core::Replay replay(model, fed, kPrompt, r.mode);
        for (int passes : kShown) {
            if (passes > lab.size(kShown[std::size(kShown) - 1])) break;
            while (replay.passes() < passes) replay.next();
            compare(std::to_string(passes), replay.trace());
        }
        // The states that generating recorded, among other sequences; not those of decode_known.
        const std::vector<double> states(
            r.states.begin(), r.states.begin() + int64_t(fed.size()) * model.config().dim);
        compare("recorded",
                core::replay_recorded(model, fed, kPrompt, r.mode,
                                      Tensor::from_double(model.context(), states,
                                                          own.hidden.shape(), model.dtype())));
        run.measured["positions"] = int64_t(fed.size()) - kPrompt;
    }
}

}  // namespace

void replay_experiment(Experiment& lab) {
    const int first =
        Corpus(lab.config().data, "").validation({kPrompt}, 1, 1, kPrompt)()->lengths.at(0);
    if (first < kPrompt)
        throw tensor::Error(tensor::ErrorKind::usage,
                            "the prompt is the first " + std::to_string(kPrompt) +
                                " tokens of validation, but its first sequence has " +
                                std::to_string(first) +
                                ": the experiment replay needs longer "
                                "documents");
    std::vector<Recipe> recipes = {three_pass_recipe(core::Fusion::gated_product),
                                   text_recipe("text-80-3-20-5", "80:3,20:5")};
    for (Recipe& recipe : paper_schedules())
        if (recipe.name == "text-75-22-3") recipes.push_back(std::move(recipe));
    lab.train(recipes);
    lab.measure([&](TrainedRun& run, const Loaded& loaded) { measure(lab, run, *loaded.model); });
    for (const Recipe& recipe : recipes) {
        Table table(
            {"passes", "K error %", "V error %", "argmax %", "KL", "|dlogp|", "exact prefix"});
        const auto row = [&](const std::string& passes) {
            const auto cell = [&](const std::string& what, const char* pattern, double factor) {
                return lab.cell(recipe.name, what + "/" + passes, pattern, factor);
            };
            table.row({passes, cell("keys", "%.3g", 100), cell("values", "%.3g", 100),
                       cell("argmax", "%.1f", 100), cell("kl", "%.1e", 1),
                       cell("logprob", "%.1e", 1), cell("prefix", "%.0f", 1)});
        };
        for (int passes : kShown) row(std::to_string(passes));
        row("recorded");
        lab.table(without_text(recipe.name) + ", " + lab.machine().dtype +
                      format(": soft rollouts of %.0f fed positions",
                             lab.median(recipe.name, "positions")),
                  table);
    }
}

}  // namespace fbt::apps
