#include "model/core/config.h"

#include <cmath>

#include "tensor/error.h"

namespace fbt::model::core {

using tensor::Error;
using tensor::ErrorKind;

double Config::alpha() const {
    return residual_scale != 0 ? residual_scale : 1 / std::sqrt(2.0 * layers);
}

bool Config::is_full_attention(int layer) const {
    return (layer + 1) % full_attention_every == 0 || layer == layers - 1;
}

void Config::validate() const {
    const auto need = [](bool ok, const char* key, const auto& value, const char* wanted) {
        if (ok) return;
        nlohmann::json shown = value;
        throw Error(ErrorKind::usage,
                    std::string("model: ") + key + " is " + shown.dump() + ", needed " + wanted);
    };
    need(vocab_size >= 1, "vocab_size", vocab_size, "at least 1");
    need(dim >= 1, "dim", dim, "at least 1");
    need(layers >= 1, "layers", layers, "at least 1");
    need(heads >= 1, "heads", heads, "at least 1");
    need(kv_heads >= 1 && heads % kv_heads == 0, "kv_heads", kv_heads, "a divisor of heads");
    need(head_dim >= 2 && head_dim % 2 == 0 && head_dim <= 256, "head_dim", head_dim,
         "an even number up to 256");
    need(ffn_dim >= 1, "ffn_dim", ffn_dim, "at least 1");
    need(context >= 1, "context", context, "at least 1");
    need(window >= 1, "window", window, "at least 1");
    need(full_attention_every >= 1, "full_attention_every", full_attention_every, "at least 1");
    need(rope_theta > 0 && std::isfinite(rope_theta), "rope_theta", rope_theta, "above 0");
    need(norm_eps > 0 && std::isfinite(norm_eps), "norm_eps", norm_eps, "above 0");
    need(residual_scale >= 0 && std::isfinite(residual_scale), "residual_scale", residual_scale,
         "0 (for 1/sqrt(2L)) or above");
}

std::string to_string(Fusion fusion) {
    switch (fusion) {
        case Fusion::gated_product:
            return "gated_product";
        case Fusion::concat_projection:
            return "concat_projection";
        case Fusion::linear_addition:
            return "linear_addition";
    }
    return "?";
}

Fusion fusion_from(const std::string& name) {
    for (Fusion f : {Fusion::gated_product, Fusion::concat_projection, Fusion::linear_addition})
        if (to_string(f) == name) return f;
    throw Error(ErrorKind::usage, "model: fusion is '" + name +
                                      "', needed gated_product, concat_projection or "
                                      "linear_addition");
}

namespace {

// One list of keys for both directions.
template <class C, class F>
void each_key(C& c, F&& visit) {
    visit("vocab_size", c.vocab_size);
    visit("dim", c.dim);
    visit("layers", c.layers);
    visit("heads", c.heads);
    visit("kv_heads", c.kv_heads);
    visit("head_dim", c.head_dim);
    visit("ffn_dim", c.ffn_dim);
    visit("context", c.context);
    visit("window", c.window);
    visit("full_attention_every", c.full_attention_every);
    visit("rope_theta", c.rope_theta);
    visit("norm_eps", c.norm_eps);
    visit("residual_scale", c.residual_scale);
}

}  // namespace

nlohmann::json to_json(const Config& config) {
    nlohmann::json json;
    each_key(config, [&](const char* key, const auto& value) { json[key] = value; });
    json["fusion"] = to_string(config.fusion);
    return json;
}

Config config_from_json(const nlohmann::json& json) {
    Config config;
    if (!json.is_object()) throw Error(ErrorKind::usage, "model: needed a JSON object of keys");
    size_t known = json.contains("fusion");
    try {
        if (known) config.fusion = fusion_from(json["fusion"].get<std::string>());
        each_key(config, [&](const char* key, auto& value) {
            if (!json.contains(key)) return;
            ++known;
            if (!json[key].is_number())
                throw Error(ErrorKind::usage, std::string("model: ") + key + " is " +
                                                  json[key].dump() + ", needed a number");
            json[key].get_to(value);
        });
    } catch (const nlohmann::json::exception& e) {
        throw Error(ErrorKind::usage, std::string("model: ") + e.what());
    }
    if (known != json.size())
        for (const auto& [key, value] : json.items())
            if (key != "fusion" && !to_json(config).contains(key))
                throw Error(ErrorKind::usage, "model: unknown key '" + key + "'");
    config.validate();
    return config;
}

}  // namespace fbt::model::core
