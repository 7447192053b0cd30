#include "model/engine/scale.h"

#include <algorithm>
#include <cmath>

#include "model/core/flops.h"
#include "model/engine/share.h"

namespace fbt::model::engine {
namespace {

// FLOPs and rows of a step's busiest rank, the mean over draws of prefixes.
struct Work {
    double total = 0;      // of all ranks
    double busiest = 0;    // of one
    double blocks = 0;     // that part of `busiest` which recomputation repeats, both directions
    double sequences = 0;  // that the busiest rank has
    double rows = 0;       // that it computes, all passes
};

// pass_flops without the classifier's and the fusion's.
double block_flops(const core::Config& c, int64_t first, int64_t length) {
    const double D = c.dim, outside = D * c.vocab_size + (first > 0 ? 2 * D * D : 0);
    return core::pass_flops(c, first, length) - 6.0 * double(length - first) * outside;
}

// What Trainer::advance would do: prefixes by counter, sequences dealt by their work. With mixin a
// suffix has any length, and the longest of those that wait for each other matters.
Work work_of(const core::Config& c, const TrainConfig& config, int passes, int64_t sequences,
             int length, int groups) {
    constexpr int64_t kDrawn = 4096;  // sequences; the mean of a thousand steps of few
    const bool varies = passes > 1 && config.mixin;
    const int64_t draws = varies ? (kDrawn + sequences - 1) / sequences : 1;
    core::Batch batch;
    batch.lengths.assign(size_t(sequences), length);
    batch.indices.resize(size_t(sequences));
    Work mean;
    for (int64_t draw = 0; draw < draws; ++draw) {
        for (int64_t s = 0; s < sequences; ++s) batch.indices[s] = draw * sequences + s;
        const auto plain = core::draw_prefixes(batch, passes, config.mixin, config.seed, draw);
        std::vector<double> costs(sequences);
        for (int64_t s = 0; s < sequences; ++s) {
            costs[s] = core::pass_flops(c, 0, length);
            for (const auto& first : plain) costs[s] += core::pass_flops(c, first[s], length);
            mean.total += costs[s] / double(draws);
        }
        const std::vector<int> dealt = deal(costs, groups);
        std::vector<double> loads(groups, 0.0);
        for (int64_t s = 0; s < sequences; ++s) loads[dealt[s]] += costs[s];
        const int busiest = int(std::ranges::max_element(loads) - loads.begin());
        mean.busiest += loads[busiest] / double(draws);
        for (int64_t s = 0; s < sequences; ++s) {
            if (dealt[s] != busiest) continue;
            double blocks = block_flops(c, 0, length), rows = length;
            for (const auto& first : plain) {
                blocks += block_flops(c, first[s], length);
                rows += length - first[s];
            }
            mean.blocks += blocks / double(draws);
            mean.rows += rows / double(draws);
            mean.sequences += 1.0 / double(draws);
        }
    }
    return mean;
}

// Seconds of a reduce-scatter or an all-gather of so many bytes over n ranks, whose pieces may be
// uneven: every rank passes on all that is not its own.
double ring_seconds(const Cluster& cluster, int n, double bytes, bool hierarchical) {
    if (n == 1) return 0;
    const int inside = std::min(n, cluster.node), nodes = (n + inside - 1) / inside;
    if (hierarchical && nodes > 1)
        return (inside - 1) * cluster.hop_inside + bytes * (inside - 1) / inside / cluster.inside +
               std::ceil(std::log2(nodes)) * cluster.hop_across +
               bytes / inside * (nodes - 1) / nodes / cluster.across;
    // As many rings as a node has ports, each entering and leaving it by one.
    const double slowest =
        nodes == 1 ? cluster.inside : std::min(cluster.inside, inside * cluster.across);
    return (n - nodes) * cluster.hop_inside + (nodes - 1) * cluster.hop_across +
           bytes * (n - 1) / n / slowest;
}

// A pipeline: bucket after bucket is computed for `work` and then communicated for `wire`, one at a
// time, and last, or first, comes `end`, beside which nothing is computed.
double exposed_of(double end, double wire, double work, double buckets) {
    return end + wire + (buckets - 1) * std::max(0.0, wire - work);
}

}  // namespace

StepPlan plan_step(core::Model& model, const TrainConfig& config, int length,
                   const Cluster& cluster, int ranks, const Strategy& strategy) {
    const core::Config& c = model.config();
    const int R = ranks, s = strategy.ranks_per_sequence, L = c.layers;
    const int groups = R / s;
    StepPlan plan;
    plan.ranks = R;
    plan.sequences = config.tokens_per_step / length;
    if (plan.sequences < 1)
        throw tensor::Error(tensor::ErrorKind::usage,
                            "--tokens-per-step is " + std::to_string(config.tokens_per_step) +
                                ", but a sequence has " + std::to_string(length) + " tokens");
    if (plan.sequences > kMostSequences)
        throw tensor::Error(tensor::ErrorKind::usage,
                            "--tokens-per-step is " + std::to_string(config.tokens_per_step) +
                                ", more than a plan's " + std::to_string(kMostSequences) +
                                " sequences of " + std::to_string(length) + " tokens");
    plan.idle = int(std::max<int64_t>(0, groups - plan.sequences)) * s;

    // Numbers of a parameter: all, in matrices, and the most that one rank owns.
    double numbers = 0, matrices = 0;
    for (const nn::Parameter& p : model.parameters().all()) {
        const double size = double(tensor::numel_of(p.shape()));
        numbers += size;
        if (p.role() != nn::Role::gain) matrices += size;
    }
    const bool shared = strategy.zero > 0;
    const double owned =
        strategy.even && shared ? numbers / R : double(most_owned(model.parameters(), R, shared));
    const double buckets = (L + strategy.bucket - 1) / strategy.bucket;
    const double embedding = double(c.vocab_size) * c.dim, bucket = (numbers - embedding) / buckets;

    // Memory.
    const double t = double(tensor::size_of(model.dtype())),
                 a = double(tensor::size_of(tensor::accumulate_dtype(model.dtype())));
    plan.state = a * (strategy.zero > 1 ? owned : numbers)  // gradient
                 + 3 * a * owned                            // value, moments
                 + (owned < numbers ? t * embedding : 0)    // the table, where it is not owned
                 + 2 * t * matrices;                        // packed both ways
    TrainConfig share = config;
    const int64_t most = (plan.sequences + groups - 1) / groups;
    share.tokens_per_step = std::max<int64_t>(1, most * length / s);
    // Keys and values of the other ranks' positions of a shared sequence.
    const double GC = double(c.kv_heads) * c.head_dim;
    const double joined = double(most * length - share.tokens_per_step) * 2 * GC * t * L;
    for (const bool recompute : {false, true}) {
        plan.recompute = recompute;
        plan.activations = plan_activations(c, model.dtype(), share, recompute) + joined;
        plan.fits = cluster.memory == 0 || plan.state + plan.activations <= cluster.memory;
        if (plan.fits) break;
    }

    // The update: value, gradient and both moments are read, three of them written, and the norm
    // reads the gradient before. Everywhere gradients are set to zero and what was gathered is
    // packed twice.
    if (cluster.bandwidth > 0)
        plan.update = ((7 + 1) * a * owned + a * numbers + 3 * t * matrices) / cluster.bandwidth;

    // Communication. Without owners one all-reduce is a reduction and a gathering of its sums.
    const double out = strategy.gradient_bytes, back = shared ? t : out;
    const auto wire = [&](double bytes) {
        return ring_seconds(cluster, R, bytes, strategy.hierarchical);
    };
    const double reduce_end = wire(out * embedding), reduce = wire(out * bucket),
                 gather_end = wire(back * embedding), gather = wire(back * bucket);
    const double norm = shared ? 2 * wire(0) : 0;  // of a gradient of which each has a part
    plan.sent = (out + back) * numbers * (R - 1) / R;

    double alone = 0, busiest = 0;  // seconds of one device; FLOPs of the busiest rank
    for (const auto& [passes, weight] : config.schedule.shares()) {
        const Work work = work_of(c, config, passes, plan.sequences, length, groups);
        const double again = plan.recompute ? work.blocks / 3 : 0;
        plan.compute += weight * (work.busiest + again) / s / cluster.rate;
        plan.flops += weight * work.total;
        busiest += weight * work.busiest;
        alone += weight * work.total / cluster.rate;
        // Only pass 1 hides anything. It is the first to need the new values, and its way back,
        // the last, is where gradients become complete.
        const double forward =
            work.sequences * block_flops(c, 0, length) / 3 / buckets / s / cluster.rate;
        const double backward = (plan.recompute ? 3 : 2) * forward;
        // Keys and values go to the other ranks of a sequence, and their gradients come back.
        const double exchange = L * (ring_seconds(cluster, s, work.rows * 2 * GC * t, false) +
                                     ring_seconds(cluster, s, work.rows * 2 * GC * a, false));
        double exposed = norm + exchange, all = norm + exchange;
        if (shared) {
            exposed += exposed_of(reduce_end, reduce, backward, buckets) +
                       exposed_of(gather_end, gather, forward, buckets);
        } else {
            exposed += exposed_of(reduce_end + gather_end, reduce + gather, backward, buckets);
        }
        all += reduce_end + gather_end + buckets * (reduce + gather);
        plan.exposed += weight * exposed;
        plan.communication += weight * all;
        plan.sent += weight * work.rows * 2 * GC * (t + a) * L * (s - 1) / s;
    }
    plan.mean_load = plan.flops / groups / busiest;
    if (cluster.bandwidth > 0)
        alone += ((7 + 1) * a * numbers + a * numbers + 3 * t * matrices) / cluster.bandwidth;
    plan.efficiency = alone / (R * plan.seconds());
    return plan;
}

}  // namespace fbt::model::engine
