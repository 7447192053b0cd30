#include "model/core/checkpoint.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <filesystem>
#include <limits>
#include <system_error>

#include "tensor/file.h"
#include "tensor/safetensors.h"

namespace fbt::model::core {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using tensor::Error;
using tensor::ErrorKind;
using tensor::SafetensorsFile;
using tensor::SafetensorsWriter;

constexpr const char* kVersion = "fbt-1";  // of the checkpoint's contents

[[noreturn]] void bad(const std::string& path, const std::string& what) {
    throw Error(ErrorKind::bad_file, path + ": " + what);
}

std::string name_of_step(int64_t step) {
    std::string digits = std::to_string(step);
    return "step_" + std::string(8 - std::min<size_t>(8, digits.size()), '0') + digits;
}

// The step of a folder's name, or -1 when it is not a checkpoint's.
int64_t step_of(const fs::path& folder) {
    const std::string name = folder.filename().string();
    if (name.size() < 13 || name.size() > 20 || !name.starts_with("step_")) return -1;
    if (!std::all_of(name.begin() + 5, name.end(), [](char c) { return c >= '0' && c <= '9'; }))
        return -1;
    return std::stoll(name.substr(5));
}

bool complete(const fs::path& folder) {
    std::error_code ignored;
    for (const char* file :
         {"model.safetensors", "optimizer.safetensors", "config.json", "state.json"})
        if (!fs::is_regular_file(folder / file, ignored)) return false;
    return true;
}

// Complete checkpoints of a run, oldest first; and the names that a crashed save left behind.
std::vector<std::pair<int64_t, fs::path>> checkpoints_of(const std::string& run,
                                                         std::vector<fs::path>* leftovers) {
    std::vector<std::pair<int64_t, fs::path>> found;
    std::error_code error;
    for (fs::directory_iterator it(run, error), end; !error && it != end; it.increment(error)) {
        const fs::path path = it->path();
        if (const int64_t step = step_of(path); step >= 0 && complete(path))
            found.emplace_back(step, path);
        else if (leftovers && path.filename().string().starts_with(".step_"))
            leftovers->push_back(path);
    }
    std::sort(found.begin(), found.end());
    return found;
}

json read_json(const std::string& path) {
    try {
        return json::parse(tensor::read_file(path));
    } catch (const json::exception& e) {
        bad(path, std::string("not JSON: ") + e.what());
    }
}

void write_tensor(SafetensorsWriter& writer, const std::string& name, const Tensor& t) {
    if (t.dtype() == DType::f64)
        writer.write(name, t.to_vector<double>());
    else if (t.dtype() == DType::i64)
        writer.write(name, t.to_vector<int64_t>());
    else
        writer.write(name, t.to_vector<float>());
}

// Checks one tensor of a file and returns its values.
std::vector<double> read_values(const SafetensorsFile& file, const std::string& name,
                                const tensor::Shape& shape) {
    const auto it = file.entries().find(name);
    if (it == file.entries().end()) bad(file.path(), "lacks tensor " + name);
    if (it->second.shape != shape)
        bad(file.path(), name + " is " + tensor::to_string(it->second.shape) + ", expected " +
                             tensor::to_string(shape));
    const DType dtype = it->second.dtype;
    if (dtype != DType::f32 && dtype != DType::f64 && dtype != DType::bf16)
        bad(file.path(), name + " is " + tensor::name_of(dtype) + ", expected f32, f64 or bf16");
    std::vector<double> values = file.read<double>(name);
    for (size_t i = 0; i < values.size(); ++i)
        if (!std::isfinite(values[i]))
            bad(file.path(), name + " holds a value that is not finite, at element " +
                                 std::to_string(i) +
                                 "; remove the checkpoint to go on from the one before");
    return values;
}

void expect_names(const SafetensorsFile& file, std::vector<std::string> names) {
    std::sort(names.begin(), names.end());
    for (const auto& [name, entry] : file.entries())
        if (!std::binary_search(names.begin(), names.end(), name))
            bad(file.path(), "holds tensor " + name + ", which this model does not have");
}

}  // namespace

