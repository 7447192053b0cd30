#include "apps/run_folder.h"

#include <filesystem>

#include "model/core/checkpoint.h"
#include "tensor/error.h"

namespace fbt::apps {

namespace core = model::core;
using tensor::Error;
using tensor::ErrorKind;

Loaded load(const std::string& path, tensor::Context& context, tensor::DType dtype) {
    Loaded out;
    out.checkpoint = core::find_checkpoint(path);
    const std::string file = out.checkpoint + "/config.json";
    const nlohmann::json config = core::load_config(out.checkpoint);
    out.train = config.at("train");
    const auto spec = out.train.find("tokenizer");
    try {
        out.model = std::make_unique<core::Model>(
            context, core::config_from_json(config.at("model")), dtype);
        if (spec != out.train.end() && spec->is_string() && *spec != "") {
            // The run's own copy, beside its checkpoints.
            const std::filesystem::path run =
                std::filesystem::absolute(out.checkpoint).parent_path();
            out.tokenizer = model::data::make_tokenizer(spec->get<std::string>(), run.string());
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
