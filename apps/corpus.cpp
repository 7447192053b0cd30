#include "apps/corpus.h"

#include <algorithm>

#include "tensor/error.h"

namespace fbt::apps {

using model::core::Batch;
using model::data::InOrder;
using model::data::Sequences;
using model::data::Source;
using tensor::Error;
using tensor::ErrorKind;

namespace {

// Keeps the batch's first `count` sequences.
void shorten(Sequences& batch, int64_t count) {
    if (count >= int64_t(batch.lengths.size())) return;
    batch.lengths.resize(size_t(count));
    batch.indices.resize(size_t(count));
    size_t rows = 0;
    for (int32_t length : batch.lengths) rows += size_t(length);
    batch.tokens.resize(rows);
    batch.targets.resize(rows);
}

}  // namespace

Corpus::Corpus(const std::string& data, const std::string& task) : task_(task) {
    if (data.empty() == task.empty())
        throw Error(ErrorKind::usage, data.empty() ? "neither --data DIR nor --task NAME is given"
                                                   : "--data and --task are both given; name one");
    if (task.empty())
        dataset_ = model::data::Dataset::open(data);
    else
        model::data::make_task(task, 1, 0);  // says which ones there are
}

int Corpus::vocab_size() const {
    return is_text() ? dataset_->meta().vocab_size
                     : model::data::make_task(task_, 1, 0)->vocab_size();
}

int Corpus::longest(int length) const {
    if (!is_text()) return length;
    int most = 0;
    for (const model::data::Piece& piece : model::data::cut(dataset_->train(), length))
        most = std::max(most, piece.count);
    return most;
}

std::unique_ptr<Source> Corpus::training(int length, uint64_t seed) const {
    if (!is_text()) return model::data::make_task(task_, length, seed);
    return std::make_unique<model::data::Loader>(dataset_->train(), vocab_size(), length, seed);
}

Corpus::Batches Corpus::validation(int length, uint64_t seed, int64_t sequences,
                                   int64_t tokens) const {
    std::function<std::optional<Sequences>()> next;
    if (is_text()) {
        auto in_order = std::make_shared<InOrder>(dataset_->val(), length);
        next = [in_order, tokens] { return in_order->next(tokens); };
    } else {
        std::shared_ptr<Source> source =
            model::data::make_task(task_, length, seed, model::data::TaskStream::evaluation);
        next = [source, tokens]() -> std::optional<Sequences> { return source->next(tokens); };
    }
    const bool all = sequences == 0;
    return [next, all, left = sequences]() mutable -> std::optional<Batch> {
        if (!all && left <= 0) return std::nullopt;
        std::optional<Sequences> batch = next();
        if (!batch) return std::nullopt;
        if (!all) shorten(*batch, left);
        left -= int64_t(batch->lengths.size());
        return Batch{std::move(batch->tokens), std::move(batch->targets), std::move(batch->lengths),
                     std::move(batch->indices)};
    };
}

int64_t Corpus::text_bytes(const Batch& batch) const {
    int64_t bytes = 0;
    for (int32_t target : batch.targets)
        if (target >= 0) bytes += int64_t(tokenizer().piece(target).size());
    return bytes;
}

}  // namespace fbt::apps
