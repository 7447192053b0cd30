// Files of rollouts: what `fbt generate --out` writes and `fbt replay` reads.
//
//   FILE.jsonl         one JSON object a rollout: "tokens" (the prompt's, then the sampled ones),
//                      "prompt_length", "mode", "logprobs" of the sampled tokens, "finish", "text",
//                      "weights" (the hash of the parameters), the sampling settings, and "states",
//                      the name of the states' file beside this one, or null
//   FILE.safetensors   states/PROMPT.SAMPLE [P+n-1, D], f32 or bf16 as they were computed, the top
//                      states of the fed positions: the last sampled token is never fed
#pragma once
#include <string>
#include <vector>

#include "model/core/config.h"
#include "model/engine/generator.h"

namespace fbt::apps {

struct RolloutFile {
    std::string weights;  // of every rollout in it
    std::vector<model::engine::Rollout> rollouts;
    std::vector<nlohmann::json> notes;         // one for each: text and settings, written along
    tensor::DType dtype = tensor::DType::f32;  // of the states, where there are any: f32 or bf16
};

// "states/3.0"
std::string states_name(const model::engine::Rollout& rollout);

// Writes FILE.jsonl, and the states first where they were kept. Errors  environment.
void write_rollouts(const std::string& path, const RolloutFile& file);

// Errors  bad_file, naming the line: no JSON, a key missing or outside what the model
// can have sampled, weights that differ from one
// line to the next, states that are missing or misshapen.
RolloutFile read_rollouts(const std::string& path, const model::core::Config& config);

}  // namespace fbt::apps