void save_checkpoint(const std::string& run, Model& model, const nn::AdamW& optimizer,
                     const TrainingState& state, const json& config, int keep_last,
                     const Saving& saving) {
    const std::string name = name_of_step(state.step);
    const fs::path temporary = fs::path(run) / ("." + name + ".tmp"), final = fs::path(run) / name;
    // A broken model must not push the good checkpoints out.
    const auto& parameters = model.parameters().all();
    std::vector<Tensor> values;
    std::vector<size_t> where;
    for (size_t i = 0; i < parameters.size(); ++i)
        if (parameters[i].owned()) {
            values.push_back(parameters[i].weight().value);
            where.push_back(i);
        }
    std::vector<double> squares(parameters.size() + 1, 0);
    const std::vector<double> sums = tensor::square_sums(values);
    for (size_t i = 0; i < where.size(); ++i) squares[where[i]] = sums[i];
    squares.back() = saving.writes && complete(final);
    squares = saving.sum(squares);
    for (size_t i = 0; i < parameters.size(); ++i)
        if (!std::isfinite(squares[i]))
            throw Error(ErrorKind::diverged, "diverged: " + parameters[i].name() +
                                                 " is not finite after step " +
                                                 std::to_string(state.step) +
                                                 "; it is not saved, older checkpoints stay");
    // This run's state at this step, which is a function of the step.
    if (squares.back() > 0) return;

    // What goes wrong where the files are written is kept until the others have sent all they have.
    std::exception_ptr failure;
    const auto attempt = [&](auto&& write) {
        if (!saving.writes || failure) return;
        try {
            write();
        } catch (...) {
            failure = std::current_exception();
        }
    };
    attempt([&] {
        try {
            fs::create_directories(run);
            fs::remove_all(temporary);
            fs::create_directory(temporary);
        } catch (const fs::filesystem_error& e) {
            throw Error(ErrorKind::environment, std::string("cannot save: ") + e.what());
        }
    });
    const auto steps = [&](size_t i) {
        return Tensor::from(model.context(), std::vector<int64_t>{optimizer.states()[i].steps}, {});
    };
    // Owned tensors by name, with their parameter; of counts every process has its own.
    struct Source {
        size_t parameter;
        Tensor own;
        bool shared = true;
    };
    const auto write_file = [&](const char* file, const std::map<std::string, Source>& sources) {
        std::vector<SafetensorsWriter::Item> items;
        for (const auto& [key, source] : sources)
            items.push_back(
                {key, source.shared ? tensor::accumulate_dtype(model.dtype()) : DType::i64,
                 source.shared ? parameters[source.parameter].shape() : tensor::Shape{}});
        std::optional<SafetensorsWriter> writer;  // gone, with its file, unless it finished
        const std::map<std::string, std::string> metadata = {{"format", "pt"}};
        attempt([&] { writer.emplace(temporary / file, items, metadata); });
        for (const auto& [key, source] : sources) {
            const Tensor t =
                source.shared ? saving.whole(source.parameter, source.own) : source.own;
            attempt([&, &name = key] { write_tensor(*writer, name, t); });
        }
        attempt([&] { writer->finish(); });
    };
    std::map<std::string, Source> weights, moments;
    for (size_t i = 0; i < parameters.size(); ++i) {
        const std::string& p = parameters[i].name();
        const nn::AdamW::State& s = optimizer.states()[i];
        weights[p] = {i, parameters[i].weight().value};
        moments["m/" + p] = {i, s.m};
        moments["v/" + p] = {i, s.v};
        moments["steps/" + p] = {i, steps(i), false};
    }
    write_file("model.safetensors", weights);
    write_file("optimizer.safetensors", moments);
    attempt([&] {
        const json state_json = {{"step", state.step},       {"epoch", state.epoch},
                                 {"index", state.index},     {"seed", state.seed},
                                 {"skipped", state.skipped}, {"version", kVersion}};
        tensor::write_file_durably(temporary / "config.json", config.dump(2) + "\n");
        tensor::write_file_durably(temporary / "state.json", state_json.dump(2) + "\n");
        tensor::fsync_folder(temporary);
        std::error_code ignored;
        fs::remove_all(final, ignored);  // an incomplete one, by whoever damaged it
        tensor::rename_durably(temporary, final);
    });
    if (!saving.writes) return;
    std::error_code ignored;  // old ones that stay are no reason to stop a training
    if (failure) {
        fs::remove_all(temporary, ignored);  // gives the space of a full disk back
        std::rethrow_exception(failure);
    }
    std::vector<fs::path> leftovers;
    const auto found = checkpoints_of(run, &leftovers);
    for (size_t i = 0; i + size_t(std::max(1, keep_last)) < found.size(); ++i) {
        // Under a leftover's name first: half a removed checkpoint must not look like one.
        const fs::path old = fs::path(run) / ("." + found[i].second.filename().string() + ".old");
        fs::rename(found[i].second, old, ignored);
        leftovers.push_back(old);
    }
    for (const fs::path& path : leftovers) fs::remove_all(path, ignored);
}

