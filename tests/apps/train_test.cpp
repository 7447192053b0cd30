// fbt train: resuming, stopping, killing and full disks change no bit of what comes out.
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "tests/apps/program.h"

namespace fbt::tests {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

size_t rows_in(const std::string& run) {
    const std::string text = get(run + "/metrics.jsonl");
    return size_t(std::count(text.begin(), text.end(), '\n'));
}

std::string only_checkpoint(const std::string& run) {
    std::string found;
    for (const auto& entry : fs::directory_iterator(run))
        if (entry.is_directory()) {
            EXPECT_EQ(found, "");
            found = entry.path();
        }
    return found;
}

TEST(Train, StopAfterAndResumeEqualOneRun) {
    const Workplace w;
    const Arguments steps = {"--steps", "20", "--eval-every", "6"};
    ASSERT_EQ(fbt(w.train("whole", steps)).code, 0);
    ASSERT_EQ(fbt(w.train("parts", steps + Arguments{"--stop-after", "10"})).code, 0);
    EXPECT_TRUE(fs::exists(w / "parts/step_00000010"));
    EXPECT_FALSE(fs::exists(w / "parts/step_00000020"));
    const Result resumed = fbt(w.train("parts", steps + Arguments{"--resume"}));
    ASSERT_EQ(resumed.code, 0) << resumed.err;
    EXPECT_TRUE(same_run(w / "whole", w / "parts", 20));
    EXPECT_EQ(metrics_of(w / "whole").size(), 24u) << "20 steps, evaluations at 6, 12, 18, 20";
}

// The comparison above can fail: another seed gives another run.
TEST(Train, AnotherSeedIsAnotherRun) {
    const Workplace w;
    ASSERT_EQ(fbt(w.train("a", {"--steps", "2"})).code, 0);
    Arguments other = w.train("b", {"--steps", "2"});
    *(std::find(other.begin(), other.end(), "--seed") + 1) = "6";
    ASSERT_EQ(fbt(other).code, 0);
    EXPECT_FALSE(same_run(w / "a", w / "b", 2));
}

TEST(Train, ThreadsAndSaveEveryChangeNothing) {
    const Workplace w;
    ASSERT_EQ(fbt(w.train("a", {"--steps", "6"})).code, 0);
    Arguments other = w.train("b", {"--steps", "6", "--save-every", "2", "--keep-last", "2"});
    *(std::find(other.begin(), other.end(), "--threads") + 1) = "2";
    ASSERT_EQ(fbt(other).code, 0);
    EXPECT_TRUE(same_run(w / "a", w / "b", 6));
    EXPECT_TRUE(fs::exists(w / "b/step_00000004"));
    EXPECT_FALSE(fs::exists(w / "b/step_00000002")) << "--keep-last 2";
}

TEST(Train, ResumeTakesTheRunsSettings) {
    const Workplace w;
    ASSERT_EQ(fbt(w.train("whole", {"--steps", "8"})).code, 0);
    ASSERT_EQ(fbt(w.train("parts", {"--steps", "8", "--stop-after", "3"})).code, 0);
    const Result resumed = fbt({"train", "--out", w / "parts", "--resume"});
    ASSERT_EQ(resumed.code, 0) << resumed.err;
    EXPECT_TRUE(same_run(w / "whole", w / "parts", 8));
}

TEST(Train, ResumeRefusesOtherSettings) {
    const Workplace w;
    ASSERT_EQ(fbt(w.train("run", {"--steps", "8", "--stop-after", "3"})).code, 0);
    const auto resumed_with = [&](const Arguments& more) {
        return fbt(Arguments{"train", "--out", w / "run", "--resume"} + more);
    };
    EXPECT_TRUE(failed(resumed_with({"--dim", "32"}), 2, {"dim", "16", "32"}));
    EXPECT_TRUE(failed(resumed_with({"--steps", "9"}), 2, {"steps", "8", "9"}));
    EXPECT_TRUE(failed(resumed_with({"--schedule", "1:2"}), 2, {"schedule"}));
    EXPECT_TRUE(failed(resumed_with({"--data", w / "elsewhere"}), 2, {"data", "elsewhere"}));
    EXPECT_TRUE(failed(resumed_with({"--task", "parity"}), 2, {"data"}));
    EXPECT_TRUE(failed(resumed_with({"--vocab-size", "300"}), 2, {"vocab_size", "257"}));
    EXPECT_TRUE(failed(fbt(w.train("run")), 2, {"step_00000003", "--resume"}));
    EXPECT_EQ(resumed_with({"--threads", "2", "--keep-last", "9", "--log-every", "3"}).code, 0);
}

TEST(Train, ResumeWithoutACheckpointStartsAndAFinishedRunRests) {
    const Workplace w;
    fs::create_directories(w / "run/step_00000009");  // incomplete
    put(w / "run/step_00000009/model.safetensors", "half");
    put(w / "run/metrics.jsonl", "{\"step\":1}\n");
    ASSERT_EQ(fbt(w.train("run", {"--steps", "4", "--resume"})).code, 0);
    ASSERT_EQ(fbt(w.train("plain", {"--steps", "4"})).code, 0);
    EXPECT_TRUE(same_run(w / "run", w / "plain", 4));
    const std::string before = get(w / "run/metrics.jsonl");
    const Result again = fbt({"train", "--out", w / "run", "--resume"});
    EXPECT_EQ(again.code, 0);
    EXPECT_NE(again.out.find("is finished: step 4 of 4"), std::string::npos) << again.out;
    EXPECT_EQ(get(w / "run/metrics.jsonl"), before);
}

TEST(Train, RowsAfterTheCheckpointAreDropped) {
    const Workplace w;
    ASSERT_EQ(fbt(w.train("whole", {"--steps", "6"})).code, 0);
    ASSERT_EQ(fbt(w.train("parts", {"--steps", "6", "--stop-after", "3"})).code, 0);
    std::ofstream(w / "parts/metrics.jsonl", std::ios::app)
        << "{\"step\":4,\"loss/total\":99}\n{\"step\":5,\"lo";  // a kill in the middle of a row
    ASSERT_EQ(fbt({"train", "--out", w / "parts", "--resume"}).code, 0);
    EXPECT_TRUE(same_run(w / "whole", w / "parts", 6));
}

TEST(Train, SignalsSaveAndLeave) {
    const Workplace w;
    for (int number : {SIGINT, SIGTERM, SIGUSR1}) {
        const std::string run = "run" + std::to_string(number);
        Program program(w.train(run, {"--steps", "1000000", "--save-every", "0"}));
        ASSERT_TRUE(eventually([&] { return rows_in(w / run) > 3; })) << program.err();
        program.signal(number);
        EXPECT_EQ(program.wait(), 75) << program.err();
        EXPECT_NE(program.out().find("stopped by a signal"), std::string::npos);
        const json state = json::parse(get(only_checkpoint(w / run) + "/state.json"));
        EXPECT_EQ(state["step"], int(rows_in(w / run))) << "the last step that was done is saved";
    }
}

TEST(Train, SecondSignalLeavesAtOnce) {
    const Workplace w;
    int code = 75;
    // A signal is seen between an evaluation's batches. A first one that comes before the only
    // batch has begun ends the run in good order; then the next run is given more time.
    for (int wait = 300; code == 75 && wait < 10000; wait *= 2) {
        // The evaluation after the only step takes much longer than this test.
        const std::string run = "run" + std::to_string(wait);
        Program program(w.train(run, {"--steps", "1", "--eval-passes", "1000000"}));
        ASSERT_TRUE(eventually([&] { return rows_in(w / run) == 1; })) << program.err();
        std::this_thread::sleep_for(std::chrono::milliseconds(wait));
        program.signal(SIGINT);
        std::this_thread::sleep_for(std::chrono::milliseconds(wait));
        if (program.running()) program.signal(SIGINT);
        code = program.wait();
    }
    EXPECT_EQ(code, 128 + SIGINT);
}

TEST(Train, StoppedDuringAnEvaluationItIsMadeUpFor) {
    const Workplace w;
    // Far more time goes into evaluations than into steps, so the signal hits one.
    const Arguments settings = {"--steps", "3", "--eval-every", "1", "--eval-passes", "200"};
    ASSERT_EQ(fbt(w.train("whole", settings)).code, 0);
    Program program(w.train("parts", settings));
    ASSERT_TRUE(eventually([&] { return rows_in(w / "parts") == 1; })) << program.err();
    program.signal(SIGTERM);
    ASSERT_EQ(program.wait(), 75) << program.err();
    ASSERT_EQ(rows_in(w / "parts"), 1u) << "no row of a part of an evaluation";
    ASSERT_EQ(fbt({"train", "--out", w / "parts", "--resume"}).code, 0);
    EXPECT_TRUE(same_run(w / "whole", w / "parts", 3));
}

TEST(Train, StoppedRunGoesOnToTheSameBits) {
    const Workplace w;
    ASSERT_EQ(fbt(w.train("whole", {"--steps", "400"})).code, 0);
    Program program(w.train("parts", {"--steps", "400"}));
    ASSERT_TRUE(eventually([&] { return rows_in(w / "parts") > 5; })) << program.err();
    program.signal(SIGTERM);
    ASSERT_EQ(program.wait(), 75) << "stopped too late; " << program.err();
    ASSERT_EQ(fbt({"train", "--out", w / "parts", "--resume"}).code, 0);
    EXPECT_TRUE(same_run(w / "whole", w / "parts", 400));
}

TEST(Train, KilledAtAnyMomentGoesOnToTheSameBits) {
    const Workplace w;
    const Arguments settings = {"--steps", "120", "--save-every", "1", "--keep-last", "2"};
    ASSERT_EQ(fbt(w.train("whole", settings)).code, 0);
    std::mt19937 random(7);
    int kills = 0;
    for (bool finished = false; !finished && kills < 15;) {
        // Most of this run's time goes into saving, so most kills hit a save.
        const size_t before = rows_in(w / "parts");
        Program program(w.train("parts", settings + Arguments{"--resume"}));
        ASSERT_TRUE(eventually([&] {
            return !program.running() || rows_in(w / "parts") != before;
        })) << program.err();
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 40000));
        finished = !program.running();
        program.signal(SIGKILL);
        const int code = program.wait();
        if (finished)
            ASSERT_EQ(code, 0) << program.err();
        else
            ++kills;
    }
    EXPECT_GE(kills, 3);
    ASSERT_EQ(fbt(w.train("parts", settings + Arguments{"--resume"})).code, 0);
    EXPECT_TRUE(same_run(w / "whole", w / "parts", 120));
    for (const auto& entry : fs::directory_iterator(w / "parts"))
        EXPECT_FALSE(entry.path().filename().string().starts_with(".step"))
            << entry.path() << " was left behind";
}

