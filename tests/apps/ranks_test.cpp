// fbt train by several processes: what a run computes does not depend on how many there are, and
// whatever happens to one of them, all end and nothing is lost.
#include <gtest/gtest.h>
#include <signal.h>

#include <cctype>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "apps/job.h"
#include "dist/dist.h"
#include "tests/apps/program.h"
#include "tests/dist/launch.h"

namespace fbt::tests {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr double kLong = 300;  // seconds that nothing here takes

// Leaks are seen in the tests of one process, and in those of dist/.
struct Training : Launch {
    explicit Training(const Arguments& command) : Launch(command, false) {}
};

Arguments command(const Arguments& arguments) { return Arguments{FBT_BINARY} + arguments; }

// `fbt ARGUMENT...` by so many ranks; one needs no launcher.
Launched fbt(int ranks, const Arguments& arguments) {
    Training launch(ranks == 1 ? command(arguments) : mpirun(ranks, {}, command(arguments)));
    return finished(launch, kLong);
}

// The arguments with another value of this flag.
Arguments with(Arguments arguments, const std::string& flag, const std::string& value) {
    *(std::find(arguments.begin(), arguments.end(), flag) + 1) = value;
    return arguments;
}

Arguments resume(const std::string& run) { return {"train", "--out", run, "--resume"}; }

// Lines that begin so. mpirun adds its own, and everybody's standard output and error are one file.
std::vector<std::string> lines(const std::string& text, const std::string& beginning) {
    std::vector<std::string> found;
    std::istringstream in(text);
    for (std::string line; std::getline(in, line);)
        if (line.starts_with(beginning)) found.push_back(line);
    return found;
}

// Passes when the job failed with this code, and one rank said why, with all the words.
testing::AssertionResult refused(const Launched& end, int code,
                                 std::initializer_list<const char*> words) {
    if (end.code != code)
        return testing::AssertionFailure() << "exit code " << end.code << ":\n" << end.out;
    const std::vector<std::string> said = lines(end.out, "fbt: ");
    if (said.size() != 1)
        return testing::AssertionFailure() << said.size() << " lines `fbt: ...`:\n" << end.out;
    for (const char* word : words)
        if (said[0].find(word) == std::string::npos)
            return testing::AssertionFailure() << "no \"" << word << "\" in: " << said[0];
    return testing::AssertionSuccess() << said[0];
}

// The processes that are ranks of a training into this run, by their rank.
std::map<int, pid_t> processes_of(const std::string& run) {
    std::map<int, pid_t> found;
    for (const auto& entry : fs::directory_iterator("/proc")) {
        const std::string name = entry.path().filename();
        if (!std::isdigit(static_cast<unsigned char>(name[0]))) continue;
        const std::string zero(1, '\0'), key = zero + "OMPI_COMM_WORLD_RANK=";
        const std::string words = get(entry.path().string() + "/cmdline");
        if (!words.starts_with(FBT_BINARY + zero) || words.find(zero + run + zero) == words.npos)
            continue;
        const std::string variables = get(entry.path().string() + "/environ");
        const size_t at = variables.find(key);
        if (at != variables.npos)
            found[std::stoi(variables.substr(at + key.size()))] = std::stoi(name);
    }
    return found;
}

bool all_gone(const std::string& run) {
    return eventually([&] { return processes_of(run).empty(); });
}

size_t rows_in(const std::string& run) { return lines(get(run + "/metrics.jsonl"), "{").size(); }

bool has_checkpoint(const std::string& run) {
    std::error_code none;
    for (const auto& entry : fs::directory_iterator(run, none))
        if (entry.path().filename().string().starts_with("step_")) return true;
    return false;
}

// The largest difference of the losses, and of the norms, of two runs that did the same steps.
double distance(const std::string& a, const std::string& b) {
    const double never = std::numeric_limits<double>::infinity();
    const auto x = metrics_of(a), y = metrics_of(b);
    if (x.empty() || x.size() != y.size()) return never;
    double most = 0;
    for (size_t i = 0; i < x.size(); ++i) {
        const json p = json::parse(x[i]), q = json::parse(y[i]);
        if (p.at("step") != q.at("step")) return never;
        for (const auto& [key, value] : p.items()) {
            if (!key.starts_with("loss/") && !key.starts_with("val/") && key != "norm") continue;
            if (!q.contains(key) || !value.is_number() || !q[key].is_number()) return never;
            most = std::max(most, std::abs(value.get<double>() - q[key].get<double>()));
        }
    }
    return most;
}

const Arguments kReference = {"--device", "ref", "--dtype", "f64"};

// Ranks add the same terms in another order. What that does to a run is what rounding does to it:
// bounded by f32's own distance from f64, which rounds 2^29 times finer.
TEST(Ranks, LossesDoNotDependOnTheirNumber) {
    NEEDS_MPIRUN();
    const Workplace w;
    const Arguments steps = {"--steps", "50", "--eval-every", "25"};
    for (int n : {1, 2, 4}) {
        for (const bool exact : {false, true}) {
            const std::string run = (exact ? "f64-" : "f32-") + std::to_string(n);
            const Launched end =
                fbt(n, w.train(run, steps + (exact ? kReference : Arguments{"--json"})));
            ASSERT_EQ(end.code, 0) << end.out;
            EXPECT_EQ(lines(end.out, "{").size(), exact ? 0u : 1u) << "one JSON document";
            EXPECT_EQ(lines(end.out, "model ").size(), 1u) << end.out;
            EXPECT_EQ(lines(end.out, "step 7/50 ").size(), 1u) << end.out;
            EXPECT_EQ(lines(end.out, "step ").size(), 52u) << "50 steps and 2 evaluations";
            EXPECT_EQ(lines(end.out, "saved ").size(), 1u) << end.out;
            for (const std::string& row : metrics_of(w / run)) {
                const json numbers = json::parse(row);
                if (!numbers.contains("loss/total")) continue;
                EXPECT_EQ(numbers["ranks"], n);
                EXPECT_EQ(numbers.contains("spread"), n > 1);
            }
        }
    }
    // 2 ranks, then 4, then 1.
    ASSERT_EQ(fbt(2, w.train("parts", steps + Arguments{"--stop-after", "10"})).code, 0);
    ASSERT_EQ(fbt(4, resume(w / "parts") + Arguments{"--stop-after", "25"}).code, 0);
    ASSERT_EQ(fbt(1, resume(w / "parts")).code, 0);
    std::vector<int> ranks;
    for (const std::string& row : metrics_of(w / "parts"))
        if (const json numbers = json::parse(row); numbers.contains("ranks"))
            ranks.push_back(numbers["ranks"]);
    EXPECT_EQ(ranks[9], 2);
    EXPECT_EQ(ranks[10], 4);
    EXPECT_EQ(ranks[25], 1);

    const double rounding = distance(w / "f32-1", w / "f64-1");
    RecordProperty("rounding", std::to_string(rounding));
    ASSERT_GT(rounding, 0);
    ASSERT_LT(rounding, 5e-3) << "8 * 5e-3 * 2^-29 < 1e-10";
    for (const char* run : {"f32-2", "f32-4", "parts"}) {
        const double d = distance(w / "f32-1", w / run);
        EXPECT_LE(d, 8 * rounding) << run;
        EXPECT_GT(d, 0) << run << ": nothing was shared out";
    }
    EXPECT_LE(distance(w / "f64-1", w / "f64-2"), 1e-10);
    EXPECT_LE(distance(w / "f64-1", w / "f64-4"), 1e-10);
}

TEST(Ranks, RunsRepeatBitForBit) {
    NEEDS_MPIRUN();
    const Workplace w;
    for (const char* dtype : {"f32", "bf16"}) {
        const auto train = [&](const std::string& name, const Arguments& more = {}) {
            const Arguments settings = {"--steps", "12", "--eval-every", "5", "--dtype", dtype};
            const Launched end = fbt(2, w.train(name + dtype, settings + more));
            EXPECT_EQ(end.code, 0) << end.out;
            return w / (name + dtype);
        };
        const std::string whole = train("whole");
        EXPECT_TRUE(same_run(whole, train("again"), 12));
        EXPECT_TRUE(same_run(whole, train("zero0", {"--zero", "0"}), 12));
        EXPECT_EQ(get(whole + "/step_00000012/config.json"),
                  get(w / ("again" + std::string(dtype)) + "/step_00000012/config.json"));
        const std::string parts = train("parts", {"--stop-after", "7"});
        EXPECT_EQ(fbt(2, resume(parts)).code, 0);
        EXPECT_TRUE(same_run(whole, parts, 12));
    }
    const auto five = fbt(5, w.train("five", {"--steps", "12", "--eval-every", "5"}));
    ASSERT_EQ(five.code, 0) << five.out;
    EXPECT_FALSE(same_run(w / "wholef32", w / "five", 12)) << "the comparison can fail";
}

// At a rate that changes nothing the models stay the same to the last bit. Every row of an
// evaluation is then the same, and its sums in double differ by their order.
TEST(Ranks, EvaluationsAreSharedOut) {
    NEEDS_MPIRUN();
    const Workplace w;
    for (const Arguments& arithmetic : {Arguments{}, kReference}) {
        std::map<int, std::string> said;
        for (int n : {1, 2, 4}) {
            const std::string run = std::to_string(arithmetic.size()) + "-" + std::to_string(n);
            const Arguments train =
                w.train(run, Arguments{"--steps", "1", "--weight-decay", "0"} + arithmetic);
            const Launched end =
                fbt(n, with(with(train, "--learning-rate", "1e-30"), "--eval-sequences", "13"));
            ASSERT_EQ(end.code, 0) << end.out;
            const auto found = lines(end.out, "step 1/1 | validation");
            ASSERT_EQ(found.size(), 1u) << end.out;
            EXPECT_NE(found[0].find("bits/byte"), std::string::npos) << found[0];
            said[n] = found[0];
            const json row = json::parse(metrics_of(w / run).back());
            const json alone =
                json::parse(metrics_of(w / (std::to_string(arithmetic.size()) + "-1")).back());
            int compared = 0;
            for (const auto& [key, value] : alone.items())
                if (key.starts_with("val/")) {
                    EXPECT_NEAR(row.at(key).get<double>(), value.get<double>(), 1e-12) << key;
                    ++compared;
                }
            EXPECT_EQ(compared, 5);
        }
        EXPECT_EQ(said[2], said[1]);
        EXPECT_EQ(said[4], said[1]);
    }
}

TEST(Ranks, SomeHaveNoSequenceAndTasksWorkToo) {
    NEEDS_MPIRUN();
    const Workplace w;
    const auto train = [&](int n, const std::string& run, int sequences) {
        const Launched end =
            fbt(n, Arguments{"train", "--preset", "parity", "--length", "5,9", "--dim", "16",
                             "--steps", "8", "--eval-sequences", "7", "--tokens-per-step",
                             std::to_string(9 * sequences), "--out", w / run, "--threads", "1"} +
                       kReference);
        EXPECT_EQ(end.code, 0) << end.out;
    };
    for (int sequences : {1, 6}) {
        const std::string name = "task" + std::to_string(sequences) + "-";
        train(1, name + "1", sequences);
        train(3, name + "3", sequences);
        EXPECT_LE(distance(w / (name + "1"), w / (name + "3")), 1e-10);
        const json row = json::parse(metrics_of(w / (name + "3")).front());
        EXPECT_EQ(row["spread"] == 2, sequences == 1) << "one of three ranks does all the work";
    }
    EXPECT_GT(distance(w / "task1-1", w / "task6-1"), 0.01) << "the comparison can fail";
    // Text, with fewer sequences than ranks as well.
    const Arguments few =
        with(w.train("few1", Arguments{"--steps", "8"} + kReference), "--tokens-per-step", "24");
    ASSERT_EQ(fbt(1, few).code, 0);
    const Launched end = fbt(4, with(few, "--out", w / "few4"));
    ASSERT_EQ(end.code, 0) << end.out;
    EXPECT_LE(distance(w / "few1", w / "few4"), 1e-10);
}

// Trains without end into `run` until a checkpoint is there.
const Arguments kEndless = {"--steps", "1000000", "--save-every", "5", "--log-every", "1000"};
// The limit leaves room for a machine that stands still for some seconds, as shared ones do; the
// seconds beyond it are the launcher's too.
constexpr double kLimit = 8, kGrace = 60;
const Arguments kPatience = {"--comm-timeout", "8"};

// Passes when the newest checkpoint goes on for some steps, by one rank or more.
testing::AssertionResult goes_on(const std::string& run, int ranks) {
    int newest = 0;
    for (const auto& entry : fs::directory_iterator(run))
        if (const std::string name = entry.path().filename(); name.starts_with("step_"))
            newest = std::max(newest, std::stoi(name.substr(5)));
    const int end = newest + 3;
    const Launched more = fbt(ranks, resume(run) + Arguments{"--stop-after", std::to_string(end)});
    if (more.code != 0) return testing::AssertionFailure() << more.code << ": " << more.out;
    const json last = json::parse(metrics_of(run).back());
    if (last.at("step") != end || int(rows_in(run)) != end)
        return testing::AssertionFailure() << "not " << end << " steps: " << last.dump();
    return testing::AssertionSuccess();
}

TEST(RanksTrouble, ARankThatIsKilledEndsAllAndLosesNothing) {
    NEEDS_MPIRUN();
    const Workplace w;
    for (int victim : {0, 1}) {
        const std::string run = w / ("run" + std::to_string(victim));
        Training launch(
            mpirun(2, {}, command(w.train("run" + std::to_string(victim), kEndless + kPatience))));
        ASSERT_TRUE(eventually([&] { return has_checkpoint(run); })) << launch.out();
        const std::map<int, pid_t> ranks = processes_of(run);
        ASSERT_EQ(ranks.size(), 2u);
        kill(ranks.at(victim), SIGKILL);
        const Launched end = finished(launch, kLimit + kGrace);
        EXPECT_GT(end.code, 0) << end.out;
        EXPECT_NE(end.out.find("rank " + std::to_string(victim)), std::string::npos)
            << "the launcher says who: " << end.out;
        EXPECT_TRUE(all_gone(run));
        EXPECT_TRUE(goes_on(run, 2));
    }
}

TEST(RanksTrouble, ARankThatIsStoppedEndsAll) {
    NEEDS_MPIRUN();
    const Workplace w;
    Training launch(mpirun(2, {}, command(w.train("run", kEndless + kPatience))));
    ASSERT_TRUE(eventually([&] { return has_checkpoint(w / "run"); })) << launch.out();
    const std::map<int, pid_t> ranks = processes_of(w / "run");
    ASSERT_EQ(ranks.size(), 2u);
    kill(ranks.at(1), SIGSTOP);
    const Launched end = finished(launch, kLimit + kGrace);
    EXPECT_TRUE(refused(end, 5, {"rank 0 of 2: ", "waited 8 s", "--comm-timeout"}));
    EXPECT_TRUE(end.out.find("reduce") != end.out.npos || end.out.find("gather") != end.out.npos ||
                end.out.find("broadcast") != end.out.npos)
        << "which op: " << end.out;
    EXPECT_TRUE(all_gone(w / "run"));
    EXPECT_TRUE(goes_on(w / "run", 1));
}

TEST(RanksTrouble, ACutCableEndsAllAndLosesNothing) {
    NEEDS_MPIRUN();
    TwoMachines machines;
    if (!machines.trouble().empty()) GTEST_SKIP() << machines.trouble();
    const Workplace w;
    Training launch(machines.on_a(
        mpirun(2, machines.options(2), command(w.train("run", kEndless + kPatience)))));
    ASSERT_TRUE(eventually([&] { return has_checkpoint(w / "run"); })) << launch.out();
    ASSERT_EQ(processes_of(w / "run").size(), 2u);
    machines.cut();
    const double start = launch.seconds();
    EXPECT_TRUE(all_gone(w / "run"));
    EXPECT_LT(launch.seconds() - start, kLimit + kGrace);
    // What the rank on the other machine says cannot come across.
    const auto said = lines(launch.out(), "fbt: ");
    ASSERT_EQ(said.size(), 1u) << launch.out();
    EXPECT_TRUE(said[0].starts_with("fbt: rank 0 of 2: ")) << said[0];
    EXPECT_NE(said[0].find("waited 8 s"), std::string::npos) << said[0];
    launch.signal(SIGKILL);  // the launcher itself, which cannot tell its other half to end
    EXPECT_TRUE(goes_on(w / "run", 1));
}

TEST(RanksTrouble, ASignalToOneIsASignalToAll) {
    NEEDS_MPIRUN();
    const Workplace w;
    struct Case {
        const char* name;
        int number, to;  // a rank, or the launcher
    };
    for (const Case& c :
         {Case{"launcher", SIGUSR1, -1}, Case{"first", SIGTERM, 0}, Case{"last", SIGTERM, 2}}) {
        const std::string run = w / c.name;
        Training launch(mpirun(3, {},
                               command(w.train(c.name, {"--steps", "1000000", "--save-every", "0",
                                                        "--log-every", "1000"}))));
        ASSERT_TRUE(eventually([&] { return rows_in(run) > 3; })) << launch.out();
        if (c.to < 0)
            launch.signal(c.number);
        else
            kill(processes_of(run).at(c.to), c.number);
        const Launched end = finished(launch, kGrace);
        EXPECT_EQ(end.code, 75) << c.name << ": " << end.out;
        EXPECT_EQ(lines(end.out, "stopped by a signal; saved ").size(), 1u) << end.out;
        EXPECT_EQ(lines(end.out, "fbt: ").size(), 0u) << end.out;
        EXPECT_TRUE(all_gone(run));
        EXPECT_TRUE(c.to >= 0 || goes_on(run, 2));
    }
}

TEST(RanksTrouble, WrongSettingsAreSaidOnce) {
    NEEDS_MPIRUN();
    const Workplace w;
    const Arguments train = w.train("run", {"--steps", "2"});
    EXPECT_TRUE(refused(fbt(2, train + Arguments{"--preset", "no"}), 2, {"--preset", "no"}));
    EXPECT_TRUE(refused(fbt(2, train + Arguments{"--zero", "2"}), 2, {"--zero", "2"}));
    EXPECT_TRUE(refused(fbt(2, with(train, "--data", w / "nowhere")), 4, {"nowhere"}));
    put(w / "file", "");
    EXPECT_TRUE(refused(fbt(2, with(train, "--out", w / "file")), 5, {"folder", "file"}));
    EXPECT_FALSE(fs::exists(w / "run"));
    ASSERT_EQ(fbt(1, train).code, 0);
    EXPECT_TRUE(refused(fbt(2, train), 2, {"step_00000002", "--resume"}));
    const Arguments wild =
        w.train("wild", {"--steps", "30", "--max-skipped", "2", "--clip-norm", "0"});
    EXPECT_TRUE(refused(fbt(2, with(wild, "--learning-rate", "1e30")), 3,
                        {"diverged", "2 steps in a row"}));
}

TEST(RanksTrouble, RanksOfDifferentCommandsAreRefused) {
    NEEDS_MPIRUN();
    const Workplace w;
    const auto both = [&](const Arguments& first, const Arguments& second) {
        Training launch(mpirun(1, {}, command(first)) + Arguments{":", "-n", "1"} +
                        command(second));
        return finished(launch, kLong);
    };
    const Arguments train = w.train("run", {"--steps", "6"});
    EXPECT_TRUE(refused(both(train, train + Arguments{"--jitter", "0.01"}), 2,
                        {"rank 1: ", "other settings"}));
    EXPECT_TRUE(refused(both(train + Arguments{"--stop-after", "3"}, train), 2,
                        {"rank 1: ", "other settings"}));
    EXPECT_TRUE(refused(both(train, with(train, "--steps", "0")), 2, {"rank 1: ", "steps", "0"}));
    EXPECT_FALSE(fs::exists(w / "run"));
    // Rank 1 sees another folder, in which the run is further.
    for (const char* step : {"1", "2"})
        ASSERT_EQ(fbt(1, with(train, "--out", w / step) + Arguments{"--stop-after", step}).code, 0);
    EXPECT_TRUE(refused(both(resume(w / "1"), resume(w / "2")), 4,
                        {"rank 1: ", "step 2", "rank 0 step 1"}));
}

TEST(RanksTrouble, FullDiskEndsAllAndLosesNothing) {
    NEEDS_MPIRUN();
    const Workplace w;
    SmallDisk disk(w / "disk");
    if (!disk.mounted()) GTEST_SKIP() << "no tmpfs can be mounted here: " << disk.reason();
    const Arguments settings = {"--steps", "30", "--save-every", "1", "--keep-last", "40"};
    EXPECT_TRUE(refused(fbt(2, w.train("disk/run", settings)), 5, {"No space left", "disk/run"}));
    ASSERT_TRUE(disk.enlarge());
    ASSERT_EQ(fbt(2, resume(w / "disk/run")).code, 0);
    ASSERT_EQ(fbt(2, w.train("whole", settings)).code, 0);
    EXPECT_TRUE(same_run(w / "whole", w / "disk/run", 30));
}

TEST(RanksTrouble, MetricsThatCannotBeWrittenEndAll) {
    NEEDS_MPIRUN();
    const Workplace w;
    SmallDisk disk(w / "disk");
    if (!disk.mounted()) GTEST_SKIP() << "no tmpfs can be mounted here: " << disk.reason();
    put(w / "disk/most", std::string(fs::space(w / "disk").available - 16384, 'x'));
    const Launched end = fbt(2, w.train("disk/run", {"--steps", "100000", "--save-every", "0"}));
    EXPECT_TRUE(refused(end, 5, {"No space left", "metrics.jsonl"}));
    EXPECT_FALSE(has_checkpoint(w / "disk/run")) << "there was no room for one";
}

// Without a launcher that this build knows, on a CPU.
TEST(RanksAlone, VariablesWithoutMpiAreExplained) {
    const Workplace w;
    const auto with = [&](const Arguments& variables) {
        Training launch(Arguments{"env"} + variables + command(w.train("run", {"--steps", "1"})));
        return finished(launch, kLong);
    };
    EXPECT_TRUE(refused(with({"WORLD_SIZE=2", "RANK=0"}), 2, {"2 ranks", "mpirun -n 2"}));
    EXPECT_TRUE(refused(with({"WORLD_SIZE=x", "RANK=0"}), 2, {"WORLD_SIZE", "\"x\""}));
    EXPECT_TRUE(refused(with({"WORLD_SIZE=2"}), 2, {"RANK", "missing"}));
    EXPECT_TRUE(refused(with({"WORLD_SIZE=2", "RANK=2"}), 2, {"rank 2 of 2"}));
    EXPECT_FALSE(fs::exists(w / "run"));
    EXPECT_EQ(with({"WORLD_SIZE=1", "RANK=0"}).code, 0);
}

apps::Launch launch_of(const std::map<std::string, std::string>& environment) {
    return apps::Launch::from([&](const char* name) -> const char* {
        const auto found = environment.find(name);
        return found == environment.end() ? nullptr : found->second.c_str();
    });
}

TEST(LaunchFrom, EveryLauncher) {
    using By = apps::Launch::By;
    const auto is = [](const apps::Launch& x, By by, int rank, int size, int local_rank,
                       int local_size) {
        return x.by == by && x.rank == rank && x.size == size && x.local_rank == local_rank &&
               x.local_size == local_size;
    };
    EXPECT_TRUE(is(launch_of({}), By::nobody, 0, 1, 0, 1));
    const std::map<std::string, std::string> open_mpi = {{"OMPI_COMM_WORLD_RANK", "5"},
                                                         {"OMPI_COMM_WORLD_SIZE", "8"},
                                                         {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                                         {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"}};
    EXPECT_TRUE(is(launch_of(open_mpi), By::mpi, 5, 8, 1, 4));
    EXPECT_TRUE(is(launch_of({{"PMI_RANK", "2"},
                              {"PMI_SIZE", "3"},
                              {"MPI_LOCALRANKID", "1"},
                              {"MPI_LOCALNRANKS", "2"}}),
                   By::pmi, 2, 3, 1, 2));
    EXPECT_TRUE(is(launch_of({{"PMI_RANK", "2"},
                              {"PMI_SIZE", "3"},
                              {"SLURM_STEP_NUM_TASKS", "3"},
                              {"SLURM_STEP_TASKS_PER_NODE", "3"},
                              {"SLURM_LOCALID", "1"}}),
                   By::pmi, 2, 3, 1, 3));
    const std::map<std::string, std::string> slurm = {{"SLURM_PROCID", "6"},
                                                      {"SLURM_STEP_NUM_TASKS", "7"},
                                                      {"SLURM_LOCALID", "2"},
                                                      {"SLURM_NODEID", "2"},
                                                      {"SLURM_STEP_TASKS_PER_NODE", "2(x2),3"},
                                                      {"SLURM_STEP_NODELIST", "node[03-07,9],x"}};
    EXPECT_TRUE(is(launch_of(slurm), By::slurm, 6, 7, 2, 3));
    auto pmix = slurm;
    pmix["PMIX_RANK"] = "6";
    EXPECT_TRUE(is(launch_of(pmix), By::mpi, 6, 7, 2, 3));
    pmix["SLURM_NODEID"] = "1";
    EXPECT_EQ(launch_of(pmix).local_size, 2);
    pmix["SLURM_CPUS_PER_TASK"] = "5";
    EXPECT_EQ(launch_of(pmix).cores, 5);
    const std::map<std::string, std::string> variables = {
        {"RANK", "3"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "2"}};
    EXPECT_TRUE(is(launch_of(variables), By::variables, 3, 4, 1, 2));
    // mpirun and torchrun work inside of Slurm's jobs, too.
    for (auto inner : {open_mpi, variables}) {
        const apps::Launch expected = launch_of(inner);
        inner.insert(slurm.begin(), slurm.end());
        EXPECT_TRUE(is(launch_of(inner), expected.by, expected.rank, expected.size,
                       expected.local_rank, expected.local_size));
    }
    // A job of one needs nobody.
    EXPECT_TRUE(is(launch_of({{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}}),
                   By::nobody, 0, 1, 0, 1));
    EXPECT_TRUE(is(launch_of({{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}}), By::nobody, 0,
                   1, 0, 1));
}

TEST(LaunchFrom, WhereRankZeroIs) {
    const auto address = [](const std::string& nodes) {
        return launch_of({{"SLURM_PROCID", "0"},
                          {"SLURM_STEP_NUM_TASKS", "2"},
                          {"SLURM_STEP_NODELIST", nodes}})
            .address;
    };
    EXPECT_EQ(address("node[03-07,9],x"), "node03");
    EXPECT_EQ(address("node[12,14-15]"), "node12");
    EXPECT_EQ(address("node[3]"), "node3");
    EXPECT_EQ(address("a,b"), "a");
    EXPECT_EQ(address("a,b[1-2]"), "a");
    EXPECT_EQ(address("gpu1"), "gpu1");
    EXPECT_EQ(address("gpu-1.site"), "gpu-1.site");
    EXPECT_EQ(address("r[1-2]-ib"), "r1-ib");
    EXPECT_EQ(address("rack[1-2]node[3-4,7],x"), "rack1node3");
    EXPECT_EQ(address("r[1-2]-ib,s"), "r1-ib");
    const apps::Launch plain = launch_of({{"RANK", "0"}, {"WORLD_SIZE", "2"}});
    EXPECT_EQ(plain.address, "");
    EXPECT_EQ(plain.port, 29500);
    const apps::Launch named = launch_of({{"RANK", "0"},
                                          {"WORLD_SIZE", "2"},
                                          {"MASTER_ADDR", "head"},
                                          {"MASTER_PORT", "7"},
                                          {"SLURM_STEP_NODELIST", "node[1-2]"}});
    EXPECT_EQ(named.address, "head");
    EXPECT_EQ(named.port, 7);
}

TEST(LaunchFrom, NumbersAreChecked) {
    const auto refuses = [](std::initializer_list<const char*> words,
                            const std::map<std::string, std::string>& environment) {
        return throws(tensor::ErrorKind::usage, words, [&] { launch_of(environment); });
    };
    for (const char* wrong : {"", "x", "2x", " 2", "2.0", "-1", "0", "99999999999999"})
        EXPECT_TRUE(refuses({"WORLD_SIZE", wrong}, {{"RANK", "0"}, {"WORLD_SIZE", wrong}}));
    EXPECT_TRUE(refuses({"RANK", "missing"}, {{"WORLD_SIZE", "2"}}));
    EXPECT_TRUE(refuses({"OMPI_COMM_WORLD_RANK", "missing"}, {{"OMPI_COMM_WORLD_SIZE", "2"}}));
    EXPECT_TRUE(refuses({"PMI_RANK", "\"\""}, {{"PMI_SIZE", "2"}, {"PMI_RANK", ""}}));
    EXPECT_TRUE(refuses({"SLURM_PROCID", "missing"}, {{"SLURM_STEP_NUM_TASKS", "2"}}));
    EXPECT_TRUE(
        refuses({"LOCAL_RANK", "-1"}, {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "-1"}}));
    EXPECT_TRUE(
        refuses({"MASTER_PORT", "0"}, {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", "0"}}));
    EXPECT_TRUE(refuses({"rank 2 of 2"}, {{"RANK", "2"}, {"WORLD_SIZE", "2"}}));
}

TEST(LaunchFrom, ThreadsAreAPartOfTheMachine) {
    apps::Launch launch;
    EXPECT_EQ(launch.threads(0), 0) << "alone: all";
    EXPECT_EQ(launch.threads(3), 3);
    launch.size = launch.local_size = 1 << 20;
    EXPECT_EQ(launch.threads(0), 1) << "one at least";
    EXPECT_EQ(launch.threads(3), 3) << "what is asked for";
    launch.local_size = 2;
    const int cores = int(sysconf(_SC_NPROCESSORS_ONLN));
    EXPECT_LE(launch.threads(0), std::max(1, cores / 2));
    EXPECT_GE(launch.threads(0), 1);
    launch.cores = 1;
    EXPECT_EQ(launch.threads(0), 1) << "what the launcher leaves";
}

#ifdef FBT_SIMT_BINARY
// A job of the emulated device's ranks, which the variables bring together.
std::vector<Launched> by_variables(int ranks, const Arguments& arguments) {
    std::vector<std::unique_ptr<Training>> launches;
    for (int r = 0; r < ranks; ++r)
        launches.push_back(std::make_unique<Training>(
            Arguments{"env", "RANK=" + std::to_string(r), "WORLD_SIZE=" + std::to_string(ranks),
                      "LOCAL_RANK=0", "MASTER_ADDR=127.0.0.1",
                      "MASTER_PORT=" + std::to_string(20000 + getpid() % 20000), FBT_SIMT_BINARY} +
            arguments));
    std::vector<Launched> ends;
    for (auto& launch : launches) ends.push_back(finished(*launch, kLong));
    return ends;
}

// The whole path of several GPUs but the GPUs: NCCL's calls, streams and events, met over TCP.
TEST(RanksOnDevices, TrainTheSameModelOverNccl) {
    if (json::parse(tests::fbt(Arguments{"info", "--json"}).out).at("sanitizers") != "")
        GTEST_SKIP() << "takes minutes with sanitizers, which see NCCL's collectives in simt_test";
    const Workplace w;
    const Arguments short_run = {"--steps", "3"};
    const Arguments on_device = short_run + Arguments{"--device", "simt"};
    const Launched exact = fbt(1, w.train("exact", short_run + kReference));
    ASSERT_EQ(exact.code, 0) << exact.out;
    Training one(Arguments{FBT_SIMT_BINARY} + w.train("one", on_device));
    const Launched alone = finished(one, kLong);
    ASSERT_EQ(alone.code, 0) << alone.out;
    for (const char* run : {"two", "again"}) {
        const std::vector<Launched> ends =
            by_variables(2, w.train(run, on_device + Arguments{"--reproducible", "true"}));
        EXPECT_EQ(ends[0].code, 0) << ends[0].out;
        EXPECT_NE(ends[0].out.find("in each of 2 ranks over NCCL"), std::string::npos);
        EXPECT_EQ(ends[1].code, 0) << ends[1].out;
        EXPECT_EQ(ends[1].out, "");
    }
    EXPECT_LE(distance(w / "two", w / "one"), 8 * distance(w / "one", w / "exact"));
    EXPECT_TRUE(same_run(w / "again", w / "two", 3));

    const std::vector<Launched> ends =
        by_variables(2, w.train("bf16", on_device + Arguments{"--dtype", "bf16", "--zero", "0"}));
    EXPECT_EQ(ends[0].code, 0) << ends[0].out;
    EXPECT_EQ(ends[1].code, 0) << ends[1].out;
}

TEST(RanksOnDevices, OtherSettingsAreRefused) {
    const Workplace w;
    Training first(Arguments{"env", "RANK=0", "WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1",
                             "MASTER_PORT=" + std::to_string(20001 + getpid() % 20000),
                             FBT_SIMT_BINARY} +
                   w.train("run", {"--device", "simt"}));
    Training second(Arguments{"env", "RANK=1", "WORLD_SIZE=2", "MASTER_ADDR=127.0.0.1",
                              "MASTER_PORT=" + std::to_string(20001 + getpid() % 20000),
                              FBT_SIMT_BINARY} +
                    w.train("run", {"--device", "simt", "--clip-norm", "9"}));
    const Launched said = finished(first, kLong), other = finished(second, kLong);
    EXPECT_TRUE(refused(said, 2, {"rank 1", "other settings"}));
    EXPECT_EQ(other.code, 2);
    EXPECT_EQ(other.out, "");
}
#endif

}  // namespace
}  // namespace fbt::tests
