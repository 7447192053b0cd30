#include "tests/simt/streams.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <unordered_set>
#include <vector>

#include "tests/simt/device_memory.h"
#include "tests/simt/scheduler.h"

namespace fbt::simt {
namespace {

using Clock = std::chrono::steady_clock;
using SharedTask = std::shared_ptr<const Task>;

struct Node {
    SharedTask task;  // null where there is only order to keep
    std::vector<std::shared_ptr<Node>> after;
    std::atomic<bool> done = false;
    Clock::time_point finished{};
};
using NodePtr = std::shared_ptr<Node>;

// What a capture records, and a graph holds: the same, with indices of earlier nodes.
constexpr size_t kNone = size_t(-1);
struct GraphNode {
    SharedTask task;
    std::vector<size_t> after;
};
using Nodes = std::vector<GraphNode>;

struct Stream;
struct Capture {
    const Stream* origin;
    std::thread::id thread;
    cudaStreamCaptureMode mode;
    Nodes nodes;
    bool active = true, invalid = false;
};

struct Stream {
    bool blocking;  // waits for the default stream, and that for it
    NodePtr last;   // null when nothing was queued yet
    std::shared_ptr<Capture> capture = nullptr;
    size_t last_captured = kNone;
};

struct Event {
    bool timed;
    NodePtr node;                      // what the last record waits for; null before the first
    std::shared_ptr<Capture> capture;  // instead, when it was recorded in one
    size_t captured = kNone;
    std::thread::id recorded_by{};
};

struct Graph {
    Nodes nodes;
};
struct GraphExec {
    std::shared_ptr<const Nodes> nodes;
    NodePtr last;  // its launches follow one another
};

struct Runtime {
    std::recursive_mutex mutex;
    // Events, and what they hold, change under this lock too: for threads that ask while work runs.
    std::mutex events_mutex;
    Schedule schedule;
    std::mt19937_64 random;
    std::vector<Stream*> streams;  // in order of creation, the default stream first
    std::unordered_set<const void*> events, graphs, graph_execs;
    std::vector<NodePtr> orphans;  // queued in streams that are destroyed
    cudaError_t failure = cudaSuccess;
    bool failure_was_reported = false;
    bool running = false;
};

// A failure that no call has reported by the end of the process would go unnoticed.
void check_that_failure_was_reported();

Runtime& runtime() {
    static Runtime& r = *[] {  // never destroyed: other static objects may still call
        Runtime* made = new Runtime;
        made->streams.push_back(new Stream{true, nullptr});
        std::atexit(check_that_failure_was_reported);
        return made;
    }();
    return r;
}

void check_that_failure_was_reported() {
    if (runtime().failure == cudaSuccess || runtime().failure_was_reported) return;
    std::fprintf(stderr, "simt: queued work failed, and no call was there to report it: %s\n",
                 last_error());
    std::abort();
}

thread_local cudaError_t kept_error = cudaSuccess;
thread_local bool in_queued_work = false;

cudaError_t keep_error(cudaError_t error) {
    // "Not ready" is an answer, not an error.
    if (error != cudaSuccess && error != cudaErrorNotReady) kept_error = error;
    return error;
}

cudaError_t guarded(const std::function<cudaError_t()>& body, bool frees) {
    if (in_queued_work) return keep_error(cudaErrorNotPermitted);  // and on a GPU may deadlock
    Runtime& r = runtime();
    const std::lock_guard lock(r.mutex);
    if (r.failure == cudaSuccess || frees) {
        const cudaError_t error = body();
        if (r.failure == cudaSuccess) return keep_error(error);
    }
    if (!frees) r.failure_was_reported = true;
    return keep_error(r.failure);
}

// Null if there is no such stream.
Stream* find(cudaStream_t handle) {
    Runtime& r = runtime();
    if (handle == nullptr || handle == cudaStreamLegacy) return r.streams[0];
    for (Stream* stream : r.streams)
        if (reinterpret_cast<cudaStream_t>(stream) == handle) return stream;
    return nullptr;
}
template <class T, class Handle>
T* find(const std::unordered_set<const void*>& known, Handle handle) {
    return known.count(handle) ? reinterpret_cast<T*>(handle) : nullptr;
}

// ---- running ----

cudaError_t attempt(const Task& task) {
    in_queued_work = true;
    cudaError_t error = cudaErrorLaunchFailure;
    try {
        error = task();
    } catch (const std::exception& e) {
        set_last_error(e.what());
    }
    in_queued_work = false;
    return error;
}

void run_node(Node& node) {
    Runtime& r = runtime();
    // After a failure nothing runs any more.
    if (node.task && r.failure == cudaSuccess) r.failure = attempt(*node.task);
    node.done = true;
    node.finished = Clock::now();
    node.task = nullptr;
    node.after.clear();
}

// The order in which to look at `count` nodes that have no order among them.
std::vector<size_t> any_order(size_t count) {
    Runtime& r = runtime();
    std::vector<size_t> order(count);
    for (size_t i = 0; i < count; ++i) order[i] = i;
    if (r.schedule.order == Order::random)
        std::shuffle(order.begin(), order.end(), r.random);
    else if (r.schedule.order != Order::forward)
        std::reverse(order.begin(), order.end());
    return order;
}

// Runs what `roots` need, themselves included, but no more than `most` tasks. A stream is followed
// back as far as possible before another: wherever nothing orders two streams, one is far ahead.
void run(const std::vector<NodePtr>& roots, size_t most = size_t(-1)) {
    struct Visit {
        NodePtr node;
        std::vector<size_t> order;
        size_t next;
    };
    std::vector<Visit> path;
    bool open = false;
    const auto enter = [&](const NodePtr& node) {
        if (node && !node->done) path.push_back({node, any_order(node->after.size()), 0});
    };
    for (size_t i : any_order(roots.size())) {
        enter(roots[i]);
        while (!path.empty() && most > 0) {
            Visit& visit = path.back();
            if (visit.next < visit.order.size()) {
                enter(NodePtr(visit.node->after[visit.order[visit.next++]]));
                continue;
            }
            if (visit.node->task) {
                --most;
                if (!open) open_device_memory();
                open = true;
            }
            run_node(*visit.node);
            path.pop_back();
        }
        path.clear();
    }
    if (open) close_device_memory();
}

bool has_pending(const NodePtr& node) { return node && !node->done; }

// ---- queuing ----

void add_pending(std::vector<NodePtr>& nodes, const NodePtr& node) {
    if (has_pending(node)) nodes.push_back(node);
}

// What must come before the stream's next work.
std::vector<NodePtr> predecessors(const Stream& stream) {
    const Runtime& r = runtime();
    std::vector<NodePtr> nodes;
    add_pending(nodes, stream.last);
    if (&stream == r.streams[0]) {
        for (const Stream* other : r.streams)
            if (other != &stream && other->blocking) add_pending(nodes, other->last);
    } else if (stream.blocking) {
        add_pending(nodes, r.streams[0]->last);
    }
    return nodes;
}

void queue(Stream& stream, SharedTask task, const NodePtr& also_after = nullptr) {
    auto node = std::make_shared<Node>();
    node->task = std::move(task);
    node->after = predecessors(stream);
    add_pending(node->after, also_after);
    stream.last = std::move(node);
}

void record(Stream& stream, SharedTask task, size_t also_after = kNone) {
    GraphNode node{std::move(task), {}};
    for (size_t before : {stream.last_captured, also_after})
        if (before != kNone) node.after.push_back(before);
    stream.last_captured = stream.capture->nodes.size();
    stream.capture->nodes.push_back(std::move(node));
}

cudaError_t invalidate(Capture& capture, cudaError_t error) {
    capture.invalid = true;
    return error;
}

// Work in the default stream would wait for the streams that capture.
cudaError_t check_implicit(const Stream& stream) {
    const Runtime& r = runtime();
    if (&stream != r.streams[0]) return cudaSuccess;
    for (const Stream* other : r.streams)
        if (other->capture && other->blocking)
            return invalidate(*other->capture, cudaErrorStreamCaptureImplicit);
    return cudaSuccess;
}

cudaError_t check_usable(const Stream& stream) {
    if (stream.capture && stream.capture->invalid) return cudaErrorStreamCaptureInvalidated;
    return check_implicit(stream);
}

// ---- capture ----

void end_capture(Capture& capture) {
    capture.active = false;
    for (Stream* stream : runtime().streams)
        if (stream->capture.get() == &capture) {
            stream->last_captured = kNone;
            stream->capture = nullptr;
        }
}

// Whether every stream that joined the capture was waited for by its origin.
bool all_joined(const Capture& capture) {
    std::vector<char> reached(capture.nodes.size());
    if (capture.origin->last_captured != kNone) reached[capture.origin->last_captured] = 1;
    for (size_t i = capture.nodes.size(); i-- > 0;)
        if (reached[i])
            for (size_t before : capture.nodes[i].after) reached[before] = 1;
    for (const Stream* stream : runtime().streams)
        if (stream->capture.get() == &capture && stream->last_captured != kNone &&
            !reached[stream->last_captured])
            return false;
    return true;
}

}  // namespace

cudaError_t call(const std::function<cudaError_t()>& body) { return guarded(body, false); }
cudaError_t freeing_call(const std::function<cudaError_t()>& body) { return guarded(body, true); }

cudaError_t check_stream(cudaStream_t handle) {
    const Stream* stream = find(handle);
    return stream ? check_usable(*stream) : cudaErrorInvalidResourceHandle;
}

cudaError_t submit(cudaStream_t handle, Task task) {
    if (const cudaError_t error = check_stream(handle)) return error;
    Stream* stream = find(handle);
    auto shared = std::make_shared<const Task>(std::move(task));
    if (stream->capture)
        record(*stream, std::move(shared));
    else
        queue(*stream, std::move(shared));
    return cudaSuccess;
}

bool is_capturing(cudaStream_t handle) {
    const Stream* stream = find(handle);
    return stream && stream->capture;
}

cudaError_t invalidate_capture(cudaStream_t handle) {
    return invalidate(*find(handle)->capture, cudaErrorStreamCaptureUnsupported);
}

cudaError_t check_no_capture() {
    for (Stream* stream : runtime().streams) {
        if (!stream->capture) continue;
        Capture& capture = *stream->capture;
        if (capture.mode == cudaStreamCaptureModeGlobal ||
            (capture.mode == cudaStreamCaptureModeThreadLocal &&
             capture.thread == std::this_thread::get_id()))
            return invalidate(capture, cudaErrorStreamCaptureUnsupported);
    }
    return cudaSuccess;
}

cudaError_t run_stream(cudaStream_t handle) {
    Stream* stream = find(handle);
    if (!stream) return cudaErrorInvalidResourceHandle;
    if (stream->capture) return invalidate(*stream->capture, cudaErrorStreamCaptureUnsupported);
    if (const cudaError_t error = check_implicit(*stream)) return error;
    run({stream->last});
    return cudaSuccess;
}

cudaError_t run_everything() {
    Runtime& r = runtime();
    std::vector<NodePtr> roots = std::move(r.orphans);
    r.orphans.clear();
    for (const Stream* stream : r.streams) add_pending(roots, stream->last);
    run(roots);
    return cudaSuccess;
}

cudaError_t run_now(const Task& task) {
    open_device_memory();
    const cudaError_t error = attempt(task);
    close_device_memory();
    return error;
}

void set_schedule(Schedule schedule) {
    const std::lock_guard lock(runtime().mutex);
    runtime().schedule = schedule;
    runtime().random.seed(schedule.seed);
}

void clear_failure() {
    Runtime& r = runtime();
    const std::lock_guard lock(r.mutex);
    if (r.failure != cudaSuccess) (void)run_everything();  // which only drops it
    r.failure = cudaSuccess;
    r.failure_was_reported = false;
    set_last_error("");
    kept_error = cudaSuccess;
}

cudaError_t enqueue(cudaStream_t stream, std::function<void()> work) {
    return call([&] {
        return submit(stream, [work = std::move(work)] {
            work();
            return cudaSuccess;
        });
    });
}

cudaError_t queue_grid(const void* kernel, const cudaLaunchConfig_t& config,
                       std::function<void()> body) {
    return call([&] {
        const dim3 grid = config.gridDim, block = config.blockDim;
        const size_t shared = config.dynamicSmemBytes;
        if (const cudaError_t error = check_grid(kernel, grid, block, shared)) return error;
        return submit(config.stream, [=, order = runtime().schedule, body = std::move(body)] {
            return run_grid(
                kernel, grid, block, shared, order,
                [](const void* p) { (*static_cast<const std::function<void()>*>(p))(); }, &body);
        });
    });
}

}  // namespace fbt::simt