TEST(Train, FullDiskLosesNothing) {
    const Workplace w;
    SmallDisk disk(w / "disk");
    if (!disk.mounted()) GTEST_SKIP() << "no tmpfs can be mounted here: " << disk.reason();
    const Arguments settings = {"--steps", "30", "--save-every", "1", "--keep-last", "40"};
    const Result full = fbt(w.train("disk/run", settings));
    EXPECT_TRUE(failed(full, 5, {"No space left", "disk/run"}));
    const Result usable =
        fbt({"generate", "--checkpoint", w / "disk/run", "--prompt", "a", "--tokens", "2"});
    EXPECT_EQ(usable.code, 0) << usable.err;
    ASSERT_TRUE(disk.enlarge());
    ASSERT_EQ(fbt({"train", "--out", w / "disk/run", "--resume"}).code, 0);
    ASSERT_EQ(fbt(w.train("whole", settings)).code, 0);
    EXPECT_TRUE(same_run(w / "whole", w / "disk/run", 30));
}

TEST(Train, FullStandardOutputLosesNothing) {
    const Workplace w;
    SmallDisk disk(w / "disk");
    if (!disk.mounted()) GTEST_SKIP() << "no tmpfs can be mounted here: " << disk.reason();
    put(w / "disk/most", std::string(fs::space(w / "disk").available - 4096, 'x'));
    std::string command = "'" FBT_BINARY "'";
    for (const std::string& argument : w.train("run", {"--steps", "300", "--save-every", "0"}))
        command += " '" + argument + "'";
    command += " > '" + (w / "disk/out") + "' 2> '" + (w / "err") + "'";
    EXPECT_EQ(WEXITSTATUS(std::system(command.c_str())), 5);
    EXPECT_NE(get(w / "err").find("; saved "), std::string::npos) << get(w / "err");
    const json state = json::parse(get(only_checkpoint(w / "run") + "/state.json"));
    EXPECT_EQ(state["step"], int(rows_in(w / "run"))) << "the last step that was done is saved";
    EXPECT_LT(state["step"], 300);
}

