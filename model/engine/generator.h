// Generation for a list of prompts, any number of samples of each, by one engine.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "model/engine/engine.h"

namespace fbt::model::engine {

struct GenerateConfig {
    core::Mode mode = core::Mode::soft;
    int max_tokens = 200;
    int samples = 1;  // of each prompt
    kernels::Sampling sampling;
    uint64_t seed = 1;
    int32_t stop_token = -1;  // ends a sequence when sampled; -1: none
    bool keep_states = false, keep_cache = false;
    EngineConfig engine;
};

// Every sampled token as it comes.
using OnToken = std::function<void(const Rollout& rollout, int32_t token)>;
// Asked before each step; true ends all sequences as they are.
using ShouldStop = std::function<bool()>;

// Steps until the engine is idle.
void run(Engine& engine, const OnToken& on_token = {}, const ShouldStop& should_stop = {});

// A sequence's tokens depend on the seed, its prompt's and its sample's number, and on nothing else
// in the batch. Throws usage when a prompt is empty, holds an id outside the vocabulary, or is not
// shorter than the context.
std::vector<Rollout> generate(core::Model& model, const std::vector<std::vector<int32_t>>& prompts,
                              const GenerateConfig& config, const OnToken& on_token = {},
                              const ShouldStop& should_stop = {});

}  // namespace fbt::model::engine
