// How many passes each training step runs: consecutive phases, each a mixture of pass counts.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace fbt::model::core {

class PassSchedule {
  public:
    // Phases separated by commas, each SHARE:PASSES or SHARE:PASSES@WEIGHT+PASSES@WEIGHT+...;
    // shares and weights are relative. The paper's schedule is "75:1,22:2,3:3"; "1:1@0.5+3@0.5"
    // draws one or three passes with equal odds at every step. Throws Error(usage) quoting the bad
    // part.
    static PassSchedule parse(const std::string& text);

    // K of one step (from 0) of a run of `steps`; drawn by counter from the seed where the phase is
    // a mixture, so that all ranks and a resumed run draw the same.
    int passes_at(int64_t step, int64_t steps, uint64_t seed) const;
    int max_passes() const;
    // The share of all steps that each pass count has; sums to 1.
    std::map<int, double> shares() const;

  private:
    struct Phase {
        double share;
        std::vector<std::pair<int, double>> mixture;  // pass count, weight
    };
    std::vector<Phase> phases_;
};

}  // namespace fbt::model::core
