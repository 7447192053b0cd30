#include "model/engine/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>

namespace fbt::model::engine {

using tensor::Error;
using tensor::ErrorKind;

namespace {

// Bytes that a step's tensors take beside the parameters; kernels' scratch is left out. What is
// kept follows nn/block.cpp and core/objective.cpp, op by op; what the way back adds, the rules in
// autograd/ops.cpp. In double: settings far beyond any memory must not wrap around to a plan that
// fits.
class StepMemory {
  public:
    StepMemory(const core::Config& m, tensor::DType dtype, const TrainConfig& config)
        : t(double(tensor::size_of(dtype))),
          a(double(tensor::size_of(tensor::accumulate_dtype(dtype)))),
          D(m.dim),
          F(m.ffn_dim),
          L(m.layers),
          V(m.vocab_size),
          H(m.heads),
          G(m.kv_heads),
          HC(H * m.head_dim),
          GC(G * m.head_dim),
          rope(double(m.context) * m.head_dim * a),
          passes(config.schedule.max_passes()),
          rows(double(config.tokens_per_step)) {
        const double T = std::min(double(m.context), rows);
        suffix = config.mixin ? std::min(rows, rows / 2 + 5 * std::sqrt(rows * T / 12)) : rows;
    }

    double peak(bool recompute) const {
        const double kept = recompute ? outputs() : block();
        double held = rope + rows * (plain_input() + L * kept + head());
        held += (passes - 1) *
                (suffix * (fused_input() + L * kept + head()) + (recompute ? 0 : L * store()));
        // The last pass's classifier still has its logits.
        const double last = passes > 1 ? suffix : rows;
        double peak = held + std::min(last, double(autograd::kLogitRows)) * V * t;
        // The way back. The first pass to be walked leaves gradients for pass 1: of its keys and
        // values, layer by layer, and of its states.
        for (int k = passes; k >= 1; --k) {
            const double n = k > 1 ? suffix : rows, joined = k > 1 ? store() : 0;
            const bool leaves = k > 1 && k == passes;
            const double again = recompute ? n * block() + joined : 0;
            const double change = (leaves ? store_gradient() : 0) -  // by walking one block
                                  (recompute ? n * kept : n * kept + joined);
            held -= n * head();
            const double most = held + std::max(0.0, (L - 1) * change) + again;
            peak = std::max({peak, most + n * at_swiglu(recompute),
                             most + n * at_attention(recompute) + store_gradient()});
            if (k > 1)
                peak = std::max(
                    peak, most + n * at_join(recompute) + 1.5 * store_gradient() - 0.5 * store());
            held += L * change - n * (k > 1 ? fused_input() : plain_input());
            if (leaves) held += rows * D * t;
        }
        return peak;
    }

