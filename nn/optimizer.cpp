#include "nn/optimizer.h"

#include <algorithm>
#include <cmath>

namespace fbt::nn {

AdamW::AdamW(ParameterSet& parameters, AdamWConfig config)
    : parameters_(parameters), config_(config) {
    for (Parameter& p : parameters_.all()) {
        const Tensor& w = p.weight().value;
        states_.push_back({Tensor::zeros(w.context(), w.shape(), w.dtype()),
                           Tensor::zeros(w.context(), w.shape(), w.dtype()), 0});
    }
}

double AdamW::gradient_norm() const {
    std::vector<Tensor> gradients;
    for (const Parameter& p : parameters_.all())
        if (p.weight().reached) gradients.push_back(p.weight().grad);
    double sum = 0;
    for (double s : tensor::square_sums(gradients)) sum += s;
    return std::sqrt(sum);
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
