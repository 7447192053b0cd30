#include "apps/rollouts.h"

#include <algorithm>
#include <filesystem>
#include <limits>
#include <map>
#include <optional>
#include <utility>

#include "tensor/file.h"
#include "tensor/safetensors.h"

namespace fbt::apps {

namespace core = model::core;
namespace fs = std::filesystem;
using model::engine::Rollout;
using nlohmann::json;
using tensor::Error;
using tensor::ErrorKind;

std::string states_name(const Rollout& rollout) {
    return "states/" + std::to_string(rollout.prompt) + "." + std::to_string(rollout.sample);
}

namespace {

void write_states(const fs::path& path, const RolloutFile& file) {
    std::vector<tensor::SafetensorsWriter::Item> items;
    std::map<std::string, const Rollout*> by_name;
    for (const Rollout& r : file.rollouts) {
        const int64_t fed = std::max<int64_t>(r.prompt_length, int64_t(r.tokens.size()) - 1);
        items.push_back({states_name(r), file.dtype, {fed, int64_t(r.states.size()) / fed}});
        by_name[states_name(r)] = &r;
    }
    const std::string temporary = tensor::temporary_beside(path);
    tensor::SafetensorsWriter writer(temporary, items, {{"format", "pt"}});
    for (const auto& item : writer.items()) {
        const std::vector<float>& states = by_name[item.name]->states;
        if (file.dtype == tensor::DType::bf16)  // exact: they were bf16 when they were kept
            writer.write(item.name, std::vector<kernels::bf16>(states.begin(), states.end()));
        else
            writer.write(item.name, states);
    }
    writer.finish();
    tensor::rename_durably(temporary, path);
}

[[noreturn]] void refuse(const std::string& name, const json& value, const std::string& expected) {
    throw Error(ErrorKind::bad_file, name + " is " +
                                         value.dump(-1, ' ', true, json::error_handler_t::replace) +
                                         ", expected " + expected);
}

int32_t integer(const std::string& name, const json& value, int32_t least, int32_t most) {
    const bool fits = value.is_number_unsigned() ? std::in_range<int32_t>(value.get<uint64_t>())
                                                 : value.is_number_integer() &&
                                                       std::in_range<int32_t>(value.get<int64_t>());
    if (!fits || value.get<int32_t>() < least || value.get<int32_t>() > most)
        refuse(name, value,
               "an integer from " + std::to_string(least) + " to " + std::to_string(most));
    return value.get<int32_t>();
}

float logprob(const std::string& name, const json& value) {
    const double most = std::numeric_limits<float>::max();
    if (!value.is_number() || !(value.get<double>() >= -most && value.get<double>() <= 0))
        refuse(name, value, "a finite number, at most 0");
    return float(value.get<double>());
}

const json& array_of(const json& row, const std::string& key) {
    const json& values = row.at(key);
    if (!values.is_array()) refuse(key, values, "an array");
    return values;
}

Rollout rollout_of(const json& row, const core::Config& config) {
    const auto fail = [](const std::string& what) { throw Error(ErrorKind::bad_file, what); };
    const auto nth = [](const char* key, size_t i) {
        return std::string(key) + "[" + std::to_string(i) + "]";
    };
    constexpr int32_t kMost = std::numeric_limits<int32_t>::max();
    if (!row.is_object()) fail("not a JSON object");
    Rollout r;
    const json& tokens = array_of(row, "tokens");
    if (tokens.empty() || tokens.size() > size_t(config.context))
        fail("tokens holds " + std::to_string(tokens.size()) +
             ", expected from 1 to the model's context of " + std::to_string(config.context));
    for (size_t i = 0; i < tokens.size(); ++i)
        r.tokens.push_back(integer(nth("tokens", i), tokens[i], 0, config.vocab_size - 1));
    r.prompt_length = integer("prompt_length", row.at("prompt_length"), 1, int32_t(tokens.size()));
    r.prompt = integer("prompt", row.at("prompt"), 0, kMost - 1);
    r.sample = integer("sample", row.at("sample"), 0, kMost - 1);
    r.mode = core::mode_from(row.at("mode").get<std::string>());
    const json& logprobs = array_of(row, "logprobs");
    if (logprobs.size() != r.tokens.size() - size_t(r.prompt_length))
        fail(std::to_string(logprobs.size()) + " logprobs for " +
             std::to_string(r.tokens.size() - size_t(r.prompt_length)) + " sampled tokens");
    for (size_t i = 0; i < logprobs.size(); ++i)
        r.logprobs.push_back(logprob(nth("logprobs", i), logprobs[i]));
    return r;
}

// Returns their dtype.
tensor::DType read_states(const tensor::SafetensorsFile& file, int dim, Rollout& r) {
    const auto& entry = file.entry(states_name(r));
    const tensor::Shape wanted = {std::max<int64_t>(r.prompt_length, int64_t(r.tokens.size()) - 1),
                                  dim};
    if (entry.shape != wanted ||
        (entry.dtype != tensor::DType::f32 && entry.dtype != tensor::DType::bf16))
        throw Error(ErrorKind::bad_file, file.path() + ": " + states_name(r) + " is " +
                                             tensor::to_string(entry.shape) + " " +
                                             tensor::name_of(entry.dtype) + ", expected " +
                                             tensor::to_string(wanted) + " f32 or bf16");
    r.states = file.read<float>(states_name(r));
    return entry.dtype;
}

}  // namespace

void write_rollouts(const std::string& path, const RolloutFile& file) {
    const bool has_states = std::any_of(file.rollouts.begin(), file.rollouts.end(),
                                        [](const Rollout& r) { return !r.states.empty(); });
    const fs::path states = fs::path(path).replace_extension(".safetensors");
    if (has_states) write_states(states, file);
    std::string text;
    for (size_t i = 0; i < file.rollouts.size(); ++i) {
        const Rollout& r = file.rollouts[i];
        json row = file.notes[i];
        row["prompt"] = r.prompt;
        row["sample"] = r.sample;
        row["mode"] = core::to_string(r.mode);
        row["tokens"] = r.tokens;
        row["prompt_length"] = r.prompt_length;
        row["logprobs"] = r.logprobs;
        row["weights"] = file.weights;
        row["states"] = has_states ? json(states.filename().string()) : json();
        text += row.dump() + "\n";
    }
    tensor::write_file_durably(path, text);
}

RolloutFile read_rollouts(const std::string& path, const core::Config& config) {
    RolloutFile file;
    const std::string text = tensor::read_file(path);
    std::optional<tensor::SafetensorsFile> states;
    std::string states_path;
    int number = 0;
    for (size_t at = 0; at < text.size();) {
        const size_t end = std::min(text.find('\n', at), text.size());
        const std::string line = text.substr(at, end - at);
        at = end + 1;
        ++number;
        if (line.empty()) continue;
        try {
            const json row = json::parse(line);
            Rollout r = rollout_of(row, config);
            const std::string weights = row.at("weights").get<std::string>();
            if (file.rollouts.empty()) file.weights = weights;
            if (weights != file.weights)
                throw Error(ErrorKind::bad_file, "its weights differ from those of line 1");
            if (const json& name = row.at("states"); !name.is_null()) {
                const std::string beside = fs::path(path).parent_path() / name.get<std::string>();
                if (beside != states_path) states = tensor::SafetensorsFile::open(beside);
                states_path = beside;
                file.dtype = read_states(*states, config.dim, r);
            }
            file.rollouts.push_back(std::move(r));
            file.notes.push_back(row);
        } catch (const json::exception& e) {
            throw Error(ErrorKind::bad_file,
                        path + " line " + std::to_string(number) + ": " + e.what());
        } catch (const Error& e) {
            if (e.kind() == ErrorKind::environment) throw;
            throw Error(ErrorKind::bad_file,
                        path + " line " + std::to_string(number) + ": " + e.what());
        }
    }
    if (file.rollouts.empty()) throw Error(ErrorKind::bad_file, path + " holds no rollout");
    return file;
}

}  // namespace fbt::apps
