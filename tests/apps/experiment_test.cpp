// fbt experiment: trainings that are kept, gone on with and reported, whatever becomes of them.
#include "apps/experiment.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <cmath>

#include "tests/apps/program.h"

namespace fbt::tests {
namespace {

namespace fs = std::filesystem;
using apps::Experiment;
using apps::Recipe;
using nlohmann::json;

// An experiment on the tiny data of a Workplace, without the command around it.
struct Laboratory {
    Workplace place;
    apps::Console console{true};
    apps::Machine machine;
    apps::StopSignals stop;
    apps::ExperimentConfig config;

    Laboratory() {
        config.name = "test";
        config.out = place / "out";
        config.seeds = 2;
        config.program = FBT_BINARY;
        machine.threads = 2;
    }
    // The recipe of a tiny model; `more` wins over its flags.
    static Recipe tiny(const std::string& name, int64_t steps, const Arguments& more = {}) {
        return {name, steps,
                Arguments{"--preset", "parity", "--task", "parity", "--dim", "8", "--layers", "1",
                          "--heads", "1", "--kv-heads", "1", "--head-dim", "8", "--ffn-dim", "8",
                          "--tokens-per-step", "64"} +
                    more};
    }
};

TEST(Experiment, EverySeedIsTrainedMeasuredAndReported) {
    Laboratory l;
    Experiment lab(l.console, l.machine, l.config, l.stop);
    lab.train({l.tiny("a", 3), l.tiny("b", 2, {"--schedule", "1:1"})});
    ASSERT_EQ(lab.runs().size(), 4u);
    lab.measure([](apps::TrainedRun& run, const apps::Loaded& loaded) {
        EXPECT_EQ(loaded.task, "parity");
        run.measured["x"] = double(run.seed) + 0.5;
    });
    for (const apps::TrainedRun& run : lab.runs()) {
        EXPECT_EQ(run.code, 0);
        EXPECT_EQ(run.steps, run.recipe == "a" ? 3 : 2);
        EXPECT_GT(run.seconds, 0);
        EXPECT_TRUE(fs::exists(run.folder + "/metrics.jsonl"));
        EXPECT_NE(run.command.find("--seed " + std::to_string(run.seed)), std::string::npos);
    }
    EXPECT_EQ(lab.cell("a", "x", "%.1f"), "2.0 (1.5-2.5)");
    EXPECT_EQ(lab.cell("a", "x", "%.0f", 10), "20 (15-25)");
    EXPECT_EQ(lab.cell("a", "y", "%.1f"), "-");
    EXPECT_EQ(lab.median("b", "x"), 2.0);
    EXPECT_TRUE(std::isnan(lab.median("b", "y")));

    apps::Table table({"recipe", "x"});
    table.row({"a", lab.cell("a", "x", "%.1f")});
    lab.table("A table", table);
    lab.finish();
    const json document = json::parse(get(l.config.out + "/test.json"));
    ASSERT_EQ(document["runs"].size(), 4u);
    EXPECT_EQ(document["runs"][0]["measured"]["x"], 1.5);
    EXPECT_NE(get(l.config.out + "/test.md")
                  .find("A table\n\n| recipe | x |\n|---|---|\n"
                        "| a | 2.0 (1.5-2.5) |\n"),
              std::string::npos);
}

// The command of the report, typed by hand, is the training that the experiment did.
TEST(Experiment, ItsCommandsRepeatItsTrainings) {
    Laboratory l;
    l.config.seeds = 1;
    Experiment lab(l.console, l.machine, l.config, l.stop);
    lab.train({l.tiny("a", 3)});
    const apps::TrainedRun& run = lab.runs().at(0);
    Arguments arguments;
    std::istringstream words(run.command);
    for (std::string word; words >> word;) arguments.push_back(word);
    ASSERT_EQ(arguments.at(0), "fbt");
    arguments.erase(arguments.begin());
    arguments.back() = l.place / "again";
    ASSERT_EQ(fbt(arguments).code, 0);
    EXPECT_TRUE(same_run(run.folder, l.place / "again", 3));
}

TEST(Experiment, FinishedTrainingsAreKeptAndOthersMustAgree) {
    Laboratory l;
    {
        Experiment lab(l.console, l.machine, l.config, l.stop);
        lab.train({l.tiny("a", 3)});
    }
    const auto written = [&] {
        return fs::last_write_time(l.config.out + "/runs/a/seed_2/metrics.jsonl");
    };
    const auto before = written();
    Experiment again(l.console, l.machine, l.config, l.stop);
    again.train({l.tiny("a", 3)});
    EXPECT_EQ(written(), before);
    EXPECT_EQ(again.runs().at(1).steps, 3);
    Experiment other(l.console, l.machine, l.config, l.stop);
    EXPECT_TRUE(
        throws(tensor::ErrorKind::usage, {"runs/a/seed_", "cannot resume with another"}, [&] {
            other.train({l.tiny("a", 3, {"--learning-rate", "0.5"})});
        }));
}

// A training that diverges is a row, and the others go on.
TEST(Experiment, DivergedTrainingsAreRows) {
    Laboratory l;
    Experiment lab(l.console, l.machine, l.config, l.stop);
    lab.train({l.tiny("wild", 50,
                      {"--learning-rate", "1e30", "--warmup", "0", "--max-skipped", "2",
                       "--clip-norm", "0"}),
               l.tiny("tame", 3)});
    lab.measure([](apps::TrainedRun& run, const apps::Loaded&) {
        EXPECT_EQ(run.recipe, "tame");
        run.measured["x"] = run.seed == 1 ? json(1.0) : json(std::nan(""));
    });
    EXPECT_EQ(lab.cell("wild", "x", "%.1f"), "- 2 diverged");
    EXPECT_EQ(lab.cell("tame", "x", "%.1f"), "inf (1.0-inf)");
    lab.finish();
    const json document = json::parse(get(l.config.out + "/test.json"));
    EXPECT_TRUE(document["runs"][0]["diverged"].get<bool>());
    EXPECT_FALSE(document["runs"][1]["diverged"].get<bool>());
}

TEST(Experiment, TheCommandRunsAndSaysWhatItWrote) {
    const Workplace w;
    const Arguments command = {"experiment", "state", "--out",     w / "out", "--seeds", "1",
                               "--steps",    "2",     "--threads", "2",       "--json"};
    const Result result = fbt(command);
    ASSERT_EQ(result.code, 0) << result.err;
    const json document = json::parse(result.out);
    EXPECT_EQ(document["experiment"], "state");
    ASSERT_EQ(document["runs"].size(), 15u) << "three tasks, five schedules";
    for (const json& run : document["runs"]) {
        EXPECT_EQ(run["steps"], 2);
        const double loss = run["measured"].contains("loss/pass_1/16")
                                ? run["measured"]["loss/pass_1/16"].get<double>()
                                : run["measured"]["loss/pass_1/12"].get<double>();
        EXPECT_TRUE(std::isfinite(loss));
        EXPECT_GT(loss, 0);
    }
    EXPECT_EQ(json::parse(get(w / "out/state.json")), document);
    EXPECT_NE(get(w / "out/state.md").find("| 3-pass |"), std::string::npos);
}

TEST(Experiment, TextExperimentsShareTheirTrainings) {
    const Workplace w;
    const auto run = [&](const char* name) {
        const Result result = fbt({"experiment", name, "--out", w / "out", "--data", w / "data",
                                   "--seeds", "1", "--steps", "2", "--threads", "2", "--json"});
        EXPECT_EQ(result.code, 0) << result.err;
        return result.code == 0 ? json::parse(result.out) : json();
    };
    const json gates = run("gates"), schedules = run("schedules");
    ASSERT_EQ(gates["runs"].size(), 3u);
    ASSERT_EQ(schedules["runs"].size(), 13u);
    EXPECT_EQ(gates["runs"][0]["folder"], schedules["runs"][12]["folder"]);
    EXPECT_EQ(gates["runs"][0]["seconds"], schedules["runs"][12]["seconds"]);
    EXPECT_TRUE(gates["runs"][0]["measured"]["permuted/pass_3"].is_number());
    EXPECT_TRUE(schedules["runs"][1]["measured"]["gap/100"].is_number());
    EXPECT_GT(schedules["runs"][1]["measured"]["fused/end"], 0.0);
}

TEST(Experiment, StoppedItSavesAndGoesOn) {
    const Workplace w;
    const Arguments command = {"experiment", "state",   "--out", w / "out",   "--seeds",
                               "1",          "--steps", "150",   "--threads", "2"};
    Program program(command);
    ASSERT_TRUE(eventually([&] {
        return fs::exists(w / "out/runs/parity-standard/seed_1/metrics.jsonl");
    })) << program.err();
    program.signal(SIGTERM);
    ASSERT_EQ(program.wait(), 75) << program.err();
    EXPECT_NE(program.err().find("the same command goes on"), std::string::npos);
    EXPECT_FALSE(fs::exists(w / "out/state.json"));
    // What was begun is saved: its training goes on to its end.
    const std::string first = w / "out/runs/parity-standard/seed_1";
    ASSERT_EQ(fbt({"train", "--out", first, "--resume"}).code, 0);
    ASSERT_EQ(fbt({"train", "--preset", "parity", "--task", "parity", "--length", "16",
                   "--tokens-per-step", "1024", "--schedule", "1:1", "--save-every", "0", "--steps",
                   "150", "--threads", "1", "--out", w / "whole"})
                  .code,
              0);
    EXPECT_TRUE(same_run(w / "whole", first, 150));
}

TEST(Experiment, BadArgumentsAreNamed) {
    const Workplace w;
    const std::string out = w / "out";
    EXPECT_TRUE(failed(fbt({"experiment", "--out", out}), 2, {"name is needed", "stability"}));
    EXPECT_TRUE(failed(fbt({"experiment", "sate", "--out", out}), 2, {"\"sate\"", "state"}));
    EXPECT_TRUE(failed(fbt({"experiment", "state"}), 2, {"--out DIR is needed"}));
    EXPECT_TRUE(failed(fbt({"experiment", "gates", "--out", out}), 2, {"--data DIR is needed"}));
    EXPECT_TRUE(failed(fbt({"experiment", "state", "--out", out, "--data", w / "data"}), 2,
                       {"leave --data out"}));
    EXPECT_TRUE(failed(fbt({"experiment", "state", "--out", out, "--seeds", "0"}), 2, {"--seeds"}));
    EXPECT_TRUE(
        failed(fbt({"experiment", "gates", "--out", out, "--data", w / "none"}), 4, {"none"}));
}

}  // namespace
}  // namespace fbt::tests
