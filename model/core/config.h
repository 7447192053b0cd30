// The shape of a model, and its JSON form (config.json of a checkpoint, the presets' "model").
#pragma once
#include <nlohmann/json.hpp>
#include <string>

namespace fbt::model::core {

// How the carried state h and the token's embedding e are fused into an input.
enum class Fusion { gated_product, concat_projection, linear_addition };

struct Config {
    int vocab_size = 257;
    int dim = 128;      // D
    int layers = 4;     // L
    int heads = 4;      // H
    int kv_heads = 4;   // G, divides H
    int head_dim = 32;  // C, even
    int ffn_dim = 352;  // F
    int context = 128;  // longest sequence in training and generation
    int window = 128;   // sliding window W: t sees [t-W+1, t]
    int full_attention_every =
        6;  // layer l (0-based) is full when (l+1) % this == 0; so is the last
    double rope_theta = 10000;
    double norm_eps = 1e-6;
    double residual_scale = 0;  // 0 means 1/sqrt(2L)
    Fusion fusion = Fusion::gated_product;

    double alpha() const;
    bool is_full_attention(int layer) const;
    // Throws Error(usage) naming the first key whose value cannot be.
    void validate() const;
};

std::string to_string(Fusion fusion);
Fusion fusion_from(const std::string& name);

nlohmann::json to_json(const Config& config);
// Unknown keys are errors (usage, with the key's name); missing ones keep their default.
Config config_from_json(const nlohmann::json& json);

}  // namespace fbt::model::core
