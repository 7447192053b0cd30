// One rank of a job that dist_test starts: `dist_rank --gtest_filter=... SECONDS FOLDER`. Why it
// ends goes to stderr and to FOLDER/its process, since what a launcher that is cut off prints is
// lost.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>

#include "dist/dist.h"
#include "tests/data/files.h"

namespace fbt::tests {
namespace {

using namespace std::chrono_literals;
using tensor::Communicator;
using tensor::Context;
using tensor::DType;
using tensor::ErrorKind;
using tensor::Tensor;
using Counts = std::vector<int64_t>;

double g_seconds = 60;
std::string g_folder;
std::unique_ptr<Communicator> g_job;

void die(const std::string& message) {
    std::fprintf(stderr, "fbt: %s\n", message.c_str());
    if (!g_folder.empty()) put(g_folder + "/" + std::to_string(getpid()), message);
    _exit(5);
}

Communicator& job() {
    if (!g_job) g_job = dist::connect_mpi({g_seconds, die});
    return *g_job;
}

// For dist_test: this process, and that the job is about to do what the test is about.
void announce() {
    put(g_folder + "/rank" + std::to_string(job().rank()) + ".tmp", std::to_string(getpid()));
    std::filesystem::rename(g_folder + "/rank" + std::to_string(job().rank()) + ".tmp",
                            g_folder + "/rank" + std::to_string(job().rank()));
}

// What rank r holds: of all signs and sizes, so that another order of summing gives other bits.
template <class T>
T value(int r, int64_t i) {
    const uint32_t bits = uint32_t(r * 7919 + i * 104729 + 12345) * 2654435761u;
    const double x = (double(bits >> 8) / double(1 << 24) - 0.5) * double(1 << (bits % 13));
    return T(x);
}
template <class T>
std::vector<T> values(int r, int64_t n) {
    std::vector<T> out(n);
    for (int64_t i = 0; i < n; ++i) out[i] = value<T>(r, i);
    return out;
}
// Summed rank by rank, as the header promises.
template <class T>
std::vector<T> sums(int64_t n) {
    std::vector<T> out = values<T>(0, n);
    for (int r = 1; r < job().size(); ++r)
        for (int64_t i = 0; i < n; ++i) out[i] += value<T>(r, i);
    return out;
}
template <class T>
bool same(const T* a, const T* b, int64_t n) {
    return n == 0 || std::memcmp(a, b, size_t(n) * sizeof(T)) == 0;
}
template <class T>
Tensor tensor_of(Context& context, const std::vector<T>& x) {
    Tensor t = Tensor::empty(context, {int64_t(x.size())}, tensor::dtype_of<T>::value);
    if (!x.empty()) t.copy_in(x.data(), x.size() * sizeof(T));
    return t;
}

// Ways to cut n elements: about evenly, all on one rank, none on one rank, growing.
std::vector<Counts> cuts(int64_t n) {
    const int size = job().size();
    std::vector<Counts> out;
    Counts even(size, n / size);
    even[0] += n % size;
    out.push_back(even);
    for (int r = 0; r < size; ++r) {
        Counts one(size, 0);
        one[r] = n;
        out.push_back(one);
    }
    Counts growing(size, 0);
    int64_t left = n;
    for (int r = size - 1; r >= 0; --r) left -= growing[r] = r == 0 ? left : left * 2 / 3;
    out.push_back(growing);
    return out;
}
int64_t first_of(const Counts& counts, int rank) {
    int64_t first = 0;
    for (int r = 0; r < rank; ++r) first += counts[r];
    return first;
}

constexpr int64_t kSizes[] = {0, 1, 2, 3, 37, 1601, 4096, 70001};

template <class T>
class Sums : public testing::Test {};
using Summable = testing::Types<float, double>;
TYPED_TEST_SUITE(Sums, Summable);

TYPED_TEST(Sums, AllReduceAddsInTheOrderOfTheRanks) {
    using T = TypeParam;
    Context context("cpu", 1);
    for (const int64_t n : kSizes) {
        const Tensor x = tensor_of(context, values<T>(job().rank(), n));
        job().wait(job().all_reduce(x));
        EXPECT_TRUE(same(x.template data<T>(), sums<T>(n).data(), n)) << n;
    }
}

// The same bits as all_reduce's, whoever owns the element.
TYPED_TEST(Sums, ReduceScatterAddsInTheOrderOfTheRanks) {
    using T = TypeParam;
    Context context("cpu", 1);
    const int me = job().rank();
    for (const int64_t n : kSizes)
        for (const Counts& counts : cuts(n)) {
            const Tensor x = tensor_of(context, values<T>(me, n));
            job().wait(job().reduce_scatter(x, counts));
            const int64_t first = first_of(counts, me);
            EXPECT_TRUE(same(x.template data<T>() + first, sums<T>(n).data() + first, counts[me]))
                << n << " elements, " << counts[me] << " of them here";
        }
}

// The order matters in these sums; else the tests above would say nothing of it.
TEST(SumsOrder, Matters) {
    if (job().size() < 3) GTEST_SKIP() << "two terms have one sum";
    std::vector<float> back(1601, 0);
    for (int r = job().size() - 1; r >= 0; --r)
        for (int64_t i = 0; i < 1601; ++i) back[i] += value<float>(r, i);
    EXPECT_FALSE(same(back.data(), sums<float>(1601).data(), 1601));
}

template <class T>
class Moves : public testing::Test {};
using Movable = testing::Types<float, double, kernels::bf16, int32_t, int64_t>;
TYPED_TEST_SUITE(Moves, Movable);

TYPED_TEST(Moves, AllGather) {
    using T = TypeParam;
    Context context("cpu", 1);
    for (const int64_t n : kSizes)
        for (const Counts& counts : cuts(n)) {
            const Tensor x = tensor_of(context, values<T>(job().rank(), n));
            job().wait(job().all_gather(x, counts));
            for (int r = 0; r < job().size(); ++r) {
                const int64_t first = first_of(counts, r);
                EXPECT_TRUE(
                    same(x.template data<T>() + first, values<T>(r, n).data() + first, counts[r]))
                    << n << " elements, rank " << r;
            }
        }
}

TYPED_TEST(Moves, Broadcast) {
    using T = TypeParam;
    Context context("cpu", 1);
    for (const int64_t n : kSizes)
        for (int root = 0; root < job().size(); ++root) {
            const Tensor x = tensor_of(context, values<T>(job().rank(), n));
            job().wait(job().broadcast(x, root));
            EXPECT_TRUE(same(x.template data<T>(), values<T>(root, n).data(), n)) << n;
        }
}

// Two hundred at once, of all kinds and sizes, while this thread computes; waiting for one of them
// waits for all before it, and a tensor that the caller has let go is kept until it is done.
TEST(Jobs, ManyAreUnderWayWhileTheCallerComputes) {
    Context context("cpu", 1);
    std::vector<Tensor> reduced, gathered;
    std::vector<Communicator::Ticket> tickets;
    for (int i = 0; i < 100; ++i) {
        const int64_t n = 1 + i * 997 % 5000;
        reduced.push_back(tensor_of(context, values<float>(job().rank() + i, n)));
        tickets.push_back(job().all_reduce(reduced.back()));
        gathered.push_back(tensor_of(context, values<int32_t>(job().rank() + i, n)));
        tickets.push_back(job().broadcast(gathered.back(), i % job().size()));
        job().broadcast(tensor_of(context, values<double>(1, n)), 0);
    }
    double work = 0;
    for (int i = 1; i < 2000000; ++i) work += 1.0 / i;
    EXPECT_GT(work, 14);
    for (size_t i = 1; i < tickets.size(); ++i) EXPECT_GT(tickets[i], tickets[i - 1]);
    job().wait(tickets[tickets.size() / 2]);
    job().wait(tickets.back());
    for (int i = 0; i < 100; ++i) {
        const int64_t n = reduced[i].numel();
        std::vector<float> sum = values<float>(i, n);
        for (int r = 1; r < job().size(); ++r)
            for (int64_t j = 0; j < n; ++j) sum[j] += value<float>(r + i, j);
        EXPECT_TRUE(same(reduced[i].data<float>(), sum.data(), n)) << i;
        EXPECT_TRUE(
            same(gathered[i].data<int32_t>(), values<int32_t>(i % job().size() + i, n).data(), n))
            << i;
    }
    job().barrier();
    EXPECT_FALSE(reduced[0].shares_storage());
}

// Nobody leaves before the last has come. All ranks are on one machine, and read one clock.
TEST(Jobs, ABarrierHoldsEverybody) {
    Context context("cpu", 1);
    const auto now = [] { return std::chrono::steady_clock::now().time_since_epoch().count(); };
    const int last = job().size() - 1;
    if (job().rank() == last) std::this_thread::sleep_for(300ms);
    const int64_t come = now();
    job().barrier();
    const int64_t left = now();
    const Tensor t = tensor_of(context, std::vector<int64_t>{come});
    job().wait(job().broadcast(t, last));
    EXPECT_GE(left, t.data<int64_t>()[0]);
}

// Threads that compute keep the cores: half a second of waiting costs far less of the processor.
TEST(Jobs, WaitingSleeps) {
    Context context("cpu", 1);
    const Tensor x = tensor_of(context, values<float>(0, 1000));
    job().barrier();
    if (job().rank() == 0) std::this_thread::sleep_for(1s);
    rusage before, after;
    getrusage(RUSAGE_SELF, &before);
    job().wait(job().all_reduce(x));
    getrusage(RUSAGE_SELF, &after);
    const auto seconds = [](const rusage& u) {
        return double(u.ru_utime.tv_sec + u.ru_stime.tv_sec) +
               1e-6 * double(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
    };
    EXPECT_LT(seconds(after) - seconds(before), 0.5);
}

std::atomic<int> g_signals{0};

TEST(Jobs, SignalsStayTheProgramsOwn) {
    struct sigaction action = {};
    for (const int number : {SIGINT, SIGTERM, SIGUSR1}) {
        sigaction(number, nullptr, &action);
        EXPECT_EQ(action.sa_handler, SIG_DFL) << number;  // MPI runs, and has taken none
        action.sa_handler = [](int) { ++g_signals; };
        sigaction(number, &action, nullptr);
        raise(number);
    }
    EXPECT_EQ(g_signals, 3);
    job().barrier();
    for (const int number : {SIGINT, SIGTERM, SIGUSR1}) signal(number, SIG_DFL);
}

TEST(Jobs, BrokenContractsThrow) {
    Context context("cpu", 1);
    const int size = job().size();
    const Tensor x = tensor_of(context, values<float>(0, 12));
    const Tensor bf16 = tensor_of(context, values<kernels::bf16>(0, 12));
    const auto refused = [](std::initializer_list<const char*> words, auto call) {
        return throws(ErrorKind::internal, words, call);
    };
    EXPECT_TRUE(refused({"all_reduce", "bf16"}, [&] { job().all_reduce(bf16); }));
    EXPECT_TRUE(refused({"all_reduce", "undefined"}, [&] { job().all_reduce({}); }));
    EXPECT_TRUE(refused({"broadcast", "rank -1"}, [&] { job().broadcast(x, -1); }));
    EXPECT_TRUE(refused({"broadcast", "rank"}, [&] { job().broadcast(x, size); }));
    Counts counts(size, 0);
    EXPECT_TRUE(refused({"all_gather", "12"}, [&] { job().all_gather(x, counts); }));
    counts[0] = 13;
    EXPECT_TRUE(refused({"reduce_scatter", "12"}, [&] { job().reduce_scatter(x, counts); }));
    counts[0] = 12;
    EXPECT_TRUE(refused({"reduce_scatter"}, [&] { job().reduce_scatter(bf16, counts); }));
    counts.push_back(0);
    EXPECT_TRUE(refused({"all_gather", "ranks"}, [&] { job().all_gather(x, counts); }));
    if (size > 1) {
        counts.pop_back();
        counts[0] = 13, counts[1] = -1;
        EXPECT_TRUE(refused({"all_gather"}, [&] { job().all_gather(x, counts); }));
    }
    const Tensor huge = Tensor::empty(context, {int64_t(1) << 31}, DType::u8);
    EXPECT_TRUE(refused({"broadcast", "2147483648", "cut"}, [&] { job().broadcast(huge, 0); }));
    job().barrier();  // all is well after that
}

TEST(Jobs, StartsOnce) {
    job();
    EXPECT_TRUE(throws(ErrorKind::environment, {"MPI", "before"}, [] {
        dist::connect_mpi({g_seconds, die});
    }));
}

TEST(Jobs, SaysWhoItIs) {
    EXPECT_STREQ(job().name(), "mpi");
    EXPECT_GE(job().rank(), 0);
    EXPECT_LT(job().rank(), job().size());
    std::printf("rank %d of %d\n", job().rank(), job().size());
}

// --- what goes wrong, each in a job of its own

// The last rank never comes; it has other work.
TEST(Trouble, OneRankStaysAway) {
    Context context("cpu", 1);
    const Tensor x = tensor_of(context, values<float>(0, 12345));
    announce();
    job().barrier();
    if (job().rank() == job().size() - 1) std::this_thread::sleep_for(300s);
    job().wait(job().all_reduce(x));
    FAIL() << "without the last rank";
}

// Collectives for ever, until dist_test strikes.
TEST(Trouble, WorksUntilStruck) {
    Context context("cpu", 1);
    const Tensor x = tensor_of(context, values<float>(0, 100000));
    job().barrier();
    announce();
    const auto end = std::chrono::steady_clock::now() + 300s;
    while (std::chrono::steady_clock::now() < end) job().wait(job().all_reduce(x));
    FAIL() << "nothing has happened";
}

// Rank 1 never calls connect: MPI's own start waits for it.
TEST(Trouble, OneRankNeverStarts) {
    if (std::getenv("OMPI_COMM_WORLD_RANK") == std::string("1")) std::this_thread::sleep_for(300s);
    job();
    FAIL() << "without rank 1";
}

// MPI_Finalize, too, waits for all.
TEST(Trouble, OneRankNeverFinishes) {
    job().barrier();
    if (job().rank() == 1) {
        job().barrier();  // the one that finish() begins with
        std::this_thread::sleep_for(300s);
    }
    g_job->finish();
    FAIL() << "without rank 1";
}

// While the others wait for it in a collective.
TEST(Trouble, OneRankEndsAll) {
    Context context("cpu", 1);
    const Tensor x = tensor_of(context, values<float>(0, 1000));
    job().barrier();
    if (job().rank() == 0) {
        job().end_all(3);
        std::this_thread::sleep_for(300s);
    }
    job().wait(job().all_reduce(x));
    FAIL() << "after the end";
}

// It has started a collective that cannot end, and its communicator goes away.
TEST(Trouble, OneRankLeavesInTheMiddle) {
    Context context("cpu", 1);
    const Tensor x = tensor_of(context, values<float>(0, 1000));
    ASSERT_GT(job().size(), 1);
    job().barrier();
    if (job().rank() == 0) {
        job().all_reduce(x);
        std::this_thread::sleep_for(100ms);
        g_job.reset();
        std::printf("rank 0 has left\n");
        std::fflush(stdout);
        _exit(7);
    }
    std::this_thread::sleep_for(300s);
}

}  // namespace
}  // namespace fbt::tests

int main(int argc, char** argv) {
    testing::InitGoogleTest(&argc, argv);
    if (argc > 1) fbt::tests::g_seconds = std::stod(argv[1]);
    if (argc > 2) fbt::tests::g_folder = argv[2];
    const int code = RUN_ALL_TESTS();
    if (fbt::tests::g_job) fbt::tests::g_job->finish();
    return code;
}
