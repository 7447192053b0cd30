#include "dist/dist.h"

#ifndef FBT_MPI

namespace fbt::dist {

std::string mpi_version() { return {}; }

std::unique_ptr<Communicator> connect_mpi(Options) {
    throw tensor::Error(tensor::ErrorKind::internal, "this build has no MPI");
}

}  // namespace fbt::dist

#else

#include <mpi.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <mutex>
#include <numeric>
#include <optional>
#include <thread>

namespace fbt::dist {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using tensor::DType;
using tensor::Error;
using tensor::ErrorKind;
using tensor::Tensor;
using Counts = std::vector<int>;  // as MPI wants them

MPI_Datatype mpi_type(DType t) {
    switch (t) {
        case DType::f32:
            return MPI_FLOAT;
        case DType::f64:
            return MPI_DOUBLE;
        case DType::bf16:  // is moved, never added
            return MPI_UINT16_T;
        case DType::i32:
            return MPI_INT32_T;
        case DType::i64:
            return MPI_INT64_T;
        case DType::u8:
            return MPI_UINT8_T;
    }
    return MPI_DATATYPE_NULL;
}

Counts starts(const Counts& counts) {
    Counts out(counts.size());
    std::exclusive_scan(counts.begin(), counts.end(), out.begin(), 0);
    return out;
}

// x[i] = (term 0 + term 1) + term 2 ..., by rank: x itself is this rank's, `others` holds the rest,
// n elements each. An element's sum has the same bits on whichever rank and in whatever piece.
template <class T>
void sum_in_order(T* x, const T* others, int64_t n, int rank, int size) {
    constexpr int64_t kBlock = 2048;  // stays in the first cache
    T sum[kBlock];
    for (int64_t first = 0; first < n; first += kBlock) {
        const int64_t count = std::min(kBlock, n - first);
        for (int r = 0; r < size; ++r) {
            const T* term = (r == rank ? x : others + (r < rank ? r : r - 1) * n) + first;
            if (r == 0)
                std::copy_n(term, count, sum);
            else
                for (int64_t i = 0; i < count; ++i) sum[i] += term[i];
        }
        std::copy_n(sum, count, x + first);
    }
}

// One thread makes every call of MPI, one job after the other. It sleeps between looks at whether a
// collective is done, as the callers of wait() do, so that the cores are left to those who compute.
// A second thread watches how long the first one has been at the same job.
class Mpi final : public Communicator {
  public:
    explicit Mpi(Options options);
    ~Mpi() override { leave(); }

    const char* name() const override { return "mpi"; }
    Ticket all_reduce(const Tensor& x) override;
    Ticket reduce_scatter(const Tensor& x, const std::vector<int64_t>& counts) override;
    Ticket all_gather(const Tensor& x, const std::vector<int64_t>& counts) override;
    Ticket broadcast(const Tensor& x, int root) override;
    void wait(Ticket ticket) override;
    void barrier() override;
    void finish() override;
    void end_all(int code) override;

  private:
    struct Job {
        std::string what;
        std::function<void()> work;  // holds the tensor
    };
    struct Left {};  // thrown out of a job that nobody waits for any more

    static std::string described(const char* op, const Tensor& x);
    void check_movable(const char* op, const Tensor& x) const;
    Counts checked(const char* op, const Tensor& x, const std::vector<int64_t>& counts) const;
    Ticket post(std::string what, std::function<void()> work);
    void leave();

    // The communicating thread's.
    void communicate();
    void start();
    std::optional<Job> next();
    void begin(const std::string& what);
    void sum_pieces(const Tensor& x, const Counts& counts);
    void gather_pieces(const Tensor& x, const Counts& counts);
    void check(int code);
    void complete(MPI_Request request);

    void watch();
    std::string me() const;

    const Options options_;
    MPI_Comm comm_ = MPI_COMM_NULL;
    std::unique_ptr<std::byte[]> scratch_;  // the other ranks' pieces
    size_t scratch_bytes_ = 0;

