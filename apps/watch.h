// Does the feedback that is being trained work? Asked of every evaluation of `fbt train`, in the
// order in which to look for faults: is pass 2 below pass 1, and only then, do later passes hold?
// docs/debugging.md says what to change.
#pragma once
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "model/core/evaluate.h"
#include "model/core/schedule.h"

namespace fbt::apps {

// What a run's steps so far have trained.
struct Feedback {
    int64_t steps = 0;  // with two passes or more
    int most = 1;       // passes of any step
};

struct Verdict {
    enum class Kind {
        early,         // too little feedback so far to say anything
        one_pass,      // the evaluation had no pass to compare with the first
        not_finite,    // the loss of pass 1 or 2
        pass_2_loses,  // it is level with pass 1 or above
        later_rise,    // a pass beyond 2 is above pass 1, or not finite
        works          // pass 2 is below pass 1, and no later pass that was evaluated is above it
    };
    Kind kind = Kind::early;
    Feedback so_far;
    int passes = 0;                 // that were evaluated
    double pass_1 = 0, pass_2 = 0;  // their losses, 0 where they were not evaluated
    // Of the passes beyond 2, 0 without one: the first whose loss is not finite, or else the one
    // with the highest; and its loss.
    int worst_pass = 0;
    double worst = 0;
    // How far states moved in pass 2, and in the last pass from 2 on that has a finite change (0
    // without one).
    double change_2 = 0, change_last = 0;
    int change_pass = 0;

    bool pass_2_below() const;  // of two passes or more
    bool holds() const;         // of three or more: no pass from 3 on is above pass 1
    bool bad() const;
    std::string text() const;    // one line; empty when it is too early
    nlohmann::json row() const;  // the same as numbers
};

// `passes` as core::evaluate gives them; `steps` of the whole run, those without feedback too.
//
// Later passes "hold" when none is above pass 1. Iterated feedback is of use while it beats the
// plain model; to ask that no pass is above pass 2 would ask too much (in docs/results.md pass 5 is
// above pass 4). There is no margin: all passes are scored on the same tokens, and whoever reads
// the line sees by how much. The states' change is told and does not decide: states can settle,
// slowly, where they predict worse than none.
Verdict judge(const std::vector<model::core::PassResult>& passes, Feedback so_far, int64_t steps);

// Counts the feedback steps by the schedule, so that the verdict depends on step, schedule and
// evaluation alone: a resumed run writes the same rows.
class Watch {
  public:
    Watch(model::core::PassSchedule schedule, int64_t steps, uint64_t seed)
        : schedule_(std::move(schedule)), steps_(steps), seed_(seed) {}

    // Of the evaluation after `step` updates, which only grows from call to call.
    Verdict judge(const std::vector<model::core::PassResult>& passes, int64_t step);

  private:
    model::core::PassSchedule schedule_;
    int64_t steps_;
    uint64_t seed_;
    int64_t counted_ = 0;  // steps that so_far_ knows of
    Feedback so_far_;
};

}  // namespace fbt::apps
