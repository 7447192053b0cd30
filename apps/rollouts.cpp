#include "apps/rollouts.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <optional>

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

// Under a temporary name first, so that a file of this name is always whole.
void write_states(const fs::path& path, const std::vector<Rollout>& rollouts) {
    std::vector<tensor::SafetensorsWriter::Item> items;
    std::map<std::string, const Rollout*> by_name;
    for (const Rollout& r : rollouts) {
        const int64_t fed = std::max<int64_t>(r.prompt_length, int64_t(r.tokens.size()) - 1);
        items.push_back(
            {states_name(r), tensor::DType::f32, {fed, int64_t(r.states.size()) / fed}});
        by_name[states_name(r)] = &r;
    }
    const std::string temporary = path.parent_path() / ("." + path.filename().string() + ".tmp");
    tensor::SafetensorsWriter writer(temporary, items, {{"format", "pt"}});
    for (const auto& item : writer.items()) writer.write(item.name, by_name[item.name]->states);
    writer.finish();
    tensor::rename_durably(temporary, path);
}

Rollout rollout_of(const json& row, int vocab_size) {
    Rollout r;
    row.at("tokens").get_to(r.tokens);
    row.at("prompt_length").get_to(r.prompt_length);
    row.at("logprobs").get_to(r.logprobs);
    row.at("prompt").get_to(r.prompt);
    row.at("sample").get_to(r.sample);
    r.mode = core::mode_from(row.at("mode").get<std::string>());
    const auto fail = [](const std::string& what) { throw Error(ErrorKind::bad_file, what); };
    if (r.prompt_length < 1 || size_t(r.prompt_length) > r.tokens.size())
        fail("prompt_length is " + std::to_string(r.prompt_length) + ", but there are " +
             std::to_string(r.tokens.size()) + " tokens");
    for (int32_t token : r.tokens)
        if (token < 0 || token >= vocab_size)
            fail("token " + std::to_string(token) + " is outside the vocabulary of " +
                 std::to_string(vocab_size));
    if (r.logprobs.size() != r.tokens.size() - size_t(r.prompt_length))
        fail(std::to_string(r.logprobs.size()) + " logprobs for " +
             std::to_string(r.tokens.size() - size_t(r.prompt_length)) + " sampled tokens");
    return r;
}

void read_states(const tensor::SafetensorsFile& file, int dim, Rollout& r) {
    const auto& entry = file.entry(states_name(r));
    const tensor::Shape wanted = {std::max<int64_t>(r.prompt_length, int64_t(r.tokens.size()) - 1),
                                  dim};
    if (entry.shape != wanted || entry.dtype != tensor::DType::f32)
        throw Error(ErrorKind::bad_file, file.path() + ": " + states_name(r) + " is " +
                                             tensor::to_string(entry.shape) + " " +
                                             tensor::name_of(entry.dtype) + ", expected " +
                                             tensor::to_string(wanted) + " f32");
    r.states = file.read<float>(states_name(r));
}

}  // namespace

void write_rollouts(const std::string& path, const RolloutFile& file) {
    const bool has_states = std::any_of(file.rollouts.begin(), file.rollouts.end(),
                                        [](const Rollout& r) { return !r.states.empty(); });
    const fs::path states = fs::path(path).replace_extension(".safetensors");
    if (has_states) write_states(states, file.rollouts);
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

RolloutFile read_rollouts(const std::string& path, int dim, int vocab_size) {
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
            Rollout r = rollout_of(row, vocab_size);
            const std::string weights = row.at("weights").get<std::string>();
            if (file.rollouts.empty()) file.weights = weights;
            if (weights != file.weights)
                throw Error(ErrorKind::bad_file, "its weights differ from those of line 1");
            if (const json& name = row.at("states"); !name.is_null()) {
                const std::string beside = fs::path(path).parent_path() / name.get<std::string>();
                if (beside != states_path) states = tensor::SafetensorsFile::open(beside);
                states_path = beside;
                read_states(*states, dim, r);
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
