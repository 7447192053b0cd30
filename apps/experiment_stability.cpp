// Stability (the paper's figures 3 and 10): what a thousand passes do to the loss and to the
// states, after schedules that trained with one, two or three passes. Passes beyond a sequence's
// length compute nothing new, so the sequences are longer than the passes are many.
#include <algorithm>
#include <iterator>

#include "apps/corpus.h"
#include "apps/experiment.h"

namespace fbt::apps {
namespace {

namespace core = model::core;

constexpr int kLength = 1100, kSequences = 1, kPasses = 1000;
constexpr int kShown[] = {1, 2, 3, 4, 5, 8, 16, 32, 64, 128, 256, 512, 1000};

}  // namespace

std::vector<Recipe> paper_schedules() {
    return {text_recipe("text-75-25-0", "75:1,25:2"), text_recipe("text-75-22-3", "75:1,22:2,3:3"),
            text_recipe("text-75-0-25", "75:1,25:3"),
            text_recipe("text-progressive", "75:1,10:2,8:3,7:4")};
}

void stability_experiment(Experiment& lab) {
    std::vector<Recipe> recipes = paper_schedules();
    recipes.push_back(three_pass_recipe(core::Fusion::gated_product));
    recipes.push_back(text_recipe("text-80-3-20-5", "80:3,20:5"));
    lab.train(recipes);
    lab.measure([&](TrainedRun& run, const Loaded& loaded) {
        const Corpus corpus(lab.config().data, "");
        for (const core::PassResult& pass : core::evaluate(
                 *loaded.model, corpus.validation({kLength}, run.seed, kSequences, kLength),
                 lab.size(kPasses), run.seed, false))
            if (std::find(std::begin(kShown), std::end(kShown), pass.pass) != std::end(kShown))
                run.add(pass);
    });
    const auto table = [&](const std::string& title, const std::string& what, const char* pattern) {
        std::vector<std::string> heading = {"pass"};
        for (const Recipe& recipe : recipes) heading.push_back(without_text(recipe.name));
        Table out(heading);
        for (int k : kShown) {
            std::vector<std::string> row = {std::to_string(k)};
            for (const Recipe& recipe : recipes)
                row.push_back(lab.cell(recipe.name, what + "/pass_" + std::to_string(k), pattern));
            out.row(row);
        }
        lab.table(title, out);
    };
    const std::string where = format(" (%d sequence of %d tokens)", kSequences, kLength);
    table("Loss of each pass" + where, "loss", "%.3f");
    table("The same on the suffix that so many passes have not made exact", "unsettled", "%.3f");
    table("Relative change of the states on that suffix", "change", "%.1e");
}

}  // namespace fbt::apps