std::optional<std::string> newest_checkpoint(const std::string& run) {
    const auto found = checkpoints_of(run, nullptr);
    if (found.empty()) return std::nullopt;
    return found.back().second.string();
}

std::string find_checkpoint(const std::string& path) {
    if (step_of(fs::path(path).lexically_normal()) >= 0 || complete(path)) {
        if (!complete(path))
            bad(path,
                "is no complete checkpoint: it needs model.safetensors, "
                "optimizer.safetensors, config.json and state.json");
        return fs::canonical(path).string();
    }
    if (const auto newest = newest_checkpoint(path)) return *newest;
    bad(path, fs::exists(path)
                  ? "holds no complete checkpoint (a folder step_00001000 of four files)"
                  : "does not exist; expected a run's folder or a checkpoint in it");
}

json load_config(const std::string& checkpoint) {
    const std::string path = checkpoint + "/config.json";
    const json config = read_json(path);
    for (const char* key : {"model", "train"})
        if (!config.is_object() || !config.contains(key))
            bad(path, std::string("lacks the key '") + key + "'");
    return config;
}

void load_parameters(const std::string& checkpoint, Model& model, bool trained) {
    const auto file = SafetensorsFile::open(checkpoint + "/model.safetensors");
    std::vector<std::string> names;
    for (const nn::Parameter& p : model.parameters().all()) names.push_back(p.name());
    expect_names(file, names);
    for (nn::Parameter& p : model.parameters().all())
        p.set(model.context(), read_values(file, p.name(), p.shape()), model.dtype(), trained);
}

void load_optimizer(const std::string& checkpoint, Model& model, nn::AdamW& optimizer) {
    const auto file = SafetensorsFile::open(checkpoint + "/optimizer.safetensors");
    std::vector<std::string> names;
    for (const nn::Parameter& p : model.parameters().all())
        for (const char* kind : {"m/", "v/", "steps/"}) names.push_back(kind + p.name());
    expect_names(file, names);
    for (size_t i = 0; i < optimizer.states().size(); ++i) {
        const nn::Parameter& p = model.parameters().all()[i];
        auto& state = optimizer.states()[i];
        const auto restore = [&](Tensor& t, const std::string& name) {
            t.copy_from(Tensor::from_double(model.context(), read_values(file, name, p.shape()),
                                            p.shape(), t.dtype()));
        };
        if (p.owned()) {
            restore(state.m, "m/" + p.name());
            restore(state.v, "v/" + p.name());
        }
        const std::string steps = "steps/" + p.name();
        if (!file.contains(steps) || !file.entry(steps).shape.empty())
            bad(file.path(), steps + " is missing or no scalar");
        state.steps = file.read<int64_t>(steps)[0];
        if (state.steps < 0) bad(file.path(), steps + " is " + std::to_string(state.steps));
    }
}

TrainingState load_state(const std::string& checkpoint) {
    const std::string path = checkpoint + "/state.json";
    const json state = read_json(path);
    if (!state.is_object() || !state.contains("version") || state["version"] != kVersion)
        bad(path, std::string("lacks \"version\": \"") + kVersion + "\"");
    const auto count = [&](const char* key) {
        if (!state.contains(key) || !state[key].is_number_unsigned() ||
            state[key].get<uint64_t>() > uint64_t(std::numeric_limits<int64_t>::max()))
            bad(path, std::string(key) + " is " +
                          (state.contains(key) ? state[key].dump() : "missing") +
                          ", expected a whole number from 0 on");
        return state[key].get<int64_t>();
    };
    TrainingState out;
    out.step = count("step");
    out.epoch = count("epoch");
    out.index = count("index");
    out.skipped = count("skipped");
    if (!state.contains("seed") || !state["seed"].is_number_unsigned())
        bad(path, "seed is missing or no whole number from 0 on");
    out.seed = state["seed"].get<uint64_t>();
    if (const int64_t named = step_of(checkpoint); named >= 0 && named != out.step)
        bad(path, "step is " + std::to_string(out.step) + ", but the folder's name says " +
                      std::to_string(named));
    return out;
}

std::string weights_hash(Model& model) {
    uint64_t h = tensor::kHashStart;
    for (const nn::Parameter& p : model.parameters().all()) {
        h = tensor::hash(tensor::bytes_of(p.name()), h);
        const std::vector<double> v = p.weight().value.to_double();
        h = tensor::hash(std::as_bytes(std::span(v)), h);
    }
    constexpr char digits[] = "0123456789abcdef";
    std::string hex;
    for (int shift = 60; shift >= 0; shift -= 4) hex += digits[(h >> shift) & 15];
    return hex;
}

}  // namespace fbt::model::core
