// What fbt train says of its feedback: every verdict, its limits, and that a resumed run says the
// same. docs/debugging.md must have what the lines point at.
#include "apps/watch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <regex>

#include "apps/console.h"
#include "tests/apps/program.h"

namespace fbt::tests {
namespace {

using apps::format;
using apps::Verdict;
using apps::Watch;
using Kind = apps::Verdict::Kind;
using model::core::PassResult;
using model::core::PassSchedule;
using nlohmann::json;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

std::vector<PassResult> passes(const std::vector<double>& losses,
                               std::vector<double> changes = {}) {
    changes.resize(losses.size(), kNan);
    std::vector<PassResult> out;
    for (size_t k = 0; k < losses.size(); ++k)
        out.push_back({.pass = int(k) + 1, .loss = losses[k], .change = changes[k]});
    return out;
}

// After 240 of 1,000 steps with three passes.
Verdict of(const std::vector<double>& losses, const std::vector<double>& changes = {}) {
    return apps::judge(passes(losses, changes), {240, 3}, 1000);
}

std::string page() { return get(FBT_SOURCE_DIR "/docs/debugging.md"); }

TEST(Watch, WorksAndHolds) {
    const Verdict v = of({1.5, 1.47, 1.46, 1.45, 1.455}, {kNan, 0.62, 0.3, 0.2, 0.0991});
    EXPECT_EQ(v.kind, Kind::works);
    EXPECT_FALSE(v.bad());
    EXPECT_EQ(v.text(),
              "feedback, 240 steps: pass 2 is 0.0300 below pass 1; passes 3 to 5 hold "
              "(worst L3 1.4600, L1 1.5000; change 0.62 at pass 2, 0.099 at pass 5)");
    const json row = v.row();
    EXPECT_EQ(row["feedback_steps"], 240);
    EXPECT_EQ(row["most_passes"], 3);
    EXPECT_EQ(row["enough"], true);
    EXPECT_EQ(row["pass_2_below"], true);
    EXPECT_EQ(row["gain"], 1.5 - 1.47);
    EXPECT_EQ(row["holds"], true);
    EXPECT_EQ(row["worst_pass"], 3);
    EXPECT_EQ(row["worst"], 1.46);
    EXPECT_EQ(row["change_2"], 0.62);
    EXPECT_EQ(row["change_pass"], 5);
    EXPECT_EQ(row["change_last"], 0.0991);
    EXPECT_NE(of({1.5, 1.4, 1.4}).text().find("pass 3 holds (worst L3"), std::string::npos);
}

TEST(Watch, PassesThatWereNotEvaluatedAreNotPraised) {
    const Verdict two = of({1.5, 1.47});
    EXPECT_EQ(two.kind, Kind::works);
    EXPECT_EQ(two.text(),
              "feedback, 240 steps: pass 2 is 0.0300 below pass 1; later ones are not evaluated "
              "(--eval-passes)");
    EXPECT_FALSE(two.row().contains("holds"));
    const Verdict one = of({1.5});
    EXPECT_EQ(one.kind, Kind::one_pass);
    EXPECT_NE(one.text().find("--eval-passes"), std::string::npos);
    EXPECT_FALSE(one.row().contains("pass_2_below"));
    EXPECT_EQ(of({}).kind, Kind::one_pass);
}

TEST(Watch, PassTwoComesFirst) {
    // Whatever later passes do.
    for (double third : {1.3, 9.0, kNan, kInf}) {
        const Verdict v = of({1.5, 1.512, third});
        EXPECT_EQ(v.kind, Kind::pass_2_loses) << third;
        EXPECT_TRUE(v.bad());
        EXPECT_EQ(v.text(),
                  "feedback, 240 steps: pass 2 is 0.0120 ABOVE pass 1: see docs/debugging.md, "
                  "\"Pass 2 does not win\"");
        EXPECT_EQ(v.row()["pass_2_below"], false);
    }
    EXPECT_EQ(of({1.5, 1.5, 1.4}).kind, Kind::pass_2_loses) << "level is not below";
    EXPECT_NE(of({1.5, 1.5}).text().find("level with pass 1"), std::string::npos);
    EXPECT_EQ(of({1.5, std::nextafter(1.5, 0)}).kind, Kind::works);
}

TEST(Watch, LaterPassesRise) {
    const Verdict v = of({1.4, 1.34, 2.1, 2.375, 2.37}, {kNan, 0.8, 0.75, 0.7, 0.65});
    EXPECT_EQ(v.kind, Kind::later_rise);
    EXPECT_TRUE(v.bad());
    EXPECT_EQ(v.text(),
              "feedback, 240 steps: pass 2 is 0.0600 below pass 1; iterating does not hold (L4 "
              "2.3750 against L1 1.4000; change 0.8 at pass 2, 0.65 at pass 5): see "
              "docs/debugging.md, \"Later passes rise\"");
    EXPECT_EQ(v.row()["holds"], false);
    // Level with pass 1 holds; the next number above does not.
    EXPECT_EQ(of({1.5, 1.4, 1.5}).kind, Kind::works);
    EXPECT_EQ(of({1.5, 1.4, std::nextafter(1.5, 2)}).kind, Kind::later_rise);
    EXPECT_NE(apps::judge(passes({1.5, 1.4, 1.6}), {240, 2}, 1000)
                  .text()
                  .find("(L3 1.6000 against L1 1.5000; no step had more than two passes yet)"),
              std::string::npos);
}

TEST(Watch, WhatIsNotFiniteIsNeverGood) {
    for (double bad : {kNan, kInf, -kInf}) {
        for (size_t pass = 0; pass < 5; ++pass) {
            std::vector<double> losses = {1.5, 1.4, 1.3, 1.2, 1.1};
            losses[pass] = bad;
            const Verdict v = of(losses);
            EXPECT_EQ(v.kind, pass < 2 ? Kind::not_finite : Kind::later_rise) << bad << " " << pass;
            EXPECT_TRUE(v.bad());
            EXPECT_NE(v.text().find("is not finite"), std::string::npos) << v.text();
            EXPECT_NE(v.text().find((pass < 2 ? "pass " : "(L") + std::to_string(pass + 1) +
                                    (pass < 2 ? " is" : " is not")),
                      std::string::npos)
                << v.text();
            const json row = v.row();
            EXPECT_EQ(row["pass_2_below"], pass >= 2);
            EXPECT_EQ(row["holds"], pass == 1) << "which asks of pass 1 and of those from 3 on";
            EXPECT_EQ(row.dump().find("nan"), std::string::npos) << row.dump();
        }
    }
    // The first of them is named, though a higher loss stands before it and one after it.
    const Verdict v = of({1.5, 1.4, 7, kNan, 9, kInf});
    EXPECT_EQ(v.worst_pass, 4);
    // A change that is none says nothing, and takes nothing away.
    EXPECT_EQ(of({1.5, 1.4, 1.4}, {kNan, 0.5, kNan}).text().find("change"), std::string::npos);
    EXPECT_EQ(of({1.5, 1.4, 1.4, 1.4}, {kNan, 0.5, 0.25, kInf}).row()["change_pass"], 3);
}

TEST(Watch, EnoughIsFiftyStepsAndATwentiethOfTheRun) {
    const auto kind = [](int64_t feedback, int64_t steps) {
        const Verdict v = apps::judge(passes({1.5, 1.4, 1.4}), {feedback, 3}, steps);
        EXPECT_EQ(v.text().empty(), v.kind == Kind::early);
        EXPECT_EQ(v.row()["enough"], v.kind != Kind::early);
        EXPECT_FALSE(v.bad());
        return v.kind;
    };
    EXPECT_EQ(kind(0, 60), Kind::early);
    EXPECT_EQ(kind(49, 60), Kind::early);
    EXPECT_EQ(kind(50, 60), Kind::works);
    EXPECT_EQ(kind(50, 1000), Kind::works);
    EXPECT_EQ(kind(50, 1001), Kind::early) << "50 are less than 5 % of 1,001";
    EXPECT_EQ(kind(51, 1001), Kind::works);
    EXPECT_EQ(apps::judge(passes({kNan, kNan}), {49, 3}, 60).bad(), false) << "nothing is said yet";
}

TEST(Watch, CountsFeedbackByTheSchedule) {
    const PassSchedule schedule = PassSchedule::parse("75:1,22:2,3:3");
    Watch watch(schedule, 1000, 5);
    const auto feedback = [&](int64_t step) {
        return watch.judge(passes({1.5, 1.4}), step).so_far;
    };
    EXPECT_EQ(feedback(750).steps, 0);
    EXPECT_EQ(feedback(750).most, 1);
    EXPECT_EQ(feedback(751).steps, 1);
    EXPECT_EQ(feedback(970).steps, 220);
    EXPECT_EQ(feedback(970).most, 2);
    EXPECT_EQ(feedback(1000).steps, 250);
    EXPECT_EQ(feedback(1000).most, 3);

    // A mixture, asked at once or often: the same.
    const PassSchedule mixed = PassSchedule::parse("1:1@1+2@1+3@1");
    Watch often(mixed, 137, 5), once(mixed, 137, 5);
    const auto evaluation = passes({1.5, 1.4}, {kNan, 0.5});
    for (int step = 1; step < 137; ++step) often.judge(evaluation, step);
    const json row = often.judge(evaluation, 137).row();
    EXPECT_EQ(row, once.judge(evaluation, 137).row());
    int64_t expected = 0;
    for (int step = 0; step < 137; ++step) expected += mixed.passes_at(step, 137, 5) >= 2;
    EXPECT_EQ(row["feedback_steps"], expected);
    EXPECT_GT(expected, 0);
    EXPECT_LT(expected, 137);
}

TEST(Watch, LinesPointAtHeadings) {
    const std::string text = page();
    for (const Verdict& v : {of({kNan, 1}), of({1, 2}), of({2, 1, 3})}) {
        static const std::regex pointer("docs/debugging.md, \"(.*)\"");
        const std::string line = v.text();
        std::smatch match;
        ASSERT_TRUE(std::regex_search(line, match, pointer)) << line;
        EXPECT_NE(text.find("\n## " + match[1].str() + "\n"), std::string::npos) << line;
    }
    EXPECT_EQ(text.find("\n## No such heading\n"), std::string::npos);
}

// The example is what the program says of the quickstart's table in docs/results.md.
TEST(Watch, ThePageShowsARealLine) {
    const Verdict v = apps::judge(
        passes({1.4966, 1.4629, 1.4535, 1.4530, 1.4548}, {kNan, 0.624, 0.294, 0.168, 0.099}),
        {1000, 5}, 1000);
    const std::string flat = std::regex_replace(page(), std::regex("\\s+"), " ");
    EXPECT_NE(flat.find(v.text()), std::string::npos) << v.text();
}

TEST(Watch, ThePageNamesFlagsThatExist) {
    const std::string help = fbt({"train", "--help"}).out + fbt({"eval", "--help"}).out +
                             fbt({"generate", "--help"}).out;
    const std::string text = page();
    static const std::regex flag("--[a-z][a-z-]*");
    int flags = 0;
    for (std::sregex_iterator it(text.begin(), text.end(), flag), end; it != end; ++it, ++flags)
        EXPECT_TRUE(std::regex_search(help, std::regex(it->str() + "[^a-z-]"))) << it->str();
    EXPECT_GT(flags, 20);
    EXPECT_FALSE(std::regex_search(help, std::regex("--no-such-flag[^a-z-]")));
}

int lines_with(const std::string& text, const std::string& what) {
    int n = 0;
    for (size_t at = 0; (at = text.find(what, at)) != std::string::npos; ++at) ++n;
    return n;
}

Arguments with_schedule(Arguments arguments, const std::string& schedule) {
    *(std::find(arguments.begin(), arguments.end(), "--schedule") + 1) = schedule;
    return arguments;
}

TEST(Watch, ARunWithFeedbackSaysHowItGoes) {
    const Workplace w;
    const Arguments settings = {"--steps", "75", "--eval-every", "5"};
    const Result whole = fbt(with_schedule(w.train("whole", settings), "1:3"));
    ASSERT_EQ(whole.code, 0) << whole.err;

    int evaluations = 0, lines = 0;
    std::optional<std::pair<bool, bool>> said;
    for (const std::string& line : metrics_of(w / "whole")) {
        const json row = json::parse(line);
        EXPECT_EQ(row.contains("watch"), row.contains("val/pass_1"));
        if (!row.contains("watch")) continue;
        ++evaluations;
        EXPECT_TRUE(row.contains("val/pass_5")) << "two more than the schedule's three";
        EXPECT_FALSE(row.contains("val/pass_6"));
        const json& watch = row["watch"];
        const int step = row["step"];
        EXPECT_EQ(watch["feedback_steps"], step);
        EXPECT_EQ(watch["enough"], step >= 50);
        EXPECT_EQ(watch["gain"], row["val/pass_1"].get<double>() - row["val/pass_2"].get<double>());
        // Said when 50 steps had feedback, when it changes, and at the end.
        const bool below = watch["pass_2_below"], holds = below && watch["holds"];
        const bool due = step >= 50 && (said != std::pair(below, holds) || step == 75);
        if (due) said = {below, holds};
        lines += due;
        EXPECT_EQ(lines_with(whole.out, format("\nfeedback, %d steps: ", step)), due) << whole.out;
    }
    EXPECT_EQ(evaluations, 15);
    EXPECT_EQ(lines_with(whole.out, "feedback, "), lines) << whole.out;
    EXPECT_LT(lines, 6) << "not at every evaluation";
    EXPECT_EQ(lines_with(whole.out, "bits/byte at L3 "), 15) << "of the most that is trained";
    EXPECT_EQ(whole.out.find('\033'), std::string::npos) << "no colours but on a terminal";

    // In two parts: the same rows, and the result for programs has them.
    ASSERT_EQ(
        fbt(with_schedule(w.train("parts", settings + Arguments{"--stop-after", "60"}), "1:3"))
            .code,
        0);
    const Result resumed = fbt({"train", "--out", w / "parts", "--resume", "--json"});
    ASSERT_EQ(resumed.code, 0) << resumed.err;
    EXPECT_TRUE(same_run(w / "whole", w / "parts", 75));
    const json watch = json::parse(resumed.out)["validation"]["watch"];
    EXPECT_EQ(watch["feedback_steps"], 75);
    EXPECT_EQ(watch["enough"], true);
}

TEST(Watch, ARunWithoutFeedbackSaysNothing) {
    const Workplace w;
    const Result result = fbt(with_schedule(w.train("run", {"--steps", "60"}), "1:1"));
    ASSERT_EQ(result.code, 0) << result.err;
    EXPECT_EQ(lines_with(result.out, "feedback, "), 0) << result.out;
    const json row = json::parse(metrics_of(w / "run").back());
    EXPECT_TRUE(row.contains("val/pass_1"));
    EXPECT_FALSE(row.contains("val/pass_2"));
    EXPECT_FALSE(row.contains("watch"));
}

}  // namespace
}  // namespace fbt::tests
