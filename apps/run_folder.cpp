#include "apps/run_folder.h"

#include <algorithm>
#include <filesystem>

#include "apps/settings.h"
#include "model/core/checkpoint.h"
#include "tensor/error.h"

namespace fbt::apps {

namespace core = model::core;
using tensor::Error;
using tensor::ErrorKind;

namespace {

// Of the settings of a training, those that are asked for here.
void take_known(Settings& settings, const nlohmann::json& train, const std::string& file) {
    if (!train.is_object())
        throw Error(ErrorKind::bad_file, file + ": train is not an object of keys");
    nlohmann::json known = nlohmann::json::object();
    for (const Setting& setting : settings.all())
        if (train.contains(setting.key)) known[setting.key] = train[setting.key];
    settings.take_json({{"train", known}}, file, ErrorKind::bad_file);
}

}  // namespace

Loaded load(const std::string& path, tensor::Context& context, tensor::DType dtype) {
    Loaded out;
    out.checkpoint = core::find_checkpoint(path);
    const std::string file = out.checkpoint + "/config.json";
    const nlohmann::json config = core::load_config(out.checkpoint);
    std::string tokenizer;
    Settings settings;
    settings.section("train");
    settings.add("data", &out.data, "");
    settings.add("task", &out.task, "");
    settings.add("tokenizer", &tokenizer, "");
    settings.add("length", &out.lengths, "").at_least(1).at_most(1 << 24);
    settings.add("test_lengths", &out.test_lengths, "").at_least(1).at_most(1 << 24);
    take_known(settings, config.at("train"), file);
    try {
        out.model = std::make_unique<core::Model>(
            context, core::config_from_json(config.at("model")), dtype);
        if (out.lengths.empty()) out.lengths = {out.model->config().context};
        if (out.test_lengths.empty())
            for (int64_t factor : {1, 2, 4})
                out.test_lengths.push_back(int(std::min<int64_t>(
                    factor * *std::max_element(out.lengths.begin(), out.lengths.end()), 1 << 24)));
        if (!tokenizer.empty()) {
            // The run's own copy, beside its checkpoints, however they were named.
            const std::filesystem::path run =
                std::filesystem::canonical(out.checkpoint).parent_path();
            out.tokenizer = model::data::make_tokenizer(tokenizer, run.string());
        }
    } catch (const Error& e) {  // what would be a wrong flag is a wrong file here
        if (e.kind() != ErrorKind::usage) throw;
        throw Error(ErrorKind::bad_file, file + ": " + e.what());
    }
    const int vocabulary = out.model->config().vocab_size;
    if (out.tokenizer && out.tokenizer->vocab_size() != vocabulary)
        throw Error(ErrorKind::bad_file, file + " says a vocabulary of " +
                                             std::to_string(vocabulary) +
                                             ", but the run's tokenizer has " +
                                             std::to_string(out.tokenizer->vocab_size()));
    core::load_parameters(out.checkpoint, *out.model, false);
    return out;
}

}  // namespace fbt::apps
