// Reverse-mode differentiation by a tape: every op records one rule that returns the gradients of
// its inputs; the tape adds them up. Parameters are not on the tape: their f32 gradients are summed
// inside the rules (matmul's dW, norms' dgain), straight into Weight::grad.
#pragma once
#include <functional>
#include <initializer_list>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tensor/ops.h"

namespace fbt::autograd {

using tensor::Tensor;

// A value of the forward pass and, on the way back, its gradient: same shape and dtype, but keys'
// and values' gradients are in the accumulate dtype, since every pass adds to those of a shared
// prefix.
class Var {
  public:
    Var() = default;
    bool defined() const { return node_ != nullptr; }
    const Tensor& value() const { return node_->value; }
    const Tensor& grad() const { return node_->grad; }  // undefined: nothing flowed here
    bool needs_grad() const { return node_ && node_->needs_grad; }

  private:
    friend class Tape;
    struct Node {
        Tensor value, grad;
        bool needs_grad = false;
    };
    explicit Var(std::shared_ptr<Node> node) : node_(std::move(node)) {}
    std::shared_ptr<Node> node_;
};

// One parameter as ops see it. `reached` is set by the first rule that adds to `grad`: a parameter
// without a gradient path in a step (the fusion while K = 1) must not be updated.
struct Weight {
    Tensor value;                      // the master copy, in the accumulate dtype: gains [D],
                                       // matrices [out, in], embedding [V, D]
    Tensor grad;                       // accumulate dtype; undefined: not trained
    tensor::PackedMatrix packed;       // value for y = x W^T
    tensor::PackedMatrix packed_back;  // value for dx = dy W
    bool reached = false;
    // Where new values are still under way (from another process): brings them. Ops call settle()
    // before they read.
    std::function<void()> arrive;
    void settle() {
        if (arrive) std::exchange(arrive, nullptr)();
    }
};

class Tape {
  public:
    // Takes the gradients of the outputs (undefined where nothing flowed) and returns one gradient
    // per input, undefined for none.
    using Rule = std::function<std::vector<Tensor>(const std::vector<Tensor>& douts)>;

    // A tape that does not record computes values only and keeps nothing alive.
    explicit Tape(bool recording) : recording_(recording) {}
    bool recording() const { return recording_; }
    bool notes() const { return recording_ || seen_; }  // what record() is told

    Var constant(Tensor value) const;  // no gradient flows into it
    std::vector<Var> constants(std::vector<Tensor> values) const {
        std::vector<Var> vars;
        vars.reserve(values.size());
        for (Tensor& t : values) vars.push_back(constant(std::move(t)));
        return vars;
    }
    Var variable(Tensor value) const;  // a gradient is wanted

    // The outputs of an op, with its rule and the weights to whose gradients the rule adds. Where
    // the tape does not record, or no input and no weight needs a gradient, the rule is dropped.
    // Decoding runs a hundred ops a token: a tape that does not record makes no Rule of `rule`.
    template <class F>
    std::vector<Var> record(std::vector<Tensor> outputs, const std::vector<Var>& inputs, F rule,
                            const std::vector<Weight*>& weights = {}) {
        if (recording_) return keep(std::move(outputs), inputs, std::move(rule), weights);
        if (seen_) seen_->insert(seen_->end(), weights.begin(), weights.end());
        return constants(std::move(outputs));
    }
    template <class F>
    Var record(Tensor output, std::initializer_list<Var> inputs, F rule,
               std::initializer_list<Weight*> weights = {}) {
        if (!recording_) {
            if (seen_) seen_->insert(seen_->end(), weights);
            return constant(std::move(output));
        }
        std::vector<Tensor> outputs;
        outputs.push_back(std::move(output));
        return keep(std::move(outputs), inputs, std::move(rule), weights)[0];
    }
    // A rule that starts the way back: it has no outputs and always runs (the loss).
    void record_root(const std::vector<Var>& inputs, Rule rule);

    // Rules of this tape that have yet to add to the weight's gradient. None: it is complete.
    int uses(const Weight& weight) const {
        const auto it = uses_.find(&weight);
        return it == uses_.end() ? 0 : it->second;
    }

    // Walks the rules backwards, dropping each as it is done. `seeds` gives outputs' gradients.
    // `ready` is told of each weight that had uses when the last of them is done, while the walk
    // goes on: so its gradient can travel meanwhile.
    using Ready = std::function<void(Weight&)>;
    void backward(const std::vector<std::pair<Var, Tensor>>& seeds = {}, const Ready& ready = {});

  private:
    struct Entry {
        std::vector<Var> inputs;
        std::vector<std::shared_ptr<Var::Node>> outputs;
        Rule rule;
        std::vector<Weight*> weights;
        bool root;
    };
    friend std::vector<Var> recompute(
        Tape& tape, const std::vector<Var>& inputs,
        const std::function<std::vector<Var>(Tape&, const std::vector<Var>&)>& run);
    std::vector<Var> keep(std::vector<Tensor> outputs, const std::vector<Var>& inputs, Rule rule,
                          const std::vector<Weight*>& weights);
    static void accumulate(Var::Node& node, const Tensor& gradient);
    void done_with(const std::vector<Weight*>& weights, const Ready& ready);
    bool recording_;
    std::vector<Entry> entries_;
    std::unordered_map<const Weight*, int> uses_;
    std::vector<Weight*>* seen_ = nullptr;  // where a tape that does not record notes weights
};

// A segment that keeps only its inputs: `run` is executed without recording now, and once more,
// recorded, on the way back. It must be a pure function of its inputs and of weights.
std::vector<Var> recompute(
    Tape& tape, const std::vector<Var>& inputs,
    const std::function<std::vector<Var>(Tape&, const std::vector<Var>&)>& run);

}  // namespace fbt::autograd
