#include "model/core/model.h"

#include <algorithm>

namespace fbt::model::core {

using nn::Role;

Model::Model(Context& context, const Config& config, DType dtype)
    : context_(context),
      config_(config),
      dtype_(dtype),
      embed_(parameters_.add("embed.weight", {config.vocab_size, config.dim}, Role::embedding)),
      input_norm_(parameters_.add("input_norm.gain", {config.dim}, Role::gain)),
      blocks_([&] {
          config.validate();
          std::vector<nn::Block> blocks;
          for (int l = 0; l < config.layers; ++l)
              blocks.emplace_back(
                  parameters_, "layers." + std::to_string(l) + ".",
                  nn::BlockShape{config.dim, config.heads, config.kv_heads, config.head_dim,
                                 config.ffn_dim, config.is_full_attention(l) ? 0 : config.window,
                                 config.alpha(), config.norm_eps});
          return blocks;
      }()),
      final_norm_(parameters_.add("final_norm.gain", {config.dim}, Role::gain)) {
    const int64_t D = config.dim;
    switch (config.fusion) {
        case Fusion::gated_product:
            feedback_state_ = &parameters_.add("feedback.state.weight", {D, D}, Role::matrix);
            feedback_token_ = &parameters_.add("feedback.gate.weight", {D, D}, Role::matrix);
            break;
        case Fusion::concat_projection:  // columns: [state | token]
            feedback_state_ = &parameters_.add("feedback.concat.weight", {D, 2 * D}, Role::matrix);
            break;
        case Fusion::linear_addition:
            feedback_state_ = &parameters_.add("feedback.state.weight", {D, D}, Role::matrix);
            feedback_token_ = &parameters_.add("feedback.token.weight", {D, D}, Role::matrix);
            break;
    }
}

Var Model::embed(Tape& tape, const Tensor& tokens) {
    return autograd::embedding(tape, tokens, embed_.weight());
}

// token = input_norm(e)
//   gated_product      (W_U h) * sigmoid(W_G token)
//   concat_projection  W_C [h; token]
//   linear_addition    W_U h + W_T token
Var Model::fuse(Tape& tape, const Var& carried, const Tensor& tokens) {
    const Var token =
        autograd::rmsnorm(tape, embed(tape, tokens), input_norm_.weight(), config_.norm_eps);
    if (config_.fusion == Fusion::concat_projection)
        return autograd::linear(tape, autograd::concat_columns(tape, carried, token),
                                feedback_state_->weight());
    const Var state = autograd::linear(tape, carried, feedback_state_->weight());
    const Var other = autograd::linear(tape, token, feedback_token_->weight());
    return config_.fusion == Fusion::gated_product ? autograd::gate(tape, state, other)
                                                   : autograd::add(tape, state, other);
}

void Model::reserve_positions(int positions) {
    if (positions <= rope_positions_) return;
    rope_positions_ = std::max({positions, config_.context, 2 * rope_positions_});
    rope_.emplace(context_, rope_positions_, config_.head_dim, config_.rope_theta, dtype_);
}

Var Model::stack(Tape& tape, const Var& u, const std::shared_ptr<const SpanBatch>& spans,
                 const std::shared_ptr<nn::KeyValueStore>& store, bool recompute,
                 std::vector<Tensor>* depths) {
    reserve_positions(spans->max_end());
    const nn::SpanCall call{spans, &*rope_, store};
    Var x = autograd::rmsnorm(tape, u, input_norm_.weight(), config_.norm_eps);
    if (depths) *depths = {x.value()};
    for (int l = 0; l < config_.layers; ++l) {
        x = blocks_[l].forward(tape, x, call, l, recompute);
        if (depths) depths->push_back(x.value());
    }
    return autograd::rmsnorm(tape, x, final_norm_.weight(), config_.norm_eps);
}

autograd::Classified Model::classify(Tape& tape, const Var& h, const Tensor& targets,
                                     const Tensor& weight, double z_weight) {
    return autograd::classifier(tape, h, embed_.weight(), targets, weight, z_weight);
}

Tensor Model::logits(const Tensor& h) {
    embed_.weight().settle();
    return tensor::matmul_forward(h, embed_.weight().packed);
}

std::vector<double> log_probabilities(const Tensor& logits, const std::vector<int32_t>& tokens) {
    const int64_t n = logits.dim(0);
    Context& context = logits.context();
    const DType a = tensor::accumulate_dtype(logits.dtype());
    Tensor ce = Tensor::empty(context, {n}, a), lse = Tensor::empty(context, {n}, a);
    tensor::cross_entropy_forward(ce, lse, logits, Tensor::from(context, tokens, {n}));
    std::vector<double> out = ce.to_double();
    for (double& x : out) x = -x;
    return out;
}

}  // namespace fbt::model::core