    std::mutex mutex_;  // guards what follows, and rank_ and size_ until started_
    std::condition_variable posted_, changed_, ending_;
    std::deque<Job> jobs_;
    Ticket given_ = 0, done_ = 0;
    std::string doing_;                       // the job at hand
    std::optional<Clock::time_point> since_;  // when it began
    std::string trouble_;                     // why MPI did not start
    std::optional<int> abort_;                // with this code
    bool started_ = false, ended_ = false;    // the communicating thread
    std::atomic<bool> leave_{false};          // wanted of it; set under the mutex
    std::thread communicating_, watching_;
};

Mpi::Mpi(Options options) : options_(std::move(options)) {
    communicating_ = std::thread([this] { communicate(); });
    watching_ = std::thread([this] { watch(); });
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return started_ || ended_; });
    if (started_) return;
    lock.unlock();
    leave();
    throw Error(ErrorKind::environment, trouble_);
}

void Mpi::leave() {
    {
        const std::lock_guard lock(mutex_);
        leave_ = true;
    }
    posted_.notify_all();
    // The watch goes on until the other thread has ended: it may be stuck.
    if (communicating_.joinable()) communicating_.join();
    if (watching_.joinable()) watching_.join();
}

std::string Mpi::described(const char* op, const Tensor& x) {
    return std::string(op) + " of " + std::to_string(x.numel()) + " " + name_of(x.dtype());
}

void Mpi::check_movable(const char* op, const Tensor& x) const {
    const auto refuse = [&](const std::string& what) {
        throw Error(ErrorKind::internal, std::string("mpi: ") + op + ": " + what);
    };
    if (!x.defined()) refuse("an undefined tensor");
    if (x.context().backend() == tensor::Backend::cuda)
        refuse("a tensor on " + x.context().name() + ", expected one in host memory");
    if (x.numel() > INT_MAX)
        refuse(std::to_string(x.numel()) + " elements, at most " + std::to_string(INT_MAX) +
               " go at once: cut the tensor");
}

Counts Mpi::checked(const char* op, const Tensor& x, const std::vector<int64_t>& counts) const {
    check_movable(op, x);
    bool good = int(counts.size()) == size_;
    int64_t sum = 0;
    for (const int64_t count : counts) {
        good = good && count >= 0 && count <= x.numel() - sum;
        if (good) sum += count;
    }
    if (!good || sum != x.numel())
        throw Error(ErrorKind::internal,
                    std::string("mpi: ") + op + ": " + std::to_string(counts.size()) +
                        " pieces that are not " + std::to_string(x.numel()) + " elements cut for " +
                        std::to_string(size_) + " ranks");
    return Counts(counts.begin(), counts.end());
}

Communicator::Ticket Mpi::post(std::string what, std::function<void()> work) {
    Ticket ticket;
    {
        const std::lock_guard lock(mutex_);
        if (leave_) throw Error(ErrorKind::internal, "mpi: " + what + " after the end");
        jobs_.push_back({std::move(what), std::move(work)});
        ticket = ++given_;
    }
    posted_.notify_one();
    return ticket;
}

void check_summable(const char* op, const Tensor& x) {
    if (x.dtype() != DType::f32 && x.dtype() != DType::f64)
        throw Error(ErrorKind::internal,
                    std::string("mpi: ") + op + ": f32 or f64 expected, got " + name_of(x.dtype()));
}

// The largest piece, which some rank receives from all others at once.
void check_pieces(const char* op, const Counts& counts) {
    const int64_t most = counts.empty() ? 0 : *std::max_element(counts.begin(), counts.end());
    if (most * int64_t(counts.size()) > INT_MAX)
        throw Error(ErrorKind::internal,
                    std::string("mpi: ") + op + ": a piece of " + std::to_string(most) +
                        " elements from " + std::to_string(counts.size()) + " ranks, at most " +
                        std::to_string(INT_MAX) + " come in at once: cut the tensor");
}

Communicator::Ticket Mpi::all_reduce(const Tensor& x) {
    check_movable("all_reduce", x);
    check_summable("all_reduce", x);
    Counts counts(size_, int(x.numel() / size_));
    for (int r = 0; r < x.numel() % size_; ++r) ++counts[r];
    check_pieces("all_reduce", counts);
    return post(described("all_reduce", x), [this, x, counts] {
        sum_pieces(x, counts);
        gather_pieces(x, counts);
    });
}