using namespace fbt::simt;

// ---- errors ----

cudaError_t cudaPeekAtLastError() {
    const std::lock_guard lock(runtime().mutex);
    if (runtime().failure == cudaSuccess) return kept_error;
    runtime().failure_was_reported = true;
    return runtime().failure;
}

cudaError_t cudaGetLastError() {
    const cudaError_t error = cudaPeekAtLastError();
    kept_error = cudaSuccess;
    return error;
}

// ---- streams ----

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
    return call([&] {
        if (flags & ~unsigned(cudaStreamNonBlocking)) return cudaErrorInvalidValue;
        Stream* made = new Stream{!(flags & cudaStreamNonBlocking), nullptr};
        runtime().streams.push_back(made);
        *stream = reinterpret_cast<cudaStream_t>(made);
        return cudaSuccess;
    });
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithFlags(stream, 0); }

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
    return cudaStreamCreateWithFlags(stream, flags);
}

// What is queued still runs.
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
    return freeing_call([&] {
        Runtime& r = runtime();
        Stream* stream = find(handle);
        if (!stream || stream == r.streams[0]) return cudaErrorInvalidResourceHandle;
        if (stream->capture) {
            invalidate(*stream->capture, cudaSuccess);
            if (stream->capture->origin == stream) end_capture(*std::shared_ptr(stream->capture));
        }
        add_pending(r.orphans, stream->last);
        r.streams.erase(std::find(r.streams.begin(), r.streams.end(), stream));
        delete stream;
        return cudaSuccess;
    });
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    return call([&] { return run_stream(stream); });
}

