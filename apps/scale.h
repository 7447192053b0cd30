// `fbt train --plan`: what the settings would take on many GPUs, computed from
// model/engine/scale.h.
#pragma once
#include "apps/command.h"
#include "model/engine/trainer.h"

namespace fbt::apps {

// The flags, and the tables that they ask for.
struct ScalePlan {
    bool asked = false;
    std::vector<int> ranks = {8, 16, 32, 64, 128, 256, 512, 1024};
    std::string gpu = "h100";
    double rate = 0, link = 0;  // TFLOP/s, GB/s; 0: stated or assumed

    void declare(Settings& settings);  // into the settings' current section
    // Errors  usage for a flag that is not for --plan alone, or does not fit the others.
    void check(const Settings& settings) const;
    // Prints the plan for sequences of `length` tokens.
    int run(Console& console, const model::core::Config& model, const std::string& dtype,
            const model::engine::TrainConfig& train, int length, int zero) const;
};

}  // namespace fbt::apps
