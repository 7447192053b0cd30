// fbt train --plan: what docs/scale.md prints, its numbers, and what is refused.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/apps/program.h"

namespace fbt::tests {
namespace {

using nlohmann::json;

std::string page() { return get(FBT_SOURCE_DIR "/docs/scale.md"); }

// A command of the page, `build/fbt ARGUMENT...`, and the indented lines below it.
struct Shown {
    Arguments arguments;
    std::string output;
};

std::vector<Shown> shown_in(const std::string& text) {
    std::vector<Shown> all;
    std::istringstream lines(text);
    bool open = false;
    for (std::string line; std::getline(lines, line);) {
        if (line.starts_with("    build/fbt ")) {
            std::istringstream words(line.substr(14));
            Arguments arguments;
            for (std::string word; words >> word;) arguments.push_back(word);
            all.push_back({arguments, ""});
            open = true;
        } else if (open && (line.empty() || line.starts_with("    "))) {
            all.back().output += (line.empty() ? line : line.substr(4)) + "\n";
        } else {
            open = false;
        }
    }
    for (Shown& one : all) {  // the empty lines around it
        one.output.erase(0, one.output.find_first_not_of('\n'));
        one.output.erase(one.output.find_last_not_of('\n') + 1);
        one.output += "\n";
    }
    return all;
}

TEST(Scale, ThePageShowsWhatTheProgramPrints) {
    const std::vector<Shown> all = shown_in(page());
    EXPECT_EQ(all.size(), 2u);
    for (const Shown& one : all) {
        const Result result = fbt(one.arguments);
        EXPECT_EQ(result.code, 0) << result.err;
        EXPECT_EQ(result.out, one.output);
    }
}

json plan(const Arguments& more) {
    const Result result =
        fbt(Arguments{"train", "--plan", "--preset", "paper-1b", "--json"} + more);
    EXPECT_EQ(result.code, 0) << result.err;
    return json::parse(result.out);
}

TEST(Scale, JsonHasTheNumbers) {
    const json document = plan({"--dtype", "bf16", "--ranks", "8,1024"});
    EXPECT_EQ(document.at("rate"), 0.4 * 989e12);
    EXPECT_EQ(document.at("rate_assumed"), true);
    EXPECT_EQ(document.at("sequences"), 64);
    const json& rows = document.at("rows");
    ASSERT_EQ(rows.size(), 2u);
    EXPECT_EQ(rows[1].at("ranks"), 1024);
    EXPECT_EQ(rows[1].at("idle"), 960);
    const double parameters = document.at("parameters");
    EXPECT_EQ(rows[0].at("sent"), 6 * parameters * 7 / 8);
    for (const json& row : rows) {
        const double seconds = row.at("seconds");
        EXPECT_NEAR(seconds,
                    row.at("compute").get<double>() + row.at("update").get<double>() +
                        row.at("exposed").get<double>(),
                    1e-12);
        EXPECT_NEAR(row.at("tokens_per_second").get<double>(), 524288 / seconds, 1e-3);
    }
    EXPECT_GT(document.at("what_if").size(), 5u);
}

TEST(Scale, MeasuredFiguresReplaceStatedOnes) {
    const auto compute = [](const json& document) {
        return document.at("rows").at(0).at("compute").get<double>();
    };
    const auto exposed = [](const json& document) {
        return document.at("rows").at(0).at("exposed").get<double>();
    };
    const Arguments on_64 = {"--dtype", "bf16", "--ranks", "64"};
    const json stated = plan(on_64);
    const json rate = plan(on_64 + Arguments{"--rate", "197.8"});  // half of what is assumed
    EXPECT_NEAR(compute(rate), 2 * compute(stated), 1e-9);
    EXPECT_EQ(rate.at("rate_assumed"), false);
    EXPECT_GT(exposed(plan(on_64 + Arguments{"--link", "5"})), 2 * exposed(stated));
    const json tight = plan(on_64 + Arguments{"--memory-budget", "40000"});
    EXPECT_EQ(stated.at("rows")[0].at("recompute"), false);
    EXPECT_EQ(tight.at("rows")[0].at("recompute"), true);
    const json here = plan({"--gpu", "this", "--rate", "0.05", "--link", "2", "--ranks", "1,2"});
    EXPECT_EQ(here.at("rows")[0].at("exposed"), 0);
    EXPECT_EQ(here.at("rows")[1].at("update"), 0);
    EXPECT_GT(here.at("rows")[1].at("exposed"), 0);
}

TEST(Scale, RefusesWhatItCannotPlan) {
    const auto train = [](const Arguments& more) { return fbt(Arguments{"train"} + more); };
    const Arguments asked = {"--plan", "--preset", "paper-1b"};
    EXPECT_TRUE(failed(train({"--plan"}), 2, {"--vocab-size", "--data", "--task"}));
    EXPECT_TRUE(failed(train(asked + Arguments{"--gpu", "tpu"}), 2, {"tpu", "h100", "this"}));
    EXPECT_TRUE(failed(train(asked + Arguments{"--gpu", "this", "--rate", "1"}), 2, {"--link"}));
    EXPECT_TRUE(failed(train(asked + Arguments{"--gpu", "this", "--link", "1"}), 2, {"--rate"}));
    EXPECT_TRUE(failed(train(asked + Arguments{"--dtype", "f64"}), 2, {"f64", "bf16"}));
    EXPECT_TRUE(failed(train(asked + Arguments{"--ranks", "0"}), 2, {"--ranks"}));
    EXPECT_TRUE(failed(train(asked + Arguments{"--rate", "-1"}), 2, {"--rate"}));
    EXPECT_TRUE(failed(train(asked + Arguments{"--tokens-per-step", "8191"}), 2, {"8191", "8192"}));
    for (const char* flag : {"--ranks", "--gpu", "--rate", "--link"})
        EXPECT_TRUE(failed(train({flag, flag == std::string("--gpu") ? "h100" : "8"}), 2,
                           {flag, "--plan"}));
}

// A task brings its vocabulary; nothing is written.
TEST(Scale, NeedsNeitherDataNorAPlace) {
    const TemporaryFolder folder;
    const Result result = fbt({"train", "--plan", "--preset", "parity", "--out", folder / "run"});
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_FALSE(std::filesystem::exists(folder / "run"));
}

}  // namespace
}  // namespace fbt::tests