cudaError_t cudaDeviceSynchronize() {
    return call([] {
        if (const cudaError_t error = check_no_capture()) return error;
        return run_everything();
    });
}

// A question runs one task, so that asking in a loop ends.
cudaError_t cudaStreamQuery(cudaStream_t handle) {
    return call([&] {
        Stream* stream = find(handle);
        if (!stream) return cudaErrorInvalidResourceHandle;
        if (stream->capture) return invalidate(*stream->capture, cudaErrorStreamCaptureUnsupported);
        if (const cudaError_t error = check_implicit(*stream)) return error;
        if (!has_pending(stream->last)) return cudaSuccess;
        run({stream->last}, 1);
        return cudaErrorNotReady;
    });
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned) {
    return call([&] {
        Stream* stream = find(handle);
        Event* event = find<Event>(runtime().events, event_handle);
        if (!stream || !event) return cudaErrorInvalidResourceHandle;
        if (const cudaError_t error = check_usable(*stream)) return error;
        if (event->capture) {
            Capture& capture = *event->capture;
            if (!capture.active) return cudaErrorCapturedEvent;
            if (capture.invalid) return cudaErrorStreamCaptureInvalidated;
            if (stream == runtime().streams[0])
                return invalidate(capture, cudaErrorStreamCaptureImplicit);
            if (stream->capture && stream->capture != event->capture) {
                invalidate(*stream->capture, cudaErrorStreamCaptureMerge);
                return invalidate(capture, cudaErrorStreamCaptureMerge);
            }
            stream->capture = event->capture;
            record(*stream, nullptr, event->captured);
        } else if (event->node) {
            if (stream->capture)
                return invalidate(*stream->capture, cudaErrorStreamCaptureIsolation);
            if (has_pending(event->node)) queue(*stream, nullptr, event->node);
        }
        return cudaSuccess;
    });
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
    return call([&] {
        if (!function) return cudaErrorInvalidValue;
        return submit(stream, [=] {
            close_device_memory();  // it runs on the host
            function(argument);
            open_device_memory();
            return cudaSuccess;
        });
    });
}

