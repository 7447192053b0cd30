// fbt replay: rollouts rebuilt in parallel passes, and how far each is from the rollout's own
// cache.
#include "model/core/replay.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "apps/command.h"
#include "apps/rollouts.h"
#include "apps/run_folder.h"
#include "model/core/checkpoint.h"

namespace fbt::apps {
namespace {

namespace core = model::core;
using model::engine::Rollout;
using nlohmann::json;
using tensor::Error;
using tensor::ErrorKind;
using tensor::Tensor;

class Replay {
  public:
    explicit Replay(CLI::App& app);
    int run();

  private:
    bool replay(Console& console, core::Model& model, const Rollout& rollout, json& document) const;

    Settings settings_;
    Machine machine_;
    std::string checkpoint_, rollout_;
    std::vector<int> passes_ = {1, 2, 3, 4, 8};
    bool recorded_ = false;
};

Replay::Replay(CLI::App& app) {
    Settings& s = settings_;
    s.add("checkpoint", &checkpoint_, "the run that generated the rollouts, or a step of it");
    s.add("rollout", &rollout_, "file of rollouts that fbt generate --out wrote");
    s.add("passes", &passes_, "numbers of passes to compare").at_least(1);
    s.add("recorded", &recorded_, "one parallel pass from the recorded states too: must be exact");
    machine_.declare(s);
    s.bind(app);
}

// The first position whose state differs in any bit, or -1.
int64_t first_difference(const std::vector<float>& recorded, const Tensor& states) {
    const std::vector<double> own = states.to_double();
    for (size_t i = 0; i < own.size(); ++i)
        if (const float x = float(own[i]); std::memcmp(&x, &recorded[i], sizeof x) != 0)
            return int64_t(i) / states.dim(1);
    return -1;
}

bool is_zero(const core::ReplayError& e) {
    return e.keys == 0 && e.values == 0 && e.argmax == 1 && e.kl == 0 && e.logprob == 0 &&
           e.exact == e.positions;
}

// Prints one rollout's table; false when a check failed.
bool Replay::replay(Console& console, core::Model& model, const Rollout& rollout,
                    json& document) const {
    const int P = rollout.prompt_length;
    // The last sampled token was never fed: no position has it as its input.
    const std::vector<int32_t> fed(rollout.tokens.begin(), rollout.tokens.end() - 1);
    const std::vector<int32_t> next(rollout.tokens.begin() + P + 1, rollout.tokens.end());
    const core::Trace own = core::decode_known(model, fed, P, rollout.mode);
    bool ok = true;
    if (!rollout.states.empty()) {
        const int64_t at = first_difference(rollout.states, own.hidden);
        if (at >= 0) {
            console.warn(states_name(rollout) +
                         ": the recorded states differ from decoding the "
                         "same tokens, first at position " +
                         std::to_string(at));
            ok = false;
        }
        document["states_equal"] = at < 0;
    }

    Table table({"passes", "K err %", "V err %", "argmax %", "KL", "|dlogp|", "exact positions"});
    const auto add = [&](const std::string& name, const core::ReplayError& e) {
        table.row({name, format("%.4f", 100 * e.keys), format("%.4f", 100 * e.values),
                   format("%.2f", 100 * e.argmax), format("%.2e", e.kl), format("%.2e", e.logprob),
                   format("%lld/%lld", static_cast<long long>(e.exact),
                          static_cast<long long>(e.positions))});
        document["rows"].push_back({{"passes", name},
                                    {"keys", e.keys},
                                    {"values", e.values},
                                    {"argmax", e.argmax},
                                    {"kl", e.kl},
                                    {"logprob", e.logprob},
                                    {"exact", e.exact},
                                    {"positions", e.positions}});
    };
    std::vector<int> passes = passes_;
    std::sort(passes.begin(), passes.end());
    passes.erase(std::unique(passes.begin(), passes.end()), passes.end());
    core::Replay replay(model, fed, P, rollout.mode);
    for (int count : passes) {
        while (replay.passes() < count) replay.next();
        add(std::to_string(count), core::compare(model, own, replay.trace(), P, next));
    }
    if (recorded_) {
        const Tensor states =
            rollout.states.empty()
                ? own.hidden
                : Tensor::from_double(model.context(),
                                      {rollout.states.begin(), rollout.states.end()},
                                      own.hidden.shape(), model.dtype());
        const core::ReplayError error = core::compare(
            model, own, core::replay_recorded(model, fed, P, rollout.mode, states), P, next);
        add("recorded", error);
        if (!is_zero(error)) {
            console.warn(states_name(rollout) +
                         ": the replay from recorded states is not exact, but it must be");
            ok = false;
        }
    }
    console.print(table.text());
    return ok;
}

int Replay::run() {
    settings_.take_flags();
    Console console(machine_.json);
    if (checkpoint_.empty()) throw Error(ErrorKind::usage, "--checkpoint RUN is needed");
    if (rollout_.empty()) throw Error(ErrorKind::usage, "--rollout FILE.jsonl is needed");
    const tensor::DType dtype = machine_.checked_dtype();
    tensor::Context context = machine_.context();
    const Loaded loaded = load(checkpoint_, context, dtype);
    const RolloutFile file = read_rollouts(rollout_, loaded.model->config());
    const std::string weights = core::weights_hash(*loaded.model);
    if (file.weights != weights)
        throw Error(ErrorKind::bad_file, rollout_ + " comes from weights " + file.weights +
                                             ", but " + loaded.checkpoint + " has " + weights +
                                             "; name the checkpoint that generated it");
    for (const Rollout& r : file.rollouts) {
        if (!r.states.empty() && dtype != file.dtype)
            throw Error(ErrorKind::usage,
                        std::string("the recorded states are ") + tensor::name_of(file.dtype) +
                            "; replay them with --dtype " + tensor::name_of(file.dtype) + ", not " +
                            machine_.dtype);
        if (r.mode == core::Mode::standard)
            throw Error(ErrorKind::usage,
                        "a standard rollout needs no replay: its inputs carry no states, so one "
                        "prefill of its tokens is exact; generate with --mode soft or fused");
    }

    bool ok = true;
    json documents = json::array();
    for (const Rollout& r : file.rollouts) {
        const size_t sampled = r.logprobs.size();
        console.line(format("prompt %d, sample %d: %s, %d prompt tokens, %zu sampled", r.prompt + 1,
                            r.sample + 1, core::to_string(r.mode).c_str(), r.prompt_length,
                            sampled));
        json document = {{"prompt", r.prompt},
                         {"sample", r.sample},
                         {"mode", core::to_string(r.mode)},
                         {"prompt_length", r.prompt_length},
                         {"sampled", sampled},
                         {"rows", json::array()}};
        if (sampled < 2)
            console.line(
                "nothing to replay: the last sampled token is never fed, so this response "
                "has no position");
        else if (!replay(console, *loaded.model, r, document))
            ok = false;
        documents.push_back(document);
    }
    console.result({{"ok", ok}, {"rollouts", documents}});
    return ok ? kDone : kCheckFailed;
}

}  // namespace

Run add_replay(CLI::App& app) {
    CLI::App* command = app.add_subcommand(
        "replay", "Rebuild the caches of soft or fused rollouts in parallel passes and compare");
    auto replay = std::make_shared<Replay>(*command);
    return [replay] { return replay->run(); };
}

}  // namespace fbt::apps
