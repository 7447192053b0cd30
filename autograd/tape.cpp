#include "autograd/tape.h"

#include <algorithm>

namespace fbt::autograd {

Var Tape::constant(Tensor value) const {
    auto node = std::make_shared<Var::Node>();
    node->value = std::move(value);
    return Var(node);
}

Var Tape::variable(Tensor value) const {
    Var v = constant(std::move(value));
    v.node_->needs_grad = recording_;
    return v;
}

std::vector<Var> Tape::keep(std::vector<Tensor> outputs, const std::vector<Var>& inputs, Rule rule,
                            const std::vector<Weight*>& weights) {
    Entry entry{inputs, {}, std::move(rule), {}, false};
    for (Weight* w : weights)
        if (w->grad.defined()) entry.weights.push_back(w);
    const bool wanted =
        !entry.weights.empty() ||
        std::any_of(inputs.begin(), inputs.end(), [](const Var& v) { return v.needs_grad(); });
    std::vector<Var> vars;
    for (Tensor& t : outputs) {
        vars.push_back(constant(std::move(t)));
        vars.back().node_->needs_grad = wanted;
        entry.outputs.push_back(vars.back().node_);
    }
    if (wanted) {
        for (const Weight* w : entry.weights) ++uses_[w];
        entries_.push_back(std::move(entry));
    }
    return vars;
}

void Tape::record_root(const std::vector<Var>& inputs, Rule rule) {
    if (recording_) entries_.push_back({inputs, {}, std::move(rule), {}, true});
}

void Tape::accumulate(Var::Node& node, const Tensor& gradient) {
    if (!node.grad.defined())
        node.grad = gradient;
    else if (node.grad.shares_storage())  // a rule may hand one tensor to two inputs
        node.grad = tensor::add(node.grad, gradient);
    else
        tensor::add_accum(node.grad, gradient);
}

void Tape::done_with(const std::vector<Weight*>& weights, const Ready& ready) {
    for (Weight* w : weights)
        if (--uses_.at(w) == 0 && ready) ready(*w);
}

void Tape::backward(const std::vector<std::pair<Var, Tensor>>& seeds, const Ready& ready) {
    for (const auto& [var, gradient] : seeds)
        if (var.needs_grad() && gradient.defined()) accumulate(*var.node_, gradient);
    while (!entries_.empty()) {
        Entry entry = std::move(entries_.back());
        entries_.pop_back();
        std::vector<Tensor> douts;
        bool any = entry.root;
        for (auto& node : entry.outputs) {
            douts.push_back(std::move(node->grad));
            node->grad = {};
            any = any || douts.back().defined();
        }
        if (!any) {
            done_with(entry.weights, ready);
            continue;
        }
        std::vector<Tensor> grads = entry.rule(douts);
        douts.clear();
        done_with(entry.weights, ready);
        for (size_t i = 0; i < entry.inputs.size(); ++i)
            if (entry.inputs[i].needs_grad() && i < grads.size() && grads[i].defined()) {
                const Tensor gradient = std::move(grads[i]);
                accumulate(*entry.inputs[i].node_, gradient);
            }
    }
}

std::vector<Var> recompute(
    Tape& tape, const std::vector<Var>& inputs,
    const std::function<std::vector<Var>(Tape&, const std::vector<Var>&)>& run) {
    if (!tape.recording()) return run(tape, inputs);
    std::vector<Weight*> weights;
    Tape forgetful(false);
    forgetful.seen_ = &weights;
    std::vector<Tensor> values;
    for (const Var& v : run(forgetful, inputs)) values.push_back(v.value());
    auto rule = [inputs, run](const std::vector<Tensor>& douts) {
        Tape again(true);
        std::vector<Var> leaves;
        for (const Var& v : inputs)
            leaves.push_back(!v.defined()     ? Var()
                             : v.needs_grad() ? again.variable(v.value())
                                              : again.constant(v.value()));
        const std::vector<Var> outputs = run(again, leaves);
        std::vector<std::pair<Var, Tensor>> seeds;
        for (size_t i = 0; i < outputs.size(); ++i) seeds.emplace_back(outputs[i], douts[i]);
        again.backward(seeds);
        std::vector<Tensor> grads;
        for (const Var& leaf : leaves) grads.push_back(leaf.defined() ? leaf.grad() : Tensor());
        return grads;
    };
    return tape.record(std::move(values), inputs, rule, weights);
}

}  // namespace fbt::autograd
