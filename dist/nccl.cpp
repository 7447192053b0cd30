// Collectives over NCCL, one GPU a process. Compiled once for each CUDA device, against the
// toolkit's libraries or the emulator's, and without either for builds that have no NCCL.
//
// Collectives run on a stream of their own, one after the other. Each waits for what was queued on
// the compute stream before it, and wait() makes the compute stream wait for it; the host waits in
// barrier() and finish() alone. Memory in flight is kept by its tensors until wait(): what the
// arena then does with it is queued on the compute stream, behind the collective.
#include "dist/dist.h"

#ifndef FBT_NCCL

namespace fbt::dist {

std::string nccl_version() { return {}; }

std::unique_ptr<Communicator> connect_nccl(Context&, int, int, const Exchange&, bool, Options) {
    throw tensor::Error(tensor::ErrorKind::internal, "this build has no NCCL");
}

}  // namespace fbt::dist

#else
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/elementwise.h"

namespace fbt::dist {
namespace {

using tensor::DType;
using tensor::Error;
using tensor::ErrorKind;
using tensor::Tensor;
using Clock = std::chrono::steady_clock;
using Counts = std::vector<int64_t>;

constexpr std::chrono::milliseconds kLook{50};  // between two looks of the watchdog
constexpr std::chrono::milliseconds kSpin{10};  // that the host polls without sleeping

class Event {
  public:
    Event() { (void)cudaEventCreateWithFlags(&event_, cudaEventDisableTiming); }
    ~Event() {
        if (event_) (void)cudaEventDestroy(event_);
    }
    Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
    Event& operator=(Event&&) = delete;
    operator cudaEvent_t() const { return event_; }

  private:
    cudaEvent_t event_ = nullptr;  // null where that failed: the next call says so
};

// A collective on its way.
struct Flight {
    Communicator::Ticket ticket;
    std::string what;  // "all_reduce of 12345 f32"
    Event start, end;  // reached when all before it is done, and when it is done itself
    std::vector<Tensor> tensors;
    bool waited = false;
    // The watchdog's:
    bool started = false, ended = false;
    Clock::time_point since{};  // it saw it started
};

class Nccl final : public Communicator {
  public:
    Nccl(Context& context, int rank, int size, const Exchange& exchange, bool reproducible,
         Options options)
        : context_(context), reproducible_(reproducible), options_(std::move(options)) {
        rank_ = rank;
        size_ = size;
        limit_ = std::chrono::duration_cast<Clock::duration>(
            std::chrono::duration<double>(patience(options_.seconds, rank)));
        if (context.backend() != tensor::Backend::cuda)
            throw Error(ErrorKind::internal, "NCCL is for --device cuda, not " + context.name());
        one_ = Tensor::zeros(context, {1}, DType::f32);
        connect(exchange);
        watchdog_ = std::thread([this] { watch(); });
    }
    ~Nccl() override {
        stop_watching();
        abort_once();
        if (stream_) (void)cudaStreamDestroy(stream_);
    }

    const char* name() const override { return "NCCL"; }

    Ticket all_reduce(const Tensor& x) override {
        const std::string what = describe("all_reduce", x);
        check_sum(what, x);
        if (x.numel() == 0) return last_;
        if (!reproducible_)
            return launch(what, {x}, [&] {
                settle(what, ncclAllReduce(x.raw(), x.raw(), size_t(x.numel()), type_of(x), ncclSum,
                                           comm_, stream_));
            });
        Counts counts(size_t(size_), x.numel() / size_);
        for (int64_t r = 0; r < x.numel() % size_; ++r) ++counts[size_t(r)];
        const Tensor theirs = buffer(x, counts);
        return launch(what, {x, theirs}, [&] {
            sum_in_order(what, x, counts, theirs);
            gather(what, x, counts);
        });
    }

