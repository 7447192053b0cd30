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

int most(const std::vector<int>& lengths) {
    return *std::max_element(lengths.begin(), lengths.end());
}

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

std::string task_list() {
    std::string list;
    for (const std::string& name : model::data::task_names())
        list += (list.empty() ? "" : ", ") + name;
    return list;
}

Corpus::Corpus(const std::string& data, const std::string& task) : task_(task) {
    if (data.empty() == task.empty())
        throw Error(ErrorKind::usage, data.empty() ? "neither --data DIR nor --task NAME is given"
                                                   : "--data and --task are both given; name one");
    if (task.empty())
        dataset_ = model::data::Dataset::open(data);
    else
        model::data::find_task(task);  // says which ones there are
}

int Corpus::vocab_size() const {
    return is_text() ? dataset_->meta().vocab_size : model::data::find_task(task_).vocab_size();
}

void Corpus::check_lengths(const std::vector<int>& lengths) const {
    if (!is_text()) model::data::check_lengths(task_, lengths);
}

int Corpus::longest(const std::vector<int>& lengths) const {
    if (!is_text()) return most(lengths);
    int longest = 0;
    for (const model::data::Piece& piece : model::data::cut(dataset_->train(), most(lengths)))
        longest = std::max(longest, piece.count);
    return longest;
}

std::unique_ptr<Source> Corpus::training(const std::vector<int>& lengths, uint64_t seed) const {
    if (!is_text()) return model::data::make_task(task_, lengths, seed);
    return std::make_unique<model::data::Loader>(dataset_->train(), vocab_size(), most(lengths),
                                                 seed);
}

Corpus::Batches Corpus::validation(const std::vector<int>& lengths, uint64_t seed,
                                   int64_t sequences, int64_t tokens) const {
    std::function<std::optional<Sequences>()> next;
    if (is_text()) {
        auto in_order = std::make_shared<InOrder>(dataset_->val(), most(lengths));
        next = [in_order, tokens] { return in_order->next(tokens); };
    } else {
        std::shared_ptr<Source> source =
            model::data::make_task(task_, lengths, seed, model::data::TaskStream::evaluation);
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
