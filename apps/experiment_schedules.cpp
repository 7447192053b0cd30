// Schedules and debugging (the paper's figure 18): the losses of passes 1 and 2 over a training,
// from before feedback is switched on, and what mends a late switch.
#include <cmath>
#include <filesystem>
#include <fstream>

#include "apps/corpus.h"
#include "apps/experiment.h"

namespace fbt::apps {
namespace {

namespace core = model::core;
using nlohmann::json;

constexpr int kPasses = 5, kSequences = 256;  // at the end
// Of the steps, in percent; the paper's schedules begin feedback after 75.
constexpr int kShown[] = {50, 75, 80, 85, 90, 95, 100};

// Each changes one thing of 75:1,25:3, or two: feedback earlier, or in a tenth of the steps before
// the switch; a higher learning rate for the fusion; a rate that does not fall with the switch;
// another fusion; three times the steps.
std::vector<Recipe> mends() {
    const std::string base = "75:1,25:3", tenth = "75:1@9+3@1,25:3";
    return {text_recipe("text-25-0-75", "25:1,75:3"),
            text_recipe("text-a-tenth", tenth),
            text_recipe("text-rate-4", base, {"--fusion-rate", "4"}),
            text_recipe("text-a-tenth-rate-4", tenth, {"--fusion-rate", "4"}),
            text_recipe("text-late-decay", base, {"--decay", "0.05"}),
            text_recipe("text-concat", base, {"--fusion", "concat_projection"}),
            text_recipe("text-3000-steps", base, {}, 3000)};
}

// The evaluations of the training itself: L1/P to L3/P and gap/P = L2 - L1 after P percent of the
// steps, and all of them as "curve", rows of [step, L1, L2, L3].
void read_curve(TrainedRun& run) {
    std::ifstream in(run.folder + "/metrics.jsonl");
    json curve = json::array();
    std::string line;
    while (std::getline(in, line)) {
        const json row = json::parse(line, nullptr, false);
        if (row.is_object() && row.contains("step") && row.contains("val/pass_3"))
            curve.push_back({row["step"], row["val/pass_1"], row["val/pass_2"], row["val/pass_3"]});
    }
    for (int percent : kShown)
        for (const json& row : curve) {
            if (row[0].get<int64_t>() * 100 < percent * run.steps) continue;
            const std::string at = "/" + std::to_string(percent);
            for (size_t k = 1; k <= 3; ++k) run.measured["L" + std::to_string(k) + at] = row[k];
            run.measured["gap" + at] = row[1].is_number() && row[2].is_number()
                                           ? json(row[2].get<double>() - row[1].get<double>())
                                           : json();
            break;
        }
    run.measured["curve"] = curve;
}

void measure(Experiment& lab, TrainedRun& run, const Loaded& loaded) {
    read_curve(run);
    const Corpus corpus(lab.config().data, "");
    const auto batches = [&] {
        return corpus.validation(loaded.lengths, run.seed, lab.size(kSequences),
                                 int64_t(kSequences) * loaded.lengths.back());
    };
    for (const core::PassResult& pass :
         core::evaluate(*loaded.model, batches(), kPasses, run.seed, true))
        run.add(pass);
    const auto scales = [&](core::Model& model, const std::string& when) {
        const core::InputScales s = core::input_scales(model, *batches()());
        run.measured["plain/" + when] = s.plain;
        run.measured["fused/" + when] = s.fused;
        run.measured["cosine/" + when] = s.cosine;
    };
    scales(*loaded.model, "end");
    const std::string at_750 = run.folder + "/step_00000750";
    if (std::filesystem::exists(at_750))
        scales(*load(at_750, lab.context(), loaded.model->dtype()).model, "750");
}

}  // namespace

void schedules_experiment(Experiment& lab) {
    const std::vector<Recipe> paper = paper_schedules(), mended = mends();
    std::vector<Recipe> all = {text_recipe("text-standard", "1:1")};
    all.insert(all.end(), paper.begin(), paper.end());
    all.insert(all.end(), mended.begin(), mended.end());
    all.push_back(three_pass_recipe(core::Fusion::gated_product));
    lab.train(all);
    lab.measure([&](TrainedRun& run, const Loaded& loaded) { measure(lab, run, loaded); });

    std::vector<std::string> heading = {"schedule"};
    for (int percent : kShown) heading.push_back(std::to_string(percent) + " %");
    Table gaps(heading), first(heading);
    Table ends({"schedule", "L1", "L2", "L3", "L5", "L2, permuted", "L2, mean"});
    Table scales({"schedule", "e, 750 steps", "e (x) h, 750 steps", "cosine, 750 steps", "e, end",
                  "e (x) h, end", "cosine, end"});
    for (const Recipe& recipe : all) {
        const std::string& name = recipe.name;
        const std::string shown = without_text(name);
        std::vector<std::string> gap = {shown}, loss = {shown};
        for (int percent : kShown) {
            gap.push_back(lab.cell(name, "gap/" + std::to_string(percent), "%+.3f"));
            loss.push_back(lab.cell(name, "L1/" + std::to_string(percent), "%.3f"));
        }
        gaps.row(gap);
        first.row(loss);
        std::vector<std::string> end = {shown};
        for (int k : {1, 2, 3, kPasses})
            end.push_back(lab.cell(name, "loss/pass_" + std::to_string(k), "%.3f"));
        for (const char* what : {"permuted", "mean"})
            end.push_back(lab.cell(name, what + std::string("/pass_2"), "%.2f"));
        ends.row(end);
        scales.row({shown, lab.cell(name, "plain/750", "%.3f"), lab.cell(name, "fused/750", "%.3f"),
                    lab.cell(name, "cosine/750", "%.2f"), lab.cell(name, "plain/end", "%.3f"),
                    lab.cell(name, "fused/end", "%.3f"), lab.cell(name, "cosine/end", "%.2f")});
    }
    lab.table("L2 - L1 on validation after this share of the steps", gaps);
    lab.table("L1 on validation after this share of the steps", first);
    lab.table("At the end, and with the carried states permuted or replaced by their mean", ends);
    lab.table(
        "Root mean square of plain inputs e and of fused ones e (x) h, and the cosine between "
        "them, after 750 steps and at the end",
        scales);
}

}  // namespace fbt::apps
