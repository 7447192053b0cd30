// Linear probes: what a linear classifier can read from the residual stream at each depth, after
// the positions before a query were computed in one way or another.
#pragma once
#include <vector>

#include "model/core/objective.h"

namespace fbt::model::core {

// How a sequence's T positions are computed. Position 0 is plain in all three, so that they agree
// where T = 1.
enum class Prefill {
    standard,   // every position plain, all in one prefill
    one_step,   // [0,T-1) plain; the last fused with the state before it, as soft decoding's first
    recurrent,  // position 0 plain; each later one fused with the state before it, one at a time
};

// The residual stream at every sequence's last position: result[l] is [sequences*D], at the depths
// l = 0..L of Model::stack. Row s has the same bits whatever else the batch holds; sequences
// are computed in groups, so that memory beside the result does not grow with their number.
//
// Errors  usage when a sequence is empty.
std::vector<std::vector<float>> query_streams(Model& model, const Batch& batch, Prefill prefill);

struct ProbeResult {
    double accuracy = 0;        // held-out rows that are classified rightly, 0..1
    std::vector<double> folds;  // the same of each fold's rows
};

// L2-regularised logistic regression, cross-validated over groups of rows: all rows of a group lie
// in one fold, so that a probe is never asked about a group that it was trained on.
//
// For each class c against the rest (for one of them, where the training rows hold two classes):
//   minimise over w    l2/2 |w|^2 + sum_r log(1 + exp(-y_r w . [x_r; 1]))      y_r = +1 or -1
// over the training rows r. liblinear does, by a trust-region Newton method that draws nothing at
// random (Lin, Weng and Keerthi, JMLR 9, 2008), until the gradient is small. The bias, w's last
// element, is regularised with the others. The class with the largest w . [x; 1] is the answer.
//
//   features  [rows*width], row-major. Each column is standardised: less its mean over the training
//             rows, divided by its standard deviation there; a column that is constant there
//             becomes 0.
//   labels    [rows], any integers, of two classes at least
//   groups    [rows], any integers. In the order of random numbers drawn from the seed and the
//             group's integer, groups go to the folds in turn.
//
// A class that no training row of a fold has is never its answer.
//
// Errors  usage when sizes do not agree, l2 is not above 0, folds is below 2, there are fewer
//         groups than folds, all labels are the same or a feature is not finite.
ProbeResult probe(const std::vector<float>& features, int64_t width,
                  const std::vector<int32_t>& labels, const std::vector<int64_t>& groups, double l2,
                  int folds = 4, uint64_t seed = 1);

}  // namespace fbt::model::core
