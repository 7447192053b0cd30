#include "apps/watch.h"

#include <algorithm>
#include <cmath>

#include "apps/console.h"

namespace fbt::apps {

using model::core::PassResult;
using nlohmann::json;

namespace {

// A fusion begins untrained, and pass 2 may well start above pass 1. Fifty steps, as many as the
// default warm-up has, are the fewest after which that means something; in a long run a twentieth
// of it, for the paper's whole feedback phase is a quarter.
constexpr int64_t kFewestSteps = 50;
constexpr int64_t kStepsPerFeedback = 20;

bool is_enough(int64_t feedback_steps, int64_t steps) {
    return feedback_steps >= kFewestSteps &&
           feedback_steps >= (steps + kStepsPerFeedback - 1) / kStepsPerFeedback;
}

std::string see(const char* heading) { return format(": see docs/debugging.md, \"%s\"", heading); }

}  // namespace

Verdict judge(const std::vector<PassResult>& passes, Feedback so_far, int64_t steps) {
    using Kind = Verdict::Kind;
    Verdict v;
    v.so_far = so_far;
    v.passes = int(passes.size());
    if (v.passes >= 1) v.pass_1 = passes[0].loss;
    if (v.passes >= 2) {
        v.pass_2 = passes[1].loss;
        v.change_2 = passes[1].change;
    }
    for (const PassResult& pass : passes) {
        if (pass.pass >= 2 && std::isfinite(pass.change)) {
            v.change_pass = pass.pass;
            v.change_last = pass.change;
        }
        if (pass.pass < 3 || !std::isfinite(v.worst)) continue;
        if (v.worst_pass == 0 || !std::isfinite(pass.loss) || pass.loss > v.worst) {
            v.worst_pass = pass.pass;
            v.worst = pass.loss;
        }
    }
    if (!is_enough(so_far.steps, steps))
        v.kind = Kind::early;
    else if (v.passes < 2)
        v.kind = Kind::one_pass;
    else if (!std::isfinite(v.pass_1) || !std::isfinite(v.pass_2))
        v.kind = Kind::not_finite;
    else if (!v.pass_2_below())
        v.kind = Kind::pass_2_loses;
    else if (v.worst_pass != 0 && !v.holds())
        v.kind = Kind::later_rise;
    else
        v.kind = Kind::works;
    return v;
}

// Only finite losses can be good.
bool Verdict::pass_2_below() const {
    return std::isfinite(pass_1) && std::isfinite(pass_2) && pass_2 < pass_1;
}

bool Verdict::holds() const {
    return std::isfinite(pass_1) && std::isfinite(worst) && worst <= pass_1;
}

bool Verdict::bad() const {
    return kind == Kind::not_finite || kind == Kind::pass_2_loses || kind == Kind::later_rise;
}

std::string Verdict::text() const {
    if (kind == Kind::early) return "";
    std::string text = format("feedback, %lld steps: ", static_cast<long long>(so_far.steps));
    if (kind == Kind::one_pass)
        return text + "not watched, for evaluations have one pass (--eval-passes)";
    if (kind == Kind::not_finite)
        return text + format("the loss of pass %d is not finite", std::isfinite(pass_1) ? 2 : 1) +
               see("A loss is not finite");
    if (kind == Kind::pass_2_loses) {
        text += pass_2 > pass_1 ? format("pass 2 is %.4f ABOVE pass 1", pass_2 - pass_1)
                                : "pass 2 is level with pass 1";
        return text + see("Pass 2 does not win");
    }

    text += format("pass 2 is %.4f below pass 1; ", pass_1 - pass_2);
    const std::string change = change_pass > 2 ? format("; change %.2g at pass 2, %.2g at pass %d",
                                                        change_2, change_last, change_pass)
                                               : "";
    if (kind == Kind::later_rise) {
        text += "iterating does not hold (";
        text += std::isfinite(worst) ? format("L%d %.4f against L1 %.4f", worst_pass, worst, pass_1)
                                     : format("L%d is not finite", worst_pass);
        text += change;
        if (so_far.most == 2) text += "; no step had more than two passes yet";
        return text + ")" + see("Later passes rise");
    }
    if (worst_pass == 0) return text + "later ones are not evaluated (--eval-passes)";
    text += passes == 3 ? "pass 3 holds" : format("passes 3 to %d hold", passes);
    return text + format(" (worst L%d %.4f, L1 %.4f", worst_pass, worst, pass_1) + change + ")";
}

json Verdict::row() const {
    json row = {{"feedback_steps", so_far.steps},
                {"most_passes", so_far.most},
                {"enough", kind != Kind::early}};
    if (passes >= 2) {
        row["gain"] = pass_1 - pass_2;
        row["pass_2_below"] = pass_2_below();
        row["change_2"] = change_2;
    }
    if (worst_pass != 0) {
        row["worst_pass"] = worst_pass;
        row["worst"] = worst;
        row["holds"] = holds();
    }
    if (change_pass > 2) {
        row["change_pass"] = change_pass;
        row["change_last"] = change_last;
    }
    return row;
}

Verdict Watch::judge(const std::vector<PassResult>& passes, int64_t step) {
    for (; counted_ < step; ++counted_) {
        const int k = schedule_.passes_at(counted_, steps_, seed_);
        so_far_.steps += k >= 2;
        so_far_.most = std::max(so_far_.most, k);
    }
    return apps::judge(passes, so_far_, steps_);
}

}  // namespace fbt::apps
