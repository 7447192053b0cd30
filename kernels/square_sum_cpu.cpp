// Sum of squares, vectorised: chunks are spread over threads.
#include <algorithm>

#include "kernels/cpu_math.h"
#include "kernels/square_sum.h"

namespace fbt::kernels::cpu {

// *sum = sum over chunks of (sum over the chunk's i of x[i]^2)
template <class A>
Status square_sum(double* sum, const A* x, int64_t n, double* scratch, Stream s) {
    if (n < 0) return {Code::bad_argument, "square_sum needs n >= 0"};
    const int64_t chunks = (n + kSquareSumChunk - 1) / kSquareSumChunk;
    for_rows(s, chunks, kSquareSumChunk, [=](int64_t c) {
        const A* chunk = x + c * kSquareSumChunk;
        scratch[c] =
            row_sum_double(std::min(kSquareSumChunk, n - c * kSquareSumChunk), [chunk](int64_t i) {
                const double value = chunk[i];
                return value * value;  // exact: 24 + 24 bits
            });
    });
    *sum = 0;
    for (int64_t c = 0; c < chunks; ++c) *sum += scratch[c];
    return {};
}

template Status square_sum<float>(double*, const float*, int64_t, double*, Stream);

}  // namespace fbt::kernels::cpu
