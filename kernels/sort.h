// Sorting on the device, which only CUDA's embedding gradient needs.
#pragma once
#include "kernels/types.h"

namespace fbt::kernels::cuda {

// Sorts pairs by key, ascending; pairs of equal keys keep their order.
// Shapes  keys, values [n] on the device, sorted in place.      Needs  n >= 0.
// Errors  bad_argument where n < 0; device_error, also when there is no memory to sort in: about
//         as much as the pairs take, allocated and freed in the stream's order.
Status sort_by_key(int32_t* keys, int32_t* values, int64_t n, Stream s);

}  // namespace fbt::kernels::cuda
