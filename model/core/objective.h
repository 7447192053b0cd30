// The multi-pass training objective (paper section 3), with prefix sharing: a plain prefix reads
// plain positions only, so in every pass its states, keys and values ARE pass 1's. A feedback pass
// computes the suffixes alone, against pass 1's keys and values; all passes' gradients flow into
// that one prefix; the prefix's loss terms are pass 1's, re-weighted.
#pragma once
#include <vector>

#include "model/core/model.h"
#include "model/data/loader.h"

namespace fbt::model::core {

// Packed sequences, N = sum of their lengths.
using Batch = data::Sequences;

// What the feedback passes of one step do.
struct PassPlan {
    int passes = 1;  // K, the plain one included
    // [K-1][sequences], in 1..T: in pass k+2 positions t < plain[k][s] keep their plain embedding.
    std::vector<std::vector<int32_t>> plain;
    double jitter = 0;  // half-width of the noise on carried states
    uint64_t seed = 0;  // of the jitter, with `step`
    int64_t step = 0;
    std::vector<std::vector<double>> noise;  // [K-1][N*D], given from outside instead; or empty
};

// Prefix lengths: uniform on 1..T per sequence and pass with mixin, 1 without.
std::vector<std::vector<int32_t>> draw_prefixes(const Batch& batch, int passes, bool mixin,
                                                uint64_t seed, int64_t step);

struct ObjectiveConfig {
    double feedback_weight = 1;  // lambda
    double z_weight = 0;
    bool recompute = false;
    bool keep_states = false;
    // Targets that losses are means over; 0: the batch's own. A part of a batch is given the
    // whole's, so that the parts' losses and gradients add up to the whole's.
    int64_t counted = 0;
};

struct Objective {
    double total = 0;               // L_1 + lambda*mean(L_2..L_K), each with its z-loss
    std::vector<double> pass_loss;  // L_k, cross-entropy alone
    std::vector<Tensor> states;     // h^(k) [N,D], if kept
};

// Forward over all passes. With a recording tape, tape.backward() then adds d total / d parameter
// to the parameters' gradients.
Objective objective(Model& model, Tape& tape, const Batch& batch, const PassPlan& plan,
                    const ObjectiveConfig& config);

}  // namespace fbt::model::core