// ---- events ----

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
    return call([&] {
        Event* made = new Event{!(flags & cudaEventDisableTiming), nullptr, nullptr};
        const std::lock_guard lock(runtime().events_mutex);
        runtime().events.insert(made);
        *event = reinterpret_cast<cudaEvent_t>(made);
        return cudaSuccess;
    });
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
    return freeing_call([&] {
        Event* event = find<Event>(runtime().events, handle);
        if (!event) return cudaErrorInvalidResourceHandle;
        const std::lock_guard lock(runtime().events_mutex);
        runtime().events.erase(event);
        delete event;
        return cudaSuccess;
    });
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream_handle) {
    return call([&] {
        Stream* stream = find(stream_handle);
        Event* event = find<Event>(runtime().events, handle);
        if (!stream || !event) return cudaErrorInvalidResourceHandle;
        if (const cudaError_t error = check_usable(*stream)) return error;
        const std::lock_guard lock(runtime().events_mutex);
        event->recorded_by = std::this_thread::get_id();
        event->capture = stream->capture;
        event->captured = stream->last_captured;
        event->node = nullptr;
        if (stream->capture) return cudaSuccess;
        queue(*stream, nullptr);
        event->node = stream->last;
        return cudaSuccess;
    });
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    return call([&] {
        Event* event = find<Event>(runtime().events, handle);
        if (!event) return cudaErrorInvalidResourceHandle;
        if (event->capture) return invalidate(*event->capture, cudaErrorCapturedEvent);
        run({event->node});
        return cudaSuccess;
    });
}

