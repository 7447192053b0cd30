// The training loop: data, passes, update, checkpoint. It prints nothing; the caller is told.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "model/core/checkpoint.h"
#include "model/core/objective.h"
#include "model/core/schedule.h"
#include "model/data/loader.h"
#include "model/engine/data_parallel.h"
#include "nn/optimizer.h"

namespace fbt::model::engine {

struct TrainConfig {
    int64_t steps = 1000;
    int64_t tokens_per_step = 2048;  // of all ranks together
    core::PassSchedule schedule;
    double feedback_weight = 1;  // lambda
    double z_weight = 0;
    double jitter = 0.02;
    bool mixin = true;
    double learning_rate = 1e-3;
    double fusion_rate = 1;  // what the fusion's matrices multiply the learning rate by
    int64_t warmup = 50;     // steps
    double decay = 0.25;     // fraction of the steps at the end
    nn::AdamWConfig adamw;
    uint64_t seed = 1;
    int64_t memory_budget = 0;  // bytes; 0: none. Recomputation is used when it would not hold.
    bool fast_matmul = false;   // CUDA: the vendor's products, which do not keep the row rule
    int max_skipped = 10;       // non-finite steps in a row before giving up
    int zero = 1;               // ZeRO's stage, 0 or 1: whether ranks share the optimiser's work
};

// What one step needs, before anything is allocated: bytes in use at its peak. Within a tenth of
// the truth where every step has the schedule's most passes, tokens_per_step tokens and no mixin.
// With mixin a feedback pass of S sequences of T tokens computes S*T/2 rows, give or take
// T*sqrt(S/12); planned are five of these deviations more, S*T at most.
struct MemoryPlan {
    int64_t parameters = 0;   // master, gradient, moments, packed copies
    int64_t activations = 0;  // the rest, nothing recomputed
    int64_t recomputed = 0;   // the same with every block recomputed
    bool recompute = false;   // the choice
};
std::string to_string(const MemoryPlan& plan);
// The plan's activations, in double: nothing recomputed, or every block.
double plan_activations(const core::Config& model, tensor::DType dtype, const TrainConfig& config,
                        bool recompute);
// Of the rank that needs most, where there are several.
// The model needs no values yet. Throws usage when even recomputation does not hold the budget.
MemoryPlan plan_memory(core::Model& model, const TrainConfig& config, int ranks = 1);

struct StepReport {
    int64_t step = 0;  // updates done, this one included
    int passes = 1;
    double total = 0;
    std::vector<double> pass_loss;
    double norm = 0;  // of the whole gradient, before clipping
    double learning_rate = 0;
    int64_t tokens = 0;  // positions of the batch, of all ranks
    double spread = 0;   // of the ranks' work: the most over the mean, less 1
    double milliseconds = 0;
    bool skipped = false;  // the loss or a gradient was not finite; nothing was updated
};

class Trainer {
  public:
    // The model's parameters are initialised from the seed; `source` starts at its beginning. Every
    // rank of the communicator's job has a trainer of the same model, source and config.
    Trainer(core::Model& model, data::Source& source, TrainConfig config, bool recompute,
            std::shared_ptr<Communicator> communicator = std::make_shared<Communicator>());

    // Continues from a checkpoint, of any number of ranks: parameters, moments, position. Throws
    // bad_file.
    void load(const std::string& checkpoint);
    // Called by every rank; rank 0 writes, and throws what goes wrong there.
    void save(const std::string& run, const nlohmann::json& config, int keep_last) const;

    int64_t step() const { return state_.step; }
    bool done() const { return state_.step >= config_.steps; }
    // One update, by all ranks. Throws diverged when max_skipped steps in a row were not finite.
    StepReport advance();

  private:
    core::Model& model_;
    data::Source& source_;
    TrainConfig config_;
    bool recompute_;
    core::TrainingState state_;
    std::unique_ptr<DataParallel> ranks_;
    std::unique_ptr<nn::AdamW> optimizer_;
};

}  // namespace fbt::model::engine
