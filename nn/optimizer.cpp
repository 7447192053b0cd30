#include "nn/optimizer.h"

#include <algorithm>
#include <cmath>

namespace fbt::nn {

AdamW::AdamW(ParameterSet& parameters, AdamWConfig config)
    : parameters_(parameters), config_(config) {
    for (const Parameter& p : parameters_.all()) {
        State& state = states_.emplace_back();
        if (!p.owned()) continue;
        const Tensor& w = p.weight().value;
        state.m = Tensor::zeros(w.context(), w.shape(), w.dtype());
        state.v = Tensor::zeros(w.context(), w.shape(), w.dtype());
    }
}

std::vector<double> AdamW::gradient_squares() const {
    std::vector<Tensor> gradients;
    std::vector<size_t> where;
    for (size_t i = 0; i < states_.size(); ++i) {
        const Parameter& p = parameters_.all()[i];
        if (!p.owned() || !p.weight().reached) continue;
        gradients.push_back(p.weight().grad);
        where.push_back(i);
    }
    std::vector<double> squares(states_.size(), 0);
    const std::vector<double> sums = tensor::square_sums(gradients);
    for (size_t i = 0; i < where.size(); ++i) squares[where[i]] = sums[i];
    return squares;
}

void AdamW::step(double learning_rate, double gradient_norm) {
    const double clip = config_.clip_norm > 0 && gradient_norm > config_.clip_norm
                            ? config_.clip_norm / gradient_norm
                            : 1;
    for (size_t i = 0; i < states_.size(); ++i) {
        Parameter& p = parameters_.all()[i];
        if (!p.weight().reached) continue;
        State& state = states_[i];
        ++state.steps;
        if (!p.owned()) continue;
        const double decay = p.role() == Role::gain ? 0 : config_.weight_decay;
        tensor::adamw_step(p.weight().value, state.m, state.v, p.weight().grad,
                           {learning_rate * p.rate(), config_.beta1, config_.beta2, config_.eps,
                            decay, clip, state.steps});
        p.updated();
    }
}

double wsd_schedule(int64_t step, int64_t steps, int64_t warmup, double decay) {
    const double rise = warmup > 0 ? std::min(1.0, double(step + 1) / double(warmup)) : 1;
    const double tail = decay * double(steps);
    const double fall = tail > 0 ? std::clamp(double(steps - step) / tail, 0.0, 1.0) : 1;
    return std::min(rise, fall);
}

}  // namespace fbt::nn
