// Loss per pass, in memory that does not grow with the number of passes.
#pragma once
#include <functional>
#include <optional>
#include <vector>

#include "model/core/decode.h"
#include "model/core/objective.h"

namespace fbt::model::core {

struct PassResult {
    int pass = 1;
    double loss = 0;      // mean cross-entropy, nats a target
    double accuracy = 0;  // targets that are the argmax, 0..1
    double last = 0;      // the same at each sequence's last target alone
    // The loss at the targets of positions t >= k, which k passes have not made exact (position t
    // of pass k is what decoding computes for t < k, whatever the weights); NaN where there is
    // none.
    double unsettled = 0;
    // sqrt(sum |h^(k)-h^(k-1)|^2 / sum |h^(k)|^2) over the same positions; NaN where there is none
    // (pass 1, or every sequence is shorter).
    double change = 0;
    // The loss when the carried states are disturbed at every feedback pass: permuted over the
    // fused rows of the whole batch, or all replaced by the mean of those rows; NaN if not asked.
    double permuted = 0, mean = 0;
    int64_t targets = 0, sequences = 0;
};

// Passes 1..passes over every batch that `next` gives, until it gives none: plain prefix 1, no
// jitter. `disturb` adds the two disturbed losses, at three times the work; the permutation is
// drawn from the seed, the batch and the pass. Processes that see parts of the batches pass `sum`,
// which adds up numbers over them; each gets the results of all.
using SumNumbers = std::function<std::vector<double>(const std::vector<double>&)>;
std::vector<PassResult> evaluate(Model& model, const std::function<std::optional<Batch>()>& next,
                                 int passes, uint64_t seed, bool disturb,
                                 const SumNumbers& sum = nullptr);

// The inputs of a stack that has only seen plain ones, against those it is given at pass 2, before
// the input norm. `cosine` compares them after it: the mean over rows of the angle's cosine.
struct InputScales {
    double plain = 0, fused = 0;  // root mean square of e and of e (x) h
    double cosine = 0;
};
InputScales input_scales(Model& model, const Batch& batch);

// Sequential decoding of known inputs, one batch after another: the share of targets that are the
// argmax, over all positions and at each sequence's last target alone.
struct Accuracy {
    double all = 0, last = 0;
    int64_t targets = 0, sequences = 0;
};
Accuracy decode_accuracy(Model& model, const std::function<std::optional<Batch>()>& next,
                         Mode mode);

}  // namespace fbt::model::core
