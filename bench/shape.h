// The model that a bench runs, by name: bench/shapes/NAME.json, or else a preset of the program.
#pragma once
#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>

namespace fbt::bench {

// {"model": core::Config's keys, "train": {"tokens_per_step": N}}. Without "train" a shape is for
// decoding only. Throws invalid_argument for a name that neither folder has.
inline nlohmann::json shape_named(const std::string& name) {
    for (const char* folder : {"bench/shapes/", "apps/presets/"})
        if (std::ifstream file(std::string(FBT_SOURCE) + "/" + folder + name + ".json"); file)
            return nlohmann::json::parse(file);
    throw std::invalid_argument("no shape '" + name + "' in bench/shapes/ or apps/presets/; " +
                                "A, B, 300M and quickstart are there");
}

}  // namespace fbt::bench
