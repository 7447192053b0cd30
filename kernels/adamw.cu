// AdamW on the GPU: a thread for four neighbouring elements. It moves 28 bytes an element, four
// arrays in and three out, and memory is the limit.
#include <cmath>

#include "kernels/adamw.h"
#include "kernels/vector.cuh"

namespace fbt::kernels::cuda {
namespace {

// What depends on the step alone, rounded to float once, from double.
struct Factors {
    float grad_scale, beta1, rest1, beta2, rest2, rate, unbias, keep, eps;
};

// m = beta1*m + (1-beta1)*g      v = beta2*v + (1-beta2)*g^2
// w = w*(1 - lr*weight_decay) - lr * (m/(1-beta1^step)) / (sqrt(v/(1-beta2^step)) + eps)
__global__ void __launch_bounds__(kElementThreads)
    adamw_step_pack(float* __restrict__ w, float* __restrict__ m, float* __restrict__ v,
                    const float* __restrict__ grad, int64_t n, Factors f, bool whole) {
    const int64_t i = first_element<float>(), left = n - i;
    if (left <= 0) return;
    const bool pack = whole && left >= kPack<float>;
    Pack<float> wi = load_pack(w + i, left, pack), mi = load_pack(m + i, left, pack),
                vi = load_pack(v + i, left, pack);
    const Pack<float> gi = load_pack(grad + i, left, pack);
#pragma unroll
    for (int j = 0; j < kPack<float>; ++j) {
        const float g = gi[j] * f.grad_scale;
        const float m_new = std::fma(f.beta1, mi[j], f.rest1 * g);
        const float v_new = std::fma(f.beta2, vi[j], f.rest2 * (g * g));
        mi.set(j, m_new);
        vi.set(j, v_new);
        wi.set(j,
               std::fma(wi[j], f.keep, -(f.rate * m_new / (std::sqrt(v_new * f.unbias) + f.eps))));
    }
    store_pack(m + i, mi, left, pack);
    store_pack(v + i, vi, left, pack);
    store_pack(w + i, wi, left, pack);
}

}  // namespace

template <class A>
Status adamw_step(A* w, A* m, A* v, const A* grad, int64_t n, const AdamWStep& h, Stream s) {
    if (n < 0 || h.step < 1) return {Code::bad_argument, "adamw_step needs n >= 0, step >= 1"};
    if (n == 0) return {};
    const Factors f = {
        .grad_scale = float(h.grad_scale),
        .beta1 = float(h.beta1),
        .rest1 = float(1 - h.beta1),
        .beta2 = float(h.beta2),
        .rest2 = float(1 - h.beta2),
        .rate = float(h.learning_rate / (1 - std::pow(h.beta1, double(h.step)))),
        .unbias = float(1 / (1 - std::pow(h.beta2, double(h.step)))),
        .keep = float(1 - h.learning_rate * h.weight_decay),
        .eps = float(h.eps),
    };
    return launch(adamw_step_pack, element_launch<float>(n), s, w, m, v, grad, n, f,
                  aligned16(w, m, v, grad));
}

template Status adamw_step<float>(float*, float*, float*, const float*, int64_t, const AdamWStep&,
                                  Stream);

}  // namespace fbt::kernels::cuda
