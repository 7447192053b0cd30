// Generation for many prompts at once: one prefill a prompt, any number of samples of it, all live
// sequences advanced together.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "kernels/sampling.h"
#include "model/core/decode.h"

namespace fbt::model::engine {

struct GenerateConfig {
    core::Mode mode = core::Mode::soft;
    int max_tokens = 200;
    int samples = 1;  // of each prompt
    kernels::Sampling sampling;
    uint64_t seed = 1;
    int32_t stop_token = -1;  // ends a sequence when sampled; -1: none
    bool keep_states = false;
};

enum class Finish { length, stop, context };  // max_tokens, the stop token, the context's end
std::string to_string(Finish finish);

struct Rollout {
    int prompt = 0, sample = 0;  // which prompt, which of its samples
    core::Mode mode = core::Mode::soft;
    std::vector<int32_t> tokens;  // the prompt's, then the sampled ones
    int prompt_length = 0;
    std::vector<double> logprobs;  // of each sampled token under the model (temperature 1)
    Finish finish = Finish::length;
    // Top states of every fed position, [P+n-1, D], where kept: the last token is never fed.
    std::vector<float> states;
    std::vector<float> keys, values;  // [L,T,G,C] of the fed positions, keys after RoPE, where kept
};

// Every sampled token as it comes.
using OnToken = std::function<void(const Rollout& rollout, int32_t token)>;
// Asked before each step; true ends all sequences as they are.
using ShouldStop = std::function<bool()>;

// A sequence's tokens depend on the seed, its prompt's and its sample's number, and on nothing else
// in the batch. Throws usage when a prompt is empty, holds an id outside the vocabulary, or is not
// shorter than the context.
std::vector<Rollout> generate(core::Model& model, const std::vector<std::vector<int32_t>>& prompts,
                              const GenerateConfig& config, const OnToken& on_token = {},
                              const ShouldStop& should_stop = {});

}  // namespace fbt::model::engine