  private:
    // Of one row:
    double block() const {
        return D * t + a             // rmsnorm: y, rstd
               + 2 * HC * t + H * a  // q as projected; rotated, rstd
               + 2 * GC * t + G * a  // k, too
               + GC * t              // v
               + HC * t + H * a      // attention: o, lse
               + H * t + HC * t      // its gate; o gated
               + D * t               // and projected
               + D * t + a           // residual_rmsnorm: y, rstd
               + D * t + a           // rmsnorm: y, rstd
               + 3 * F * t           // gate, up, silu(gate) * up
               + D * t               // down
               + D * t + a;          // residual_rmsnorm: y, rstd
    }
    double outputs() const { return D * t + 2 * GC * t; }  // of a block: y, own k and v
    double plain_input() const {
        return 2 * D * t + a  // embedding; rmsnorm: y, rstd
               + 2 * 4;       // tokens, positions
    }
    double fused_input() const {
        return D * t                     // carried state
               + 3 * D * t               // its and the token's projection, their fusion; or, of a
                                         // concatenation, both and their projection
               + 2 * 8                   // where the carried and the own rows lie
               + D * t + plain_input();  // token's embedding, normed
    }
    double head() const {
        return 2 * D * t + a  // rmsnorm: h, rstd; dh
               + 2 * a;       // ce, lse
    }
    // At a block's rules of swiglu and of attention: the gradients under way, less what the rules
    // walked before them let go, the block's output included, unless that was computed again.
    double at_swiglu(bool recompute) const {
        return D * t + 3 * F * t  // of the residual; of the product, gate and up
               - D * t            // down
               - (recompute ? 0 : D * t);
    }
    double at_attention(bool recompute) const {
        return 2 * D * t + 2 * HC * t + H * a          // of residual, normed x, o, q; delta
               - (4 * D + 3 * F + HC + H) * t - 3 * a  // from down to the gate
               - (recompute ? 0 : D * t);
    }
    // At the join of the keys, after that of the values: o, lse, delta, the gradient of o and the
    // joined values are gone, gradients of own and of pass 1's rows have come.
    double at_join(bool recompute) const {
        return at_attention(recompute) - 2 * HC * t - 2 * H * a + 2 * GC * a;
    }
    // The keys and values of all rows in one layer, which each later pass joins anew; and their
    // gradients.
    double store() const { return rows * 2 * GC * t; }
    double store_gradient() const { return rows * 2 * GC * a; }

