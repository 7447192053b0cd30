// fbt replay: rollouts rebuilt in parallel passes, and how far each is from the rollout's own
// cache; or certified by one pass over their recorded states; or what two such rebuilds differ in.
#include "model/core/replay.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <set>

#include "apps/command.h"
#include "apps/rollouts.h"
#include "apps/run_folder.h"
#include "tensor/safetensors.h"

namespace fbt::apps {
namespace {

namespace core = model::core;
namespace fs = std::filesystem;
using model::engine::Rollout;
using nlohmann::json;
using tensor::Error;
using tensor::ErrorKind;
using tensor::SafetensorsFile;
using tensor::Tensor;

class Replay {
  public:
    explicit Replay(CLI::App& app);
    int run();

  private:
    // A replay from tokens.
    struct Way {
        std::string name;  // of its row: 8, tolerance 0.001, exact
        core::ReplayLimits limits;
    };

    void check_flags() const;
    std::vector<Way> ways() const;
    void check_rollouts(const RolloutFile& file) const;
    bool certify(Console& console, core::Model& model, const Rollout& rollout,
                 std::optional<core::Trace>& own, json& document) const;
    bool replay(Console& console, core::Model& model, const Rollout& rollout,
                std::optional<core::Trace>& own, core::Trace& last, json& document) const;
    int compare_files(Console& console) const;

