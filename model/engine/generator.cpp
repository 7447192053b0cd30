#include "model/engine/generator.h"

#include <algorithm>

#include "kernels/philox.h"

namespace fbt::model::engine {

using tensor::Error;
using tensor::ErrorKind;
using tensor::Tensor;

std::string to_string(Finish finish) {
    switch (finish) {
        case Finish::length:
            return "length";
        case Finish::stop:
            return "stop";
        case Finish::context:
            return "context";
    }
    return "?";
}

namespace {

void check(const std::vector<std::vector<int32_t>>& prompts, const core::Config& model) {
    for (size_t i = 0; i < prompts.size(); ++i) {
        const std::string which = "prompt " + std::to_string(i + 1);
        if (prompts[i].empty()) throw Error(ErrorKind::usage, which + " is empty");
        for (int32_t token : prompts[i])
            if (token < 0 || token >= model.vocab_size)
                throw Error(ErrorKind::usage, which + " holds token " + std::to_string(token) +
                                                  ", outside the vocabulary of " +
                                                  std::to_string(model.vocab_size));
        if (int(prompts[i].size()) >= model.context)
            throw Error(ErrorKind::usage, which + " has " + std::to_string(prompts[i].size()) +
                                              " tokens, but the context is " +
                                              std::to_string(model.context) +
                                              ": shorten it to leave room for the response");
    }
}

}  // namespace

std::vector<Rollout> generate(core::Model& model, const std::vector<std::vector<int32_t>>& prompts,
                              const GenerateConfig& config, const OnToken& on_token,
                              const ShouldStop& should_stop) {
    check(prompts, model.config());
    core::Decoder decoder(model, config.mode);
    std::vector<Tensor> heads;
    std::vector<int> ids = decoder.prefill(prompts, config.keep_states ? &heads : nullptr);

    std::vector<Rollout> rollouts;
    std::vector<int> sequence;  // the decoder's id of each rollout
    std::vector<size_t> live;   // rollouts that go on
    for (size_t p = 0; p < prompts.size(); ++p)
        for (int s = 0; s < config.samples; ++s) {
            Rollout r;
            r.prompt = int(p);
            r.sample = s;
            r.mode = config.mode;
            r.tokens = prompts[p];
            r.prompt_length = int(prompts[p].size());
            if (config.keep_states) {
                const std::vector<double> head = heads[p].to_double();
                r.states.assign(head.begin(), head.end());
            }
            sequence.push_back(s == 0 ? ids[p] : decoder.fork(ids[p]));
            live.push_back(rollouts.size());
            rollouts.push_back(std::move(r));
        }

    const auto key = kernels::philox_key(config.seed, kernels::Draw::sampling);
    std::vector<int> live_ids = sequence;
    Tensor h = config.max_tokens > 0 && !live.empty() ? decoder.states(live_ids) : Tensor();
    while (h.defined() && !(should_stop && should_stop())) {
        const Tensor logits = model.logits(h);
        std::vector<float> uniform;
        for (size_t i : live) {
            const Rollout& r = rollouts[i];
            const uint64_t counter = uint64_t(r.prompt) << 32 | uint32_t(r.sample);
            uniform.push_back(kernels::uniform_float(
                kernels::philox_bits(key, counter, uint32_t(r.logprobs.size()))));
        }
        const std::vector<int32_t> tokens = tensor::sample(
            logits, std::vector<kernels::Sampling>(live.size(), config.sampling), uniform);
        const std::vector<double> logprobs = core::log_probabilities(logits, tokens);

        std::vector<size_t> next_live;
        std::vector<int32_t> next_tokens;
        live_ids.clear();
        for (size_t i = 0; i < live.size(); ++i) {
            Rollout& r = rollouts[live[i]];
            r.tokens.push_back(tokens[i]);
            r.logprobs.push_back(logprobs[i]);
            if (on_token) on_token(r, tokens[i]);
            const bool stopped = tokens[i] == config.stop_token;
            const bool full = int(r.logprobs.size()) >= config.max_tokens;
            const bool context = int(r.tokens.size()) >= model.config().context;
            r.finish = stopped ? Finish::stop : full ? Finish::length : Finish::context;
            if (stopped || full || context) {
                decoder.drop(sequence[live[i]]);
                continue;
            }
            next_live.push_back(live[i]);
            next_tokens.push_back(tokens[i]);
            live_ids.push_back(sequence[live[i]]);
        }
        live = std::move(next_live);
        if (live.empty()) break;
        h = decoder.step(live_ids, next_tokens);
        if (config.keep_states) {
            const std::vector<double> rows = h.to_double();
            const int64_t D = model.config().dim;
            for (size_t i = 0; i < live.size(); ++i)
                rollouts[live[i]].states.insert(rollouts[live[i]].states.end(),
                                                rows.begin() + int64_t(i) * D,
                                                rows.begin() + int64_t(i + 1) * D);
        }
    }
    return rollouts;
}

}  // namespace fbt::model::engine
