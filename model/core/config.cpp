#include "model/core/config.h"

#include <algorithm>
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
    // The upper bounds are far beyond use; they keep products of sizes inside 64 bits.
    const auto size = [&](const char* key, int value, int most, const char* wanted) {
        need(value >= 1 && value <= most, key, value, wanted);
    };
    size("vocab_size", vocab_size, 1 << 24, "1 to 16777216");
    size("dim", dim, 1 << 16, "1 to 65536");
    size("layers", layers, 1 << 12, "1 to 4096");
    size("heads", heads, 1 << 12, "1 to 4096");
    need(kv_heads >= 1 && heads % kv_heads == 0, "kv_heads", kv_heads, "a divisor of heads");
    need(head_dim >= 2 && head_dim % 2 == 0 && head_dim <= 256, "head_dim", head_dim,
         "an even number up to 256");
    size("ffn_dim", ffn_dim, 1 << 20, "1 to 1048576");
    size("context", context, 1 << 24, "1 to 16777216");
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
            const nlohmann::json& given = json[key];
            constexpr bool whole = std::is_integral_v<std::decay_t<decltype(value)>>;
            if (whole ? !given.is_number_integer() : !given.is_number())
                throw Error(ErrorKind::usage,
                            std::string("model: ") + key + " is " + given.dump() +
                                (whole ? ", needed a whole number" : ", needed a number"));
            if constexpr (whole) {
                // Negative or huge: validate() rejects what these stand for.
                const double x = std::clamp(given.get<double>(), -1.0, 2147483647.0);
                value = int(x);
            } else {
                value = given.get<double>();
            }
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