    Ticket reduce_scatter(const Tensor& x, const Counts& counts) override {
        const std::string what = describe("reduce_scatter", x);
        check_sum(what, x);
        check_counts(what, x, counts);
        if (x.numel() == 0) return last_;
        if (reproducible_) {
            const Tensor theirs = buffer(x, counts);
            return launch(what, {x, theirs}, [&] { sum_in_order(what, x, counts, theirs); });
        }
        return launch(what, {x}, [&] {
            if (equal(counts)) {
                settle(what, ncclReduceScatter(x.raw(), piece(x, counts, rank_), size_t(counts[0]),
                                               type_of(x), ncclSum, comm_, stream_));
                return;
            }
            group(what, [&] {
                for (int r = 0; r < size_; ++r)
                    if (const size_t n = size_t(counts[size_t(r)]); n > 0) {
                        std::byte* p = piece(x, counts, r);
                        check(what, ncclReduce(p, p, n, type_of(x), ncclSum, r, comm_, stream_));
                    }
            });
        });
    }

    Ticket all_gather(const Tensor& x, const Counts& counts) override {
        const std::string what = describe("all_gather", x);
        check_counts(what, x, counts);
        if (x.numel() == 0) return last_;
        return launch(what, {x}, [&] { gather(what, x, counts); });
    }

    Ticket broadcast(const Tensor& x, int root) override {
        const std::string what = describe("broadcast", x);
        if (root < 0 || root >= size_)
            throw Error(ErrorKind::internal, what + ": there is no rank " + std::to_string(root));
        if (x.numel() == 0) return last_;
        return launch(what, {x}, [&] {
            settle(what,
                   ncclBroadcast(x.raw(), x.raw(), x.bytes(), ncclUint8, root, comm_, stream_));
        });
    }

    void wait(Ticket ticket) override {
        std::vector<Tensor> done_with;  // released after the compute stream has been told to wait
        cudaEvent_t end = nullptr;
        {
            const std::lock_guard lock(mutex_);
            for (Flight& flight : flights_)
                if (flight.ticket <= ticket && !std::exchange(flight.waited, true)) {
                    end = flight.end;
                    std::ranges::move(flight.tensors, std::back_inserter(done_with));
                    flight.tensors.clear();
                }
        }
        if (end) check("wait", cudaStreamWaitEvent(compute(), end, 0));
        forget_what_is_over();
    }

    void barrier() override {
        const std::string what = "barrier";
        const Ticket ticket = launch(what, {one_}, [&] {
            settle(what,
                   ncclAllReduce(one_.raw(), one_.raw(), 1, ncclFloat32, ncclSum, comm_, stream_));
        });
        check(what, cudaStreamSynchronize(stream_));
        wait(ticket);
    }

    void finish() override {
        check("finish", cudaStreamSynchronize(stream_));
        wait(last_);
        stop_watching();
        settle("finish", ncclCommFinalize(comm_));
        check("finish", ncclCommDestroy(std::exchange(comm_, nullptr)));
    }

    void end_all(int) override { abort_once(); }

  private:
    // ---- the start ----

    void connect(const Exchange& exchange) {
        const auto check = [&](bool fine, const std::string& text) {
            if (fine) return;
            abort_once();
            if (stream_) (void)cudaStreamDestroy(stream_);
            throw Error(ErrorKind::environment, who() + text);
        };
        ncclUniqueId id{};
        ncclResult_t result = rank_ == 0 ? ncclGetUniqueId(&id) : ncclSuccess;
        check(result == ncclSuccess, text_of(result));
        exchange(std::as_writable_bytes(std::span(id.internal)));
        cudaError_t error = cudaSetDevice(context_.device());
        if (error == cudaSuccess)
            error = cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking);
        check(error == cudaSuccess, text_of(error));
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        config.blocking = 0;  // so that no call of NCCL waits for another rank
        result = ncclCommInitRankConfig(&comm_, size_, id, rank_, &config);
        const Clock::time_point begun = Clock::now();
        while (result == ncclInProgress) {
            check(
                Clock::now() - begun < limit_,
                ": NCCL waited " + seconds() + " s for the other ranks to start (--comm-timeout)");
            pause(begun);
            const ncclResult_t asked = ncclCommGetAsyncError(comm_, &result);
            if (asked != ncclSuccess) result = asked;
        }
        check(result == ncclSuccess, text_of(result));
    }

