// RUN/metrics.jsonl: one JSON object a line and step, evaluations among them.
#pragma once
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

namespace fbt::apps {

class Metrics {
  public:
    // Keeps the file's rows up to this step and drops the rest, durably: what a run that was killed
    // wrote after the checkpoint from which it goes on. Errors  environment.
    Metrics(const std::string& path, int64_t step);
    ~Metrics();
    Metrics(const Metrics&) = delete;
    Metrics& operator=(const Metrics&) = delete;

    // The last of the rows that were kept: null without one.
    const nlohmann::json& last_kept() const { return last_kept_; }

    // Numbers are written so that reading gives the same bits; one that is not finite is null.
    void append(const nlohmann::json& row);
    // To be called before a checkpoint is saved: its rows must not be younger than it.
    void sync();

  private:
    [[noreturn]] void fail() const;

    std::string path_;
    nlohmann::json last_kept_;
    int descriptor_ = -1;
};

}  // namespace fbt::apps
