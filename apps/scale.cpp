#include "apps/scale.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "model/engine/scale.h"
#include "tensor/file.h"

namespace fbt::apps {

namespace engine = model::engine;
using engine::Cluster;
using engine::StepPlan;
using engine::Strategy;
using nlohmann::json;
using tensor::DType;
using tensor::Error;
using tensor::ErrorKind;

namespace {

// What NVIDIA's data sheets state for the SXM modules, dense products, in eights with an InfiniBand
// port each (DGX A100, H100, H200). Links count one direction.
struct Gpu {
    const char* name;
    double bf16, f32;          // FLOP/s at most; f32 does not use the tensor cores
    double memory, bandwidth;  // bytes, byte/s
    double nvlink, port;       // byte/s
};
constexpr Gpu kGpus[] = {{"a100", 312e12, 19.5e12, 80e9, 2.039e12, 300e9, 25e9},
                         {"h100", 989e12, 67e12, 80e9, 3.35e12, 450e9, 50e9},
                         {"h200", 989e12, 67e12, 141e9, 4.8e12, 450e9, 50e9}};
constexpr double kAssumedShare = 0.4;  // of the peak
// Seconds a step of a ring takes over NVLink and over the network: what NCCL's own choice of
// algorithms assumes (src/graph/tuning.cc, ring, simple protocol).
constexpr double kHopInside = 3.4e-6, kHopAcross = 9.6e-6;
constexpr double kWorthwhile = 0.8;  // efficiency for which the last column gives a batch
constexpr const char* kMeasured = "this";

std::string gpu_names() {
    std::string names;
    for (const Gpu& gpu : kGpus) names += std::string(gpu.name) + ", ";
    return names + kMeasured;
}

std::string percent(double x) { return format("%.1f", 100 * x); }
std::string milliseconds(double s) { return format(s < 0.0995 ? "%.2f" : "%.1f", 1e3 * s); }
std::string gigabytes(double bytes) {
    return format(bytes < 99.5e6 ? "%.4f" : "%.2f", bytes / 1e9);
}

json json_of(const StepPlan& p) {
    return {{"ranks", p.ranks},
            {"sequences", p.sequences},
            {"idle", p.idle},
            {"seconds", p.seconds()},
            {"compute", p.compute},
            {"update", p.update},
            {"exposed", p.exposed},
            {"communication", p.communication},
            {"sent", p.sent},
            {"flops", p.flops},
            {"mean_load", p.mean_load},
            {"state", p.state},
            {"activations", p.activations},
            {"recompute", p.recompute},
            {"fits", p.fits},
            {"efficiency", p.efficiency}};
}

struct Figures {
    Cluster cluster;
    std::string rate, links;  // and where they are from
};

Figures figures_of(const ScalePlan& asked, const std::string& dtype) {
    Cluster cluster;
    std::string rate = format("%g TFLOP/s, as given", asked.rate),
                links = format("%g GB/s each way, as given", asked.link);
    const auto gpu = std::ranges::find_if(kGpus, [&](const Gpu& g) { return g.name == asked.gpu; });
    if (gpu == std::end(kGpus)) {
        cluster.node = std::ranges::max(asked.ranks);
        rate += ", updates included";
    } else {
        const double peak = dtype == "f32" ? gpu->f32 : gpu->bf16;
        cluster = {.rate = kAssumedShare * peak,
                   .memory = gpu->memory,
                   .bandwidth = gpu->bandwidth,
                   .inside = gpu->nvlink,
                   .across = gpu->port,
                   .hop_inside = kHopInside,
                   .hop_across = kHopAcross};
        if (asked.rate == 0)
            rate = format(
                "%.4g TFLOP/s, assumed to be %.0f %% of the peak of %.4g, not measured "
                "(--rate takes a measured one)",
                cluster.rate / 1e12, 100 * kAssumedShare, peak / 1e12);
        if (asked.link == 0)
            links = format(
                "%.0f GB/s each way within a node of %d, %.0f across, as stated (--link "
                "takes a measured one)",
                cluster.inside / 1e9, cluster.node, cluster.across / 1e9);
    }
    if (asked.rate > 0) cluster.rate = asked.rate * 1e12;
    if (asked.link > 0) cluster.inside = cluster.across = asked.link * 1e9;
    return {cluster, rate, links};
}

// What else could be done, one thing at a time and all together.
std::vector<std::pair<std::string, Strategy>> other_ways(const Strategy& now, int ranks,
                                                         int64_t sequences) {
    std::vector<std::pair<std::string, Strategy>> ways = {{"as planned", now}};
    Strategy all = now;
    const auto add = [&](const std::string& what, auto change) {
        Strategy one = now;
        change(one);
        change(all);
        ways.emplace_back(what, one);
    };
    add("4 blocks at once", [](Strategy& s) { s.bucket = 4; });
    add("gradients in bf16", [](Strategy& s) { s.gradient_bytes = 2; });
    add("hierarchical reduction", [](Strategy& s) { s.hierarchical = true; });
    add("owners with equal shares", [](Strategy& s) { s.even = true; });
    add("ZeRO-2", [](Strategy& s) { s.zero = 2; });
    const int spare = int(ranks / std::max<int64_t>(1, sequences));
    if (spare > 1 && ranks % spare == 0)
        add(std::to_string(spare) + " GPUs a sequence",
            [&](Strategy& s) { s.ranks_per_sequence = spare; });
    ways.emplace_back("all of these", all);
    return ways;
}

std::string hidden(const StepPlan& p) {
    return p.communication > 0 ? percent(1 - p.exposed / p.communication) : "-";
}
std::string memory(const StepPlan& p) {
    return gigabytes(p.state + p.activations) + (p.fits ? "" : " !");
}

}  // namespace

void ScalePlan::declare(Settings& s) {
    s.add("plan", &asked,
          "print what a step would take on many GPUs, and leave; see docs/scale.md");
    s.add("ranks", &ranks, "--plan: numbers of GPUs").at_least(1).at_most(1 << 14);
    s.add("gpu", &gpu, "--plan: " + gpu_names() + " (measured: needs --rate and --link)");
    s.add("rate", &rate, "--plan: measured TFLOP/s of one GPU in training; 0: assumed").at_least(0);
    s.add("link", &link, "--plan: measured GB/s of a reduction, each way; 0: as stated")
        .at_least(0);
}

void ScalePlan::check(const Settings& settings) const {
    for (const char* key : {"ranks", "gpu", "rate", "link"})
        if (!asked && settings.given(key))
            throw Error(ErrorKind::usage, std::string("--") + key + " is for --plan; add it");
    if (gpu == kMeasured) {
        if (asked && (rate == 0 || (link == 0 && std::ranges::max(ranks) > 1)))
            throw Error(ErrorKind::usage,
                        std::string("--gpu ") + kMeasured +
                            " has no stated figures: give what was measured, --rate TFLOP/s and "
                            "--link GB/s");
    } else if (std::ranges::none_of(kGpus, [&](const Gpu& g) { return g.name == gpu; })) {
        throw Error(ErrorKind::usage,
                    "--gpu is " + tensor::in_quotes(gpu) + ", needed one of " + gpu_names());
    }
}

int ScalePlan::run(Console& console, const model::core::Config& config, const std::string& dtype,
                   const engine::TrainConfig& train, int length, int zero) const {
    if (dtype != "f32" && dtype != "bf16")
        throw Error(ErrorKind::usage,
                    "--dtype is " + tensor::in_quotes(dtype) + ", needed f32 or bf16 for --plan");
    tensor::Context host("cpu", 1);
    model::core::Model model(host, config, dtype == "f32" ? DType::f32 : DType::bf16);

    const Figures figures = figures_of(*this, dtype);
    Cluster cluster = figures.cluster;
    if (train.memory_budget > 0) cluster.memory = double(train.memory_budget);

    const auto plan = [&](int n, int64_t tokens, const Strategy& strategy) {
        engine::TrainConfig other = train;
        other.tokens_per_step = tokens;
        return engine::plan_step(model, other, length, cluster, n, strategy);
    };
    const Strategy now{.zero = zero};
    const int64_t tokens = train.tokens_per_step, sequences = tokens / length;

    // The smallest power of two of sequences for each GPU, or those that share one, that is
    // worthwhile.
    const auto enough = [&](int n, const Strategy& strategy) -> json {
        for (int64_t q = 1; q <= 64; q *= 2) {
            const int64_t least = q * (n / strategy.ranks_per_sequence) * length;
            const StepPlan p = plan(n, least, strategy);
            if (p.fits && p.efficiency >= kWorthwhile) return least;
        }
        return nullptr;
    };
    const auto text_of = [](const json& least) {
        return least.is_null() ? "none" : short_count(least.get<double>());
    };
    const std::string worthwhile = format("%.0f %% from", 100 * kWorthwhile);

    json rows = json::array();
    Table table({"GPUs", "ms/step", "compute", "update", "exposed", "hidden %", "sent GB", "GB/GPU",
                 "recompute", "idle", "tokens/s", "strong %", "weak %", worthwhile});
    std::vector<StepPlan> plans;
    for (int n : ranks) plans.push_back(plan(n, tokens, now));
    const int64_t each = std::max<int64_t>(1, sequences / ranks[0]);
    for (const StepPlan& p : plans) {
        const int n = p.ranks;
        // As many sequences for each GPU as the first row has.
        std::optional<StepPlan> weak;
        if (each * n <= engine::kMostSequences) weak = plan(n, each * n * length, now);
        const json least = enough(n, now);
        const double speed_of = double(p.sequences * length) / p.seconds();
        table.row({std::to_string(n), milliseconds(p.seconds()), milliseconds(p.compute),
                   milliseconds(p.update), milliseconds(p.exposed), hidden(p), gigabytes(p.sent),
                   memory(p), p.recompute ? "yes" : "no", std::to_string(p.idle),
                   short_count(speed_of), percent(p.efficiency),
                   weak ? percent(weak->efficiency) + (weak->fits ? "" : " !") : "-",
                   text_of(least)});
        json row = json_of(p);
        row["tokens_per_second"] = speed_of;
        row["weak_efficiency"] = weak ? json(weak->efficiency) : json();
        row["enough_tokens"] = least;
        rows.push_back(row);
    }

    console.line(
        format("plan: %s parameters in %s, %lld tokens a step: %lld sequences of %d, "
               "ZeRO-%d",
               short_count(double(model.parameters().count())).c_str(), dtype.c_str(),
               static_cast<long long>(tokens), static_cast<long long>(sequences), length, zero));
    console.line(gpu + ": " + figures.rate);
    console.line("links: " + figures.links);
    console.line("");
    console.print(table.text());

    const StepPlan& last = *std::ranges::max_element(plans, {}, &StepPlan::ranks);
    json what_if = json::array();
    if (last.ranks > cluster.node) {
        Table next({format("on %d", last.ranks), "ms/step", "compute", "update", "exposed",
                    "sent GB", "GB/GPU", "strong %", worthwhile});
        for (const auto& [what, strategy] : other_ways(now, last.ranks, sequences)) {
            const StepPlan p = plan(last.ranks, tokens, strategy);
            const json least = enough(last.ranks, strategy);
            next.row({what, milliseconds(p.seconds()), milliseconds(p.compute),
                      milliseconds(p.update), milliseconds(p.exposed), gigabytes(p.sent), memory(p),
                      percent(p.efficiency), text_of(least)});
            json row = json_of(p);
            row["what"] = what;
            row["enough_tokens"] = least;
            what_if.push_back(row);
        }
        console.line("");
        console.print(next.text());
    }
    if (last.idle > 0)
        console.line("\n" + format("%lld sequences: of more than %lld GPUs some have none",
                                   static_cast<long long>(sequences),
                                   static_cast<long long>(sequences)));
    if (std::ranges::any_of(plans, [](const StepPlan& p) { return !p.fits; }))
        console.line("\n!: more than the device's memory, even with every block recomputed");
    console.result({{"gpu", gpu},
                    {"rate", cluster.rate},
                    {"rate_assumed", rate == 0},
                    {"dtype", dtype},
                    {"parameters", model.parameters().count()},
                    {"tokens_per_step", tokens},
                    {"sequences", sequences},
                    {"length", length},
                    {"zero", zero},
                    {"rows", rows},
                    {"what_if", what_if}});
    return kDone;
}

}  // namespace fbt::apps