// Another thread than the one that recorded the event only looks: it neither runs the work nor
// waits while that runs.
cudaError_t cudaEventQuery(cudaEvent_t handle) {
    {
        const std::lock_guard lock(runtime().events_mutex);
        const Event* event = find<Event>(runtime().events, handle);
        if (event && event->node && event->recorded_by != std::this_thread::get_id())
            return event->node->done ? cudaSuccess : cudaErrorNotReady;
    }
    return call([&] {
        Event* event = find<Event>(runtime().events, handle);
        if (!event) return cudaErrorInvalidResourceHandle;
        if (event->capture) return invalidate(*event->capture, cudaErrorCapturedEvent);
        if (const cudaError_t error = check_no_capture()) return error;
        if (!has_pending(event->node)) return cudaSuccess;
        run({event->node}, 1);
        return has_pending(event->node) ? cudaErrorNotReady : cudaSuccess;
    });
}

// The host's time, which says nothing about a GPU's.
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
    return call([&] {
        const Event* a = find<Event>(runtime().events, from);
        const Event* b = find<Event>(runtime().events, to);
        if (!a || !b || !a->timed || !b->timed || !a->node || !b->node)
            return cudaErrorInvalidResourceHandle;
        if (has_pending(a->node) || has_pending(b->node)) return cudaErrorNotReady;
        *milliseconds =
            std::chrono::duration<float, std::milli>(b->node->finished - a->node->finished).count();
        return cudaSuccess;
    });
}