    // ---- one collective ----

    // Queues what `body` calls, behind all that the compute stream and this one have got.
    template <class F>
    Ticket launch(const std::string& what, std::vector<Tensor> tensors, F body) {
        Flight flight{last_ + 1, what, {}, {}, std::move(tensors)};
        check(what, cudaEventRecord(reached_, compute()));
        check(what, cudaStreamWaitEvent(stream_, reached_, 0));
        check(what, cudaEventRecord(flight.start, stream_));
        body();
        check(what, cudaEventRecord(flight.end, stream_));
        forget_what_is_over();
        const std::lock_guard lock(mutex_);
        flights_.push_back(std::move(flight));
        return ++last_;
    }

    // Gives every nonempty piece to its owner, who adds them up in the order of the ranks:
    // ((x0 + x1) + x2) + ..., so an element's bits do not depend on who owns it.
    void sum_in_order(const std::string& what, const Tensor& x, const Counts& counts,
                      const Tensor& theirs) {
        const int64_t mine = counts[size_t(rank_)];
        const auto from = [&](int r) {  // where rank r's copy of the piece lies; not for rank_
            return theirs.raw() + (r < rank_ ? r : r - 1) * mine * size_of(x.dtype());
        };
        group(what, [&] {
            for (int r = 0; r < size_; ++r) {
                if (r == rank_) continue;
                if (const size_t n = size_t(counts[size_t(r)]); n > 0)
                    check(what, ncclSend(piece(x, counts, r), n, type_of(x), r, comm_, stream_));
                if (mine > 0)
                    check(what, ncclRecv(from(r), size_t(mine), type_of(x), r, comm_, stream_));
            }
        });
        if (mine == 0) return;
        std::byte* own = piece(x, counts, rank_);
        for (int r = 1; r < rank_; ++r) add(what, x.dtype(), from(0), from(r), mine);
        if (rank_ > 0) add(what, x.dtype(), own, from(0), mine);  // a + b = b + a, to the last bit
        for (int r = rank_ + 1; r < size_; ++r) add(what, x.dtype(), own, from(r), mine);
    }
    void add(const std::string& what, DType dtype, std::byte* y, const std::byte* x, int64_t n) {
        const auto call = [&]<class T>(T*) {
            return kernels::cuda::add_accum(reinterpret_cast<T*>(y), reinterpret_cast<const T*>(x),
                                            n, kernels::Stream{stream_, 1});
        };
        const kernels::Status status = dtype == DType::f64 ? call(static_cast<double*>(nullptr))
                                                           : call(static_cast<float*>(nullptr));
        if (!status.ok()) fail(who() + ": " + what + ": " + status.message);
    }
    // For the other ranks' copies of this rank's piece.
    Tensor buffer(const Tensor& x, const Counts& counts) const {
        return Tensor::empty(context_, {(size_ - 1) * counts[size_t(rank_)]}, x.dtype());
    }

    void gather(const std::string& what, const Tensor& x, const Counts& counts) {
        const size_t bytes = size_t(size_of(x.dtype()));
        if (equal(counts)) {
            settle(what, ncclAllGather(piece(x, counts, rank_), x.raw(), size_t(counts[0]) * bytes,
                                       ncclUint8, comm_, stream_));
            return;
        }
        group(what, [&] {
            for (int r = 0; r < size_; ++r)
                if (const size_t n = size_t(counts[size_t(r)]) * bytes; n > 0) {
                    std::byte* p = piece(x, counts, r);
                    check(what, ncclBroadcast(p, p, n, ncclUint8, r, comm_, stream_));
                }
        });
    }

    template <class F>
    void group(const std::string& what, F calls) {
        check(what, ncclGroupStart());
        calls();
        settle(what, ncclGroupEnd());
    }

