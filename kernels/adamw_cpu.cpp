// AdamW, vectorised. It reads four arrays and writes three: memory is the limit.
#include <cmath>

#include "kernels/adamw.h"
#include "kernels/cpu_math.h"

namespace fbt::kernels::cpu {

// m = beta1*m + (1-beta1)*g      v = beta2*v + (1-beta2)*g^2
// w = w*(1 - lr*weight_decay) - lr * (m/(1-beta1^step)) / (sqrt(v/(1-beta2^step)) + eps)
template <class A>
Status adamw_step(A* w, A* m, A* v, const A* grad, int64_t n, const AdamWStep& h, Stream s) {
    if (n < 0 || h.step < 1) return {Code::bad_argument, "adamw_step needs n >= 0, step >= 1"};
    // What depends on the step alone is rounded to A once, from double.
    const A beta1 = A(h.beta1), beta2 = A(h.beta2), rest1 = A(1 - h.beta1), rest2 = A(1 - h.beta2);
    const A rate = A(h.learning_rate / (1 - std::pow(h.beta1, double(h.step))));
    const A unbias = A(1 / (1 - std::pow(h.beta2, double(h.step))));
    const A keep = A(1 - h.learning_rate * h.weight_decay), eps = A(h.eps),
            grad_scale = A(h.grad_scale);
    for_elements(s, n, [=](int64_t i) {
        const A g = grad[i] * grad_scale;
        const A m_new = std::fma(beta1, m[i], rest1 * g);
        const A v_new = std::fma(beta2, v[i], rest2 * (g * g));
        m[i] = m_new;
        v[i] = v_new;
        w[i] = std::fma(w[i], keep, -(rate * m_new / (std::sqrt(v_new * unbias) + eps)));
    });
    return {};
}

template Status adamw_step<float>(float*, float*, float*, const float*, int64_t, const AdamWStep&,
                                  Stream);

}  // namespace fbt::kernels::cpu
