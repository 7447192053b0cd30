// AdamW in plain loops.
#include <cmath>

#include "kernels/adamw.h"

namespace fbt::kernels::ref {

// m = beta1*m + (1-beta1)*g      v = beta2*v + (1-beta2)*g^2
// w = w*(1 - lr*weight_decay) - lr * (m/(1-beta1^step)) / (sqrt(v/(1-beta2^step)) + eps)
template <class A>
Status adamw_step(A* w, A* m, A* v, const A* grad, int64_t n, const AdamWStep& h, Stream) {
    if (n < 0 || h.step < 1) return {Code::bad_argument, "adamw_step needs n >= 0, step >= 1"};
    // In double, so that 1 - beta keeps its digits.
    const A correction1 = A(1 - std::pow(h.beta1, double(h.step)));
    const A correction2 = A(1 - std::pow(h.beta2, double(h.step)));
    for (int64_t i = 0; i < n; ++i) {
        const A g = grad[i] * A(h.grad_scale);
        m[i] = A(h.beta1) * m[i] + A(1 - h.beta1) * g;
        v[i] = A(h.beta2) * v[i] + A(1 - h.beta2) * (g * g);
        const A update = (m[i] / correction1) / (std::sqrt(v[i] / correction2) + A(h.eps));
        w[i] = w[i] * A(1 - h.learning_rate * h.weight_decay) - A(h.learning_rate) * update;
    }
    return {};
}

template Status adamw_step<float>(float*, float*, float*, const float*, int64_t, const AdamWStep&,
                                  Stream);
template Status adamw_step<double>(double*, double*, double*, const double*, int64_t,
                                   const AdamWStep&, Stream);

}  // namespace fbt::kernels::ref
