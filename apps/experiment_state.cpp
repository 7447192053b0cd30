// State tracking: labels that need the whole past, at lengths beyond training's. A stack of L
// blocks composes only so many steps in one pass; the recurrence composes one more at every
// position.
#include "apps/corpus.h"
#include "apps/experiment.h"
#include "model/core/evaluate.h"

namespace fbt::apps {
namespace {

namespace core = model::core;

struct Tracked {
    const char* task;
    int length, steps;
};
constexpr Tracked kTracked[] = {{"parity", 16, 2000}, {"swap-s5", 12, 4000}, {"mod-sum", 12, 4000}};
constexpr std::pair<const char*, const char*> kSchedules[] = {{"standard", "1:1"},
                                                              {"2-pass", "1:2"},
                                                              {"3-pass", "1:3"},
                                                              {"paper", "75:1,22:2,3:3"},
                                                              {"random-K", "1:1+2+3"}};
constexpr int kSequencesPerStep = 64, kSequences = 512, kPasses = 3;

std::string recipe_name(const Tracked& tracked, const char* schedule) {
    return std::string(tracked.task) + "-" + schedule;
}

// loss/pass_K/LENGTH, accuracy/..., last/..., and standard/LENGTH, soft/LENGTH: the share of right
// answers at the last position of sequences decoded one position at a time.
void measure(Experiment& lab, const Tracked& tracked, TrainedRun& run, const Loaded& loaded) {
    const Corpus corpus("", tracked.task);
    for (int factor : {1, 2, 4}) {
        lab.check_stop();
        const int length = factor * tracked.length;
        const std::string at = "/" + std::to_string(length);
        const auto batches = [&] {
            return corpus.validation({length}, run.seed, lab.size(kSequences), kSequences * length);
        };
        for (const core::PassResult& pass :
             core::evaluate(*loaded.model, batches(), kPasses, run.seed, false)) {
            const std::string key = "/pass_" + std::to_string(pass.pass) + at;
            run.measured["loss" + key] = pass.loss;
            run.measured["accuracy" + key] = pass.accuracy;
            run.measured["last" + key] = pass.last;
        }
        for (core::Mode mode : {core::Mode::standard, core::Mode::soft}) {
            const core::Accuracy accuracy = core::decode_accuracy(*loaded.model, batches(), mode);
            run.measured[core::to_string(mode) + at] = accuracy.last;
            run.measured[core::to_string(mode) + "_all" + at] = accuracy.all;
        }
    }
}

}  // namespace

void state_experiment(Experiment& lab) {
    std::vector<Recipe> recipes;
    for (const Tracked& t : kTracked)
        for (const auto& [name, schedule] : kSchedules)
            recipes.push_back(
                {recipe_name(t, name),
                 t.steps,
                 {"--preset", "parity", "--task", t.task, "--length", std::to_string(t.length),
                  "--tokens-per-step", std::to_string(kSequencesPerStep * t.length), "--schedule",
                  schedule, "--save-every", "0"}});
    lab.train(recipes);
    lab.measure([&](TrainedRun& run, const Loaded& loaded) {
        for (const Tracked& t : kTracked)
            if (loaded.task == t.task) measure(lab, t, run, loaded);
    });
    for (const Tracked& t : kTracked) {
        const std::string at = "/" + std::to_string(t.length);
        Table losses({t.task, "L1", "L2", "L3"});
        Table decoded({t.task, "standard 1x %", "soft 1x %", "standard 2x %", "soft 2x %",
                       "standard 4x %", "soft 4x %"});
        Table passes({t.task, "pass 1, 2x %", "pass 2, 2x %", "pass 3, 2x %", "pass 1, 4x %",
                      "pass 2, 4x %", "pass 3, 4x %"});
        for (const auto& [name, schedule] : kSchedules) {
            const std::string recipe = recipe_name(t, name);
            std::vector<std::string> loss = {name}, decode = {name}, pass = {name};
            for (int k = 1; k <= kPasses; ++k)
                loss.push_back(lab.cell(recipe, "loss/pass_" + std::to_string(k) + at, "%.3f"));
            for (int factor : {1, 2, 4})
                for (const char* mode : {"standard/", "soft/"})
                    decode.push_back(
                        lab.cell(recipe, mode + std::to_string(factor * t.length), "%.0f", 100));
            for (int factor : {2, 4})
                for (int k = 1; k <= kPasses; ++k)
                    pass.push_back(lab.cell(recipe,
                                            "accuracy/pass_" + std::to_string(k) + "/" +
                                                std::to_string(factor * t.length),
                                            "%.0f", 100));
            losses.row(loss);
            decoded.row(decode);
            passes.row(pass);
        }
        const std::string heading = format("%s, trained at length %d for %lld steps", t.task,
                                           t.length, static_cast<long long>(lab.steps(t.steps)));
        lab.table(heading + ": validation loss of each pass at that length", losses);
        lab.table(heading + ": right answers at the last position, decoded step by step", decoded);
        lab.table(heading + ": right answers at all positions, in parallel passes", passes);
    }
}

}  // namespace fbt::apps
