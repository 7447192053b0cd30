// The work of training: its floating-point operations, counted from shapes.
#pragma once
#include <cstdint>
#include <vector>

#include "model/core/config.h"

namespace fbt::model::core {

// [out, in] of a weight, and how many such a model has.
struct Matrix {
    int64_t out, in;
    int count;
};

// All that a row is multiplied by, the classifier included; a fused row's with the fusion's.
std::vector<Matrix> row_matrices(const Config& config, bool fused);
double row_weights(const Config& config, bool fused);  // numbers in them

// FLOPs, forward and backward, of computing positions [first, length) of one sequence, on top of
// the keys and values of those before: 6 for each weight and row (2 forward, 4 backward), 12 for
// each channel, query head and visible pair of positions. Pass 1 begins at 0; a pass that begins
// later is a feedback pass, whose rows are fused. Left out are norms and other elementwise work,
// recomputation, and backward's second product of queries and keys.
// Needs  0 <= first <= length.  Costs a few operations for every layer, whatever the length.
double pass_flops(const Config& config, int64_t first, int64_t length);

}  // namespace fbt::model::core