    double t, a;  // sizes of the dtype and of its accumulate dtype
    double D, F, L, V, H, G, HC, GC, rope;
    int passes;
    double rows, suffix = 0;  // of pass 1, of a later pass
};

std::string mib(int64_t bytes) {  // rounded up, to be enough as a budget
    return std::to_string((bytes >> 20) + (bytes % (1 << 20) != 0)) + " MiB";
}

}  // namespace

double plan_activations(const core::Config& model, tensor::DType dtype, const TrainConfig& config,
                        bool recompute) {
    return StepMemory(model, dtype, config).peak(recompute);
}

MemoryPlan plan_memory(core::Model& model, const TrainConfig& config, int ranks) {
    // Whole sequences are dealt, so a rank's share exceeds the mean by one at most, where rows are
    // work; where long sequences are more work than their rows, one with short ones has more rows.
    TrainConfig own = config;
    if (ranks > 1)
        own.tokens_per_step = std::min(config.tokens_per_step,
                                       config.tokens_per_step / ranks + model.config().context);
    const auto activations = [&](bool recompute) {
        return int64_t(
            std::min(plan_activations(model.config(), model.dtype(), own, recompute), 4e18));
    };
    MemoryPlan plan;
    plan.activations = activations(false);
    plan.recomputed = activations(true);
    const int64_t master = int64_t(tensor::size_of(tensor::accumulate_dtype(model.dtype())));
    // Every gradient; values and moments of what is updated here; elsewhere the embedding's table.
    // New values on their way are gone before the activations are many.
    const int64_t count = model.parameters().count(),
                  most = most_owned(model.parameters(), ranks, config.zero > 0);
    plan.parameters = master * (count + 3 * most);
    if (most < count)
        plan.parameters += int64_t(tensor::size_of(model.dtype())) * model.config().vocab_size *
                           model.config().dim;
    const int64_t budget = config.memory_budget;
    const auto too_much = [&](int64_t activations) {
        return budget > 0 && activations > budget - plan.parameters;
    };
    // Finding a layout tries its product; where the rest is too much already, padding is left out.
    const bool padded = !too_much(plan.recomputed);
    const auto packed = [&](int64_t N, int64_t K) {
        return padded ? tensor::matmul_packed_size(model.context(), N, K, model.dtype()) : N * K;
    };
    for (const nn::Parameter& p : model.parameters().all()) {
        if (p.role() == nn::Role::gain) continue;
        const int64_t N = p.shape()[0], K = p.shape()[1];
        plan.parameters += (packed(N, K) + packed(K, N)) * int64_t(tensor::size_of(model.dtype()));
    }
    plan.recompute = too_much(plan.activations);
    if (too_much(plan.recomputed))
        throw Error(ErrorKind::usage,
                    "--memory-budget is " + mib(budget) + ", but a step takes at least " +
                        mib(plan.parameters + plan.activations) + ", or " +
                        mib(plan.parameters + plan.recomputed) +
                        " with every block recomputed, of which the parameters' " +
                        mib(plan.parameters) + " do not depend on --tokens-per-step; raise the " +
                        "budget, lower --tokens-per-step, or take a smaller model");
    return plan;
}

std::string to_string(const MemoryPlan& plan) {
    const int64_t without = plan.parameters + plan.activations,
                  with = plan.parameters + plan.recomputed;
    return mib(plan.recompute ? with : without) + ", of which parameters, gradients and moments " +
           mib(plan.parameters) +
           (plan.recompute ? "; every block is recomputed, without that " + mib(without)
                           : "; with every block recomputed " + mib(with));
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

Trainer::Trainer(core::Model& model, data::Source& source, TrainConfig config, bool recompute,
                 std::shared_ptr<Communicator> communicator)
    : model_(model), source_(source), config_(std::move(config)), recompute_(recompute) {
    model_.parameters().initialise(model_.context(), model_.dtype(), config_.seed, true);
    for (nn::Parameter& p : model_.parameters().all())
        if (p.name().starts_with("feedback.")) p.set_rate(config_.fusion_rate);
    ranks_ = std::make_unique<DataParallel>(model_.parameters(), std::move(communicator),
                                            config_.zero > 0);
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
    core::save_checkpoint(
        run, model_, *optimizer_, state_, config, keep_last,
        {.writes = ranks_->communicator().rank() == 0,
         .whole = [&](size_t i, const Tensor& own) { return ranks_->whole(i, own); },
         .sum = [&](const std::vector<double>& numbers) { return ranks_->sum(numbers); }});
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

    Communicator& others = ranks_->communicator();
    StepReport report;
    std::optional<core::Batch> share;
    if (others.size() > 1) {
        const Share mine = share_of(model_.config(), batch, plan, others.rank(), others.size());
        share = batch.select(mine.sequences);
        for (std::vector<int32_t>& plain : plan.plain) {
            std::vector<int32_t> kept;
            for (size_t s : mine.sequences) kept.push_back(plain[s]);
            plain = std::move(kept);
        }
        report.spread = mine.spread;
    }
    const core::Batch& own = share ? *share : batch;

    const FastMatmul products(model_.context(), config_.fast_matmul);
    model_.parameters().zero_gradients();
    autograd::Tape tape(true);
    core::Objective loss;
    loss.pass_loss.assign(size_t(plan.passes), 0);
    if (!own.lengths.empty())  // more ranks than sequences
        loss = core::objective(model_, tape, own, plan,
                               {.feedback_weight = config_.feedback_weight,
                                .z_weight = config_.z_weight,
                                .recompute = recompute_,
                                .counted = batch.targets_counted()});
    ranks_->begin(tape);
    tape.backward({}, [&](autograd::Weight& w) { ranks_->ready(w); });
    ranks_->finish();

    std::vector<double> sums = loss.pass_loss;
    sums.push_back(loss.total);
    report.norm = ranks_->norm_and_sums(optimizer_->gradient_squares(), sums);
    report.total = sums.back();
    sums.pop_back();
    report.pass_loss = sums;
    report.passes = plan.passes;
    report.tokens = int64_t(batch.tokens.size());
    report.learning_rate = config_.learning_rate * nn::wsd_schedule(state_.step, config_.steps,
                                                                    config_.warmup, config_.decay);
    report.skipped = !std::isfinite(report.total) || !std::isfinite(report.norm);
    if (report.skipped)
        ++state_.skipped;
    else {
        optimizer_->step(report.learning_rate, report.norm);
        ranks_->hand_round();
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
