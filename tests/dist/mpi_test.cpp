// Jobs of several ranks over MPI: what they compute, and how they end when one of them is lost.
#include <gtest/gtest.h>

#include "dist/dist.h"
#include "tests/dist/launch.h"

namespace fbt::tests {
namespace {

// The rank program on these of its tests.
Arguments rank(const std::string& filter, double seconds, const std::string& folder) {
    return {FBT_RANK,
            "--gtest_brief=1",
            "--gtest_color=no",
            "--gtest_filter=" + filter,
            std::to_string(seconds),
            folder};
}

int count(const std::string& text, const std::string& word) {
    int n = 0;
    for (size_t at = 0; (at = text.find(word, at)) != text.npos; at += word.size()) ++n;
    return n;
}

// The process of a rank of a job that has announced itself; 0 when it does not.
pid_t process_of(int rank, const TemporaryFolder& folder) {
    const std::string file = folder / ("rank" + std::to_string(rank));
    if (!eventually([&] { return std::filesystem::exists(file); })) return 0;
    return std::stoi(get(file));
}

bool gone(pid_t process) { return kill(process, 0) != 0; }

class Mpi : public testing::TestWithParam<int> {};

TEST_P(Mpi, Collectives) {
    NEEDS_MPIRUN();
    const int n = GetParam();
    Launch launch(mpirun(n, {}, rank("-Trouble.*", 100, "")));
    const Launched end = finished(launch, 300);
    EXPECT_EQ(end.code, 0) << end.out;
    EXPECT_EQ(count(end.out, "[  PASSED  ] 2"), n) << end.out;
    for (int r = 0; r < n; ++r)
        EXPECT_NE(end.out.find("rank " + std::to_string(r) + " of " + std::to_string(n)),
                  std::string::npos)
            << end.out;
}
INSTANTIATE_TEST_SUITE_P(Ranks, Mpi, testing::Values(1, 2, 3, 4));

// Without a launcher a process is a job of one.
TEST(MpiAlone, NeedsNoLauncher) {
    if (dist::mpi_version().empty()) GTEST_SKIP() << "this build has no MPI";
    Launch launch(rank("Sums*:Jobs*", 100, ""));
    const Launched end = finished(launch, 100);
    EXPECT_EQ(end.code, 0) << end.out;
    EXPECT_NE(end.out.find("rank 0 of 1"), std::string::npos) << end.out;
}

TEST(MpiVersion, NamesTheLibrary) {
    const std::string version = dist::mpi_version();
    if (version.empty()) GTEST_SKIP() << "this build has no MPI";
    EXPECT_NE(version.find_first_of("0123456789"), std::string::npos) << version;
    EXPECT_EQ(version.find_first_of(",\n\t"), std::string::npos) << version;
}

// The limit leaves room for a machine that stands still for some seconds, as shared ones do; the
// seconds beyond it, until the last process is gone, are the launcher's too.
constexpr double kLimit = 8, kGrace = 60;

TEST(MpiTrouble, ARankThatStaysAwayEndsTheJob) {
    NEEDS_MPIRUN();
    TemporaryFolder folder;
    Launch launch(mpirun(3, {}, rank("Trouble.OneRankStaysAway", kLimit, folder.path())));
    const pid_t last = process_of(2, folder);
    ASSERT_GT(last, 0) << launch.out();
    const Launched end = finished(launch, kLimit + kGrace);
    EXPECT_EQ(end.code, 5) << end.out;
    EXPECT_GE(end.seconds, kLimit);
    EXPECT_NE(end.out.find("fbt: rank 0 of 3: all_reduce of 12345 f32 waited 8 s"),
              std::string::npos)
        << end.out;
    EXPECT_TRUE(eventually([&] { return gone(last); }));
}

TEST(MpiTrouble, ARankThatIsKilledEndsTheJob) {
    NEEDS_MPIRUN();
    TemporaryFolder folder;
    Launch launch(mpirun(3, {}, rank("Trouble.WorksUntilStruck", kLimit, folder.path())));
    const pid_t first = process_of(0, folder), second = process_of(1, folder);
    ASSERT_TRUE(first > 0 && second > 0) << launch.out();
    kill(second, SIGKILL);
    const Launched end = finished(launch, kLimit + kGrace);
    EXPECT_GT(end.code, 0) << end.out;
    EXPECT_TRUE(eventually([&] { return gone(first); }));
}

TEST(MpiTrouble, ARankThatIsStoppedEndsTheJob) {
    NEEDS_MPIRUN();
    TemporaryFolder folder;
    Launch launch(mpirun(3, {}, rank("Trouble.WorksUntilStruck", kLimit, folder.path())));
    const pid_t first = process_of(0, folder), second = process_of(1, folder);
    ASSERT_TRUE(first > 0 && second > 0) << launch.out();
    kill(second, SIGSTOP);
    const Launched end = finished(launch, kLimit + kGrace);
    EXPECT_EQ(end.code, 5) << end.out;
    EXPECT_NE(end.out.find("of 3: all_reduce of 100000 f32 waited 8 s"), std::string::npos)
        << end.out;
    EXPECT_TRUE(eventually([&] { return gone(first) && gone(second); }));
}

TEST(MpiTrouble, ARankThatNeverStartsEndsTheJob) {
    NEEDS_MPIRUN();
    Launch launch(mpirun(2, {}, rank("Trouble.OneRankNeverStarts", kLimit, "")));
    const Launched end = finished(launch, kLimit + kGrace);
    EXPECT_EQ(end.code, 5) << end.out;
    EXPECT_NE(end.out.find("MPI_Init waited 8 s"), std::string::npos) << end.out;
}

TEST(MpiTrouble, ARankThatNeverFinishesEndsTheJob) {
    NEEDS_MPIRUN();
    Launch launch(mpirun(2, {}, rank("Trouble.OneRankNeverFinishes", kLimit, "")));
    const Launched end = finished(launch, kLimit + kGrace);
    EXPECT_EQ(end.code, 5) << end.out;
    EXPECT_NE(end.out.find("rank 0 of 2: MPI_Finalize waited 8 s"), std::string::npos) << end.out;
}

TEST(MpiTrouble, OneRankCanEndAll) {
    NEEDS_MPIRUN();
    Launch launch(mpirun(3, {}, rank("Trouble.OneRankEndsAll", 100, "")));
    const Launched end = finished(launch, 50);
    EXPECT_EQ(end.code, 3) << end.out;
}

TEST(MpiTrouble, LeavingDoesNotWaitForTheOthers) {
    NEEDS_MPIRUN();
    Launch launch(mpirun(2, {}, rank("Trouble.OneRankLeavesInTheMiddle", 100, "")));
    const Launched end = finished(launch, 50);
    EXPECT_EQ(end.code, 7) << end.out;
    EXPECT_NE(end.out.find("rank 0 has left"), std::string::npos) << end.out;
}

TEST(MpiMachines, Collectives) {
    NEEDS_MPIRUN();
    TwoMachines machines;
    if (!machines.trouble().empty()) GTEST_SKIP() << machines.trouble();
    Launch launch(machines.on_a(mpirun(4, machines.options(4), rank("-Trouble.*", 100, ""))));
    const Launched end = finished(launch, 300);
    EXPECT_EQ(end.code, 0) << end.out;
    EXPECT_EQ(count(end.out, "[  PASSED  ] 2"), 4) << end.out;
}

// The cable is pulled in the middle of the work: every rank says so and ends, on both sides.
TEST(MpiMachines, ACutCableEndsEveryRank) {
    NEEDS_MPIRUN();
    TwoMachines machines;
    if (!machines.trouble().empty()) GTEST_SKIP() << machines.trouble();
    TemporaryFolder folder;
    Launch launch(machines.on_a(
        mpirun(4, machines.options(4), rank("Trouble.WorksUntilStruck", kLimit, folder.path()))));
    std::vector<pid_t> ranks;
    for (int r = 0; r < 4; ++r) ranks.push_back(process_of(r, folder));
    ASSERT_TRUE(std::ranges::all_of(ranks, [](pid_t p) { return p > 0; })) << launch.out();
    machines.cut();
    const double start = launch.seconds();
    EXPECT_TRUE(eventually([&] { return std::ranges::all_of(ranks, gone); }));
    EXPECT_LT(launch.seconds() - start, kLimit + kGrace);
    // One rank of each machine speaks for it; its launcher ends the others, where it can.
    std::vector<int> spoke;
    for (const int r : {0, 1, 2, 3})
        if (get(folder / std::to_string(ranks[r]))
                .starts_with("rank " + std::to_string(r) +
                             " of 4: all_reduce of 100000 f32 waited 8 s"))
            spoke.push_back(r);
    ASSERT_FALSE(spoke.empty());
    EXPECT_EQ(spoke.front(), 0) << launch.out();
    EXPECT_GE(spoke.back(), 2) << launch.out();
    EXPECT_NE(launch.out().find("fbt: rank 0 of 4: all_reduce"), std::string::npos) << launch.out();
    // The launcher itself, which cannot tell its other half to end, is left to its user.
}

}  // namespace
}  // namespace fbt::tests
