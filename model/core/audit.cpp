#include "model/core/audit.h"

#include <cmath>

#include "model/core/objective.h"
#include "model/core/replay.h"
#include "tensor/safetensors.h"

namespace fbt::model::core {
namespace {

using tensor::Error;
using tensor::ErrorKind;
using tensor::SafetensorsFile;
using tensor::Shape;

[[noreturn]] void bad(const std::string& path, const std::string& what) {
    throw Error(ErrorKind::bad_file, path + ": " + what);
}

// Everything the file says about inputs, read and checked.
struct Golden {
    Config config;
    int passes, prompt_length;
    ObjectiveConfig objective;
    Batch batch;
    PassPlan plan;
};

Golden read_golden(const SafetensorsFile& file, const std::string& path) {
    const auto meta = [&](const char* key) {
        const auto it = file.metadata().find(key);
        if (it == file.metadata().end())
            bad(path, std::string("metadata lacks '") + key + "'; not a golden file");
        return it->second;
    };
    if (meta("format") != "fbt-golden-1")
        bad(path, "format is '" + meta("format") + "', expected fbt-golden-1");
    Golden g;
    try {
        g.config = config_from_json(nlohmann::json::parse(meta("config")));
        g.passes = std::stoi(meta("passes"));
        g.prompt_length = std::stoi(meta("prompt_length"));
        g.objective.feedback_weight = std::stod(meta("feedback_weight"));
        g.objective.z_weight = std::stod(meta("z_weight"));
    } catch (const Error& e) {
        bad(path, e.what());
    } catch (const std::exception& e) {
        bad(path, std::string("metadata: ") + e.what());
    }
    const auto need = [&](const char* name) {
        if (!file.entries().contains(name)) bad(path, std::string("lacks tensor ") + name);
    };
    for (const char* name : {"tokens", "targets", "lengths"}) need(name);
    g.batch.tokens = file.read<int32_t>("tokens");
    g.batch.targets = file.read<int32_t>("targets");
    g.batch.lengths = file.read<int32_t>("lengths");
    int64_t total = 0;
    for (int32_t length : g.batch.lengths) {
        if (length < 1) bad(path, "a sequence of length " + std::to_string(length));
        g.batch.indices.push_back(int64_t(g.batch.indices.size()));
        total += length;
    }
    const int64_t N = int64_t(g.batch.tokens.size()), S = int64_t(g.batch.lengths.size());
    if (S == 0 || total != N || int64_t(g.batch.targets.size()) != N)
        bad(path, "lengths sum to " + std::to_string(total) + ", but there are " +
                      std::to_string(N) + " tokens and " + std::to_string(g.batch.targets.size()) +
                      " targets");
    for (int64_t n = 0; n < N; ++n)
        if (g.batch.tokens[n] < 0 || g.batch.tokens[n] >= g.config.vocab_size ||
            g.batch.targets[n] >= g.config.vocab_size)
            bad(path, "token or target at " + std::to_string(n) + " is outside the vocabulary of " +
                          std::to_string(g.config.vocab_size));
    if (g.passes < 1) bad(path, "passes is " + std::to_string(g.passes));
    if (g.prompt_length < 1 || g.prompt_length >= g.batch.lengths[0])
        bad(path, "prompt_length " + std::to_string(g.prompt_length) +
                      " leaves no response in a sequence of " + std::to_string(g.batch.lengths[0]));
    g.plan.passes = g.passes;
    g.plan.plain.resize(g.passes - 1);
    if (g.passes > 1) {
        need("plain");
        const std::vector<int32_t> plain = file.read<int32_t>("plain");  // [S, K-1]
        if (int64_t(plain.size()) != S * (g.passes - 1)) bad(path, "plain has the wrong shape");
        for (int k = 0; k < g.passes - 1; ++k)
            for (int64_t s = 0; s < S; ++s) {
                const int32_t p = plain[s * (g.passes - 1) + k];
                if (p < 1 || p > g.batch.lengths[s])
                    bad(path, "a plain prefix of " + std::to_string(p) + " in a sequence of " +
                                  std::to_string(g.batch.lengths[s]));
                g.plan.plain[k].push_back(p);
            }
    }
    if (file.entries().contains("noise")) {
        const std::vector<double> noise = file.read<double>("noise");  // [K-1, N, D]
        const int64_t each = N * g.config.dim;
        if (int64_t(noise.size()) != (g.passes - 1) * each) bad(path, "noise has the wrong shape");
        for (int k = 0; k < g.passes - 1; ++k)
            g.plan.noise.emplace_back(noise.begin() + k * each, noise.begin() + (k + 1) * each);
    }
    g.objective.keep_states = true;
    return g;
}

}  // namespace

Audit audit(Context& context, const std::string& path, DType dtype) {
    const SafetensorsFile file = SafetensorsFile::open(path);
    const Golden g = read_golden(file, path);
    Model model(context, g.config, dtype);
    for (nn::Parameter& p : model.parameters().all()) {
        const std::string name = "params/" + p.name();
        const auto entry = file.entries().find(name);
        if (entry == file.entries().end()) bad(path, "lacks tensor " + name);
        if (entry->second.shape != p.shape())
            bad(path, name + " is " + tensor::to_string(entry->second.shape) + ", expected " +
                          tensor::to_string(p.shape()));
        p.set(context, file.read<double>(name), dtype, true);
    }

    Audit out;
    const auto put = [&](const std::string& name, Shape shape, std::vector<double> values) {
        out.values[name] = {std::move(shape), std::move(values)};
    };
    const auto put_tensor = [&](const std::string& name, const Tensor& t) {
        put(name, t.shape(), t.to_double());
    };

    Tape tape(true);
    const Objective objective_values = objective(model, tape, g.batch, g.plan, g.objective);
    tape.backward();
    put("loss/total", {}, {objective_values.total});
    for (int k = 0; k < g.passes; ++k) {
        const std::string pass = "pass_" + std::to_string(k + 1);
        put("loss/" + pass, {}, {objective_values.pass_loss[k]});
        put_tensor("hidden/" + pass, objective_values.states[k]);
        put_tensor("logits/" + pass, model.logits(objective_values.states[k]));
    }
    for (nn::Parameter& p : model.parameters().all())
        put_tensor("grads/" + p.name(), p.weight().grad);

    const std::vector<int32_t> row(g.batch.tokens.begin(),
                                   g.batch.tokens.begin() + g.batch.lengths[0]);
    const auto put_cache = [&](const std::string& name, const std::vector<Tensor>& layers) {
        std::vector<int64_t> shape(layers[0].shape().begin(), layers[0].shape().end());
        shape.insert(shape.begin(), int64_t(layers.size()));
        std::vector<double> all;
        for (const Tensor& t : layers) {
            const std::vector<double> v = t.to_double();
            all.insert(all.end(), v.begin(), v.end());
        }
        put(name, Shape(shape), std::move(all));
    };
    for (Mode mode : {Mode::standard, Mode::soft, Mode::fused}) {
        const std::string name = "rollout/" + to_string(mode) + "/";
        const Trace trace = decode_known(model, row, g.prompt_length, mode);
        put_tensor(name + "hidden", trace.hidden);
        put_tensor(name + "logits", model.logits(trace.hidden));
        put_cache(name + "k", trace.keys);
        put_cache(name + "v", trace.values);
    }
    for (Mode mode : {Mode::soft, Mode::fused}) {
        Replay replay(model, row, g.prompt_length, mode);
        for (int n = 1; n <= 4; ++n) {
            replay.next();
            const std::string name =
                "replay/" + to_string(mode) + "/pass_" + std::to_string(n) + "/";
            const Trace trace = replay.trace();
            put_tensor(name + "hidden", trace.hidden);
            put_cache(name + "k", trace.keys);
            put_cache(name + "v", trace.values);
        }
    }

    // Every quantity that the file has a bound for in this dtype must be there and inside it.
    const std::string prefix = std::string("bound/") + tensor::name_of(dtype) + "/";
    for (const auto& [name, entry] : file.entries()) {
        if (!name.starts_with(prefix)) continue;
        const std::string quantity = name.substr(prefix.size());
        const auto got = out.values.find(quantity);
        if (got == out.values.end() || !file.entries().contains(quantity))
            bad(path, "has a bound for " + quantity + ", which is not a known quantity of it");
        const std::vector<double> want = file.read<double>(quantity);
        const std::vector<double>& have = got->second.second;
        if (want.size() != have.size() || file.entries().at(quantity).shape != got->second.first)
            bad(path, quantity + " is " + tensor::to_string(file.entries().at(quantity).shape) +
                          ", expected " + tensor::to_string(got->second.first));
        double worst = 0;
        for (size_t i = 0; i < want.size(); ++i) {
            const double e = std::abs(have[i] - want[i]);
            if (!(e <= worst)) worst = e;  // NaN stays
            if (std::isnan(worst)) break;
        }
        const double bound = file.read<double>(name)[0];
        const bool ok = worst <= bound;
        out.ok = out.ok && ok;
        out.rows.push_back({quantity, worst, bound, ok});
    }
    // A file that bounds nothing would pass by saying nothing.
    if (out.rows.empty()) bad(path, std::string("has no bounds for dtype ") + prefix);
    return out;
}

}  // namespace fbt::model::core
