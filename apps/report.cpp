#include "apps/report.h"

#include <cmath>

#include "tensor/error.h"

namespace fbt::apps {

double PassReport::bits_per_byte(const model::core::PassResult& pass) const {
    return pass.loss * double(pass.targets) / std::log(2.0) / double(text_bytes);
}

PassReport report_passes(model::core::Model& model, const Corpus& corpus,
                         const Corpus::Batches& batches, int passes, uint64_t seed, bool disturb,
                         const std::function<bool()>& stop) {
    PassReport report;
    const auto counted = [&]() -> std::optional<model::core::Batch> {
        report.stopped = stop && stop();
        if (report.stopped) return std::nullopt;
        auto batch = batches();
        if (batch && corpus.is_text()) report.text_bytes += corpus.text_bytes(*batch);
        return batch;
    };
    report.passes = model::core::evaluate(model, counted, passes, seed, disturb);
    if (report.stopped) return report;
    if (report.passes.empty() || report.passes[0].targets == 0)
        throw tensor::Error(tensor::ErrorKind::bad_file,
                            "the validation data holds no sequence with a target; make the data "
                            "folder from more text");
    return report;
}

}  // namespace fbt::apps