    static std::byte* piece(const Tensor& x, const Counts& counts, int r) {
        return x.raw() +
               std::accumulate(counts.begin(), counts.begin() + r, int64_t(0)) * size_of(x.dtype());
    }
    static bool equal(const Counts& counts) {
        return std::ranges::all_of(counts, [&](int64_t n) { return n == counts[0]; });
    }
    static ncclDataType_t type_of(const Tensor& x) {
        return x.dtype() == DType::f64 ? ncclFloat64 : ncclFloat32;
    }
    static std::string describe(const char* op, const Tensor& x) {
        return std::string(op) + " of " + std::to_string(x.numel()) + " " + name_of(x.dtype());
    }
    static void check_sum(const std::string& what, const Tensor& x) {
        if (x.dtype() != DType::f32 && x.dtype() != DType::f64)
            throw Error(ErrorKind::internal, what + ": sums need f32 or f64");
    }
    void check_counts(const std::string& what, const Tensor& x, const Counts& counts) const {
        if (std::ssize(counts) != size_ ||
            std::ranges::any_of(counts, [](int64_t n) { return n < 0; }) ||
            std::accumulate(counts.begin(), counts.end(), int64_t(0)) != x.numel())
            throw Error(ErrorKind::internal, what + ": " + std::to_string(counts.size()) +
                                                 " pieces do not make it up for " +
                                                 std::to_string(size_) + " ranks");
    }
    cudaStream_t compute() const { return static_cast<cudaStream_t>(context_.stream().handle); }

    // ---- what goes wrong ----

    std::string who() const {
        return "rank " + std::to_string(rank_) + " of " + std::to_string(size_);
    }
    std::string seconds() const {
        std::string text = std::to_string(options_.seconds);  // 300.000000
        text.erase(text.find_last_not_of('0') + 1);
        if (text.ends_with('.')) text.pop_back();
        return text;
    }
    std::string text_of(ncclResult_t result) const {
        std::string text = ncclGetErrorString(result);
        const std::string more = ncclGetLastError(comm_);
        if (!more.empty()) text += " (" + more + ")";
        return ": NCCL: " + text;
    }
    static std::string text_of(cudaError_t error) {
        return std::string(": CUDA: ") + cudaGetErrorString(error);
    }
    std::string broken(const std::string& what, ncclResult_t result) const {
        const std::string text = text_of(result);  // ": NCCL: ..."
        return who() + ": NCCL: " + what + text.substr(text.find(": ", 2));
    }
    std::string late(const std::string& what) const {
        return who() + ": " + what + " waited " + seconds() +
               " s for the other ranks; one of them is gone, stuck or cut off (--comm-timeout)";
    }
    // One thread alone ends the process.
    bool may_fail() {
        std::thread::id nobody;
        return failing_.compare_exchange_strong(nobody, std::this_thread::get_id());
    }
    [[noreturn]] static void wait_for_the_end() {
        for (;;) std::this_thread::sleep_for(std::chrono::seconds(1));
    }
    [[noreturn]] void fail(const std::string& message) {
        if (!may_fail()) wait_for_the_end();
        options_.fail(message);
        std::terminate();  // it promised not to return
    }
    void check(const std::string& what, cudaError_t error) {
        if (error == cudaSuccess) return;
        (void)cudaGetLastError();
        fail(who() + ": " + what + text_of(error));
    }
    // Within a group, where calls only note what is wanted.
    void check(const std::string& what, ncclResult_t result) {
        if (result != ncclSuccess && result != ncclInProgress) fail(broken(what, result));
    }
    // Until NCCL has put the call into the stream. The first ones connect to other ranks meanwhile.
    void settle(const std::string& what, ncclResult_t result) {
        const Clock::time_point begun = Clock::now();
        while (result == ncclInProgress) {
            if (Clock::now() - begun > limit_) fail(late(what));
            {
                const std::lock_guard lock(mutex_);
                if (!comm_) break;
                const ncclResult_t asked = ncclCommGetAsyncError(comm_, &result);
                if (asked != ncclSuccess) result = asked;
            }
            if (result == ncclInProgress) pause(begun);
        }
        if (result != ncclSuccess) fail(broken(what, result));
    }
    static void pause(Clock::time_point begun) {
        if (Clock::now() - begun < kSpin)
            std::this_thread::yield();
        else
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }

