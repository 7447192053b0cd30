// Choosing the next token from a row of logits: argmax, temperature, top-k, top-p.
#pragma once
#include <limits>

#include "kernels/types.h"

namespace fbt::kernels {

struct Sampling {
    float temperature = 1;  // 0: argmax, the lowest id among equals
    int top_k = 0;          // 0: all; else only the top_k largest logits (ties: lower id first)
    float top_p = 1;        // the smallest set of most probable tokens whose sum reaches top_p
};

// What `sample` needs of its arguments, for who has the settings in host memory: ref and cpu check
// it themselves; a caller with a GPU checks before it copies them there.
inline Status sample_arguments(const Sampling* settings, int64_t N, int V) {
    if (N < 0 || V < 1) return {Code::bad_argument, "sample needs N >= 0, V >= 1"};
    constexpr float kLargest = std::numeric_limits<float>::max();
    for (int64_t n = 0; n < N; ++n) {
        const Sampling& how = settings[n];
        if (!(how.temperature >= 0 && how.temperature <= kLargest && how.top_p > 0 &&
              how.top_p <= 1 && how.top_k >= 0))
            return {Code::bad_argument,
                    "sample needs finite temperature >= 0, 0 < top_p <= 1, top_k >= 0"};
    }
    return {};
}

// tokens[n] = the token whose interval of the cumulative probability, taken over the kept tokens in
// the order (probability descending, id ascending), contains uniform[n].
//   p = softmax(logits/temperature) over the top_k kept; then cut by top_p; then renormalised.
// A NaN logit counts as -infinity.
// Shapes  tokens [N]; logits [N,V] T; settings [N]; uniform [N] in [0,1); scratch_ids [N,V] int32.
//         All in the memory of the device: cuda cannot report bad settings, see sample_arguments.
// Dtypes  T = float; on cpu and cuda also bf16; on ref also double.
//         Weights are rounded to float (cuda: then to multiples of V*2^-61 or less), so the token
//         may differ between backends where uniform lies that close to an interval's end.
// Needs   N >= 0, V >= 1, finite temperature >= 0, 0 < top_p <= 1, top_k >= 0.
// Errors  bad_argument where Needs is not met; on cuda for N and V alone.
FBT_OP(template <class T> Status sample(int32_t* tokens, const T* logits, const Sampling* settings,
                                        const float* uniform, int64_t N, int V,
                                        int32_t* scratch_ids, Stream s);)

}  // namespace fbt::kernels