TEST(Train, DataWithoutValidationStillTrains) {
    const Workplace w;
    json meta = json::parse(get(w / "data/meta.json"));
    meta["val_tokens"] = 0;
    put(w / "data/meta.json", meta.dump());
    fs::remove(w / "data/val_000000.bin");
    const Result result = fbt(w.train("run", {"--steps", "2"}));
    EXPECT_EQ(result.code, 0) << result.err;
    EXPECT_NE(result.err.find("no validation sequences"), std::string::npos) << result.err;
    EXPECT_EQ(metrics_of(w / "run").size(), 2u);
}

TEST(Train, DivergedIsSaid) {
    const Workplace w;
    Arguments wild = w.train("run", {"--steps", "30", "--max-skipped", "2", "--clip-norm", "0"});
    *(std::find(wild.begin(), wild.end(), "--learning-rate") + 1) = "1e30";
    EXPECT_TRUE(failed(fbt(wild), 3, {"diverged", "2 steps in a row"}));
    EXPECT_TRUE(json::parse(metrics_of(w / "run").back())["skipped"].get<bool>());
}

TEST(Train, ReaderThatLeavesDoesNotStopIt) {
    const Workplace w;
    std::string command = "'" FBT_BINARY "'";
    for (const std::string& argument : w.train("run", {"--steps", "9"}))
        command += " '" + argument + "'";
    command = "bash -c \"" + command + " | true; exit \\${PIPESTATUS[0]}\"";
    EXPECT_EQ(std::system(command.c_str()), 0);
    EXPECT_TRUE(fs::exists(w / "run/step_00000009"));
}