Communicator::Ticket Mpi::reduce_scatter(const Tensor& x, const std::vector<int64_t>& pieces) {
    const Counts counts = checked("reduce_scatter", x, pieces);
    check_summable("reduce_scatter", x);
    check_pieces("reduce_scatter", counts);
    return post(described("reduce_scatter", x), [this, x, counts] { sum_pieces(x, counts); });
}

Communicator::Ticket Mpi::all_gather(const Tensor& x, const std::vector<int64_t>& pieces) {
    const Counts counts = checked("all_gather", x, pieces);
    return post(described("all_gather", x), [this, x, counts] { gather_pieces(x, counts); });
}

Communicator::Ticket Mpi::broadcast(const Tensor& x, int root) {
    check_movable("broadcast", x);
    if (root < 0 || root >= size_)
        throw Error(ErrorKind::internal, "mpi: broadcast: from rank " + std::to_string(root) +
                                             " of " + std::to_string(size_));
    return post(described("broadcast", x), [this, x, root] {
        MPI_Request request;
        check(MPI_Ibcast(x.raw(), int(x.numel()), mpi_type(x.dtype()), root, comm_, &request));
        complete(request);
    });
}

void Mpi::wait(Ticket ticket) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_ >= ticket || ended_; });
}

void Mpi::barrier() {
    wait(post("barrier", [this] {
        MPI_Request request;
        check(MPI_Ibarrier(comm_, &request));
        complete(request);
    }));
}

void Mpi::finish() {
    barrier();
    wait(post("MPI_Finalize", [this] {
        check(MPI_Comm_free(&comm_));
        check(MPI_Finalize());
    }));
    leave();
}

void Mpi::end_all(int code) {
    if (std::this_thread::get_id() == communicating_.get_id()) {
        MPI_Abort(MPI_COMM_WORLD, code);
        return;
    }
    std::unique_lock lock(mutex_);
    if (ended_ || leave_) return;
    abort_ = code;
    leave_ = true;
    posted_.notify_all();
    changed_.wait_for(lock, 5s, [&] { return ended_; });
}

void Mpi::communicate() {
    try {
        start();
        while (std::optional<Job> job = next()) {
            job->work();
            job.reset();  // the tensor is the caller's alone again
            const std::lock_guard lock(mutex_);
            since_.reset();
            ++done_;
            changed_.notify_all();
        }
    } catch (const Left&) {
    } catch (const std::exception& e) {  // std::bad_alloc
        options_.fail(me() + ": MPI: " + doing_ + ": " + e.what());
    }
    std::unique_lock lock(mutex_);
    if (abort_) {
        const int code = *abort_;
        lock.unlock();
        MPI_Abort(MPI_COMM_WORLD, code);
        lock.lock();
    }
    since_.reset();
    ended_ = true;
    changed_.notify_all();
    ending_.notify_all();
}

void Mpi::start() {
    begin("MPI_Init");
    const auto trouble = [&](const std::string& what) {
        const std::lock_guard lock(mutex_);
        trouble_ = "MPI did not start: " + what;
        throw Left();
    };
    int before = 0, level = 0;
    MPI_Initialized(&before);
    if (before) trouble("it has been started in this process before");
    if (MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &level) != MPI_SUCCESS)
        trouble("MPI_Init_thread failed");
    if (level < MPI_THREAD_FUNNELED) trouble("it was built without support for threads");
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    check(MPI_Comm_dup(MPI_COMM_WORLD, &comm_));
    check(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN));
    int rank = 0, size = 1;
    check(MPI_Comm_rank(comm_, &rank));
    check(MPI_Comm_size(comm_, &size));
    const std::lock_guard lock(mutex_);
    rank_ = rank;
    size_ = size;
    since_.reset();
    started_ = true;
    changed_.notify_all();
}

std::optional<Mpi::Job> Mpi::next() {
    std::unique_lock lock(mutex_);
    posted_.wait(lock, [&] { return leave_ || !jobs_.empty(); });
    if (leave_) return std::nullopt;
    Job job = std::move(jobs_.front());
    jobs_.pop_front();
    doing_ = job.what;
    since_ = Clock::now();
    return job;
}

void Mpi::begin(const std::string& what) {
    const std::lock_guard lock(mutex_);
    doing_ = what;
    since_ = Clock::now();
}

