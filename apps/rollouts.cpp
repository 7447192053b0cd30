#include "apps/rollouts.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <map>
#include <set>
#include <utility>

#include "model/core/checkpoint.h"
#include "tensor/file.h"
#include "tensor/safetensors.h"

namespace fbt::apps {

namespace core = model::core;
namespace fs = std::filesystem;
using model::engine::Rollout;
using nlohmann::json;
using tensor::Error;
using tensor::ErrorKind;

std::string place_of(const Rollout& r) {
    return std::to_string(r.prompt) + "." + std::to_string(r.sample);
}

int64_t fed_positions(const Rollout& r) {
    return std::max<int64_t>(r.prompt_length, int64_t(r.tokens.size()) - 1);
}

namespace {

struct Kept {
    const char* folder;  // of the tensor's name
    std::vector<float> Rollout::*values;
    bool cache;  // [L,T,G,C]; otherwise [T,D]
};
constexpr Kept kKept[] = {{"states/", &Rollout::states, false},
                          {"keys/", &Rollout::keys, true},
                          {"values/", &Rollout::values, true}};

tensor::Shape shape_of(const Kept& kept, const core::Config& config, const Rollout& r) {
    const int64_t T = fed_positions(r);
    if (kept.cache) return {config.layers, T, config.kv_heads, config.head_dim};
    return {T, config.dim};
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

double logprob(const std::string& name, const json& value) {
    const double most = std::numeric_limits<float>::max();
    if (!value.is_number() || !(value.get<double>() >= -most && value.get<double>() <= 0))
        refuse(name, value, "a finite number, at most 0");
    return value.get<double>();
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

// Reads the states (cache: false) or the keys and values of a rollout.
void read_kept(const tensor::SafetensorsFile& from, const core::Config& config, bool cache,
               RolloutFile& file, Rollout& r) {
    const auto fail = [&](const std::string& what) {
        throw Error(ErrorKind::bad_file, from.path() + ": " + what);
    };
    const auto weights = from.metadata().find("weights");
    if (weights == from.metadata().end() || weights->second != file.weights)
        fail("its states and caches come from " +
             (weights == from.metadata().end() ? "weights that it does not name"
                                               : "weights " + tensor::in_quotes(weights->second)) +
             ", but the rollout from " + file.weights);
    for (const Kept& kept : kKept) {
        if (kept.cache != cache) continue;
        const std::string name = kept.folder + place_of(r);
        const auto& entry = from.entry(name);
        const tensor::Shape wanted = shape_of(kept, config, r);
        if (entry.shape != wanted ||
            (entry.dtype != tensor::DType::f32 && entry.dtype != tensor::DType::bf16))
            fail(name + " is " + tensor::to_string(entry.shape) + " " +
                 tensor::name_of(entry.dtype) + ", expected " + tensor::to_string(wanted) +
                 " f32 or bf16");
        if (file.kept_in.empty()) file.dtype = entry.dtype;
        if (entry.dtype != file.dtype)
            fail(name + " is " + tensor::name_of(entry.dtype) + ", but what was kept before it " +
                 tensor::name_of(file.dtype));
        std::vector<float>& values = r.*kept.values;
        values = from.read<float>(name);
        for (size_t i = 0; i < values.size(); ++i)
            if (!std::isfinite(values[i]))
                fail(name + " holds " + std::to_string(values[i]) + " as its element " +
                     std::to_string(i) + ", expected finite values");
        if (std::find(file.kept_in.begin(), file.kept_in.end(), from.path()) == file.kept_in.end())
            file.kept_in.push_back(from.path());
    }
}

// write_kept() without replacing anything: `path` is a temporary one.
void write_tensors(const std::string& path, const RolloutFile& file, const core::Config& config) {
    std::vector<tensor::SafetensorsWriter::Item> items;
    std::map<std::string, const std::vector<float>*> by_name;
    for (const Rollout& r : file.rollouts)
        for (const Kept& kept : kKept) {
            const std::vector<float>& values = r.*kept.values;
            if (values.empty()) continue;
            items.push_back({kept.folder + place_of(r), file.dtype, shape_of(kept, config, r)});
            by_name[items.back().name] = &values;
        }
    tensor::SafetensorsWriter writer(path, items, {{"format", "pt"}, {"weights", file.weights}});
    for (const auto& item : writer.items()) {
        const std::vector<float>& values = *by_name[item.name];
        if (file.dtype == tensor::DType::bf16)  // exact: they were bf16 when they were kept
            writer.write(item.name, std::vector<kernels::bf16>(values.begin(), values.end()));
        else
            writer.write(item.name, values);
    }
    writer.finish();
}

}  // namespace

void write_kept(const std::string& path, const RolloutFile& file, const core::Config& config) {
    const std::string temporary = tensor::temporary_beside(path);
    write_tensors(temporary, file, config);
    tensor::rename_durably(temporary, path);
}

void write_rollouts(const std::string& path, const RolloutFile& file, const core::Config& config) {
    const bool any = std::any_of(file.rollouts.begin(), file.rollouts.end(), [](const Rollout& r) {
        return !r.states.empty() || !r.keys.empty();
    });
    const fs::path kept = fs::path(path).replace_extension(".safetensors");
    const json name = kept.filename().string();
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
        row["states"] = r.states.empty() ? json() : name;
        row["cache"] = r.keys.empty() ? json() : name;
        text += row.dump() + "\n";
    }
    // Both are whole before the first of them takes the place of an old one: a full disk leaves
    // both old ones, and there is next to no time in which one is old and one new.
    const std::string temporary = tensor::temporary_beside(path);
    tensor::OutputFile rows(temporary);
    rows.write(tensor::bytes_of(text));
    rows.finish();
    if (any) {
        const std::string states = tensor::temporary_beside(kept);
        try {
            write_tensors(states, file, config);
            fs::rename(states, kept);
        } catch (...) {
            std::error_code ignored;
            fs::remove(temporary, ignored);
            throw;
        }
    }
    tensor::rename_durably(temporary, path);
}

RolloutFile read_rollouts(const std::string& path, const core::Config& config) {
    RolloutFile file;
    const std::string text = tensor::read_file(path);
    std::map<std::string, tensor::SafetensorsFile> kept;  // by name
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
            for (const bool cache : {false, true}) {
                const json name = cache ? row.value("cache", json()) : row.at("states");
                if (name.is_null()) continue;
                const std::string beside = fs::path(path).parent_path() / name.get<std::string>();
                if (!kept.contains(beside))
                    kept.emplace(beside, tensor::SafetensorsFile::open(beside));
                read_kept(kept.at(beside), config, cache, file, r);
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

void check_origin(const RolloutFile& file, const std::string& path, const Loaded& loaded) {
    const std::string weights = core::weights_hash(*loaded.model);
    if (file.weights != weights)
        throw Error(ErrorKind::bad_file, path + " comes from weights " + file.weights + ", but " +
                                             loaded.checkpoint + " has " + weights +
                                             "; name the checkpoint that generated it");
    const tensor::DType dtype = loaded.model->dtype();
    if (!file.kept_in.empty() && dtype != file.dtype) {
        const std::string kept = tensor::name_of(file.dtype);
        throw Error(ErrorKind::usage, "the recorded states are " + kept + "; go on with --dtype " +
                                          kept + ", not " + tensor::name_of(dtype));
    }
}

void check_places(const RolloutFile& file, const std::string& path) {
    std::set<std::string> places;
    for (const Rollout& r : file.rollouts)
        if (!places.insert(place_of(r)).second)
            throw Error(ErrorKind::bad_file,
                        path + " holds prompt " + std::to_string(r.prompt + 1) + ", sample " +
                            std::to_string(r.sample + 1) +
                            " twice, but states and caches are kept under these numbers; leave one "
                            "out");
}

tensor::Tensor states_of(const Rollout& r, core::Model& model) {
    return tensor::Tensor::from_double(model.context(), {r.states.begin(), r.states.end()},
                                       {fed_positions(r), model.config().dim}, model.dtype());
}

}  // namespace fbt::apps
