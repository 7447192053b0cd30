// Gates (the paper's figure 20): the three fusions of state and embedding on the same recipe.
#include "apps/corpus.h"
#include "apps/experiment.h"

namespace fbt::apps {
namespace {

namespace core = model::core;

constexpr core::Fusion kFusions[] = {core::Fusion::gated_product, core::Fusion::concat_projection,
                                     core::Fusion::linear_addition};
constexpr int kPasses = 8;

}  // namespace

void gates_experiment(Experiment& lab) {
    std::vector<Recipe> recipes;
    for (core::Fusion fusion : kFusions) recipes.push_back(three_pass_recipe(fusion));
    lab.train(recipes);
    lab.measure([&](TrainedRun& run, const Loaded& loaded) {
        const Corpus corpus(lab.config().data, "");
        for (const core::PassResult& pass : core::evaluate(
                 *loaded.model, corpus.validation(loaded.lengths, run.seed, lab.size(256), 4096),
                 kPasses, run.seed, true))
            run.add(pass);
        run.measured["gain"] =
            run.measured["loss/pass_1"].get<double>() - run.measured["loss/pass_3"].get<double>();
    });
    Table losses({"fusion", "L1", "L2", "L3", "L4", "L8", "L1-L3"});
    Table states(
        {"fusion", "change, pass 3", "change, pass 8", "L3, states permuted", "L3, states' mean"});
    for (size_t i = 0; i < recipes.size(); ++i) {
        const std::string& recipe = recipes[i].name;
        const std::string fusion = core::to_string(kFusions[i]);
        std::vector<std::string> row = {fusion};
        for (int k : {1, 2, 3, 4, kPasses})
            row.push_back(lab.cell(recipe, "loss/pass_" + std::to_string(k), "%.3f"));
        row.push_back(lab.cell(recipe, "gain", "%.3f"));
        losses.row(row);
        states.row({fusion, lab.cell(recipe, "change/pass_3", "%.2f"),
                    lab.cell(recipe, "change/pass_8", "%.3f"),
                    lab.cell(recipe, "permuted/pass_3", "%.2f"),
                    lab.cell(recipe, "mean/pass_3", "%.2f")});
    }
    lab.table("Three passes from the first step: validation loss of each pass", losses);
    lab.table("Does the model use what it carries?", states);
}

}  // namespace fbt::apps
