// fbt experiment: trainings that are kept, gone on with and reported, whatever becomes of them.
#include "apps/experiment.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <thread>

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
    EXPECT_EQ(lab.cell("a", "x", "%.1f"), "2.0 (1.5 to 2.5)");
    EXPECT_EQ(lab.cell("a", "x", "%.0f", 10), "20 (15 to 25)");
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
                        "| a | 2.0 (1.5 to 2.5) |\n"),
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
    const Recipe wild = l.tiny(
        "wild", 50,
        {"--learning-rate", "1e30", "--warmup", "0", "--max-skipped", "2", "--clip-norm", "0"});
    lab.train({wild, l.tiny("tame", 3)});
    lab.measure([](apps::TrainedRun& run, const apps::Loaded&) {
        EXPECT_EQ(run.recipe, "tame");
        run.measured["x"] = run.seed == 1 ? json(1.0) : json(std::nan(""));
    });
    EXPECT_EQ(lab.cell("wild", "x", "%.1f"), "- 2 diverged");
    // Asked again, it diverges again.
    Experiment again(l.console, l.machine, l.config, l.stop);
    again.train({wild});
    for (size_t seed : {0, 1}) {
        EXPECT_TRUE(again.runs().at(seed).diverged());
        EXPECT_EQ(again.runs().at(seed).steps, lab.runs().at(2 * seed).steps);
    }
    EXPECT_EQ(lab.cell("tame", "x", "%.1f"), "inf (1.0 to inf)");
    lab.finish();
    const json document = json::parse(get(l.config.out + "/test.json"));
    EXPECT_TRUE(document["runs"][0]["diverged"].get<bool>());
    EXPECT_FALSE(document["runs"][1]["diverged"].get<bool>());
}

// Wherever among the seeds they are: sorting by < alone would leave NaN where it was.
TEST(Experiment, NumbersThatAreNotFiniteAreTheWorst) {
    Laboratory l;
    l.config.seeds = 3;
    for (uint64_t bad = 1; bad <= 3; ++bad)
        for (const json& value : {json(std::nan("")), json(), json(HUGE_VAL)}) {
            Experiment lab(l.console, l.machine, l.config, l.stop);
            lab.train({l.tiny("a", 1)});
            lab.measure([&](apps::TrainedRun& run, const apps::Loaded&) {
                run.measured["x"] = run.seed == bad ? value : json(double(run.seed));
            });
            const std::string low = bad == 1 ? "2" : "1", middle = bad == 3 ? "2" : "3";
            EXPECT_EQ(lab.cell("a", "x", "%.0f"), middle + " (" + low + " to inf)") << bad << value;
        }
}

// A training that ends otherwise than done or diverged ends the experiment, and is not measured.
TEST(Experiment, TrainingsThatFailEndIt) {
    Laboratory l;
    l.config.program = l.place / "program";
    const auto train = [&](const std::string& script) {
        put(l.config.program, "#!/bin/sh\n" + script);
        fs::permissions(l.config.program, fs::perms::owner_all);
        Experiment(l.console, l.machine, l.config, l.stop).train({l.tiny("a", 3)});
    };
    using Kind = tensor::ErrorKind;
    EXPECT_TRUE(throws(Kind::usage, {"a/seed_", ".log: a b"}, [&] { train("echo a b; exit 2"); }));
    EXPECT_TRUE(throws(Kind::environment, {".log: full"}, [&] { train("echo full; exit 5"); }));
    EXPECT_TRUE(throws(Kind::bad_file, {".log: torn"}, [&] { train("echo torn; exit 4"); }));
    EXPECT_TRUE(throws(Kind::environment, {"ended by signal 9", "step 3"},
                       [&] { train("echo step 3; kill -9 $$"); }));
    // By somebody else: nobody asked the experiment to stop.
    EXPECT_TRUE(throws(Kind::environment, {".log: saved"}, [&] { train("echo saved; exit 75"); }));
    EXPECT_TRUE(throws(Kind::environment, {"ended by signal 15"}, [&] { train("kill $$"); }));
    l.config.program = l.place / "none";
    EXPECT_TRUE(throws(Kind::environment, {"cannot be started"}, [&] {
        Experiment(l.console, l.machine, l.config, l.stop).train({l.tiny("a", 3)});
    }));
}

