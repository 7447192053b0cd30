#include "model/engine/trainer.h"

#include <chrono>
#include <cmath>

namespace fbt::model::engine {

using tensor::Error;
using tensor::ErrorKind;

MemoryPlan plan_memory(const core::Config& m, const TrainConfig& config, tensor::DType dtype) {
    const int64_t size = tensor::size_of(dtype);
    const int64_t D = m.dim, HC = int64_t(m.heads) * m.head_dim,
                  GC = int64_t(m.kv_heads) * m.head_dim, F = m.ffn_dim;
    const int64_t matrices = int64_t(m.vocab_size) * D + 2 * D * D +
                             m.layers * (2 * D * HC + 2 * D * GC + D * m.heads + 3 * D * F);
    MemoryPlan plan;
    plan.parameters = matrices * size * (4 + 2);  // value, gradient, two moments; packed both ways

    // What the rules of one block keep for each row, and what a block must keep when it is run
    // again on the way back: its input and its own keys and values.
    const int64_t block = 7 * D + 4 * HC + 4 * GC + 3 * F + 2 * m.heads;
    const int64_t kept = D + 2 * GC;
    const int K = config.schedule.max_passes();
    const int64_t rows = config.tokens_per_step * K;  // prefixes may all be short
    const int64_t joined = K > 1 ? 2 * GC : 0;        // a feedback pass's store
    const int64_t outside = rows * 6 * D + autograd::kLogitRows * m.vocab_size;  // fusion, head
    plan.activations = size * (outside + rows * m.layers * (block + joined));
    plan.recomputed =
        size * (outside + rows * m.layers * kept + 2 * config.tokens_per_step * (block + joined));
    if (config.memory_budget > 0) {
        plan.recompute = plan.parameters + plan.activations > config.memory_budget;
        if (plan.recompute && plan.parameters + plan.recomputed > config.memory_budget)
            throw Error(ErrorKind::usage,
                        "memory-budget of " + std::to_string(config.memory_budget >> 20) +
                            " MiB is too small: " +
                            std::to_string((plan.parameters + plan.recomputed) >> 20) +
                            " MiB are needed with recomputation; lower tokens-per-step");
    }
    return plan;
}

Trainer::Trainer(core::Model& model, data::Source& source, TrainConfig config, bool recompute)
    : model_(model), source_(source), config_(std::move(config)), recompute_(recompute) {
    model_.parameters().initialise(model_.context(), model_.dtype(), config_.seed, true);
    optimizer_ = std::make_unique<nn::AdamW>(model_.parameters(), config_.adamw);
    state_.seed = config_.seed;
}

void Trainer::load(const std::string& checkpoint) {
    state_ = core::load_state(checkpoint);
    core::load_parameters(checkpoint, model_, true);
    core::load_optimizer(checkpoint, model_, *optimizer_);
    source_.seek({state_.epoch, state_.index});
}

void Trainer::save(const std::string& run, const nlohmann::json& config, int keep_last) const {
    core::save_checkpoint(run, model_, *optimizer_, state_, config, keep_last);
}

StepReport Trainer::advance() {
    if (state_.skipped >= config_.max_skipped)
        throw Error(ErrorKind::diverged,
                    "diverged: loss or gradients were not finite for " +
                        std::to_string(state_.skipped) + " steps in a row, up to step " +
                        std::to_string(state_.step) +
                        "; lower the learning rate, or give the schedule three-pass steps");
    const auto start = std::chrono::steady_clock::now();
    const core::Batch batch = source_.next(config_.tokens_per_step);
    core::PassPlan plan;
    plan.passes = config_.schedule.passes_at(state_.step, config_.steps, config_.seed);
    plan.plain = core::draw_prefixes(batch, plan.passes, config_.mixin, config_.seed, state_.step);
    plan.jitter = config_.jitter;
    plan.seed = config_.seed;
    plan.step = state_.step;

    model_.parameters().zero_gradients();
    autograd::Tape tape(true);
    const core::Objective loss = core::objective(model_, tape, batch, plan,
                                                 {.feedback_weight = config_.feedback_weight,
                                                  .z_weight = config_.z_weight,
                                                  .recompute = recompute_});
    tape.backward();

    StepReport report;
    report.passes = plan.passes;
    report.total = loss.total;
    report.pass_loss = loss.pass_loss;
    report.tokens = int64_t(batch.tokens.size());
    report.norm = optimizer_->gradient_norm();
    report.learning_rate = config_.learning_rate * nn::wsd_schedule(state_.step, config_.steps,
                                                                    config_.warmup, config_.decay);
    report.skipped = !std::isfinite(loss.total) || !std::isfinite(report.norm);
    if (report.skipped)
        ++state_.skipped;
    else {
        optimizer_->step(report.learning_rate, report.norm);
        state_.skipped = 0;
    }
    report.step = ++state_.step;
    state_.epoch = source_.position().epoch;
    state_.index = source_.position().index;
    model_.context().synchronize();
    report.milliseconds =
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
    return report;
}

}  // namespace fbt::model::engine
