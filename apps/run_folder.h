// A checkpoint that the other subcommands start from: the model, and what it was trained on.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "model/core/model.h"
#include "model/data/tokenizer.h"

namespace fbt::apps {

struct Loaded {
    std::string checkpoint;                     // the step's folder
    std::string data, task;                     // what it was trained on: one of them
    std::vector<int> lengths;                   // of the sequences it was trained with
    std::vector<int> test_lengths;              // at which decoding is tested, where it was a task
    std::unique_ptr<model::core::Model> model;  // without gradients
    std::unique_ptr<model::data::Tokenizer> tokenizer;  // null for a task
};

// path: a run or one of its step folders. Errors  bad_file.
Loaded load(const std::string& path, tensor::Context& context, tensor::DType dtype);

}  // namespace fbt::apps