    Settings settings_;
    Machine machine_;
    std::string checkpoint_, rollout_, save_;
    std::vector<std::string> compared_;
    std::vector<int> passes_ = {1, 2, 3, 4, 8};
    double tolerance_ = 0;
    int block_ = 0;
    bool recorded_ = false, certify_ = false, until_exact_ = false;
};

Replay::Replay(CLI::App& app) {
    Settings& s = settings_;
    s.add("checkpoint", &checkpoint_, "the run that generated the rollouts, or a step of it");
    s.add("rollout", &rollout_, "file of rollouts that fbt generate --out wrote");
    s.add("passes", &passes_, "numbers of passes to compare").at_least(1);
    s.add("tolerance", &tolerance_,
          "pass until a pass changes the states by at most this, relative to their norm")
        .above(0);
    s.add("until_exact", &until_exact_,
          "pass until all positions are exact: about as many passes as tokens");
    s.add("block", &block_, "do so in blocks of so many positions, one after the other")
        .at_least(1);
    s.add("recorded", &recorded_, "one parallel pass from the recorded states too: must be exact");
    s.add("certify", &certify_,
          "one parallel pass over the recorded states instead of decoding: every bit of the record "
          "must come out of it");
    s.add("save", &save_,
          "file for the states and caches, FILE.safetensors: those of the recorded states' pass, "
          "or of the last replay");
    machine_.declare(s);
    s.bind(app);
    app.add_option("--compare", compared_,
                   "two files that --save or fbt generate wrote: what differs in them")
        ->expected(2)
        ->type_name("A.safetensors B.safetensors");
}

double milliseconds(core::Model& model, const std::function<void()>& work) {
    using Clock = std::chrono::steady_clock;
    model.context().synchronize();
    const Clock::time_point start = Clock::now();
    work();
    model.context().synchronize();
    return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

core::Record record_of(const Rollout& r) { return {r.states, r.keys, r.values, r.logprobs}; }

std::vector<int32_t> fed_tokens(const Rollout& r) {
    return {r.tokens.begin(), r.tokens.begin() + fed_positions(r)};
}

bool has_response(const Rollout& r) { return fed_positions(r) > r.prompt_length; }

// Decoding carried states of the response, so that a pass needs them.
bool carries(const Rollout& r) { return r.mode != core::Mode::standard && has_response(r); }

std::string name_of(const Rollout& r) {
    return format("prompt %d, sample %d", r.prompt + 1, r.sample + 1);
}

bool is_zero(const core::ReplayError& e) {
    return e.keys == 0 && e.values == 0 && e.argmax == 1 && e.kl == 0 && e.logprob == 0 &&
           e.exact == e.positions;
}

void Replay::check_flags() const {
    const auto refuse = [](const std::string& what) { throw Error(ErrorKind::usage, what); };
    if (!compared_.empty()) {
        for (const Setting& s : settings_.all())
            if (settings_.given(s.key) && s.key != "json")
                refuse("--compare needs its two files only; leave " + s.flag() + " out");
        return;
    }
    if (checkpoint_.empty()) refuse("--checkpoint RUN is needed");
    if (rollout_.empty()) refuse("--rollout FILE.jsonl is needed");
    if (block_ > 0 && ways().empty())
        refuse("--block is for replays from tokens: give --passes, --tolerance or --until-exact");
    if (certify_ && recorded_)
        refuse(
            "--certify is the pass of --recorded, without decoding to compare it with: give one");
    if (save_.empty()) return;
    if (!save_.ends_with(".safetensors"))
        refuse("--save is " + tensor::in_quotes(save_) +
               ", needed a name that ends with .safetensors");
    if (machine_.dtype == "f64")
        refuse("--save keeps f32 or bf16 values, so it is not for --dtype f64");
    check_output("--save", save_);
}

std::vector<Replay::Way> Replay::ways() const {
    std::vector<Way> out;
    if (settings_.given("passes") || (tolerance_ == 0 && !until_exact_ && !certify_)) {
        const std::set<int> counts(passes_.begin(), passes_.end());
        for (int count : counts)
            out.push_back({std::to_string(count), {.passes = count, .block = block_}});
    }
    if (tolerance_ > 0)
        out.push_back(
            {format("tolerance %g", tolerance_), {.tolerance = tolerance_, .block = block_}});
    if (until_exact_) out.push_back({"exact", {.block = block_}});
    return out;
}

void Replay::check_rollouts(const RolloutFile& file) const {
    const auto refuse = [](const std::string& what) { throw Error(ErrorKind::usage, what); };
    std::error_code error;
    for (const std::string& kept : file.kept_in)
        if (!save_.empty() && fs::equivalent(kept, save_, error))
            refuse("--save would overwrite the record, " + kept + "; name another file");
    for (const Rollout& r : file.rollouts) {
        if (r.mode == core::Mode::standard && !ways().empty())
            refuse(
                "a standard rollout needs no replay: its inputs carry no states, so one prefill of "
                "its tokens is exact; check it with --certify alone, or generate with --mode soft "
                "or fused");
        if (certify_ && carries(r) && r.states.empty())
            refuse("--certify needs recorded states, and " + name_of(r) +
                   " has none; generate it with --states, or replay it with --until-exact");
    }
    if (!save_.empty()) check_places(file, rollout_);
}

// One pass over the recorded states. Prints what came of it; false when it is refused.
bool Replay::certify(Console& console, core::Model& model, const Rollout& r,
                     std::optional<core::Trace>& own, json& document) const {
    std::optional<core::Certificate> certificate;
    const double ms = milliseconds(model, [&] {
        certificate = core::certify(model, r.tokens, r.prompt_length, r.mode, record_of(r));
    });
    const core::Difference& d = certificate->difference;
    document["certificate"] = {{"certified", certificate->holds()},
                               {"states", !r.states.empty()},
                               {"cache", !r.keys.empty()},
                               {"position", certificate->holds() ? json() : json(d.position)},
                               {"what", certificate->holds() ? json() : json(d.what)},
                               {"ms", ms}};
    if (!certificate->holds()) {
        console.warn(name_of(r) +
                     " is refused: one pass over the record gives other bits at "
                     "position " +
                     std::to_string(d.position) + " (" + d.what + ")");
        return false;
    }
    console.line(format("certified in %.1f ms: every bit of", ms) +
                 (r.states.empty() ? "" : " the states,") + (r.keys.empty() ? "" : " the cache,") +
                 format(" %zu log-probabilities", r.logprobs.size()));
    own = certificate->trace;
    return true;
}

// Prints one rollout's table; false when a check failed. `last`: what --save keeps, the recorded
// states' pass or else the last replay.
bool Replay::replay(Console& console, core::Model& model, const Rollout& rollout,
                    std::optional<core::Trace>& own, core::Trace& last, json& document) const {
    const int P = rollout.prompt_length;
    const std::vector<int32_t> fed = fed_tokens(rollout);
    // The last sampled token was never fed: no position has it as its input.
    const std::vector<int32_t> next(rollout.tokens.begin() + P + 1, rollout.tokens.end());
    bool ok = true;
    if (!own) {
        const double ms =
            milliseconds(model, [&] { own = core::decode_known(model, fed, P, rollout.mode); });
        document["decode_ms"] = ms;
        console.line(format("decoded one by one in %.1f ms", ms));
        if (!rollout.states.empty()) {
            const core::Difference d =
                core::first_difference(model, rollout.tokens, P, record_of(rollout), *own);
            if (d.position >= 0) {
                console.warn(name_of(rollout) +
                             ": decoding the same tokens gives other bits than "
                             "the record (" +
                             d.what + "), first at position " + std::to_string(d.position));
                ok = false;
            }
            document["states_equal"] = d.position < 0;
        }
    }

    Table table({"passes", "K err %", "V err %", "argmax %", "KL", "|dlogp|", "exact positions",
                 "ran", "computed", "ms"});
    const auto add = [&](const std::string& name, const core::Trace& trace, int passes,
                         int64_t computed, int64_t visited, double ms) {
        const core::ReplayError e = core::compare(model, *own, trace, P, next);
        const auto of = [](int64_t a, int64_t b) {
            return std::to_string(a) + "/" + std::to_string(b);
        };
        table.row({name, format("%.4f", 100 * e.keys), format("%.4f", 100 * e.values),
                   format("%.2f", 100 * e.argmax), format("%.2e", e.kl), format("%.2e", e.logprob),
                   of(e.exact, e.positions), std::to_string(passes), of(computed, visited),
                   format("%.1f", ms)});
        document["rows"].push_back({{"passes", name},
                                    {"keys", e.keys},
                                    {"values", e.values},
                                    {"argmax", e.argmax},
                                    {"kl", e.kl},
                                    {"logprob", e.logprob},
                                    {"exact", e.exact},
                                    {"prefix", e.prefix},
                                    {"positions", e.positions},
                                    {"ran", passes},
                                    {"computed", computed},
                                    {"visited", visited},
                                    {"block", block_},
                                    {"ms", ms}});
        return e;
    };
    for (const Way& way : ways()) {
        std::optional<core::Replay> replay;
        const double ms = milliseconds(model, [&] {
            replay.emplace(model, fed, P, rollout.mode);
            replay->run(way.limits);
        });
        last = replay->trace();
        const core::ReplayError error =
            add(way.name, last, replay->passes(), replay->computed(), replay->visited(), ms);
        if (replay->exact() && !is_zero(error)) {
            console.warn(name_of(rollout) +
                         ": the replay until it is exact is not, but it must be");
            ok = false;
        }
    }
    if (recorded_) {
        const Tensor states = rollout.states.empty() ? own->hidden : states_of(rollout, model);
        const double ms = milliseconds(
            model, [&] { last = core::replay_recorded(model, fed, P, rollout.mode, states); });
        const int64_t n = int64_t(fed.size()) - P;
        if (!is_zero(add("recorded", last, 1, n, n, ms))) {
            console.warn(name_of(rollout) +
                         ": the replay from recorded states is not exact, but it must be");
            ok = false;
        }
    }
    console.print(table.text());
    return ok;
}

// Fills in what --save keeps of a rollout.
void keep(Rollout& r, const core::Trace& trace) {
    const auto append = [](std::vector<float>& out, const Tensor& t) {
        const std::vector<double> values = t.to_double();
        out.insert(out.end(), values.begin(), values.end());
    };
    r.states.clear();
    r.keys.clear();
    r.values.clear();
    append(r.states, trace.hidden);
    for (const Tensor& layer : trace.keys) append(r.keys, layer);
    for (const Tensor& layer : trace.values) append(r.values, layer);
}

// Of two tensors of one shape and dtype.
struct Gap {
    double relative = 0;    // |a - b| / |a|, L2
    int64_t position = -1;  // the first whose bits differ, or that is not finite
};

Gap gap_between(const SafetensorsFile& a, const SafetensorsFile& b, const std::string& name) {
    const SafetensorsFile::Entry& entry = a.entry(name);
    const size_t rank = entry.shape.size();  // [T,D] or [L,T,G,C]
    const int64_t T = entry.shape[rank == 2 ? 0 : 1];
    const int64_t width = rank == 2 ? entry.shape[1] : entry.shape[2] * entry.shape[3];
    const std::vector<double> x = a.read<double>(name), y = b.read<double>(name);
    const std::span<const std::byte> p = a.bytes(name), q = b.bytes(name);
    const size_t each = size_t(size_of(entry.dtype));
    Gap gap;
    double difference = 0, size = 0;
    for (size_t i = 0; i < x.size(); ++i) {
        difference += (x[i] - y[i]) * (x[i] - y[i]);
        size += x[i] * x[i];
        const int64_t t = int64_t(i) / width % T;
        if ((gap.position < 0 || t < gap.position) &&
            (!std::isfinite(x[i]) ||
             std::memcmp(p.data() + i * each, q.data() + i * each, each) != 0))
            gap.position = t;
    }
    if (difference != 0) gap.relative = std::sqrt(difference / size);
    return gap;
}

// Errors  bad_file unless the file holds what write_kept writes.
SafetensorsFile open_kept(const std::string& path) {
    SafetensorsFile file = SafetensorsFile::open(path);
    for (const auto& [name, entry] : file.entries()) {
        const bool states = name.starts_with("states/");
        if ((!states && !name.starts_with("keys/") && !name.starts_with("values/")) ||
            entry.shape.size() != (states ? 2u : 4u) ||
            (entry.dtype != tensor::DType::f32 && entry.dtype != tensor::DType::bf16))
            throw Error(ErrorKind::bad_file,
                        path + " holds " + tensor::in_quotes(name) + " " +
                            tensor::to_string(entry.shape) + " " + tensor::name_of(entry.dtype) +
                            ", expected states/... [T,D], keys/... and values/... [L,T,G,C], f32 "
                            "or bf16");
    }
    if (file.entries().empty()) throw Error(ErrorKind::bad_file, path + " holds no tensor");
    return file;
}

int Replay::compare_files(Console& console) const {
    const SafetensorsFile files[] = {open_kept(compared_[0]), open_kept(compared_[1])};
    const auto what = [](const SafetensorsFile& file, const std::string& name) {
        if (!file.contains(name)) return std::string("lacks it");
        const SafetensorsFile::Entry& entry = file.entry(name);
        return "has " + tensor::to_string(entry.shape) + " " + tensor::name_of(entry.dtype);
    };
    for (const SafetensorsFile& file : files)
        for (const auto& [name, entry] : file.entries())
            if (const std::string a = what(files[0], name), b = what(files[1], name); a != b)
                throw Error(ErrorKind::bad_file, tensor::in_quotes(name) + ": " + files[0].path() +
                                                     " " + a + ", but " + files[1].path() + " " +
                                                     b + "; expected files of the same rollouts");
    json weights = json::array(), rows = json::array();
    for (const SafetensorsFile& file : files) {
        const auto found = file.metadata().find("weights");
        weights.push_back(found == file.metadata().end() ? json() : json(found->second));
    }
    if (weights[0] != weights[1])
        console.warn("the files are of different weights: " + weights[0].dump() + " and " +
                     weights[1].dump());
    Table table({"tensor", "shape", "relative error", "first position that differs"});
    bool same = true;
    for (const auto& [name, entry] : files[0].entries()) {
        const Gap gap = gap_between(files[0], files[1], name);
        same = same && gap.position < 0;
        table.row({name, tensor::to_string(entry.shape), format("%.3e", gap.relative),
                   gap.position < 0 ? "none" : std::to_string(gap.position)});
        rows.push_back({{"tensor", name},
                        {"shape", std::vector<int64_t>(entry.shape.begin(), entry.shape.end())},
                        {"relative", gap.relative},
                        {"position", gap.position < 0 ? json() : json(gap.position)}});
    }
    console.print(table.text());
    console.line(same ? "every bit is the same" : "the files differ");
    console.result({{"ok", same}, {"weights", weights}, {"tensors", rows}});
    return same ? kDone : kCheckFailed;
}

int Replay::run() {
    settings_.take_flags();
    Console console(machine_.json);
    check_flags();
    if (!compared_.empty()) return compare_files(console);
    const tensor::DType dtype = machine_.checked_dtype();
    tensor::Context context = machine_.context();
    const Loaded loaded = load(checkpoint_, context, dtype);
    core::Model& model = *loaded.model;
    const RolloutFile file = read_rollouts(rollout_, model.config());
    check_origin(file, rollout_, loaded);
    check_rollouts(file);

    bool ok = true;
    json documents = json::array();
    RolloutFile saved;
    saved.weights = file.weights;
    saved.dtype = dtype;
    for (const Rollout& r : file.rollouts) {
        const size_t sampled = r.logprobs.size();
        console.line(name_of(r) + format(": %s, %d prompt tokens, %zu sampled",
                                         core::to_string(r.mode).c_str(), r.prompt_length,
                                         sampled));
        json document = {{"prompt", r.prompt},
                         {"sample", r.sample},
                         {"mode", core::to_string(r.mode)},
                         {"prompt_length", r.prompt_length},
                         {"sampled", sampled},
                         {"rows", json::array()}};
        std::optional<core::Trace> own;
        core::Trace last;
        bool good = !certify_ || certify(console, model, r, own, document);
        const bool certified = certify_ && good;
        if (!ways().empty()) {
            if (has_response(r))
                good = replay(console, model, r, own, last, document) && good;
            else
                console.line(
                    "nothing to replay: the last sampled token is never fed, so this response "
                    "has no position");
        }
        ok = ok && good;
        documents.push_back(document);
        if (save_.empty() || !good) continue;
        if (certified)
            last = *own;
        else if (!has_response(r))
            last = core::decode_known(model, fed_tokens(r), r.prompt_length, r.mode);
        else if (!recorded_ && !r.states.empty())
            last = core::replay_recorded(model, fed_tokens(r), r.prompt_length, r.mode,
                                         states_of(r, model));
        saved.rollouts.push_back(r);
        keep(saved.rollouts.back(), last);
    }
    if (!save_.empty() && ok) {
        write_kept(save_, saved, model.config());
        console.line("wrote " + save_);
    } else if (!save_.empty()) {
        console.line("a check failed: nothing was written to " + save_);
    }
    console.result({{"ok", ok}, {"rollouts", documents}});
    return ok ? kDone : kCheckFailed;
}

}  // namespace

Run add_replay(CLI::App& app) {
    CLI::App* command = app.add_subcommand(
        "replay", "Rebuild the caches of rollouts in parallel passes, compare and certify them");
    auto replay = std::make_shared<Replay>(*command);
    return [replay] { return replay->run(); };
}

}  // namespace fbt::apps