TEST(Train, TasksAndPresets) {
    const TemporaryFolder folder;
    const Result result = fbt({"train", "--preset", "parity", "--task", "parity", "--steps", "3",
                               "--out", folder / "run", "--json", "--threads", "1"});
    ASSERT_EQ(result.code, 0) << result.err;
    const json summary = json::parse(result.out);
    EXPECT_EQ(summary["step"], 3);
    EXPECT_EQ(summary["last"]["passes"], 3);
    EXPECT_TRUE(summary["validation"].contains("val/pass_3"));
    const json config = json::parse(get(folder / "run/step_00000003/config.json"));
    EXPECT_EQ(config["model"]["dim"], 64) << "the preset's";
    EXPECT_EQ(config["model"]["vocab_size"], 4) << "the task's";
    EXPECT_EQ(config["train"]["steps"], 3) << "the flag's";
    EXPECT_EQ(config["train"]["length"], 16);
}

TEST(Train, ListsOfLengthsAreKept) {
    const TemporaryFolder folder;
    const auto train = [&](const char* run, const char* length, const Arguments& more = {}) {
        return fbt(Arguments{"train", "--preset", "parity", "--length", length, "--steps", "4",
                             "--out", folder / run, "--threads", "1"} +
                   more);
    };
    ASSERT_EQ(train("whole", "5,16,9").code, 0);
    ASSERT_EQ(train("parts", "5,16,9", {"--stop-after", "2"}).code, 0);
    const json config = json::parse(get(folder / "parts/step_00000002/config.json"))["train"];
    EXPECT_EQ(config["length"], json({5, 16, 9}));
    EXPECT_EQ(config["test_lengths"], json::array());
    for (const char* other : {"5,16", "5,9,16", "16"})
        EXPECT_TRUE(failed(fbt({"train", "--out", folder / "parts", "--resume", "--length", other}),
                           2, {"another length", "[5,16,9]", other}));
    ASSERT_EQ(fbt({"train", "--out", folder / "parts", "--resume"}).code, 0);
    EXPECT_TRUE(same_run(folder / "whole", folder / "parts", 4));
    ASSERT_EQ(train("other", "16").code, 0);
    EXPECT_FALSE(same_run(folder / "whole", folder / "other", 4));
}

TEST(Train, ConfigStandsBetweenPresetAndFlags) {
    const TemporaryFolder folder;
    put(folder / "c.json", R"({"model": {"dim": 8, "layers": 1}, "train": {"steps": 5}})");
    ASSERT_EQ(fbt({"train", "--preset", "parity", "--config", folder / "c.json", "--steps", "2",
                   "--out", folder / "run", "--threads", "1"})
                  .code,
              0);
    const json config = json::parse(get(folder / "run/step_00000002/config.json"));
    EXPECT_EQ(config["model"]["dim"], 8);
    EXPECT_EQ(config["model"]["layers"], 1);
    EXPECT_EQ(config["model"]["head_dim"], 16);
    EXPECT_EQ(config["train"]["steps"], 2);
    // A checkpoint's own config.json is such a file.
    const Result copy = fbt({"train", "--config", folder / "run/step_00000002/config.json", "--out",
                             folder / "copy", "--threads", "1"});
    ASSERT_EQ(copy.code, 0) << copy.err;
    EXPECT_TRUE(same_run(folder / "run", folder / "copy", 2));
}

}  // namespace
}  // namespace fbt::tests
