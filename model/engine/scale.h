// What a training step takes on many devices: time, memory, communication. A formula over the
// figures that it is given; nothing is measured or run. docs/scale.md derives it.
#pragma once
#include "model/engine/trainer.h"

namespace fbt::model::engine {

// Devices and their links, in bytes and seconds.
struct Cluster {
    double rate = 0;       // FLOP/s that one device reaches in training
    double memory = 0;     // bytes of one device; 0: without end
    double bandwidth = 0;  // byte/s of that memory; 0: `rate` was measured with the updates
    int node = 8;          // devices that one node holds
    // byte/s that a device can send, at the same time as it receives as much: within its node, and
    // by its own port to other nodes.
    double inside = 0, across = 0;
    double hop_inside = 0, hop_across = 0;  // seconds for one step of a ring
};

// How the work is shared. The defaults are what `fbt train` does; the rest says what else would
// give.
struct Strategy {
    // 0: all state everywhere. 1: values and moments are kept and updated by their owner alone. 2:
    // gradients, too.
    int zero = 1;
    double gradient_bytes = 4;   // of one number on the wire
    int bucket = 1;              // blocks that are reduced, and gathered, at once
    bool even = false;           // owners have equal shares, not whole parameters
    bool hierarchical = false;   // reduce inside the nodes first, then in log2(nodes) hops
    int ranks_per_sequence = 1;  // that share its positions and exchange keys and values
};

struct StepPlan {
    int ranks = 1;
    int64_t sequences = 0;  // of the global batch
    int idle = 0;           // ranks without a sequence
    // Seconds of the mean step of the schedule, on the busiest rank:
    double compute = 0;        // products and attention, blocks that are computed again included
    double update = 0;         // the optimizer's
    double exposed = 0;        // communication that nothing hides
    double communication = 0;  // all of it
    double sent = 0;           // bytes a step that a rank sends, the mean over ranks
    double flops = 0;          // of all ranks, nothing recomputed
    double mean_load = 1;      // of a rank / the busiest rank's
    // Bytes of a device:
    double state = 0;  // values, gradients, moments, packed copies
    double activations = 0;
    bool recompute = false;  // every block, since the memory asks for it
    bool fits = true;
    double efficiency = 1;  // one device's time for the whole batch / (ranks * seconds)

    double seconds() const { return compute + update + exposed; }
};

// One step of `config.tokens_per_step` tokens, as many whole sequences of `length` as they hold, on
// `ranks` devices. `config.memory_budget` and its steps play no part. Efficiency compares with one
// device that would hold the whole batch without recomputation.
// Needs  length, ranks, bucket >= 1; ranks a multiple of ranks_per_sequence.
// Errors  usage when there is no whole sequence, or more than kMostSequences.
inline constexpr int64_t kMostSequences = 1 << 22;
StepPlan plan_step(core::Model& model, const TrainConfig& config, int length,
                   const Cluster& cluster, int ranks, const Strategy& strategy = {});

}  // namespace fbt::model::engine
