#include "model/core/schedule.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "kernels/philox.h"
#include "tensor/error.h"

namespace fbt::model::core {
namespace {

[[noreturn]] void bad(const std::string& text, const std::string& part) {
    throw tensor::Error(
        tensor::ErrorKind::usage,
        "schedule '" + text + "': '" + part +
            "' is not SHARE:PASSES[@WEIGHT][+PASSES@WEIGHT...], as in 75:1,22:2,3:3");
}

std::vector<std::string> split(const std::string& text, char separator) {
    std::vector<std::string> parts(1);
    for (char c : text)
        if (c == separator)
            parts.emplace_back();
        else
            parts.back() += c;
    return parts;
}

// A whole string as a number above zero, or nothing.
template <class T>
bool positive(const std::string& s, T& value) {
    const auto [end, error] = std::from_chars(s.data(), s.data() + s.size(), value);
    return error == std::errc() && end == s.data() + s.size() && value > 0 && value < 1e9;
}

}  // namespace

PassSchedule PassSchedule::parse(const std::string& text) {
    PassSchedule schedule;
    for (const std::string& part : split(text, ',')) {
        const std::vector<std::string> sides = split(part, ':');
        Phase phase;
        if (sides.size() != 2 || !positive(sides[0], phase.share)) bad(text, part);
        for (const std::string& term : split(sides[1], '+')) {
            const std::vector<std::string> pair = split(term, '@');
            int passes = 0;
            double weight = 1;
            if (pair.size() > 2 || !positive(pair[0], passes) ||
                (pair.size() == 2 && !positive(pair[1], weight)))
                bad(text, part);
            phase.mixture.emplace_back(passes, weight);
        }
        schedule.phases_.push_back(std::move(phase));
    }
    return schedule;
}

int PassSchedule::passes_at(int64_t step, int64_t steps, uint64_t seed) const {
    double total = 0, before = 0;
    for (const Phase& p : phases_) total += p.share;
    // A phase ends at the rounded step of its cumulative share; the last one never ends.
    size_t i = 0;
    for (; i + 1 < phases_.size(); ++i) {
        before += phases_[i].share;
        if (step < std::llround(double(steps) * before / total)) break;
    }
    const auto& mixture = phases_[i].mixture;
    double weight = 0;
    for (const auto& [passes, w] : mixture) weight += w;
    const auto key = kernels::philox_key(seed, kernels::Draw::passes, uint64_t(step));
    double draw = double(kernels::uniform_float(kernels::philox_bits(key, 0))) * weight;
    for (const auto& [passes, w] : mixture) {
        if (draw < w) return passes;
        draw -= w;
    }
    return mixture.back().first;
}

int PassSchedule::max_passes() const {
    int most = 1;
    for (const Phase& p : phases_)
        for (const auto& [passes, w] : p.mixture) most = std::max(most, passes);
    return most;
}

std::map<int, double> PassSchedule::shares() const {
    double total = 0;
    for (const Phase& p : phases_) total += p.share;
    std::map<int, double> shares;
    for (const Phase& p : phases_) {
        double weight = 0;
        for (const auto& [passes, w] : p.mixture) weight += w;
        for (const auto& [passes, w] : p.mixture) shares[passes] += p.share / total * w / weight;
    }
    return shares;
}

}  // namespace fbt::model::core