// The signal that is passed on finds trainings that do not handle it yet.
TEST(Experiment, AStopBeforeATrainingHasBegunIsNoFailure) {
    Laboratory l;
    l.config.program = l.place / "program";
    put(l.config.program, "#!/bin/sh\nexec sleep 50\n");
    fs::permissions(l.config.program, fs::perms::owner_all);
    Experiment lab(l.console, l.machine, l.config, l.stop);
    std::thread signaller([&] {
        EXPECT_TRUE(eventually([&] { return fs::exists(l.config.out + "/runs/a/seed_2.log"); }));
        kill(getpid(), SIGTERM);
    });
    std::string error = "no error";
    try {
        lab.train({l.tiny("a", 3)});
    } catch (const std::exception& e) {
        error = e.what();
    } catch (...) {  // what check_stop() throws is the experiments' own
        error = "";
    }
    signaller.join();
    EXPECT_EQ(error, "");
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
        EXPECT_EQ(run["measured"]["gain"],
                  double(run["measured"]["loss/pass_1"]) - double(run["measured"]["loss/pass_3"]));
    }
    EXPECT_EQ(json::parse(get(w / "out/quick/gates.json")), document);
    EXPECT_NE(get(w / "out/quick/gates.md").find("| concat_projection |"), std::string::npos);
    // Another experiment in the folder takes what is trained already, the same bits.
    const Result replay = fbt({"experiment", "replay", "--out", w / "out", "--data", w / "data",
                               "--seeds", "1", "--quick", "--threads", "2", "--json"});
    ASSERT_EQ(replay.code, 0) << replay.err;
    const json rows = json::parse(replay.out)["runs"];
    EXPECT_EQ(rows[0]["folder"], document["runs"][0]["folder"]);
    EXPECT_EQ(rows[0]["seconds"], document["runs"][0]["seconds"]);
    for (const json& run : rows) {
        const json& m = run["measured"];
        for (const std::string dtype : {"f32", "bf16"}) {
            EXPECT_EQ(m["keys/" + dtype + "/recorded"], 0.0);
            EXPECT_EQ(m["values/" + dtype + "/recorded"], 0.0);
            EXPECT_EQ(m["certified/" + dtype + "/recorded"], 1.0);
            EXPECT_EQ(m["prefix/" + dtype + "/recorded"], 16);
            EXPECT_GT(m["keys/" + dtype + "/1"], 0.0);
            EXPECT_GE(m["prefix/" + dtype + "/12"], 11.0);
            EXPECT_EQ(m["keys/" + dtype + "/exact, blocks of 16"], 0.0);
            EXPECT_EQ(m["prefix/" + dtype + "/exact"], 16);
            EXPECT_LE(m["computed/" + dtype + "/exact"], 1 + 17.0 / 2);
            EXPECT_LT(m["keys/" + dtype + "/change 0.01"], m["keys/" + dtype + "/2"]);
            EXPECT_LE(m["keys/" + dtype + "/change 0.001"], m["keys/" + dtype + "/change 0.01"]);
            EXPECT_LE(m["computed/" + dtype + "/change 0.01"], m["computed/" + dtype + "/exact"]);
        }
    }
    const std::string plot = get(w / "out/quick/replay.tsv");
    EXPECT_EQ(std::count(plot.begin(), plot.end(), '\n'), 1 + 16) << plot;
    EXPECT_EQ(plot.substr(0, plot.find('\n')),
              "passes\t3-pass-gated_product, f32\t3-pass-gated_product, bf16\t80-3-20-5, f32"
              "\t80-3-20-5, bf16\t75-22-3, f32\t75-22-3, bf16");
    EXPECT_EQ(plot.find("nan"), std::string::npos) << plot;
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

// The system asks the trainings of an experiment that is killed to stop.
TEST(Experiment, KilledItsTrainingsSaveAndLeave) {
    const Workplace w;
    Program program({"experiment", "state", "--out", w / "out", "--seeds", "1", "--threads", "2"});
    const std::string first = w / "out/runs/parity-standard/seed_1";
    ASSERT_TRUE(eventually([&] { return fs::exists(first + "/metrics.jsonl"); })) << program.err();
    // Orphans become children of this process, so that it can wait until the last has left.
    ASSERT_EQ(prctl(PR_SET_CHILD_SUBREAPER, 1), 0);
    program.signal(SIGKILL);
    EXPECT_EQ(program.wait(), 128 + SIGKILL);
    int orphans = 0;
    while (waitpid(-1, nullptr, 0) > 0) ++orphans;
    EXPECT_GE(orphans, 1);
    EXPECT_NE(get(first + ".log").find("stopped by a signal; saved"), std::string::npos)
        << get(first + ".log");
}

