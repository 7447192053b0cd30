// Collectives over NCCL, real or emulated, between processes: each test starts this binary once
// more for every rank, which then runs the one test that is disabled below, in the part that its
// environment names. On real devices every rank needs a GPU of its own.
#include <fcntl.h>
#include <netinet/in.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <future>
#include <map>
#include <numeric>
#include <random>
#include <sstream>
#include <thread>

#include "dist/dist.h"
#include "tensor/ops.h"
#include "tests/compare.h"
#include "tests/cuda/device.h"

extern char** environ;

namespace fbt::tests {
namespace {

using dist::Communicator;
using tensor::Context;
using tensor::DType;
using tensor::Shape;
using tensor::Tensor;
using Clock = std::chrono::steady_clock;
using Counts = std::vector<int64_t>;
using std::chrono::milliseconds;

// ---- in a rank ----

struct Rank {
    int rank, size;
    bool in_order;  // sums are reproducible
    Context& context;
    Communicator& comm;

    Tensor tensor(const std::vector<float>& values) const {
        return Tensor::from(context, values, {int64_t(values.size())});
    }
};

// What a rank brings: anybody can tell, so everybody knows the result.
template <class T = float>
std::vector<T> brought(int rank, int64_t n) {
    std::vector<T> x = normal<T>(size_t(n), unsigned(100 + rank));
    for (T& v : x) v /= 3;  // all bits in use, in double too
    return x;
}
template <class T = float>
std::vector<T> sum_of_ranks(int size, int64_t n) {
    std::vector<T> sum = brought<T>(0, n);
    for (int r = 1; r < size; ++r) {
        const std::vector<T> x = brought<T>(r, n);
        for (size_t i = 0; i < sum.size(); ++i) sum[i] += x[i];
    }
    return sum;
}
template <class T>
std::vector<T> cut(const std::vector<T>& v, const Counts& counts, int r) {
    const int64_t at = std::accumulate(counts.begin(), counts.begin() + r, int64_t(0));
    return {v.begin() + at, v.begin() + at + counts[size_t(r)]};
}

// Pieces of every kind: equal ones, uneven, with empty ones, all in one place.
std::vector<Counts> pieces_for(int size) {
    std::vector<Counts> all = {
        Counts(size_t(size), 1), Counts(size_t(size), 1601), Counts(), Counts(),
        Counts(size_t(size), 0), Counts(size_t(size), 0)};
    for (int r = 0; r < size; ++r) {
        all[2].push_back(37 + 3 * r);
        all[3].push_back(r % 2 ? 0 : 1001 + r);
    }
    all[4].back() = 63;
    return all;
}

template <class T>
testing::AssertionResult is_sum(const std::vector<T>& got, const std::vector<T>& in_order,
                                const Rank& r) {
    if (r.in_order) return same_bits(got, in_order);
    // Standard normal numbers, thirds of them, none beyond 6/3, added in any order.
    return close(got, in_order, 2.0 * r.size * 2 * gamma<T>(r.size));
}

template <class T>
void check_sums(const Rank& r) {
    for (const Counts& counts : pieces_for(r.size)) {
        const int64_t n = std::accumulate(counts.begin(), counts.end(), int64_t(0));
        const std::vector<T> mine = brought<T>(r.rank, n), want = sum_of_ranks<T>(r.size, n);
        const Tensor all = Tensor::from(r.context, mine, {n}),
                     part = Tensor::from(r.context, mine, {n});
        r.comm.all_reduce(all);
        r.comm.wait(r.comm.reduce_scatter(part, counts));
        const std::vector<T> got = all.template to_vector<T>(),
                             got_part = cut(part.template to_vector<T>(), counts, r.rank);
        EXPECT_TRUE(is_sum(got, want, r)) << n;
        EXPECT_TRUE(is_sum(got_part, cut(want, counts, r.rank), r)) << n;
        // The same element, whoever owns it.
        if (r.in_order) {
            EXPECT_TRUE(same_bits(got_part, cut(got, counts, r.rank)));
        }
#ifdef FBT_SIMT  // whose NCCL adds in another order: a test that could not tell would be no test
        if (!r.in_order && r.size > 2 && n > 100) {
            EXPECT_FALSE(same_bits(got, want));
        }
#endif
    }
}

void every_op(const Rank& r) {
    EXPECT_EQ(r.comm.rank(), r.rank);
    EXPECT_EQ(r.comm.size(), r.size);
    EXPECT_STREQ(r.comm.name(), "NCCL");
    check_sums<float>(r);
    check_sums<double>(r);
    for (const Counts& counts : pieces_for(r.size)) {
        const int64_t n = std::accumulate(counts.begin(), counts.end(), int64_t(0));
        std::vector<int32_t> values(size_t(n), -1), whole(size_t(n), 0);
        std::iota(whole.begin(), whole.end(), 5);
        int64_t at = 0;
        for (int p = 0; p < r.size; at += counts[size_t(p++)])
            if (p == r.rank)
                std::copy_n(whole.begin() + at, counts[size_t(p)], values.begin() + at);
        const Tensor x = Tensor::from(r.context, values, {n});
        r.comm.wait(r.comm.all_gather(x, counts));
        EXPECT_EQ(x.to_vector<int32_t>(), whole);
        const Tensor half =
            Tensor::from_double(r.context, {values.begin(), values.end()}, {n}, DType::bf16);
        r.comm.wait(r.comm.all_gather(half, counts));
        EXPECT_EQ(half.to_double(),
                  Tensor::from_double(r.context, {whole.begin(), whole.end()}, {n}, DType::bf16)
                      .to_double());
    }
    for (int root = 0; root < r.size; ++root) {
        const Tensor x = Tensor::from(r.context, std::vector<int64_t>(7, r.rank), {7});
        const Tensor y = Tensor::from_double(r.context, {1.0 + r.rank}, {1}, DType::bf16);
        r.comm.broadcast(x, root);
        r.comm.wait(r.comm.broadcast(y, root));
        EXPECT_EQ(x.to_vector<int64_t>(), std::vector<int64_t>(7, root));
        EXPECT_EQ(y.to_double(), std::vector<double>{1.0 + root});
    }
    EXPECT_EQ(r.comm.all_reduce(r.tensor({})), r.comm.all_reduce(r.tensor({})));  // nothing to do
    const Tensor four = r.tensor({1, 2, 3, 4});
    EXPECT_THROW(r.comm.reduce_scatter(four, Counts(size_t(r.size), 4 / r.size + 1)),
                 tensor::Error);
    EXPECT_THROW(r.comm.all_gather(four, Counts(size_t(r.size) + 1, 0)), tensor::Error);
    EXPECT_THROW(r.comm.broadcast(four, r.size), tensor::Error);
    EXPECT_THROW(r.comm.all_reduce(Tensor::zeros(r.context, {3}, DType::i32)), tensor::Error);
}

// Work before and after, in the streams' order alone: the host waits at the end.
void streams_in_order(const Rank& r) {
    const int64_t n = 1000;
    const auto filled = [&](double x) { return r.tensor(std::vector<float>(size_t(n), float(x))); };
    const float ranks = float(r.size), ranks_sum = float(r.size * (r.size + 1)) / 2;
    for (int round = 0; round < 3; ++round) {
        const Tensor x = filled(r.rank + 1);
        const Tensor twice = tensor::add(x, x);  // queued before
        const Communicator::Ticket first = r.comm.all_reduce(twice);
        const Tensor unrelated = tensor::add(x, x);
        std::byte* in_flight = nullptr;
        Communicator::Ticket second = 0;
        {
            const Tensor y = tensor::add(unrelated, x);
            in_flight = y.raw();
            second = r.comm.all_reduce(y);
        }  // nobody but the communicator keeps y
        std::vector<Tensor> others;
        for (int i = 0; i < 3; ++i) {
            others.push_back(filled(-7));
            EXPECT_NE(tensor::add(others.back(), others.back()).raw(), in_flight);
        }
        r.comm.wait(first);
        const Tensor four = tensor::add(twice, twice);  // queued after
        const Counts counts(size_t(r.size), n);
        Tensor pieces = Tensor::zeros(r.context, {r.size, n}, DType::f32);
        pieces.rows(r.rank, 1).copy_from(four.view({1, n}));
        const Communicator::Ticket third = r.comm.all_gather(pieces, counts);
        Tensor last = pieces.rows(r.size - 1, 1).view({n});
        r.comm.wait(third);  // and so for the second
        tensor::add_accum(last, filled(1));
        const Communicator::Ticket fourth = r.comm.broadcast(last, r.size - 1);
        r.comm.wait(fourth);
        EXPECT_EQ(last.to_vector<float>(), std::vector<float>(size_t(n), 4 * ranks_sum + 1));
        EXPECT_GT(second, first);
        EXPECT_GT(third, second);
    }
    // Many at once, waited for by the last ticket.
    std::vector<Tensor> many;
    Communicator::Ticket ticket = 0;
    for (int i = 0; i < 20; ++i) {
        many.push_back(filled(i));
        ticket = r.comm.all_reduce(many.back());
    }
    r.comm.wait(ticket);
    r.comm.wait(ticket);  // again: nothing is left to do
    for (int i = 0; i < 20; ++i) {
        tensor::add_accum(many[size_t(i)], filled(0.5));
        EXPECT_EQ(many[size_t(i)].to_vector<float>(),
                  std::vector<float>(size_t(n), ranks * float(i) + 0.5f));
    }
}

// Nobody leaves before the last has come. All ranks are on one machine, and read one clock.
void barriers(const Rank& r) {
    const auto now = [] { return int64_t(Clock::now().time_since_epoch().count()); };
    for (int late = 0; late < r.size; ++late) {
        if (r.rank == late) std::this_thread::sleep_for(milliseconds(300));
        const int64_t come = now();
        r.comm.barrier();
        const int64_t left = now();
        const Tensor t = Tensor::from(r.context, std::vector<int64_t>{come}, {1});
        r.comm.wait(r.comm.broadcast(t, late));
        EXPECT_GE(left, t.to_vector<int64_t>()[0]);
    }
}

// How long ranks wait where one is lost: room for a machine that stands still for some seconds.
constexpr milliseconds kLimit{4000};

// Rank 1 does not take part; the others end by themselves.
void one_is_absent(const Rank& r) {
    if (r.rank == 1) {
        std::this_thread::sleep_for(2 * kLimit);
        _exit(0);
    }
    const Tensor x = r.tensor({1, 2, 3, 4, 5});
    r.comm.wait(r.comm.all_reduce(x));
    (void)x.to_vector<float>();
    ADD_FAILURE() << "a sum without rank 1";
}

void one_is_killed(const Rank& r) {
    r.comm.barrier();
    if (r.rank == 1) std::raise(SIGKILL);
    const Tensor x = r.tensor({1, 2, 3});
    r.comm.wait(r.comm.all_reduce(x));
    (void)x.to_vector<float>();
    ADD_FAILURE() << "a sum without rank 1";
}

// The time a collective waits for its own compute stream does not count, nor do pauses between two.
void slow_but_alive(const Rank& r) {
    const Tensor x = r.tensor({float(r.rank)});
    const Communicator::Ticket ticket =
        r.comm.all_reduce(x);  // at once on a GPU, late in the emulator
    std::this_thread::sleep_for(kLimit + milliseconds(500));
    r.comm.wait(ticket);
    EXPECT_EQ(x.to_vector<float>(), std::vector<float>{float(r.size * (r.size - 1) / 2)});
}

// A rank that leaves without finish(), with a collective that never ends under way.
void leaves_early(const Rank& r) {
    if (r.rank == 0) (void)r.comm.all_reduce(r.tensor({1}));
    if (r.rank == 1) r.comm.end_all(5);
}

// Rank 1 does something else than the others. NCCL itself does not tell.
void one_disagrees(const Rank& r) {
    const Tensor x = r.tensor({1, 2, 3});
    r.comm.wait(r.rank == 1 ? r.comm.broadcast(x, 1) : r.comm.all_reduce(x));
    (void)x.to_vector<float>();
    r.comm.barrier();
}

void nothing(const Rank&) {}

struct Part {
    void (*run)(const Rank&);
    bool finishes = true;
    milliseconds limit{60000};
};
const std::map<std::string, Part> kParts = {
    {"every_op", {every_op}},
    {"streams_in_order", {streams_in_order}},
    {"barriers", {barriers}},
    {"one_is_absent", {one_is_absent, false, kLimit}},
    {"one_is_killed", {one_is_killed, false, kLimit}},
    {"slow_but_alive", {slow_but_alive, true, kLimit}},
    {"leaves_early", {leaves_early, false}},
    {"one_disagrees", {one_disagrees, false}},
    {"one_never_starts", {nothing, true, kLimit}},
};

std::string setting(const char* name) {
    const char* value = std::getenv(name);
    return value ? value : "";
}

// Not a test: one rank of one.
TEST(NcclRank, DISABLED_Run) {
    if (setting("FBT_TEST_PART").empty()) GTEST_SKIP() << "for the other tests of this file";
    const std::string name = setting("FBT_TEST_PART");
    const Part& part = kParts.at(name);
    const int rank = std::stoi(setting("FBT_TEST_RANK")),
              size = std::stoi(setting("FBT_TEST_SIZE")),
              port = std::stoi(setting("FBT_TEST_PORT"));
    ASSERT_LT(rank, size);
#ifdef FBT_SIMT
    simt::set_schedule({simt::Order(std::stoi(setting("FBT_TEST_SCHEDULE"))), 1});
#endif
    Context context(kDevice, 1, rank);
    dist::Options options{double(part.limit.count()) / 1000, [](const std::string& message) {
                              std::fprintf(stderr, "%s\n", message.c_str());
                              std::fflush(stderr);
                              _exit(5);
                          }};
    const bool in_order = setting("FBT_TEST_IN_ORDER") == "1";
    std::unique_ptr<Communicator> comm;
    try {
        comm = dist::connect_nccl(
            context, rank, size,
            [&](std::span<std::byte> bytes) {
                dist::exchange_over_tcp(bytes, rank, size, "127.0.0.1", port, 60);
                if (name == "one_never_starts" && rank == 1) _exit(0);
            },
            in_order, options);
    } catch (const tensor::Error& e) {
        options.fail(std::string("error: ") + e.what());
    }
    part.run({rank, size, in_order, context, *comm});
    if (part.finishes) comm->finish();
}

// ---- who starts them ----

int free_port() {
    const int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    const bool fine = bind(s, reinterpret_cast<sockaddr*>(&address), length) == 0 &&
                      getsockname(s, reinterpret_cast<sockaddr*>(&address), &length) == 0;
    ::close(s);
    return fine ? ntohs(address.sin_port) : 0;
}

struct Ended {
    int code = -1;  // of the exit; minus the signal's number
    std::string output;
};

// Runs a part on so many ranks. Those that go on for two minutes are killed.
std::vector<Ended> run_ranks(const std::string& part, int size, bool in_order = false,
                             int schedule = 0) {
    const int port = free_port();
    std::vector<pid_t> processes;
    std::vector<std::string> logs;
    for (int rank = 0; rank < size; ++rank) {
        char log[] = "/tmp/fbt-nccl-test-XXXXXX";
        const int file = mkstemp(log);
        logs.push_back(log);
        const std::map<std::string, std::string> more = {
            {"FBT_TEST_PART", part},
            {"FBT_TEST_RANK", std::to_string(rank)},
            {"FBT_TEST_SIZE", std::to_string(size)},
            {"FBT_TEST_PORT", std::to_string(port)},
            {"FBT_TEST_IN_ORDER", in_order ? "1" : "0"},
            {"FBT_TEST_SCHEDULE", std::to_string(schedule)}};
        std::vector<std::string> settings;
        for (char** e = environ; *e; ++e) settings.push_back(*e);
        for (const auto& [name, value] : more) settings.push_back(name + "=" + value);
        std::vector<char*> environment;
        for (std::string& s : settings) environment.push_back(s.data());
        environment.push_back(nullptr);
        std::string words[] = {"rank", "--gtest_filter=NcclRank.DISABLED_Run",
                               "--gtest_also_run_disabled_tests", "--gtest_color=no"};
        std::vector<char*> arguments;
        for (std::string& word : words) arguments.push_back(word.data());
        arguments.push_back(nullptr);
        posix_spawn_file_actions_t actions;
        posix_spawn_file_actions_init(&actions);
        posix_spawn_file_actions_adddup2(&actions, file, 1);
        posix_spawn_file_actions_adddup2(&actions, file, 2);
        pid_t process = -1;
        if (posix_spawn(&process, "/proc/self/exe", &actions, nullptr, arguments.data(),
                        environment.data()) != 0)
            process = -1;
        posix_spawn_file_actions_destroy(&actions);
        ::close(file);
        processes.push_back(process);
    }
    const Clock::time_point begun = Clock::now();
    std::vector<Ended> all;
    for (size_t r = 0; r < processes.size(); ++r) {
        int status = 0;
        while (processes[r] > 0 && waitpid(processes[r], &status, WNOHANG) == 0) {
            if (Clock::now() - begun > std::chrono::minutes(2)) kill(processes[r], SIGKILL);
            std::this_thread::sleep_for(milliseconds(10));
        }
        std::stringstream output;
        output << std::ifstream(logs[r]).rdbuf();
        std::remove(logs[r].c_str());
        all.push_back({WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status), output.str()});
    }
    return all;
}

testing::AssertionResult all_fine(const std::vector<Ended>& ranks) {
    for (size_t r = 0; r < ranks.size(); ++r)
        if (ranks[r].code != 0 || ranks[r].output.find("[  PASSED  ] 1 test") == std::string::npos)
            return testing::AssertionFailure()
                   << "rank " << r << " ended with " << ranks[r].code << ":\n"
                   << ranks[r].output;
    return testing::AssertionSuccess();
}
testing::AssertionResult ends_with(const Ended& rank, int code, const std::string& text) {
    if (rank.code == code && rank.output.find(text) != std::string::npos)
        return testing::AssertionSuccess();
    return testing::AssertionFailure() << "it ended with " << rank.code << ":\n" << rank.output;
}

class Nccl : public testing::TestWithParam<int> {
  protected:
    void SetUp() override {
        if (dist::nccl_version().empty()) GTEST_SKIP() << "this build has no NCCL";
        skip_without_device();
    }
    // True, and the test is skipped, where there are fewer GPUs.
    static bool too_few(int ranks) {
#ifdef FBT_SIMT
        (void)ranks;
        return false;
#else
        return int(tensor::cuda_devices().size()) < ranks;
#endif
    }
};
#define NEEDS(ranks) \
    if (IsSkipped() || too_few(ranks)) GTEST_SKIP() << "fewer GPUs than the " << ranks << " ranks"

TEST_P(Nccl, EveryOp) {
    NEEDS(GetParam());
    EXPECT_TRUE(all_fine(run_ranks("every_op", GetParam())));
}
TEST_P(Nccl, EveryOpInTheOrderOfTheRanks) {
    NEEDS(GetParam());
    EXPECT_TRUE(all_fine(run_ranks("every_op", GetParam(), true)));
}
TEST_P(Nccl, StreamsInOrder) {
    NEEDS(GetParam());
    for (int schedule = 0; schedule < int(std::size(kSchedules)) - 1 || schedule == 0; ++schedule)
        for (const bool in_order : {false, true})
            EXPECT_TRUE(all_fine(run_ranks("streams_in_order", GetParam(), in_order, schedule)))
                << schedule << in_order;
}
TEST_P(Nccl, Barrier) {
    NEEDS(GetParam());
    EXPECT_TRUE(all_fine(run_ranks("barriers", GetParam())));
}
INSTANTIATE_TEST_SUITE_P(Ranks, Nccl, testing::Values(1, 2, 3, 4));

class NcclFailures : public Nccl {};

TEST_P(NcclFailures, ARankThatDoesNotTakePart) {
    NEEDS(GetParam());
    std::future<std::vector<Ended>> both[2];  // at the same time: they mostly wait
    for (const bool in_order : {false, true})
        both[in_order] =
            std::async(std::launch::async, run_ranks, "one_is_absent", GetParam(), in_order, 0);
    for (auto& one : both) {
        const std::vector<Ended> ranks = one.get();
        EXPECT_TRUE(ends_with(
            ranks[0], 5,
            "rank 0 of " + std::to_string(GetParam()) +
                ": all_reduce of 5 f32 waited 4 s for the other ranks; one of them is gone, stuck "
                "or cut off (--comm-timeout)\n"));
        // Another one waits longer, and may hear of rank 0's end before.
        for (int r = 2; r < GetParam(); ++r)
            EXPECT_TRUE(ends_with(ranks[size_t(r)], 5, "all_reduce of 5 f32"));
    }
}
TEST_P(NcclFailures, ARankThatIsKilled) {
    NEEDS(GetParam());
    const std::vector<Ended> ranks = run_ranks("one_is_killed", GetParam());
#ifdef FBT_SIMT
    const char* message = ": NCCL: all_reduce of 3 f32: remote";
#else
    const char* message = "all_reduce of 3 f32";  // the time may be over first
#endif
    for (int r = 0; r < GetParam(); ++r)
        EXPECT_TRUE(r == 1 ? ends_with(ranks[1], -SIGKILL, "")
                           : ends_with(ranks[size_t(r)], 5, message));
}
#ifdef FBT_SIMT
TEST_P(NcclFailures, ARankThatDisagrees) {
    NEEDS(GetParam());
    const std::vector<Ended> ranks = run_ranks("one_disagrees", GetParam());
    EXPECT_TRUE(ends_with(ranks[0], 5,
                          "NCCL: all_reduce of 3 f32: invalid usage (rank 1 called something "
                          "else)"));
}
#endif
TEST_P(NcclFailures, ARankThatNeverStarts) {
    NEEDS(GetParam());
    const std::vector<Ended> ranks = run_ranks("one_never_starts", GetParam());
    for (int r = 0; r < GetParam(); ++r) {
        if (r == 1) continue;
        EXPECT_TRUE(ends_with(ranks[size_t(r)], 5,
                              "error: rank " + std::to_string(r) + " of " +
                                  std::to_string(GetParam()) +
                                  ": NCCL waited 4 s for the other ranks to start"));
    }
}
TEST_P(NcclFailures, TimeSpentElsewhereDoesNotCount) {
    NEEDS(GetParam());
    EXPECT_TRUE(all_fine(run_ranks("slow_but_alive", GetParam())));
}
TEST_P(NcclFailures, LeavingWithoutFinish) {
    NEEDS(GetParam());
    EXPECT_TRUE(all_fine(run_ranks("leaves_early", GetParam())));
}
INSTANTIATE_TEST_SUITE_P(Ranks, NcclFailures, testing::Values(2, 3));

}  // namespace
}  // namespace fbt::tests
