// Files of rollouts: what `fbt generate --out` writes and `fbt replay` reads.
//
//   FILE.jsonl         one JSON object a rollout: "tokens" (the prompt's, then the sampled ones),
//                      "prompt_length", "mode", "logprobs" of the sampled tokens, "finish", "text",
//                      "weights" (the hash of the parameters), the sampling settings, and "states"
//                      and "cache", the name of the file beside this one that has them, or null
//   FILE.safetensors   of the T fed positions, f32 or bf16 as they were computed:
//                        states/PROMPT.SAMPLE [T,D], the top states;
//                        keys/PROMPT.SAMPLE, values/PROMPT.SAMPLE [L,T,G,C], keys after RoPE;
//                      T is P+n-1, as the last sampled token is never fed; the metadata's "weights"
//                      are the rollouts'
#pragma once
#include <string>
#include <vector>

#include "apps/run_folder.h"
#include "model/core/config.h"
#include "model/engine/generator.h"

namespace fbt::apps {

struct RolloutFile {
    std::string weights;  // of every rollout in it
    std::vector<model::engine::Rollout> rollouts;
    std::vector<nlohmann::json> notes;  // one for each: text and settings, written along
    tensor::DType dtype =
        tensor::DType::f32;            // of states and caches, where there are any: f32, bf16
    std::vector<std::string> kept_in;  // the files that have these, each once
};

// "3.0": its place among the tensors of a file
std::string place_of(const model::engine::Rollout& rollout);
// The positions that were fed: all tokens but the last sampled one.
int64_t fed_positions(const model::engine::Rollout& rollout);

// Writes FILE.safetensors: the states and caches that the rollouts have; config: their model's.
// Errors  environment.
void write_kept(const std::string& path, const RolloutFile& file,
                const model::core::Config& config);

// Writes FILE.jsonl, and what was kept; where it cannot write both it replaces neither. Errors
// environment.
void write_rollouts(const std::string& path, const RolloutFile& file,
                    const model::core::Config& config);

// Errors  bad_file, naming the line: no JSON, a key missing or outside what the model can have
// sampled, weights that differ from one line to the next, states or a cache that are missing,
// misshapen, not finite, of another dtype than the rest, or of other weights.
RolloutFile read_rollouts(const std::string& path, const model::core::Config& config);

// Errors  bad_file when the file comes from other weights than the loaded ones; usage when what it
// kept is of another dtype.
void check_origin(const RolloutFile& file, const std::string& path, const Loaded& loaded);

// Errors  bad_file when two rollouts have one place: write_kept() could not tell them apart.
void check_places(const RolloutFile& file, const std::string& path);

// The recorded states on the model's device, [T,D].
tensor::Tensor states_of(const model::engine::Rollout& rollout, model::core::Model& model);

}  // namespace fbt::apps