// This rank's piece of x becomes the sum. Every rank sends every other one its piece: as many bytes
// as a ring would send, and all terms are there at once to be added in the order of the ranks.
void Mpi::sum_pieces(const Tensor& x, const Counts& counts) {
    const int mine = counts[rank_];
    const Counts from = starts(counts);
    Counts send = counts, receive(size_, mine), to(size_);
    send[rank_] = receive[rank_] = 0;
    for (int r = 0; r < size_; ++r) to[r] = r;
    const size_t bytes = size_t(size_ - 1) * mine * size_of(x.dtype());
    if (bytes > scratch_bytes_) {
        scratch_.reset();
        scratch_.reset(new std::byte[bytes]);
        scratch_bytes_ = bytes;
    }
    MPI_Request request;
    const MPI_Datatype type = mpi_type(x.dtype());
    const Counts at = starts(receive);
    check(MPI_Ialltoallv(x.raw(), send.data(), from.data(), type, scratch_.get(), receive.data(),
                         at.data(), type, comm_, &request));
    complete(request);
    const auto sum = [&]<class T>(T* data) {
        sum_in_order(data + from[rank_], reinterpret_cast<const T*>(scratch_.get()), mine, rank_,
                     size_);
    };
    if (x.dtype() == DType::f32)
        sum(x.data<float>());
    else
        sum(x.data<double>());
}

void Mpi::gather_pieces(const Tensor& x, const Counts& counts) {
    MPI_Request request;
    const Counts from = starts(counts);
    check(MPI_Iallgatherv(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, x.raw(), counts.data(), from.data(),
                          mpi_type(x.dtype()), comm_, &request));
    complete(request);
}

void Mpi::check(int code) {
    if (code == MPI_SUCCESS) return;
    char text[MPI_MAX_ERROR_STRING];
    int length = 0;
    MPI_Error_string(code, text, &length);
    options_.fail(me() + ": MPI: " + doing_ + ": " + std::string(text, length));
    throw Left();
}

void Mpi::complete(MPI_Request request) {
    constexpr int kTriesAtOnce = 20;
    std::chrono::microseconds pause = 10us;
    for (int tries = 0;; ++tries) {
        int done = 0;
        check(MPI_Test(&request, &done, MPI_STATUS_IGNORE));
        if (done) return;
        if (leave_) throw Left();
        if (tries < kTriesAtOnce) continue;
        std::this_thread::sleep_for(pause);
        pause = std::min(pause * 5 / 4, 200us);
    }
}

void Mpi::watch() {
    const auto seconds = [](double s) {
        return std::chrono::duration_cast<Clock::duration>(
            std::chrono::duration<double>(std::min(s, 1e9)));
    };
    std::unique_lock lock(mutex_);
    while (!ended_) {
        const auto limit = seconds(patience(options_.seconds, std::max(rank_, options_.rank)));
        const auto now = Clock::now();
        const auto end = since_.value_or(now) + limit;
        if (now >= end) {
            char after[32];
            std::snprintf(after, sizeof after, "%g", options_.seconds);
            const std::string message =
                me() + ": " + doing_ + " waited " + after +
                " s for the other ranks; one of them is gone, stuck or cut off (--comm-timeout)";
            lock.unlock();
            options_.fail(message);
            return;
        }
        ending_.wait_until(lock, end);  // no job that begins meanwhile must end before
    }
}

std::string Mpi::me() const {
    if (!started_) return options_.rank < 0 ? "a rank" : "rank " + std::to_string(options_.rank);
    return "rank " + std::to_string(rank_) + " of " + std::to_string(size_);
}

}  // namespace

std::string mpi_version() {
    char text[MPI_MAX_LIBRARY_VERSION_STRING];
    int length = 0;
    if (MPI_Get_library_version(text, &length) != MPI_SUCCESS) return "MPI";
    std::string version(text, length);
    version.resize(std::min(version.find_first_of(",\n"), version.size()));
    const size_t v = version.find(" v");
    if (v != version.npos) version.erase(v + 1, 1);  // "Open MPI v4.1.4, package: ..."
    return version;
}

std::unique_ptr<Communicator> connect_mpi(Options options) {
    return std::make_unique<Mpi>(std::move(options));
}

}  // namespace fbt::dist

#endif
