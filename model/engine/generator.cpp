#include "model/engine/generator.h"

#include <algorithm>

namespace fbt::model::engine {

void run(Engine& engine, const OnToken& on_token, const ShouldStop& should_stop) {
    while (!engine.idle()) {
        if (should_stop && should_stop()) return engine.cancel_all();
        for (const Engine::Event& event : engine.step())
            if (on_token) on_token(engine.rollout(event.id), event.token);
    }
}

std::vector<Rollout> generate(core::Model& model, const std::vector<std::vector<int32_t>>& prompts,
                              const GenerateConfig& config, const OnToken& on_token,
                              const ShouldStop& should_stop) {
    Engine engine(model, config.engine);
    Request request;
    request.mode = config.mode;
    request.sampling = config.sampling;
    request.seed = config.seed;
    request.max_tokens = config.max_tokens;
    if (config.stop_token >= 0) request.stop_tokens = {config.stop_token};
    request.keep_states = config.keep_states;
    request.keep_cache = config.keep_cache;
    for (size_t p = 0; p < prompts.size(); ++p) {
        request.tokens = prompts[p];
        request.prompt = int(p);
        request.stream = uint64_t(p) << 32;
        engine.submit(request, config.samples);
    }
    run(engine, on_token, should_stop);
    std::vector<Rollout> rollouts;
    for (int64_t id = 0; id < int64_t(prompts.size()) * config.samples; ++id)
        rollouts.push_back(engine.take(id));
    return rollouts;
}

}  // namespace fbt::model::engine
