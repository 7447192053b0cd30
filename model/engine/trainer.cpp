#include "model/engine/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>

namespace fbt::model::engine {

using tensor::Error;
using tensor::ErrorKind;

MemoryPlan plan_memory(const core::Config& m, const TrainConfig& config, tensor::DType dtype) {
    // In double: settings far beyond any memory must not wrap around to a plan that fits.
    const double size = double(tensor::size_of(dtype)), D = m.dim, F = m.ffn_dim, L = m.layers,
                 V = m.vocab_size, HC = double(m.heads) * m.head_dim,
                 GC = double(m.kv_heads) * m.head_dim;
    const auto bytes = [](double x) { return int64_t(std::min(x, 4e18)); };
    const double matrices =
        V * D + 2 * D * D + L * (2 * D * HC + 2 * D * GC + D * m.heads + 3 * D * F);
    MemoryPlan plan;
    // Value, gradient and moments in the accumulate dtype; packed twice.
    plan.parameters =
        bytes(matrices * (4 * tensor::size_of(tensor::accumulate_dtype(dtype)) + 2 * size));

    // What the rules of one block keep for each row, and what a block must keep when it is run
    // again on the way back: its input and its own keys and values.
    const double block = 7 * D + 4 * HC + 4 * GC + 3 * F + 2.0 * m.heads, kept = D + 2 * GC;
    const int K = config.schedule.max_passes();
    const double tokens = double(config.tokens_per_step), rows = tokens * K;  // prefixes all short
    const double joined = K > 1 ? 2 * GC : 0;                        // a later pass's store
    const double outside = rows * 6 * D + autograd::kLogitRows * V;  // fusion, head
    plan.activations = bytes(size * (outside + rows * L * (block + joined)));
    plan.recomputed = bytes(size * (outside + rows * L * kept + 2 * tokens * (block + joined)));
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

std::string to_string(const MemoryPlan& plan) {
    const auto mib = [](int64_t bytes) {
        char text[32];
        std::snprintf(text, sizeof text, "%.1f MiB", double(bytes) / (1 << 20));
        return std::string(text);
    };
    return "parameters, gradients and moments " + mib(plan.parameters) + ", activations " +
           mib(plan.recompute ? plan.recomputed : plan.activations) +
           (plan.recompute ? " (every block recomputed; " + mib(plan.activations) + " without)"
                           : "");
}

namespace {

// The vendor's products while a step lasts; evaluations keep the row rule.
class FastMatmul {
  public:
    FastMatmul(tensor::Context& context, bool on) : context_(context) {
        context_.set_fast_matmul(on);
    }
    ~FastMatmul() { context_.set_fast_matmul(false); }
    FastMatmul(const FastMatmul&) = delete;

  private:
    tensor::Context& context_;
};

}  // namespace

Trainer::Trainer(core::Model& model, data::Source& source, TrainConfig config, bool recompute)
    : model_(model), source_(source), config_(std::move(config)), recompute_(recompute) {
    model_.parameters().initialise(model_.context(), model_.dtype(), config_.seed, true);
    for (nn::Parameter& p : model_.parameters().all())
        if (p.name().starts_with("feedback.")) p.set_rate(config_.fusion_rate);
    optimizer_ = std::make_unique<nn::AdamW>(model_.parameters(), config_.adamw);
    state_.seed = config_.seed;
}

void Trainer::load(const std::string& checkpoint) {
    state_ = core::load_state(checkpoint);
    if (state_.seed != config_.seed)
        throw Error(ErrorKind::bad_file, checkpoint + "/state.json: seed is " +
                                             std::to_string(state_.seed) + ", but the run's is " +
                                             std::to_string(config_.seed));
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

    const FastMatmul products(model_.context(), config_.fast_matmul);
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
