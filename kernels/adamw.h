// AdamW (arXiv:1711.05101, algorithm 2; decay coupled to the learning rate as in PyTorch).
#pragma once
#include "kernels/types.h"

namespace fbt::kernels {

struct AdamWStep {
    double learning_rate, beta1, beta2, eps, weight_decay;
    double grad_scale;  // every gradient is multiplied by this first (clipping)
    int64_t step;       // 1 for a parameter's first update
};

// g = grad*grad_scale      m = beta1*m + (1-beta1)*g      v = beta2*v + (1-beta2)*g^2
// w = w*(1 - lr*weight_decay) - lr * (m/(1-beta1^step)) / (sqrt(v/(1-beta2^step)) + eps)
// Shapes  w, m, v, grad [n].      Dtypes  A = float; on ref also double.      Alias  none.
// Needs   n >= 0, step >= 1.      Errors  bad_argument where Needs is not met.
// Moves   7*n*sizeof(A) bytes.
FBT_OP(template <class A>
       Status adamw_step(A* w, A* m, A* v, const A* grad, int64_t n, const AdamWStep& h, Stream s);)

}  // namespace fbt::kernels
