// fbt experiment: the paper's claims, each at a scale of minutes on two cores.
//
// An experiment trains some recipes with several seeds and measures the trained models. Every
// training is a `fbt train` of its own, in a folder of its own, with a command that anyone can
// repeat; trainings that are there already are kept, so that an experiment goes on where it was
// stopped, and two experiments in one folder share what they have in common.
//
//   OUT/runs/RECIPE/seed_1/       a run as `fbt train` leaves it
//   OUT/runs/RECIPE/seed_1.log    what it printed
//   OUT/NAME.json                 every run with its command and all that was measured of it
//   OUT/NAME.md                   the tables: medians over the seeds, and lowest to highest
//   OUT/quick/                    all of this of quick experiments
#pragma once
#include <algorithm>
#include <string>
#include <vector>

#include "apps/command.h"
#include "apps/run_folder.h"
#include "apps/signals.h"
#include "model/core/evaluate.h"

namespace fbt::apps {

// What is compared: a name, which is also a folder's, and the flags of `fbt train`.
struct Recipe {
    std::string name;
    int64_t steps;
    std::vector<std::string> flags;
};

struct TrainedRun {
    std::string recipe, folder, command;
    uint64_t seed = 1;
    int code = -1;            // of `fbt train`: done or diverged, all else ends the experiment
    int64_t steps = 0;        // updates done
    double seconds = 0;       // that the updates took, in this call or an earlier one
    nlohmann::json measured;  // numbers by name, filled by the experiment
    bool diverged() const { return code == kDiverged; }
    // Adds a pass's numbers: loss/pass_K, accuracy/pass_K, last/pass_K, and, where there are such,
    // unsettled/pass_K, change/pass_K, permuted/pass_K and mean/pass_K; `suffix` ends every name.
    void add(const model::core::PassResult& pass, const std::string& suffix = "");
};

constexpr int64_t kQuickSteps = 20;

struct ExperimentConfig {
    std::string name, data, out;
    int seeds = 3;
    bool quick = false;                      // 20 steps and small measurements: does all of it run?
    std::string program = "/proc/self/exe";  // that trains
};

class Experiment {
  public:
    Experiment(Console& console, const Machine& machine, const ExperimentConfig& config,
               const StopSignals& stop);

    const ExperimentConfig& config() const { return config_; }
    const Machine& machine() const { return machine_; }
    tensor::Context& context() { return context_; }

    // Trains every recipe with every seed, as many at once as there are threads, one thread each.
    // Errors  those of `fbt train`, with the last line of its log.
    void train(const std::vector<Recipe>& recipes);
    // Calls `measure` with every run that did not diverge. It fills run.measured.
    void measure(const std::function<void(TrainedRun& run, const Loaded& loaded)>& measure);

    const std::vector<TrainedRun>& runs() const { return runs_; }
    // "1.234 (1.230 to 1.250)": a number of every seed's run of the recipe, its median, its lowest
    // and highest; times `factor`. Seeds that diverged are named, and so are numbers that are not
    // there.
    std::string cell(const std::string& recipe, const std::string& number, const char* pattern,
                     double factor = 1) const;
    // The same numbers' median alone; NaN where there is none.
    double median(const std::string& recipe, const std::string& number) const;

    // A training's steps: so many, or a few where the experiment is quick.
    int64_t steps(int64_t full) const { return config_.quick ? std::min(full, kQuickSteps) : full; }
    // A measurement's size: so many sequences or passes, or a few where the experiment is quick.
    int size(int full) const { return config_.quick ? std::min(full, 16) : full; }

    void table(const std::string& title, const Table& table);
    void say(const std::string& paragraph);
    // Asked between pieces of work: ends the experiment when a signal came.
    void check_stop() const;

    // Writes NAME.json and NAME.md, and says how long it took.
    nlohmann::json finish();

  private:
    std::vector<std::string> command_of(const Recipe& recipe, const TrainedRun& run) const;

    Console& console_;
    const Machine& machine_;
    ExperimentConfig config_;
    const StopSignals& stop_;
    tensor::Context context_;
    std::vector<TrainedRun> runs_;
    std::string text_;  // NAME.md
    double begun_, training_ = 0;
};

// What text experiments train: 377 thousand parameters on 2,048 bytes a step, evaluated every 50
// steps; the checkpoint of step 750 stays.
Recipe text_recipe(const std::string& name, const std::string& schedule,
                   const std::vector<std::string>& more = {}, int64_t steps = 1000);
// A text recipe's name in a table of text recipes.
std::string without_text(const std::string& recipe);
// The four schedules of the paper's figures that the experiments stability and schedules share.
std::vector<Recipe> paper_schedules();
// Three passes from the first step, with one of the three fusions: gates and replay share them.
Recipe three_pass_recipe(model::core::Fusion fusion);

void state_experiment(Experiment& lab);
void stability_experiment(Experiment& lab);
void replay_experiment(Experiment& lab);
void gates_experiment(Experiment& lab);
void schedules_experiment(Experiment& lab);
void probing_experiment(Experiment& lab);

}  // namespace fbt::apps
