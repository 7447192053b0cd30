// Replay (the paper's figure 8): rollouts rebuilt from their tokens, and from recorded states in
// one pass, in f32 and in bf16. The error falls to a floor, the rounding that circulates in the
// recurrence; the first n - 1 positions are exact for any weights; recorded states leave no error
// at all. What tolerances, blocks and leaving out settled positions save is counted in positions.
#include <algorithm>
#include <cmath>

#include "apps/corpus.h"
#include "apps/experiment.h"
#include "model/core/checkpoint.h"
#include "model/core/replay.h"
#include "model/engine/generator.h"
#include "tensor/file.h"

namespace fbt::apps {
namespace {

namespace core = model::core;
namespace engine = model::engine;
using core::ReplayLimits;
using tensor::DType;
using tensor::Tensor;

constexpr int kPrompt = 16;
constexpr int kFed = 512;  // positions of the response: four times the length that was trained
constexpr int kShown[] = {1, 2, 3, 4, 8, 16, 32};
constexpr int kPlotted = 32;  // passes in the figure, each of them

struct Way {
    std::string name;
    ReplayLimits limits;
};

// What ends by itself: to a tolerance or to exactness, in one block or in several.
std::vector<Way> ways() {
    std::vector<Way> out;
    for (double tolerance : {1e-2, 1e-3, 0.0})
        for (int block : {0, 256, 64, 16}) {
            std::string name = tolerance > 0 ? format("change %g", tolerance) : "exact";
            if (block > 0) name += format(", blocks of %d", block);
            out.push_back({name, {.tolerance = tolerance, .block = block}});
        }
    return out;
}

std::vector<DType> dtypes(const Experiment& lab) {
    if (lab.machine().device == "ref") return {DType::f32};
    return {DType::f32, DType::bf16};
}

// Of a rollout, QUANTITY/DTYPE/WAY, a way being a number of passes, one of ways() or "recorded":
// keys, values, kl, logprob, argmax, prefix, ran (passes) and computed (positions over the
// response's).
void measure(Experiment& lab, TrainedRun& run, const Loaded& loaded, DType dtype) {
    const Corpus corpus(lab.config().data, "");
    const core::Batch text = *corpus.validation({kPrompt}, run.seed, 1, kPrompt)();
    const std::vector<int32_t> prompt(text.tokens.begin(), text.tokens.begin() + kPrompt);
    const int fed_response = lab.size(kFed);
    // The same weights with room for a longer rollout than they were trained on.
    core::Config config = loaded.model->config();
    config.context = kPrompt + fed_response + 1;
    core::Model model(lab.context(), config, dtype);
    core::load_parameters(loaded.checkpoint, model, false);

    engine::GenerateConfig sampling;
    sampling.samples = 2;  // one is measured, whose states were computed in company
    sampling.max_tokens = fed_response + 1;
    sampling.sampling.temperature = 0.8f;
    sampling.seed = run.seed;
    sampling.keep_states = true;
    const engine::Rollout r = engine::generate(model, {prompt}, sampling).back();
    const std::vector<int32_t> fed(r.tokens.begin(), r.tokens.end() - 1);
    const std::vector<int32_t> next(r.tokens.begin() + kPrompt + 1, r.tokens.end());
    const core::Trace own = core::decode_known(model, fed, kPrompt, r.mode);
    const auto put = [&](const char* what, const std::string& way, double value) {
        run.measured[what + ("/" + std::string(tensor::name_of(dtype))) + "/" + way] = value;
    };
    const auto compare = [&](const std::string& way, const core::Trace& replayed, int64_t ran,
                             int64_t computed) {
        const core::ReplayError e = core::compare(model, own, replayed, kPrompt, next);
        put("keys", way, e.keys);
        put("values", way, e.values);
        put("argmax", way, e.argmax);
        put("kl", way, e.kl);
        put("logprob", way, e.logprob);
        put("prefix", way, double(e.prefix));
        put("ran", way, double(ran));
        put("computed", way, double(computed) / fed_response);
    };
    core::Replay replay(model, fed, kPrompt, r.mode);
    while (replay.passes() < lab.size(kPlotted)) {
        replay.next();
        compare(std::to_string(replay.passes()), replay.trace(), replay.passes(),
                replay.computed());
    }
    for (const Way& way : ways()) {
        lab.check_stop();
        replay.run(way.limits);
        compare(way.name, replay.trace(), replay.passes(), replay.computed());
    }
    // The states that generating recorded, not those of decode_known.
    const core::Certificate certificate =
        core::certify(model, r.tokens, kPrompt, r.mode, {r.states, {}, {}, r.logprobs});
    compare("recorded", certificate.trace, 1, fed_response);
    put("certified", "recorded", certificate.holds());
}

// The figure's numbers, as a table with tabs: by the number of passes, the keys' error of every
// recipe in every dtype.
std::string plot_rows(const Experiment& lab, const std::vector<Recipe>& recipes) {
    std::string out = "passes";
    for (const Recipe& recipe : recipes)
        for (DType dtype : dtypes(lab))
            out += "\t" + without_text(recipe.name) + ", " + tensor::name_of(dtype);
    for (int passes = 1; passes <= lab.size(kPlotted); ++passes) {
        out += format("\n%d", passes);
        for (const Recipe& recipe : recipes)
            for (DType dtype : dtypes(lab))
                out += format(
                    "\t%g",
                    lab.median(recipe.name, format("keys/%s/%d", tensor::name_of(dtype), passes)));
    }
    return out + "\n";
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
    lab.measure([&](TrainedRun& run, const Loaded& loaded) {
        for (DType dtype : dtypes(lab)) measure(lab, run, loaded, dtype);
    });
    for (const Recipe& recipe : recipes) {
        const auto cell = [&](const std::string& what, DType dtype, const std::string& way,
                              const char* pattern, double factor) {
            return lab.cell(recipe.name, what + "/" + tensor::name_of(dtype) + "/" + way, pattern,
                            factor);
        };
        const std::string title =
            without_text(recipe.name) + format(", %d fed positions", lab.size(kFed));
        for (DType dtype : dtypes(lab)) {
            Table table({"until", "passes", "K error %", "V error %", "argmax %", "KL", "|dlogp|",
                         "exact prefix", "computed"});
            const auto row = [&](const std::string& way) {
                table.row(
                    {way, cell("ran", dtype, way, "%.0f", 1), cell("keys", dtype, way, "%.3g", 100),
                     cell("values", dtype, way, "%.3g", 100),
                     cell("argmax", dtype, way, "%.1f", 100), cell("kl", dtype, way, "%.1e", 1),
                     cell("logprob", dtype, way, "%.1e", 1), cell("prefix", dtype, way, "%.0f", 1),
                     cell("computed", dtype, way, "%.2f", 1)});
            };
            for (int passes : kShown)
                if (passes <= lab.size(kPlotted)) row(std::to_string(passes));
            for (const Way& way : ways()) row(way.name);
            row("recorded");
            lab.table(title + ", " + tensor::name_of(dtype) +
                          " (computed: positions, over the response's)",
                      table);
        }
    }
    tensor::write_file_durably(lab.config().out + "/replay.tsv", plot_rows(lab, recipes));
}

}  // namespace fbt::apps
