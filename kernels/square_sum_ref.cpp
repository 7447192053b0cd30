// Sum of squares in plain loops.
#include <algorithm>

#include "kernels/square_sum.h"

namespace fbt::kernels::ref {

// *sum = sum over chunks of (sum over the chunk's i of x[i]^2)
template <class A>
Status square_sum(double* sum, const A* x, int64_t n, double* scratch, Stream) {
    if (n < 0) return {Code::bad_argument, "square_sum needs n >= 0"};
    const int64_t chunks = (n + kSquareSumChunk - 1) / kSquareSumChunk;
    for (int64_t c = 0; c < chunks; ++c) {
        scratch[c] = 0;
        for (int64_t i = c * kSquareSumChunk; i < std::min(n, (c + 1) * kSquareSumChunk); ++i)
            scratch[c] += double(x[i]) * double(x[i]);
    }
    *sum = 0;
    for (int64_t c = 0; c < chunks; ++c) *sum += scratch[c];
    return {};
}

template Status square_sum<float>(double*, const float*, int64_t, double*, Stream);
template Status square_sum<double>(double*, const double*, int64_t, double*, Stream);

}  // namespace fbt::kernels::ref