// ---- capture and graphs ----

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
    return call([&] {
        Stream* stream = find(handle);
        if (!stream) return cudaErrorInvalidResourceHandle;
        if (stream == runtime().streams[0]) return cudaErrorStreamCaptureUnsupported;
        if (stream->capture) return cudaErrorIllegalState;
        stream->capture =
            std::make_shared<Capture>(Capture{stream, std::this_thread::get_id(), mode, {}});
        stream->last_captured = kNone;
        return cudaSuccess;
    });
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
    return call([&] {
        *graph = nullptr;
        Stream* stream = find(handle);
        if (!stream) return cudaErrorInvalidResourceHandle;
        if (!stream->capture) return cudaErrorIllegalState;
        const std::shared_ptr<Capture> capture = stream->capture;
        if (capture->origin != stream) return invalidate(*capture, cudaErrorStreamCaptureUnmatched);
        if (capture->mode != cudaStreamCaptureModeRelaxed &&
            capture->thread != std::this_thread::get_id())
            return invalidate(*capture, cudaErrorStreamCaptureWrongThread);
        const bool joined = all_joined(*capture);
        end_capture(*capture);
        if (capture->invalid) return cudaErrorStreamCaptureInvalidated;
        if (!joined) return cudaErrorStreamCaptureUnjoined;
        Graph* made = new Graph{std::move(capture->nodes)};
        runtime().graphs.insert(made);
        *graph = reinterpret_cast<cudaGraph_t>(made);
        return cudaSuccess;
    });
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
    return call([&] {
        const Stream* stream = find(handle);
        if (!stream) return cudaErrorInvalidResourceHandle;
        if (const cudaError_t error = check_implicit(*stream)) return error;
        *status = !stream->capture           ? cudaStreamCaptureStatusNone
                  : stream->capture->invalid ? cudaStreamCaptureStatusInvalidated
                                             : cudaStreamCaptureStatusActive;
        return cudaSuccess;
    });
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t handle, unsigned long long) {
    return call([&] {
        const Graph* graph = find<Graph>(runtime().graphs, handle);
        if (!graph) return cudaErrorInvalidValue;
        auto* made = new GraphExec{std::make_shared<const Nodes>(graph->nodes), nullptr};
        runtime().graph_execs.insert(made);
        *exec = reinterpret_cast<cudaGraphExec_t>(made);
        return cudaSuccess;
    });
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* exec, cudaGraph_t graph,
                                          unsigned long long flags) {
    return cudaGraphInstantiate(exec, graph, flags);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t stream_handle) {
    return call([&] {
        Stream* stream = find(stream_handle);
        GraphExec* exec = find<GraphExec>(runtime().graph_execs, handle);
        if (!stream || !exec) return cudaErrorInvalidValue;
        if (const cudaError_t error = check_usable(*stream)) return error;
        // Captured in its turn it would be a graph within a graph.
        if (stream->capture) return invalidate(*stream->capture, cudaErrorStreamCaptureUnsupported);
        queue(*stream, nullptr, exec->last);
        const NodePtr start = stream->last;
        auto end = std::make_shared<Node>();
        std::vector<NodePtr> nodes;
        for (const GraphNode& captured : *exec->nodes) {
            auto node = std::make_shared<Node>();
            node->task = captured.task;
            for (size_t before : captured.after) node->after.push_back(nodes[before]);
            if (captured.after.empty()) node->after.push_back(start);
            end->after.push_back(node);
            nodes.push_back(std::move(node));
        }
        if (nodes.empty()) end->after.push_back(start);
        stream->last = exec->last = std::move(end);
        return cudaSuccess;
    });
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t handle) {
    return freeing_call([&] {
        GraphExec* exec = find<GraphExec>(runtime().graph_execs, handle);
        if (!exec) return cudaErrorInvalidValue;
        runtime().graph_execs.erase(exec);
        delete exec;
        return cudaSuccess;
    });
}

cudaError_t cudaGraphDestroy(cudaGraph_t handle) {
    return freeing_call([&] {
        Graph* graph = find<Graph>(runtime().graphs, handle);
        if (!graph) return cudaErrorInvalidValue;
        runtime().graphs.erase(graph);
        delete graph;
        return cudaSuccess;
    });
}
