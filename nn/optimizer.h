// AdamW over a parameter set, and the learning-rate schedule.
#pragma once
#include "nn/parameter.h"

namespace fbt::nn {

struct AdamWConfig {
    double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
    double weight_decay = 0.01;  // matrices and the embedding; gains are not decayed
    double clip_norm = 1.0;      // of the global gradient norm; 0: none
};

// First and second moments and each parameter's own count of updates.
class AdamW {
  public:
    struct State {
        Tensor m, v;  // of owned parameters only
        int64_t steps = 0;
    };

    AdamW(ParameterSet& parameters, AdamWConfig config);

    // What updating a parameter takes, for dealing parameters to processes: here the numbers that
    // it has. (A matrix optimiser's would be its products; parameters are dealt whole for its
    // sake.)
    static double cost(const Parameter& p) { return double(tensor::numel_of(p.shape())); }

    // The sum of squares of each owned parameter's gradient, in the parameters' order; 0 for those
    // that no gradient reached. Not finite when the gradient is not.
    std::vector<double> gradient_squares() const;
    // Updates every owned parameter that a gradient reached, and leaves the others as they are.
    void step(double learning_rate, double gradient_norm);

    std::vector<State>& states() { return states_; }  // in the parameters' order
    const std::vector<State>& states() const { return states_; }

  private:
    ParameterSet& parameters_;
    AdamWConfig config_;
    std::vector<State> states_;
};

// Warm-up, stable, decay (WSD), as a factor: (step+1)/warmup up to 1, then 1, then over the last
// `decay` fraction of `steps` linear down to 1/(decay*steps) at the last. `step` counts from 0.
double wsd_schedule(int64_t step, int64_t steps, int64_t warmup, double decay);

}  // namespace fbt::nn
