// The full-bandwidth transformer: parameters, input fusion, and the one primitive, the stack over
// spans, which training, prefill, decoding, replay and scoring all call.
#pragma once
#include <memory>
#include <optional>
#include <vector>

#include "model/core/config.h"
#include "nn/block.h"

namespace fbt::model::core {

using autograd::Tape;
using autograd::Var;
using tensor::Context;
using tensor::DType;
using tensor::SpanBatch;
using tensor::Tensor;

class Model {
  public:
    // Parameters have names and shapes, but no values until they are initialised or loaded.
    // dtype  of activations: f32, f64 on the device ref, or bf16 on any other.
    Model(Context& context, const Config& config, DType dtype);
    Model(const Model&) = delete;

    const Config& config() const { return config_; }
    Context& context() const { return context_; }
    DType dtype() const { return dtype_; }
    nn::ParameterSet& parameters() { return parameters_; }
    // Positions that the rotary tables hold. They move to other memory when this grows.
    int rope_positions() const { return rope_positions_; }
    void reserve_positions(int positions);

    // Plain inputs e [N,D]; tokens [N] i32.
    Var embed(Tape& tape, const Tensor& tokens);
    // Fused inputs e (x) h [N,D] (paper eq. 4 and its two alternatives); carried [N,D].
    Var fuse(Tape& tape, const Var& carried, const Tensor& tokens);
    // Top-layer states h [N,D] of the spans' rows, from inputs u [N,D]. With `depths` not null,
    // sets it to the residual stream, L+1 tensors [N,D]: depth 0 enters block 1 (after the input
    // norm), depth l leaves block l, and depth L is what the final norm makes h from.
    Var stack(Tape& tape, const Var& u, const std::shared_ptr<const SpanBatch>& spans,
              const std::shared_ptr<nn::KeyValueStore>& store, bool recompute = false,
              std::vector<Tensor>* depths = nullptr);
    // Cross-entropy of h against targets, over the tied embedding.
    autograd::Classified classify(Tape& tape, const Var& h, const Tensor& targets,
                                  const Tensor& weight, double z_weight);
    Tensor logits(const Tensor& h);  // [N,V]; for few rows

  private:
    Context& context_;
    Config config_;
    DType dtype_;
    nn::ParameterSet parameters_;
    nn::Parameter &embed_, &input_norm_;
    std::vector<nn::Block> blocks_;
    nn::Parameter& final_norm_;
    nn::Parameter *feedback_state_ = nullptr, *feedback_token_ = nullptr;
    std::optional<nn::RopeTable> rope_;  // grown to the longest sequence seen
    int rope_positions_ = 0;
};

// log p of one token a row of logits [N,V], by the classifier's row function: what a rollout
// records of its sampled tokens. The values are of the logits' accumulate dtype, f32 beside bf16.
std::vector<double> log_probabilities(const Tensor& logits, const std::vector<int32_t>& tokens);

}  // namespace fbt::model::core