    // The oldest collective that is not done has been able to start, that is, the compute stream
    // and the collective before it have got so far, for how long? And is NCCL well? The device's
    // own failures are for the thread that uses it: its next call reports them.
    std::string look() {
        const std::lock_guard lock(mutex_);
        if (!comm_) return {};
        const auto oldest = std::ranges::find_if(flights_, [](Flight& flight) {
            return !flight.ended && !(flight.ended = cudaEventQuery(flight.end) == cudaSuccess);
        });
        ncclResult_t state = ncclSuccess;
        const ncclResult_t asked = ncclCommGetAsyncError(comm_, &state);
        if (asked != ncclSuccess) state = asked;
        if (state != ncclSuccess && state != ncclInProgress)
            return broken(oldest == flights_.end() ? "between collectives" : oldest->what, state);
        if (oldest == flights_.end()) return {};
        if (!oldest->started && cudaEventQuery(oldest->start) == cudaSuccess) {
            oldest->started = true;
            oldest->since = Clock::now();
        }
        return oldest->started && Clock::now() - oldest->since > limit_ ? late(oldest->what)
                                                                        : std::string();
    }
    void watch() {
        (void)cudaSetDevice(context_.device());
        for (;;) {
            {
                std::unique_lock lock(stop_mutex_);
                if (stop_.wait_for(lock, kLook, [&] { return stopping_; })) return;
            }
            const std::string message = look();
            if (message.empty()) continue;
            if (may_fail()) options_.fail(message);
            return;
        }
    }
    void stop_watching() {
        if (!watchdog_.joinable()) return;
        {
            const std::lock_guard lock(stop_mutex_);
            stopping_ = true;
        }
        stop_.notify_all();
        const std::thread::id watchdog = watchdog_.get_id();
        if (watchdog == std::this_thread::get_id())
            watchdog_.detach();  // the process ends on it, and destroys what is left
        else if (failing_.load() == watchdog)
            wait_for_the_end();
        else
            watchdog_.join();
    }
    // Events are destroyed by the thread that records them, not by the watchdog.
    void forget_what_is_over() {
        const std::lock_guard lock(mutex_);
        while (!flights_.empty() && flights_.front().waited && flights_.front().ended)
            flights_.pop_front();
    }
    void abort_once() {
        ncclComm_t comm = nullptr;
        {
            const std::lock_guard lock(mutex_);
            comm = std::exchange(comm_, nullptr);
        }
        if (comm) (void)ncclCommAbort(comm);
    }

    Context& context_;
    const bool reproducible_;
    const Options options_;
    Clock::duration limit_{};
    cudaStream_t stream_ = nullptr;
    Event reached_;  // by the compute stream, at the last collective
    Tensor one_;     // for barriers
    Ticket last_ = 0;

    std::mutex mutex_;  // of what follows
    ncclComm_t comm_ = nullptr;
    std::deque<Flight> flights_;  // not over, or not waited for

    std::thread watchdog_;
    std::mutex stop_mutex_;
    std::condition_variable stop_;
    bool stopping_ = false;
    std::atomic<std::thread::id> failing_{};
};

}  // namespace

std::string nccl_version() {
    int code = 0;
    if (ncclGetVersion(&code) != ncclSuccess) return {};
    return std::to_string(code / 10000) + "." + std::to_string(code / 100 % 100) + "." +
           std::to_string(code % 100);
}

std::unique_ptr<Communicator> connect_nccl(Context& context, int rank, int size,
                                           const Exchange& exchange, bool reproducible,
                                           Options options) {
    return std::make_unique<Nccl>(context, rank, size, exchange, reproducible, std::move(options));
}

}  // namespace fbt::dist
#endif
