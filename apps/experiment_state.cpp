// State tracking: labels that need the whole past, at lengths beyond training's. A stack of L
// blocks composes only so many steps in one pass; the recurrence composes one more at every
// position.
#include "apps/corpus.h"
#include "apps/experiment.h"

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
             core::evaluate(*loaded.model, batches(), kPasses, run.seed, false))
            run.add(pass, at);
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
    constexpr int kFactors[] = {1, 2, 4};
    for (const Tracked& t : kTracked) {
        std::vector<std::string> by_loss = {t.task}, by_pass = {t.task}, by_mode = {t.task};
        for (int factor : kFactors) {
            for (int k = 1; k <= kPasses; ++k) {
                by_loss.push_back(format("L%d, %dx", k, factor));
                by_pass.push_back(format("pass %d, %dx", k, factor));
            }
            for (const char* mode : {"standard", "soft"})
                by_mode.push_back(format("%s, %dx", mode, factor));
        }
        Table losses(by_loss), accuracies(by_pass), decoded(by_mode);
        for (const auto& [name, schedule] : kSchedules) {
            const std::string recipe = recipe_name(t, name);
            std::vector<std::string> loss = {name}, accuracy = {name}, decode = {name};
            for (int factor : kFactors) {
                const std::string at = "/" + std::to_string(factor * t.length);
                for (int k = 1; k <= kPasses; ++k) {
                    const std::string pass = "/pass_" + std::to_string(k) + at;
                    loss.push_back(lab.cell(recipe, "loss" + pass, "%.3f"));
                    accuracy.push_back(lab.cell(recipe, "accuracy" + pass, "%.0f", 100));
                }
                for (const char* mode : {"standard", "soft"})
                    decode.push_back(lab.cell(recipe, mode + at, "%.0f", 100));
            }
            losses.row(loss);
            accuracies.row(accuracy);
            decoded.row(decode);
        }
        const std::string heading = format("%s, trained at length %d for %lld steps", t.task,
                                           t.length, static_cast<long long>(lab.steps(t.steps)));
        lab.table(heading + ": validation loss of each pass at 1, 2 and 4 times that length",
                  losses);
        lab.table(heading + ": right answers of each pass, % of all positions", accuracies);
        lab.table(heading + ": right answers decoded step by step, % of last positions", decoded);
    }
}

}  // namespace fbt::apps
