// Checkpoints: a folder RUN/step_00001000 (updates done) of four files.
//   model.safetensors      parameters by name, f32 (or f64), __metadata__.format = pt
//   optimizer.safetensors  m/NAME, v/NAME, and steps/NAME, a scalar i64
//   config.json            "model" (core/config.h) and "train", every setting of the run
//   state.json             step, data position, seed, skipped steps, version of this format
// A checkpoint is written under a name that begins with a dot, fsynced and renamed: it is there
// whole or not at all.
#pragma once
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "model/core/model.h"
#include "nn/optimizer.h"

namespace fbt::model::core {

struct TrainingState {
    int64_t step = 0;              // updates done
    int64_t epoch = 0, index = 0;  // the data source's position
    uint64_t seed = 0;
    int64_t skipped = 0;  // consecutive steps whose update was skipped as non-finite
};

// How the processes of a job save a state that is spread over them; by itself, of a job of one. All
// make the same calls, in the same order, whatever happens to the one that writes.
struct Saving {
    bool writes = true;
    // A parameter's whole value or moment, from the process that owns it.
    std::function<Tensor(size_t parameter, const Tensor& own)> whole =
        [](size_t, const Tensor& own) { return own; };
    // Sums over the processes.
    std::function<std::vector<double>(const std::vector<double>&)> sum =
        [](const std::vector<double>& numbers) { return numbers; };
};

// Saves and then removes all but the newest `keep_last` checkpoints of the run, and what crashed
// saves left. Throws environment when the disk fails; older checkpoints are then untouched.
void save_checkpoint(const std::string& run, Model& model, const nn::AdamW& optimizer,
                     const TrainingState& state, const nlohmann::json& config, int keep_last,
                     const Saving& saving = {});

// The newest complete checkpoint of a run, or nothing.
std::optional<std::string> newest_checkpoint(const std::string& run);

// A checkpoint folder from what a user typed: such a folder itself, or a run (its newest one).
// Throws bad_file when there is none.
std::string find_checkpoint(const std::string& path);

// All throw bad_file, naming the file and what is wrong with it: missing, extra, misshapen tensors,
// or values that are not finite.
nlohmann::json load_config(const std::string& checkpoint);  // has "model" and "train"
void load_parameters(const std::string& checkpoint, Model& model, bool trained);
// Moments of owned parameters; all are checked to be there.
void load_optimizer(const std::string& checkpoint, Model& model, nn::AdamW& optimizer);
TrainingState load_state(const std::string& checkpoint);

// 64-bit hash of all parameter values, in hex: names the weights a rollout came from.
std::string weights_hash(Model& model);

}  // namespace fbt::model::core
