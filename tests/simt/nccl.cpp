// NCCL for the emulated device: the functions of <nccl.h> that dist/nccl.cpp calls, for
// non-blocking communicators, between processes of one machine. Every pair of ranks has a socket.
// What is called moves when the stream runs it, with device memory open, and blocks whoever runs
// the stream until the others have done the same; README.md says more.
#include <nccl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tests/simt/device_memory.h"

namespace fbt::simt {
cudaError_t enqueue(cudaStream_t stream, std::function<void()> work);  // emu.h, not to be had here
}

namespace {

using Bytes = std::vector<char>;

struct State {
    int rank = 0, size = 1;
    std::vector<int> sockets;  // of each peer; -1 for oneself
    std::atomic<int> result{ncclInProgress};
    std::atomic<bool> aborted{false};
    std::thread connecting;
    std::mutex mutex;
    std::string error;
    // What was called and waits to be asked for: until then it is not in the stream.
    std::function<ncclResult_t()> pending;
    std::thread::id caller;

    ~State() {
        for (int socket : sockets)
            if (socket >= 0) close(socket);
    }
    void fail(ncclResult_t why, const std::string& text) {
        const std::lock_guard lock(mutex);
        error = text;
        result = why;
    }
    // What fails on a GPU stays where it is until somebody aborts it.
    void hang() const {
        while (!aborted) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
};
using Shared = std::shared_ptr<State>;

// ---- meeting ----

sockaddr_un address_of(const std::string& job, int rank, socklen_t& length) {
    const std::string name = job + "-" + std::to_string(rank);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;  // a first byte of 0: a name, no file
    std::memcpy(address.sun_path + 1, name.data(), name.size());
    length = socklen_t(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    return address;
}

bool connect_all(State& s, const std::string& job) {
    const auto new_socket = [] { return socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0); };
    socklen_t length = 0;
    const int listener = new_socket();
    sockaddr_un address = address_of(job, s.rank, length);
    bool fine = bind(listener, reinterpret_cast<sockaddr*>(&address), length) == 0 &&
                listen(listener, s.size) == 0;
    for (int peer = 0; fine && peer < s.rank; ++peer) {
        address = address_of(job, peer, length);
        const int made = s.sockets[size_t(peer)] = new_socket();
        while (!s.aborted && connect(made, reinterpret_cast<sockaddr*>(&address), length) != 0)
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
        fine = !s.aborted && send(made, &s.rank, sizeof(int), MSG_NOSIGNAL) == sizeof(int);
    }
    for (int left = s.size - 1 - s.rank; fine && left > 0; --left) {
        pollfd wanted{listener, POLLIN, 0};
        while (!s.aborted && poll(&wanted, 1, 20) <= 0) {
        }
        const int made = s.aborted ? -1 : accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
        int peer = -1;
        fine = made >= 0 && recv(made, &peer, sizeof(int), MSG_WAITALL) == sizeof(int) &&
               peer > s.rank && peer < s.size && s.sockets[size_t(peer)] < 0;
        if (fine) s.sockets[size_t(peer)] = made;
        if (!fine && made >= 0) close(made);
    }
    close(listener);
    return fine;
}

// ---- what is called ----

enum class Call : uint64_t { reduce, all_reduce, reduce_scatter, broadcast, all_gather, send };
// Before every message. On a GPU calls that do not match end in a hang or in wrong values.
struct Label {
    Call call;
    uint64_t bytes;
    bool operator==(const Label&) const = default;
};

struct Plan {
    struct Send {
        int peer;
        Label label;
        const void* data;
    };
    struct Receive {
        int peer;
        Label label;
        std::shared_ptr<Bytes> data;
    };
    std::vector<Send> sends;
    std::vector<Receive> receives;
    std::vector<std::function<void()>> after;  // all sends and receives
    Shared comm;
    cudaStream_t stream = nullptr;
    ncclResult_t mistake = ncclSuccess;
};

const void* readable(const void* p, size_t bytes) {
    if (!fbt::simt::lives(p, bytes)) throw std::runtime_error("nccl: outside an allocation");
    return p;
}
void* writable(void* p, size_t bytes) { return const_cast<void*>(readable(p, bytes)); }

// Moves everything of the plan at once, so that no order of sends and receives can block.
void run(Plan& plan) {
    State& s = *plan.comm;
    if (s.aborted) return;
    if (s.result != ncclSuccess && s.result != ncclInProgress) return s.hang();
    const size_t size = size_t(s.size);
    std::vector<Bytes> out(size), in(size);
    std::vector<size_t> sent(size), received(size);
    for (const auto& [peer, label, data] : plan.sends) {
        Bytes& to = out[size_t(peer)];
        const char* head = reinterpret_cast<const char*>(&label);
        const char* body = static_cast<const char*>(readable(data, label.bytes));
        to.insert(to.end(), head, head + sizeof label);
        to.insert(to.end(), body, body + label.bytes);
    }
    for (const auto& [peer, label, data] : plan.receives)
        in[size_t(peer)].resize(in[size_t(peer)].size() + sizeof label + label.bytes);
    for (;;) {
        std::vector<pollfd> wanted;
        std::vector<size_t> peers;
        for (size_t p = 0; p < size; ++p) {
            const short events = short((sent[p] < out[p].size() ? POLLOUT : 0) |
                                       (received[p] < in[p].size() ? POLLIN : 0));
            if (!events) continue;
            wanted.push_back({s.sockets[p], events, 0});
            peers.push_back(p);
        }
        if (wanted.empty()) break;
        (void)poll(wanted.data(), wanted.size(), 50);
        if (s.aborted) return;
        for (size_t i = 0; i < wanted.size(); ++i) {
            const size_t p = peers[i];
            ssize_t moved = 1;
            if (wanted[i].events & POLLOUT) {
                moved = send(wanted[i].fd, out[p].data() + sent[p], out[p].size() - sent[p],
                             MSG_DONTWAIT | MSG_NOSIGNAL);
                if (moved > 0) sent[p] += size_t(moved);
            }
            if (wanted[i].events & POLLIN && (moved >= 0 || errno == EAGAIN)) {
                moved = recv(wanted[i].fd, in[p].data() + received[p], in[p].size() - received[p],
                             MSG_DONTWAIT);
                if (moved > 0) received[p] += size_t(moved);
                if (moved == 0) errno = EPIPE;
            }
            if (moved <= 0 && errno != EAGAIN && errno != EINTR) {
                s.fail(ncclRemoteError, "rank " + std::to_string(p) + " has gone");
                return s.hang();
            }
        }
    }
    std::vector<size_t> at(size);
    for (const auto& [peer, label, data] : plan.receives) {
        const size_t p = size_t(peer);
        Label came;
        std::memcpy(&came, in[p].data() + at[p], sizeof came);
        if (came != label) {
            s.fail(ncclInvalidUsage, "rank " + std::to_string(p) + " called something else");
            return s.hang();
        }
        at[p] += sizeof came;
        data->assign(in[p].begin() + long(at[p]), in[p].begin() + long(at[p] + label.bytes));
        at[p] += label.bytes;
    }
    for (const auto& step : plan.after) step();
}

thread_local int group_depth = 0;
thread_local Plan group;

// Returns ncclInProgress, and queues the plan when the caller asks how it goes.
ncclResult_t launch() {
    Plan plan = std::exchange(group, {});
    if (plan.mistake != ncclSuccess) return plan.mistake;
    if (!plan.comm) return ncclSuccess;  // an empty group
    State& s = *plan.comm;
    const std::lock_guard lock(s.mutex);
    s.caller = std::this_thread::get_id();
    s.pending = [plan = std::make_shared<Plan>(std::move(plan))] {
        return fbt::simt::enqueue(plan->stream, [plan] { run(*plan); }) == cudaSuccess
                   ? ncclSuccess
                   : ncclUnhandledCudaError;
    };
    return ncclInProgress;
}

}  // namespace

struct ncclComm {
    Shared state;
};

namespace {

size_t size_of(ncclDataType_t type) {
    switch (type) {
        case ncclInt8:
        case ncclUint8:
            return 1;
        case ncclFloat32:
            return 4;
        case ncclFloat64:
            return 8;
        default:
            return 0;  // nobody here sends them
    }
}

// Adds a call to the group, or makes a group of it alone.
ncclResult_t add(ncclComm_t comm, cudaStream_t stream, ncclDataType_t type, int peer,
                 const std::function<void(Plan&, const State&)>& body) {
    const Shared& s = comm->state;
    {
        const std::lock_guard lock(s->mutex);
        if (s->pending || (s->result != ncclSuccess)) group.mistake = ncclInvalidUsage;
    }
    if (size_of(type) == 0 || peer < 0 || peer >= s->size) group.mistake = ncclInvalidArgument;
    if (group.comm && (group.comm != s || group.stream != stream)) group.mistake = ncclInvalidUsage;
    group.comm = s;
    group.stream = stream;
    if (group.mistake == ncclSuccess) body(group, *s);
    return group_depth > 0 ? group.mistake : launch();
}

void give(Plan& plan, const State& s, int peer, Call call, const void* data, size_t bytes) {
    if (peer != s.rank) plan.sends.push_back({peer, {call, bytes}, data});
}
std::shared_ptr<Bytes> take(Plan& plan, int peer, Call call, size_t bytes) {
    auto data = std::make_shared<Bytes>();
    plan.receives.push_back({peer, {call, bytes}, data});
    return data;
}
void put(void* to, const void* from, size_t bytes) {
    std::memmove(writable(to, bytes), from, bytes);
}

template <class T>
void sum_into(void* to, const std::vector<Bytes>& parts) {
    const size_t n = parts[0].size() / sizeof(T);
    T* out = static_cast<T*>(writable(to, n * sizeof(T)));
    for (size_t i = 0; i < n; ++i) {
        T sum = 0;
        for (size_t r = parts.size(); r-- > 0;) {  // any order, but not that of the ranks
            T x;
            std::memcpy(&x, parts[r].data() + i * sizeof(T), sizeof(T));
            sum = r + 1 == parts.size() ? x : sum + x;
        }
        out[i] = sum;
    }
}

// to = the sum of everybody's: takes theirs, and adds `mine` once all has arrived.
void take_sum(Plan& plan, const State& s, Call call, const void* mine, void* to, size_t bytes,
              ncclDataType_t type) {
    std::vector<std::shared_ptr<Bytes>> theirs(size_t(s.size));
    for (int r = 0; r < s.size; ++r)
        if (r != s.rank) theirs[size_t(r)] = take(plan, r, call, bytes);
    plan.after.push_back([=, rank = size_t(s.rank)] {
        std::vector<Bytes> parts(theirs.size());
        for (size_t r = 0; r < parts.size(); ++r)
            if (r != rank) parts[r] = std::move(*theirs[r]);
        const char* own = static_cast<const char*>(readable(mine, bytes));
        parts[rank].assign(own, own + bytes);
        type == ncclFloat64 ? sum_into<double>(to, parts) : sum_into<float>(to, parts);
    });
}

bool is_sum(ncclDataType_t type, ncclRedOp_t op) {
    return op == ncclSum && (type == ncclFloat32 || type == ncclFloat64);
}

const char* at(const void* p, size_t bytes) { return static_cast<const char*>(p) + bytes; }
char* at(void* p, size_t bytes) { return static_cast<char*>(p) + bytes; }

}  // namespace

// ---- communicators ----

ncclResult_t ncclGetVersion(int* version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    static std::atomic<int> made{0};
    const std::string name = "fbt-nccl-" + std::to_string(getpid()) + "-" +
                             std::to_string(std::chrono::system_clock::now().time_since_epoch() /
                                            std::chrono::microseconds(1)) +
                             "-" + std::to_string(made++);
    *id = {};
    std::memcpy(id->internal, name.data(), name.size());
    return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
    if (!config || config->blocking != 0 || size < 1 || rank < 0 || rank >= size)
        return ncclInvalidArgument;
    const auto s = std::make_shared<State>();
    s->rank = rank;
    s->size = size;
    s->sockets.assign(size_t(size), -1);
    s->connecting = std::thread([state = s.get(), job = std::string(id.internal)] {
        if (connect_all(*state, job))
            state->result = ncclSuccess;
        else if (!state->aborted)
            state->fail(ncclSystemError, "the ranks could not connect");
    });
    *comm = new ncclComm{s};
    return ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* result) {
    State& s = *comm->state;
    *result = ncclResult_t(s.result.load());
    std::function<ncclResult_t()> pending;
    {
        const std::lock_guard lock(s.mutex);
        if (!s.pending || *result != ncclSuccess) return ncclSuccess;
        *result = ncclInProgress;
        if (s.caller == std::this_thread::get_id()) pending = std::exchange(s.pending, nullptr);
    }
    if (pending) *result = pending();
    return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    State& s = *comm->state;
    const std::lock_guard lock(s.mutex);
    if (s.pending) return ncclInvalidUsage;
    s.caller = std::this_thread::get_id();
    s.pending = [] { return ncclSuccess; };
    return ncclInProgress;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    comm->state->connecting.join();
    delete comm;  // what is queued keeps its state
    return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
    State& s = *comm->state;
    s.aborted = true;
    s.connecting.join();
    for (int socket : s.sockets)
        if (socket >= 0) (void)shutdown(socket, SHUT_RDWR);
    delete comm;
    return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
    const char* names[] = {"no error",
                           "unhandled cuda error",
                           "unhandled system error",
                           "internal error",
                           "invalid argument",
                           "invalid usage",
                           "remote process exited or there was a network error",
                           "NCCL operation in progress"};
    return result >= 0 && result < ncclNumResults ? names[result] : "unknown result code";
}

const char* ncclGetLastError(ncclComm_t comm) {
    static thread_local std::string text;
    text.clear();
    if (comm) {
        const std::lock_guard lock(comm->state->mutex);
        text = comm->state->error;
    }
    return text.c_str();
}

// ---- groups and collectives ----

ncclResult_t ncclGroupStart() {
    ++group_depth;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
    if (group_depth == 0) return ncclInvalidUsage;
    return --group_depth > 0 ? ncclSuccess : launch();
}

ncclResult_t ncclReduce(const void* from, void* to, size_t count, ncclDataType_t type,
                        ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
    if (!is_sum(type, op)) return ncclInvalidArgument;
    const size_t bytes = count * size_of(type);
    return add(comm, stream, type, root, [=](Plan& plan, const State& s) {
        give(plan, s, root, Call::reduce, from, bytes);
        if (s.rank == root) take_sum(plan, s, Call::reduce, from, to, bytes, type);
    });
}

ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    if (!is_sum(type, op)) return ncclInvalidArgument;
    const size_t bytes = count * size_of(type);
    return add(comm, stream, type, 0, [=](Plan& plan, const State& s) {
        for (int r = 0; r < s.size; ++r) give(plan, s, r, Call::all_reduce, from, bytes);
        take_sum(plan, s, Call::all_reduce, from, to, bytes, type);
    });
}

ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    if (!is_sum(type, op)) return ncclInvalidArgument;
    const size_t bytes = count * size_of(type);
    return add(comm, stream, type, 0, [=](Plan& plan, const State& s) {
        for (int r = 0; r < s.size; ++r)
            give(plan, s, r, Call::reduce_scatter, at(from, size_t(r) * bytes), bytes);
        take_sum(plan, s, Call::reduce_scatter, at(from, size_t(s.rank) * bytes), to, bytes, type);
    });
}

ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
    const size_t bytes = count * size_of(type);
    return add(comm, stream, type, root, [=](Plan& plan, const State& s) {
        if (s.rank != root) {
            const auto data = take(plan, root, Call::broadcast, bytes);
            plan.after.push_back([=] { put(to, data->data(), bytes); });
            return;
        }
        for (int r = 0; r < s.size; ++r) give(plan, s, r, Call::broadcast, from, bytes);
        plan.after.push_back([=] { put(to, readable(from, bytes), bytes); });
    });
}

ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
    const size_t bytes = count * size_of(type);
    return add(comm, stream, type, 0, [=](Plan& plan, const State& s) {
        for (int r = 0; r < s.size; ++r) {
            void* place = at(to, size_t(r) * bytes);
            if (r == s.rank) {
                plan.after.push_back([=] { put(place, readable(from, bytes), bytes); });
                continue;
            }
            give(plan, s, r, Call::all_gather, from, bytes);
            const auto data = take(plan, r, Call::all_gather, bytes);
            plan.after.push_back([=] { put(place, data->data(), bytes); });
        }
    });
}

ncclResult_t ncclSend(const void* from, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
    if (peer == comm->state->rank) return ncclInvalidArgument;  // allowed in groups; nobody does it
    return add(comm, stream, type, peer, [=](Plan& plan, const State& s) {
        give(plan, s, peer, Call::send, from, count * size_of(type));
    });
}

ncclResult_t ncclRecv(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
    if (peer == comm->state->rank) return ncclInvalidArgument;
    const size_t bytes = count * size_of(type);
    return add(comm, stream, type, peer, [=](Plan& plan, const State&) {
        const auto data = take(plan, peer, Call::send, bytes);
        plan.after.push_back([=] { put(to, data->data(), bytes); });
    });
}
