#include "apps/report.h"

#include <cmath>

#include "tensor/error.h"

namespace fbt::apps {

double PassReport::bits_per_byte(const model::core::PassResult& pass) const {
    return pass.loss * double(pass.targets) / std::log(2.0) / double(text_bytes);
}

PassReport report_passes(model::core::Model& model, const Corpus& corpus,
                         const Corpus::Batches& batches, int passes, uint64_t seed, bool disturb,
                         const std::function<bool()>& stop, const Job* job) {
    PassReport report;
    int64_t turn = 0;
    const auto counted = [&]() -> std::optional<model::core::Batch> {
        for (;;) {
            report.stopped = stop && stop();
            if (report.stopped) return std::nullopt;
            auto batch = batches();
            if (batch && job && turn++ % job->size() != job->rank()) continue;
            if (batch && corpus.is_text()) report.text_bytes += corpus.text_bytes(*batch);
            return batch;
        }
    };
    const auto sum = [&](const std::vector<double>& numbers) { return job->sum(numbers); };
    report.passes = model::core::evaluate(model, counted, passes, seed, disturb,
                                          job ? model::core::SumNumbers(sum) : nullptr);
    if (job) {
        const std::vector<double> sums =
            job->sum({double(report.text_bytes), report.stopped ? 1.0 : 0.0});
        report.text_bytes = int64_t(sums[0]);
        report.stopped = sums[1] > 0;
    }
    if (report.stopped) return report;
    if (report.passes.empty() || report.passes[0].targets == 0)
        throw tensor::Error(tensor::ErrorKind::bad_file,
                            "the validation data holds no sequence with a target; make the data "
                            "folder from more text");
    return report;
}

}  // namespace fbt::apps
