// Loss per pass of a model on its validation data: the table of `fbt eval`, the rows of training.
#pragma once
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "apps/corpus.h"
#include "apps/job.h"
#include "model/core/evaluate.h"

namespace fbt::apps {

struct PassReport {
    std::vector<model::core::PassResult> passes;
    int64_t text_bytes = 0;  // that all targets stand for; 0 for a task
    bool stopped = false;    // before all batches were seen: the rest means nothing

    // L * targets / ln 2 / bytes
    double bits_per_byte(const model::core::PassResult& pass) const;
};

// `stop` is asked before every batch. The ranks of a job take the batches in turn; each gets the
// report of all.
PassReport report_passes(model::core::Model& model, const Corpus& corpus,
                         const Corpus::Batches& batches, int passes, uint64_t seed, bool disturb,
                         const std::function<bool()>& stop = nullptr, const Job* job = nullptr);

}  // namespace fbt::apps
