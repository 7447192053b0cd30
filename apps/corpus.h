// What a model is trained on and judged by: a data folder's text, or a generated task.
#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "model/core/objective.h"
#include "model/data/shards.h"
#include "model/data/tasks.h"

namespace fbt::apps {

// The generated tasks' names with commas between.
std::string task_list();

class Corpus {
  public:
    // One of the two is named; the other is empty. Errors  usage otherwise.
    Corpus(const std::string& data, const std::string& task);

    bool is_text() const { return dataset_.has_value(); }
    int vocab_size() const;
    const model::data::Tokenizer& tokenizer() const { return dataset_->tokenizer(); }

    // `lengths` below are those that a task's sequences are drawn from; sequences of text have at
    // most as many tokens as the longest. Errors  usage where the task has no such sequences.
    void check_lengths(const std::vector<int>& lengths) const;

    // The most tokens of any training sequence.
    int longest(const std::vector<int>& lengths) const;

    // The corpus must outlive the source.
    std::unique_ptr<model::data::Source> training(const std::vector<int>& lengths,
                                                  uint64_t seed) const;

    // The first `sequences` of the validation data (0: all of it, which a task does not have), in
    // batches of at most `tokens`. The corpus must outlive the function.
    using Batches = std::function<std::optional<model::core::Batch>()>;
    Batches validation(const std::vector<int>& lengths, uint64_t seed, int64_t sequences,
                       int64_t tokens) const;

    // Bytes of text that a batch's targets stand for.
    int64_t text_bytes(const model::core::Batch& batch) const;

  private:
    std::optional<model::data::Dataset> dataset_;
    std::string task_;
};

}  // namespace fbt::apps