// The cells of the row of a report's first table with this title that begins with this name.
std::vector<std::string> cells_of(const std::string& report, const std::string& title,
                                  const std::string& name) {
    const std::string begin = "\n| " + name + " |";
    std::vector<std::string> cells;
    const size_t table = report.find(title);
    const size_t row = table == std::string::npos ? table : report.find(begin, table);
    if (row == std::string::npos) return cells;
    std::istringstream in(
        report.substr(row + begin.size(), report.find('\n', row + 1) - row - begin.size()));
    for (std::string cell; std::getline(in, cell, '|');)
        cells.push_back(cell.substr(1, cell.size() - 2));
    return cells;
}

TEST(Experiment, StateMeasuresWhatEvalDoes) {
    const Workplace w;
    const Result result = fbt({"experiment", "state", "--out", w / "out", "--seeds", "1", "--quick",
                               "--threads", "2", "--json"});
    ASSERT_EQ(result.code, 0) << result.err;
    const std::string report = get(w / "out/quick/state.md");
    EXPECT_NE(report.find("swap-s5, trained at length 12 for 20 steps"), std::string::npos);
    const json document = json::parse(result.out);
    struct Checked {
        std::string task, name;
        int length;
    };
    for (const auto& [task, name, length] :
         {Checked{"parity", "3-pass", 16}, Checked{"mod-sum", "standard", 12}}) {
        const std::string recipe = task + "-" + name;
        const auto found = std::find_if(document["runs"].begin(), document["runs"].end(),
                                        [&](const json& r) { return r["recipe"] == recipe; });
        ASSERT_NE(found, document["runs"].end());
        const json& run = *found;
        const json& m = run["measured"];
        std::vector<std::string> losses, decoded, passes;
        for (int factor : {1, 2, 4}) {
            const std::string at = "/" + std::to_string(factor * length);
            const Result eval =
                fbt({"eval", "--checkpoint", run["folder"], "--context", at.substr(1), "--lengths",
                     at.substr(1), "--sequences", "16", "--threads", "1", "--json"});
            ASSERT_EQ(eval.code, 0) << eval.err;
            const json expected = json::parse(eval.out);
            for (const json& pass : expected["passes"]) {
                const std::string key = "/pass_" + pass["pass"].dump() + at;
                EXPECT_EQ(m["loss" + key], pass["loss"]) << recipe << key;
                EXPECT_EQ(m["accuracy" + key], pass["accuracy"]) << recipe << key;
                losses.push_back(apps::format("%.3f", double(pass["loss"])));
                passes.push_back(apps::format("%.0f", 100 * double(pass["accuracy"])));
            }
            for (const json& row : expected["lengths"]) {
                const std::string mode = row["mode"];
                EXPECT_EQ(m[mode + at], row["accuracy_last"]) << recipe << mode << at;
                EXPECT_EQ(m[mode + "_all" + at], row["accuracy"]) << recipe << mode << at;
                decoded.push_back(apps::format("%.0f", 100 * double(row["accuracy_last"])));
            }
        }
        const std::string title = task + ", trained at length " + std::to_string(length);
        EXPECT_EQ(cells_of(report, title + " for 20 steps: validation", name), losses);
        EXPECT_EQ(cells_of(report, title + " for 20 steps: right answers decoded", name), decoded);
        EXPECT_EQ(cells_of(report, title + " for 20 steps: right answers of each pass", name),
                  passes);
    }
}

TEST(Experiment, DataThatCannotBeMeasuredAreRefusedBeforeTraining) {
    const Workplace w;
    put(w / "short.jsonl", [] {
        std::string lines;
        for (int i = 0; i < 100; ++i) lines += "{\"text\": \"fourteen bytes\"}\n";
        return lines;
    }());
    ASSERT_EQ(
        fbt({"data", "--input", w / "short.jsonl", "--tokenizer", "bytes", "--out", w / "short"})
            .code,
        0);
    const std::string out = w / "out";
    const auto experiment = [&](const char* name, const std::string& data) {
        return fbt({"experiment", name, "--out", out, "--data", data, "--quick", "--seeds", "1"});
    };
    EXPECT_TRUE(failed(experiment("replay", w / "short"), 2, {"first 16 tokens", "longer"}));
    // Without a validation split.
    json meta = json::parse(get(w / "data/meta.json"));
    meta["val_tokens"] = meta["val_text_bytes"] = 0;
    put(w / "data/meta.json", meta.dump());
    fs::remove(w / "data/val_000000.bin");
    for (const char* name : {"stability", "replay", "gates", "schedules"})
        EXPECT_TRUE(failed(experiment(name, w / "data"), 2, {"validation data", "has none"}));
    EXPECT_FALSE(fs::exists(out + "/runs"));
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
