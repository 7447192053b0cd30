// Probing (the paper's figure 7): can a linear classifier read the answer from the residual stream
// at the query, and from which depth on? After a standard prefill the stream at depth 0 knows the
// query's token and nothing else. One fused step brings the state of the position before.
#include <algorithm>

#include "apps/corpus.h"
#include "apps/experiment.h"
#include "model/core/probe.h"

namespace fbt::apps {
namespace {

namespace core = model::core;

// Trained at, and probed at, all of these lengths: of completion and memory with a scratch stretch
// of 0, 16, 64 and 256 updates, of registers with 2, 4 and 8 writes each.
struct Probed {
    const char *task, *lengths;
    int steps;
    std::vector<int> at;
};
const Probed kProbed[] = {{"completion", "13,29,77,269", 1500, {13, 29, 77, 269}},
                          {"memory", "2,18,66,258", 600, {2, 18, 66, 258}},
                          {"registers", "17,33,65", 2000, {17, 33, 65}}};
constexpr std::pair<core::Prefill, const char*> kPrefills[] = {
    {core::Prefill::standard, "standard"},
    {core::Prefill::one_step, "one_step"},
    {core::Prefill::recurrent, "recurrent"}};
constexpr int kSequences = 400, kFolds = 4;
constexpr double kL2 = 1;

// PREFILL/LENGTH/DEPTH, accuracies of the probes, and model/PREFILL/LENGTH, the model's own.
void measure(Experiment& lab, const Probed& probed, TrainedRun& run, const Loaded& loaded) {
    const Corpus corpus("", probed.task);
    for (int length : probed.at) {
        const auto batches = [&] {
            return corpus.validation({length}, run.seed, lab.size(kSequences),
                                     int64_t(kSequences) * length);
        };
        const core::Batch batch = *batches()();
        std::vector<int32_t> labels;
        for (size_t s = 1; s <= batch.lengths.size(); ++s)
            labels.push_back(batch.targets[s * size_t(length) - 1]);
        for (const auto& [prefill, name] : kPrefills) {
            lab.check_stop();
            const auto streams = core::query_streams(*loaded.model, batch, prefill);
            for (size_t depth = 0; depth < streams.size(); ++depth)
                run.measured[std::string(name) + "/" + std::to_string(length) + "/" +
                             std::to_string(depth)] =
                    core::probe(streams[depth], loaded.model->config().dim, labels, batch.indices,
                                kL2, kFolds, run.seed)
                        .accuracy;
        }
        for (core::Mode mode : {core::Mode::standard, core::Mode::soft})
            run.measured["model/" + core::to_string(mode) + "/" + std::to_string(length)] =
                core::decode_accuracy(*loaded.model, batches(), mode).last;
    }
}

}  // namespace

void probing_experiment(Experiment& lab) {
    std::vector<Recipe> recipes;
    for (const Probed& p : kProbed)
        recipes.push_back({p.task, p.steps, {"--preset",          "parity",  "--task",       p.task,
                                             "--length",          p.lengths, "--layers",     "4",
                                             "--context",         "512",     "--window",     "512",
                                             "--tokens-per-step", "2048",    "--schedule",   "1:3",
                                             "--mixin",           "true",    "--save-every", "0"}});
    lab.train(recipes);
    lab.measure([&](TrainedRun& run, const Loaded& loaded) {
        for (const Probed& p : kProbed)
            if (loaded.task == p.task) measure(lab, p, run, loaded);
    });
    for (const Probed& p : kProbed) {
        std::vector<std::string> heading = {"prefill and depth"};
        for (int length : p.at) heading.push_back(std::to_string(length) + " tokens");
        Table table(heading);
        for (const auto& [prefill, name] : kPrefills)
            for (int depth = 0; depth <= 4; ++depth) {
                std::vector<std::string> row = {format("%s, depth %d", name, depth)};
                for (int length : p.at)
                    row.push_back(lab.cell(p.task,
                                           std::string(name) + "/" + std::to_string(length) + "/" +
                                               std::to_string(depth),
                                           "%.0f", 100));
                table.row(row);
            }
        for (const char* mode : {"standard", "soft"}) {
            std::vector<std::string> row = {std::string("the model's answer, ") + mode};
            for (int length : p.at)
                row.push_back(lab.cell(p.task,
                                       std::string("model/") + mode + "/" + std::to_string(length),
                                       "%.0f", 100));
            table.row(row);
        }
        lab.table(format("%s, trained for %lld steps: right answers of a linear probe at the "
                         "query, %%; chance is 50",
                         p.task, static_cast<long long>(lab.steps(p.steps))),
                  table);
    }
}

}  // namespace fbt::apps
