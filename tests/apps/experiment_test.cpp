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

    apps::Table table({"recipe", "|x|"});
    table.row({"a", lab.cell("a", "x", "%.1f")});
    lab.table("A table", table);
    lab.finish();
    const json document = json::parse(get(l.config.out + "/test.json"));
    ASSERT_EQ(document["runs"].size(), 4u);
    EXPECT_EQ(document["runs"][0]["measured"]["x"], 1.5);
    EXPECT_NE(get(l.config.out + "/test.md")
                  .find("A table\n\n| recipe | \\|x\\| |\n|---|---|\n"
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

TEST(Experiment, ACommandSaysWhatItWrote) {
    const Workplace w;
    const Result result = fbt({"experiment", "gates", "--out", w / "out", "--data", w / "data",
                               "--seeds", "1", "--quick", "--threads", "2", "--json"});
    ASSERT_EQ(result.code, 0) << result.err;
    const json document = json::parse(result.out);
    EXPECT_EQ(document["experiment"], "gates");
    ASSERT_EQ(document["runs"].size(), 3u) << "three fusions";
    for (const json& run : document["runs"]) {
        EXPECT_EQ(run["steps"], 20);
        const double loss = run["measured"]["loss/pass_3"];
        EXPECT_GT(loss, 0);
        EXPECT_LT(loss, 10);
        EXPECT_TRUE(run["measured"]["permuted/pass_3"].is_number());
    }
    EXPECT_EQ(json::parse(get(w / "out/gates.json")), document);
    EXPECT_NE(get(w / "out/gates.md").find("| concat_projection |"), std::string::npos);
    // Another experiment in the folder takes what is trained already, the same bits.
    const Result replay = fbt({"experiment", "replay", "--out", w / "out", "--data", w / "data",
                               "--seeds", "1", "--quick", "--threads", "2", "--json"});
    ASSERT_EQ(replay.code, 0) << replay.err;
    const json rows = json::parse(replay.out)["runs"];
    EXPECT_EQ(rows[0]["folder"], document["runs"][0]["folder"]);
    EXPECT_EQ(rows[0]["seconds"], document["runs"][0]["seconds"]);
    for (const json& run : rows) {
        const json& m = run["measured"];
        EXPECT_EQ(m["keys/recorded"], 0.0);
        EXPECT_EQ(m["values/recorded"], 0.0);
        EXPECT_EQ(m["prefix/recorded"], m["positions"]);
        EXPECT_GT(m["keys/1"], 0.0);
        EXPECT_GE(m["prefix/12"], 11.0);
    }
}

TEST(Experiment, StoppedItSavesAndGoesOn) {
    const Workplace w;
    const Arguments command = {"experiment", "state", "--out",     w / "out",
                               "--seeds",    "1",     "--threads", "2"};
    Program program(command);
    ASSERT_TRUE(eventually([&] {
        return fs::exists(w / "out/runs/parity-standard/seed_1/metrics.jsonl");
    })) << program.err();
    program.signal(SIGTERM);
    ASSERT_EQ(program.wait(), 75) << program.err();
    EXPECT_NE(program.err().find("the same command goes on"), std::string::npos);
    EXPECT_FALSE(fs::exists(w / "out/state.json"));
    // What was begun is saved.
    const std::string first = w / "out/runs/parity-standard/seed_1";
    const Result resumed = fbt({"train", "--out", first, "--resume", "--stop-after", "1"});
    ASSERT_EQ(resumed.code, 0) << resumed.err;
    EXPECT_NE(resumed.out.find("is that far already"), std::string::npos) << resumed.out;
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
