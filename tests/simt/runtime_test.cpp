// The emulated runtime: CUDA's rules about order, memory and capture as they are, and host code
// with seeded bugs, each of which must be caught.
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <stdexcept>
#include <thread>
#include <vector>

#include "kernels/gpu.h"
#include "tests/cuda/device.h"

namespace fbt::tests {
namespace {

using kernels::cuda::launch;

__global__ void fill(int* out, int value) { out[threadIdx.x] = value; }
__global__ void add(int* out, const int* amount) { out[threadIdx.x] += *amount; }
__global__ void copy_ints(int* out, const int* in) { out[threadIdx.x] = in[threadIdx.x]; }
__global__ void stray_barrier(int*, int) {
    if (threadIdx.x == 0) __syncthreads();
}

// Two streams that nothing orders, and eight ints on the device.
class Runtime : public testing::Test {
  protected:
    void SetUp() override {
        EXPECT_EQ(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking), cudaSuccess);
        EXPECT_EQ(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking), cudaSuccess);
        EXPECT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
        EXPECT_EQ(cudaMallocHost(&pinned_memory, 8 * sizeof(int)), cudaSuccess);
        pinned = static_cast<int*>(pinned_memory);
    }
    void TearDown() override {
        simt::clear_failure();
        simt::set_schedule({});
        EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
        EXPECT_EQ(cudaStreamDestroy(a), cudaSuccess);
        EXPECT_EQ(cudaStreamDestroy(b), cudaSuccess);
        EXPECT_EQ(cudaFreeHost(pinned_memory), cudaSuccess);
    }
    static void run(void (*kernel)(int*, int), int* out, int value, cudaStream_t s) {
        EXPECT_TRUE(ok(launch(kernel, {.grid = dim3(1), .block = dim3(8)}, {s}, out, value)));
    }
    static void run(void (*kernel)(int*, const int*), int* out, const int* in, cudaStream_t s) {
        EXPECT_TRUE(ok(launch(kernel, {.grid = dim3(1), .block = dim3(8)}, {s}, out, in)));
    }
    static cudaError_t to_host(int* host, const int* device, cudaStream_t s) {
        return cudaMemcpyAsync(host, device, 8 * sizeof(int), cudaMemcpyDeviceToHost, s);
    }
    static cudaError_t to_device(int* device, const int* host, cudaStream_t s) {
        return cudaMemcpyAsync(device, host, 8 * sizeof(int), cudaMemcpyHostToDevice, s);
    }

    using Ints = std::vector<int>;
    const Ints zeros = Ints(8, 0), sevens = Ints(8, 7), ones = Ints(8, 1);
    cudaStream_t a = nullptr, b = nullptr;
    cudaEvent_t event = nullptr;
    void* pinned_memory = nullptr;
    int* pinned = nullptr;
};

// ---- when queued work runs ----

TEST_F(Runtime, MissingWaitForAStreamIsSeen) {
    DeviceArray<int> x(zeros);
    Ints host(8, -1);
    run(fill, x.data(), 7, a);
    EXPECT_EQ(to_host(host.data(), x.data(), a), cudaSuccess);
    EXPECT_EQ(host, Ints(8, -1));
    EXPECT_EQ(cudaStreamSynchronize(b), cudaSuccess);  // of the wrong stream
    EXPECT_EQ(host, Ints(8, -1));
    EXPECT_EQ(cudaStreamSynchronize(a), cudaSuccess);
    EXPECT_EQ(host, sevens);
}

TEST_F(Runtime, EarlyReuseOfAPinnedBufferIsSeen) {
    DeviceArray<int> x(zeros);
    for (int i = 0; i < 8; ++i) pinned[i] = 7;
    EXPECT_EQ(to_device(x.data(), pinned, a), cudaSuccess);
    for (int i = 0; i < 8; ++i) pinned[i] = 1;
    EXPECT_EQ(cudaStreamSynchronize(a), cudaSuccess);
    EXPECT_EQ(x.host(), ones);
}

TEST_F(Runtime, OrdinaryMemoryMayBeReusedAtOnce) {
    DeviceArray<int> x(zeros);
    Ints host = sevens;
    EXPECT_EQ(to_device(x.data(), host.data(), a), cudaSuccess);
    host = ones;
    EXPECT_EQ(cudaStreamSynchronize(a), cudaSuccess);
    EXPECT_EQ(x.host(), sevens);
}

TEST_F(Runtime, EventsOrderTwoStreams) {
    for (const simt::Schedule& schedule : kSchedules) {
        simt::set_schedule(schedule);
        DeviceArray<int> x(zeros), y(zeros);
        run(fill, x.data(), 7, a);
        EXPECT_EQ(cudaEventRecord(event, a), cudaSuccess);
        run(fill, x.data(), 1, a);  // behind the event: nobody waits for it
        EXPECT_EQ(cudaStreamWaitEvent(b, event, 0), cudaSuccess);
        run(copy_ints, y.data(), x.data(), b);
        Ints host(8);
        EXPECT_EQ(to_host(host.data(), y.data(), b), cudaSuccess);
        EXPECT_EQ(cudaStreamSynchronize(b), cudaSuccess);
        EXPECT_EQ(host, sevens);
    }
}

TEST_F(Runtime, MissingEventBetweenTwoStreamsIsSeen) {
    DeviceArray<int> x(zeros), y(zeros);
    Ints host(8);
    run(fill, x.data(), 7, a);
    run(copy_ints, y.data(), x.data(), b);
    EXPECT_EQ(to_host(host.data(), y.data(), b), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(b), cudaSuccess);
    EXPECT_EQ(host, zeros);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);

    // Where the host waits for both, the order of the two is the schedule's.
    bool early = false, late = false;
    for (const simt::Schedule& schedule : kSchedules) {
        simt::set_schedule(schedule);
        DeviceArray<int> from(zeros), to(zeros);
        run(fill, from.data(), 7, a);
        run(copy_ints, to.data(), from.data(), b);
        EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        (to.host() == sevens ? late : early) = true;
    }
    EXPECT_TRUE(early && late);
}

TEST_F(Runtime, WaitingForAnEventRunsWhatWasBeforeIt) {
    DeviceArray<int> x(zeros);
    Ints host(8, -1), later(8, -1);
    EXPECT_EQ(cudaEventSynchronize(event), cudaSuccess);  // never recorded
    run(fill, x.data(), 7, a);
    EXPECT_EQ(to_host(host.data(), x.data(), a), cudaSuccess);
    EXPECT_EQ(cudaEventRecord(event, a), cudaSuccess);
    EXPECT_EQ(to_host(later.data(), x.data(), a), cudaSuccess);
    EXPECT_EQ(cudaEventSynchronize(event), cudaSuccess);
    EXPECT_EQ(host, sevens);
    EXPECT_EQ(later, Ints(8, -1));
    EXPECT_EQ(cudaStreamSynchronize(a), cudaSuccess);
    EXPECT_EQ(later, sevens);
}

TEST_F(Runtime, AskingInALoopEnds) {
    DeviceArray<int> x(zeros);
    for (int i = 0; i < 3; ++i) run(fill, x.data(), i, a);
    EXPECT_EQ(cudaEventRecord(event, a), cudaSuccess);
    EXPECT_EQ(cudaEventQuery(event), cudaErrorNotReady);
    EXPECT_EQ(cudaStreamQuery(a), cudaErrorNotReady);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    int asked = 0;
    while (cudaStreamQuery(a) == cudaErrorNotReady) ASSERT_LT(++asked, 10);
    EXPECT_EQ(cudaEventQuery(event), cudaSuccess);
    EXPECT_EQ(x.host(), Ints(8, 2));
}

// As a watchdog does: it may not run the work, nor be held up by who does.
TEST_F(Runtime, AnotherThreadOnlyLooks) {
    DeviceArray<int> x(zeros);
    std::atomic<bool> looked = false, running = false, seen = false;
    run(fill, x.data(), 7, a);
    EXPECT_EQ(simt::enqueue(a,
                            [&] {
                                running = true;
                                while (!seen) std::this_thread::yield();
                            }),
              cudaSuccess);
    EXPECT_EQ(cudaEventRecord(event, a), cudaSuccess);
    std::thread watchdog([&] {
        EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
        for (int i = 0; i < 10; ++i) EXPECT_EQ(cudaEventQuery(event), cudaErrorNotReady);
        EXPECT_FALSE(running);
        looked = true;
        while (!running) std::this_thread::yield();
        EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
        EXPECT_EQ(cudaEventQuery(event), cudaErrorNotReady);
        seen = true;
        while (cudaEventQuery(event) != cudaSuccess) std::this_thread::yield();
    });
    while (!looked) std::this_thread::yield();
    EXPECT_EQ(cudaStreamSynchronize(a), cudaSuccess);
    watchdog.join();
}

TEST_F(Runtime, ElapsedTime) {
    cudaEvent_t from = nullptr, to = nullptr;
    EXPECT_EQ(cudaEventCreate(&from), cudaSuccess);
    EXPECT_EQ(cudaEventCreate(&to), cudaSuccess);
    DeviceArray<int> x(zeros);
    EXPECT_EQ(cudaEventRecord(from, a), cudaSuccess);
    run(fill, x.data(), 7, a);
    EXPECT_EQ(cudaEventRecord(to, a), cudaSuccess);
    float milliseconds = -1;
    EXPECT_EQ(cudaEventElapsedTime(&milliseconds, from, to), cudaErrorNotReady);
    EXPECT_EQ(cudaEventSynchronize(to), cudaSuccess);
    EXPECT_EQ(cudaEventElapsedTime(&milliseconds, from, to), cudaSuccess);
    EXPECT_GE(milliseconds, 0);
    EXPECT_EQ(cudaEventRecord(event, a), cudaSuccess);
    EXPECT_EQ(cudaEventSynchronize(event), cudaSuccess);
    EXPECT_EQ(cudaEventElapsedTime(&milliseconds, from, event), cudaErrorInvalidResourceHandle);
    EXPECT_EQ(cudaEventDestroy(from), cudaSuccess);
    EXPECT_EQ(cudaEventDestroy(to), cudaSuccess);
}

// The default stream and blocking ones wait for each other; others do not.
TEST_F(Runtime, DefaultStream) {
    cudaStream_t blocking = nullptr;
    EXPECT_EQ(cudaStreamCreate(&blocking), cudaSuccess);
    DeviceArray<int> x(zeros), y(zeros);
    Ints host(8), other(8, -1);
    run(fill, x.data(), 7, blocking);
    run(fill, y.data(), 7, a);
    run(copy_ints, y.data(), x.data(), nullptr);
    EXPECT_EQ(to_host(host.data(), y.data(), blocking), cudaSuccess);
    EXPECT_EQ(to_host(other.data(), y.data(), a), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(blocking), cudaSuccess);
    EXPECT_EQ(host, sevens);
    EXPECT_EQ(other, Ints(8, -1));
    // What a destroyed stream was given still runs.
    run(fill, x.data(), 1, blocking);
    EXPECT_EQ(cudaStreamDestroy(blocking), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(other, sevens);
    EXPECT_EQ(x.host(), ones);
}

TEST_F(Runtime, HostFunctionsRunInOrder) {
    struct Seen {
        Ints* host;
        int value = 0;
        cudaError_t nested = cudaSuccess;
    };
    DeviceArray<int> x(zeros);
    Ints host(8);
    Seen seen{&host};
    run(fill, x.data(), 7, a);
    EXPECT_EQ(to_host(host.data(), x.data(), a), cudaSuccess);
    const auto look = [](void* p) {
        Seen& s = *static_cast<Seen*>(p);
        s.value = (*s.host)[0];
        s.nested = cudaDeviceSynchronize();  // may deadlock on a GPU
    };
    EXPECT_EQ(cudaLaunchHostFunc(a, look, &seen), cudaSuccess);
    EXPECT_EQ(seen.value, 0);
    EXPECT_EQ(cudaStreamSynchronize(a), cudaSuccess);
    EXPECT_EQ(seen.value, 7);
    EXPECT_EQ(seen.nested, cudaErrorNotPermitted);
    EXPECT_EQ(cudaGetLastError(), cudaErrorNotPermitted);
}

TEST_F(Runtime, StandInsForKernelsRunInOrderOnDeviceMemory) {
    DeviceArray<int> x(zeros);
    run(fill, x.data(), 7, a);
    int* p = x.data();
    EXPECT_EQ(simt::enqueue(a, [p] { p[3] += 1; }), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(a), cudaSuccess);
    EXPECT_EQ(x.host()[3], 8);
    EXPECT_EQ(simt::enqueue(a, [] { throw std::runtime_error("no scratch left"); }), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(a), cudaErrorLaunchFailure);
    EXPECT_STREQ(cudaGetErrorString(cudaErrorLaunchFailure), "no scratch left");
}

TEST_F(Runtime, HostThreadsMayCallAtOnce) {
    std::vector<Ints> results(4);
    std::vector<std::thread> callers;
    for (int t = 0; t < 4; ++t)
        callers.emplace_back([&, t] {
            cudaStream_t stream = nullptr;
            EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
            for (int i = 0; i < 20; ++i) {
                DeviceArray<int> x(zeros);
                run(fill, x.data(), 100 * t + i, stream);
                results[t] = Ints(8);
                EXPECT_EQ(to_host(results[t].data(), x.data(), stream), cudaSuccess);
                EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
            }
            EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
        });
    for (std::thread& caller : callers) caller.join();
    for (int t = 0; t < 4; ++t) EXPECT_EQ(results[t], Ints(8, 100 * t + 19));
}

// ---- failures ----

TEST_F(Runtime, FailureOfAKernelIsReportedByTheSynchronisationAndAfter) {
    DeviceArray<int> x(zeros);
    Ints host(8, -1);
    run(stray_barrier, x.data(), 0, a);
    EXPECT_EQ(to_host(host.data(), x.data(), a), cudaSuccess);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(a), cudaErrorLaunchFailure);
    EXPECT_EQ(host, Ints(8, -1));  // nothing runs after it
    const std::string text = cudaGetErrorString(cudaErrorLaunchFailure);
    EXPECT_NE(text.find("runtime_test.cpp:"), std::string::npos) << text;
    void* memory = nullptr;
    EXPECT_EQ(cudaMalloc(&memory, 8), cudaErrorLaunchFailure);
    EXPECT_EQ(cudaStreamSynchronize(b), cudaErrorLaunchFailure);
    EXPECT_EQ(cudaGetLastError(), cudaErrorLaunchFailure);
    EXPECT_EQ(cudaGetLastError(), cudaErrorLaunchFailure);
    EXPECT_EQ(launch(fill, {.grid = dim3(1), .block = dim3(8)}, {a}, x.data(), 7).message, text);

    simt::clear_failure();
    EXPECT_EQ(cudaStreamSynchronize(a), cudaSuccess);
    run(fill, x.data(), 7, a);
    EXPECT_EQ(cudaStreamSynchronize(a), cudaSuccess);
    EXPECT_EQ(x.host(), sevens);
}

TEST_F(Runtime, FailureThatNoCallReportsEndsTheProcess) {
    EXPECT_DEATH(
        {
            {
                DeviceArray<int> x(zeros);
                run(stray_barrier, x.data(), 0, a);
            }  // cudaFree runs it
            std::exit(0);
        },
        "queued work failed, and no call was there to report it: ");
}

TEST_F(Runtime, UnknownHandlesAndPointers) {
    const auto bad_stream = reinterpret_cast<cudaStream_t>(this);
    DeviceArray<int> x(zeros);
    int host[9] = {};
    EXPECT_EQ(cudaStreamSynchronize(bad_stream), cudaErrorInvalidResourceHandle);
    EXPECT_EQ(cudaEventRecord(reinterpret_cast<cudaEvent_t>(this), a),
              cudaErrorInvalidResourceHandle);
    EXPECT_EQ(to_host(host, x.data(), bad_stream), cudaErrorInvalidResourceHandle);
    EXPECT_EQ(to_host(host, host, a), cudaErrorInvalidValue);
    EXPECT_EQ(to_device(x.data(), x.data(), a), cudaErrorInvalidValue);
    EXPECT_EQ(cudaFree(host), cudaErrorInvalidValue);
    EXPECT_EQ(cudaFree(x.data() + 1), cudaErrorInvalidValue);
    EXPECT_EQ(cudaMemsetAsync(host, 0, 4, a), cudaErrorInvalidValue);
}

TEST_F(Runtime, CopyPastTheEnd) {
    DeviceArray<int> x(zeros);
    std::vector<int> host(9);
    EXPECT_EQ(cudaMemcpyAsync(x.data(), host.data(), 36, cudaMemcpyHostToDevice, a), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(a), cudaErrorIllegalAddress);
    const std::string text = cudaGetErrorString(cudaErrorIllegalAddress);
    EXPECT_NE(text.find("copy: 36 bytes"), std::string::npos) << text;
}

// ---- memory ----

TEST_F(Runtime, HostTouchingDeviceMemoryDies) {
    DeviceArray<int> x(zeros);
    run(fill, x.data(), 7, a);
    EXPECT_EQ(cudaStreamSynchronize(a), cudaSuccess);
    volatile int* p = x.data();
    EXPECT_DEATH((void)*p, "");
    EXPECT_DEATH(*p = 1, "");
    const auto touch = [](void* q) { *static_cast<volatile int*>(q) = 1; };
    EXPECT_DEATH(
        {
            (void)cudaLaunchHostFunc(a, touch, x.data());
            (void)cudaStreamSynchronize(a);
        },
        "");
}

#if !FBT_TEST_ASAN  // which ends the process at the kernel's read
TEST_F(Runtime, KernelAfterTheFreeReadsNan) {
    void* x = nullptr;
    DeviceArray<int> y(zeros);
    EXPECT_EQ(cudaMallocAsync(&x, 32, a), cudaSuccess);
    EXPECT_EQ(cudaMemsetAsync(x, 0, 32, a), cudaSuccess);
    EXPECT_EQ(cudaFreeAsync(x, a), cudaSuccess);
    run(copy_ints, y.data(), static_cast<int*>(x), a);
    EXPECT_EQ(cudaStreamSynchronize(a), cudaSuccess);
    EXPECT_EQ(y.host(), Ints(8, -1));
}
#else
TEST_F(Runtime, KernelAfterTheFree) {
    void* x = nullptr;
    DeviceArray<int> y(zeros);
    EXPECT_EQ(cudaMallocAsync(&x, 32, a), cudaSuccess);
    EXPECT_EQ(cudaFreeAsync(x, a), cudaSuccess);
    EXPECT_DEATH(
        {
            run(copy_ints, y.data(), static_cast<int*>(x), a);
            (void)cudaStreamSynchronize(a);
        },
        "AddressSanitizer: use-after-poison");
}
#endif

TEST_F(Runtime, CopyAfterTheFree) {
    void* x = nullptr;
    int host[8] = {};
    EXPECT_EQ(cudaMallocAsync(&x, 32, a), cudaSuccess);
    EXPECT_EQ(cudaFreeAsync(x, a), cudaSuccess);
    EXPECT_EQ(cudaFreeAsync(x, a), cudaErrorInvalidValue);  // twice
    EXPECT_EQ(to_host(host, static_cast<int*>(x), a), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(a), cudaErrorIllegalAddress);
}

// In another stream the allocation may not have come to pass.
TEST_F(Runtime, CopyBeforeTheAllocation) {
    void* x = nullptr;
    EXPECT_EQ(cudaMallocAsync(&x, 32, a), cudaSuccess);
    EXPECT_EQ(cudaMemsetAsync(x, 0, 32, b), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(b), cudaErrorIllegalAddress);
    simt::clear_failure();
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(cudaFree(x), cudaSuccess);
}

TEST_F(Runtime, OutOfMemory) {
    const size_t mib = 1 << 20;
    size_t before = 0, free_bytes = 0, total = 0;
    EXPECT_EQ(cudaMemGetInfo(&before, &total), cudaSuccess);
    simt::set_memory_limit(total - before + 3 * mib);
    void *x = nullptr, *y = nullptr, *z = nullptr;
    EXPECT_EQ(cudaMalloc(&x, 4 * mib), cudaErrorMemoryAllocation);
    EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
    EXPECT_EQ(x, nullptr);
    EXPECT_EQ(cudaMalloc(&x, mib), cudaSuccess);
    EXPECT_EQ(cudaMallocAsync(&y, 2 * mib, a), cudaSuccess);
    EXPECT_EQ(cudaMemGetInfo(&free_bytes, &total), cudaSuccess);
    EXPECT_EQ(free_bytes, 0u);
    EXPECT_EQ(cudaMallocAsync(&z, 1, a), cudaErrorMemoryAllocation);
    // What was freed is had again, at the latest when it is needed.
    EXPECT_EQ(cudaFreeAsync(y, a), cudaSuccess);
    EXPECT_EQ(cudaMallocAsync(&z, 2 * mib, b), cudaSuccess);
    EXPECT_EQ(cudaFree(x), cudaSuccess);
    EXPECT_EQ(cudaFree(z), cudaSuccess);
    simt::set_memory_limit(0);
    EXPECT_EQ(cudaMemGetInfo(&free_bytes, &total), cudaSuccess);
    EXPECT_EQ(free_bytes, before);
}

TEST_F(Runtime, PoolKeepsWhatItsThresholdSays) {
    cudaMemPool_t pool = nullptr;
    EXPECT_EQ(cudaDeviceGetDefaultMemPool(&pool, 0), cudaSuccess);
    const auto reserved = [&] {
        uint64_t bytes = 0;
        EXPECT_EQ(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrReservedMemCurrent, &bytes),
                  cudaSuccess);
        return bytes;
    };
    const auto allocate_and_free = [&] {
        void* x = nullptr;
        EXPECT_EQ(cudaMallocAsync(&x, 4096, a), cudaSuccess);
        EXPECT_EQ(cudaFreeAsync(x, a), cudaSuccess);
        EXPECT_EQ(reserved(), 4096u);
        EXPECT_EQ(cudaStreamSynchronize(a), cudaSuccess);
    };
    allocate_and_free();
    EXPECT_EQ(reserved(), 0u);
    uint64_t threshold = UINT64_MAX;
    EXPECT_EQ(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold),
              cudaSuccess);
    allocate_and_free();
    EXPECT_EQ(reserved(), 4096u);
    EXPECT_EQ(cudaMemPoolTrimTo(pool, 1024), cudaSuccess);
    EXPECT_EQ(reserved(), 1024u);
    EXPECT_EQ(cudaMemPoolTrimTo(pool, 0), cudaSuccess);
    EXPECT_EQ(reserved(), 0u);
    threshold = 0;
    EXPECT_EQ(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &threshold),
              cudaSuccess);
}

// ---- capture and graphs ----

class Graphs : public Runtime {
  protected:
    void begin() {
        EXPECT_EQ(cudaStreamBeginCapture(a, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    }
    // Ends the capture and gives the graph, ready to launch.
    cudaGraphExec_t end() {
        cudaGraph_t graph = nullptr;
        cudaGraphExec_t exec = nullptr;
        EXPECT_EQ(cudaStreamEndCapture(a, &graph), cudaSuccess);
        EXPECT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
        EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
        return exec;
    }
    void end_with(cudaError_t error) {
        cudaGraph_t graph = nullptr;
        EXPECT_EQ(cudaStreamEndCapture(a, &graph), error);
        EXPECT_EQ(graph, nullptr);
        cudaStreamCaptureStatus status = cudaStreamCaptureStatusActive;
        EXPECT_EQ(cudaStreamIsCapturing(a, &status), cudaSuccess);
        EXPECT_EQ(status, cudaStreamCaptureStatusNone);
        (void)cudaGetLastError();
    }
};

TEST_F(Graphs, ReplayWhatWasCaptured) {
    for (const simt::Schedule& schedule : kSchedules) {
        simt::set_schedule(schedule);
        DeviceArray<int> x(zeros), amount(zeros);
        Ints host(8);
        for (int i = 0; i < 8; ++i) pinned[i] = 2;
        begin();
        cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
        EXPECT_EQ(cudaStreamIsCapturing(a, &status), cudaSuccess);
        EXPECT_EQ(status, cudaStreamCaptureStatusActive);
        EXPECT_EQ(to_device(amount.data(), pinned, a), cudaSuccess);
        {
            int* out = x.data();  // arguments are copied at the capture
            run(add, out, amount.data(), a);
            out = nullptr;
        }
        const cudaGraphExec_t exec = end();
        EXPECT_EQ(x.host(), zeros);  // nothing ran
        EXPECT_EQ(cudaGraphLaunch(exec, a), cudaSuccess);
        EXPECT_EQ(cudaGraphLaunch(exec, b), cudaSuccess);  // follows the first one
        EXPECT_EQ(cudaStreamSynchronize(b), cudaSuccess);
        EXPECT_EQ(x.host(), Ints(8, 4));
        pinned[0] = 5;  // is read at every launch
        EXPECT_EQ(cudaGraphLaunch(exec, a), cudaSuccess);
        EXPECT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);  // what was launched still runs
        EXPECT_EQ(cudaStreamSynchronize(a), cudaSuccess);
        EXPECT_EQ(x.host(), Ints(8, 9));
    }
}

// Stream b joins the capture by waiting for an event of it.
TEST_F(Graphs, ForkAndJoin) {
    for (const simt::Schedule& schedule : kSchedules) {
        simt::set_schedule(schedule);
        DeviceArray<int> x(zeros), y(zeros);
        begin();
        run(fill, x.data(), 7, a);
        EXPECT_EQ(cudaEventRecord(event, a), cudaSuccess);
        EXPECT_EQ(cudaStreamWaitEvent(b, event, 0), cudaSuccess);
        run(copy_ints, y.data(), x.data(), b);
        EXPECT_EQ(cudaEventRecord(event, b), cudaSuccess);
        EXPECT_EQ(cudaStreamWaitEvent(a, event, 0), cudaSuccess);
        run(fill, x.data(), 1, a);
        const cudaGraphExec_t exec = end();
        EXPECT_EQ(cudaGraphLaunch(exec, a), cudaSuccess);
        EXPECT_EQ(cudaStreamSynchronize(a), cudaSuccess);
        EXPECT_EQ(x.host(), ones);
        EXPECT_EQ(y.host(), sevens);
        EXPECT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
    }
}

TEST_F(Graphs, ForkMustBeJoined) {
    DeviceArray<int> x(zeros);
    begin();
    EXPECT_EQ(cudaEventRecord(event, a), cudaSuccess);
    EXPECT_EQ(cudaStreamWaitEvent(b, event, 0), cudaSuccess);
    run(fill, x.data(), 7, b);
    end_with(cudaErrorStreamCaptureUnjoined);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(x.host(), zeros);
}

TEST_F(Graphs, FailureInAGraphIsReportedByTheSynchronisation) {
    DeviceArray<int> x(zeros);
    begin();
    run(stray_barrier, x.data(), 0, a);
    const cudaGraphExec_t exec = end();
    EXPECT_EQ(cudaGraphLaunch(exec, a), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(a), cudaErrorLaunchFailure);
    EXPECT_EQ(cudaGraphExecDestroy(exec), cudaErrorLaunchFailure);
}

TEST_F(Graphs, IllegalCallsInACapture) {
    DeviceArray<int> x(zeros);
    int host[8] = {};
    void* memory = nullptr;
    const cudaError_t unsupported = cudaErrorStreamCaptureUnsupported;
    const std::function<cudaError_t()> illegal[] = {
        [&] { return cudaStreamSynchronize(a); },
        [&] { return cudaStreamQuery(a); },
        [&] { return cudaDeviceSynchronize(); },
        [&] { return cudaMalloc(&memory, 8); },
        [&] { return cudaMallocAsync(&memory, 8, a); },
        [&] { return cudaMallocHost(&memory, 8); },
        [&] { return cudaMemcpy(host, x.data(), 32, cudaMemcpyDeviceToHost); },
        [&] { return to_device(x.data(), host, a); },  // from memory that is not pinned
    };
    for (const auto& call : illegal) {
        begin();
        EXPECT_EQ(call(), unsupported);
        EXPECT_EQ(cudaMemsetAsync(x.data(), 0, 32, a), cudaErrorStreamCaptureInvalidated);
        end_with(cudaErrorStreamCaptureInvalidated);
    }
    // Events of a capture can be waited for by streams only,
    begin();
    EXPECT_EQ(cudaEventRecord(event, a), cudaSuccess);
    EXPECT_EQ(cudaEventSynchronize(event), cudaErrorCapturedEvent);
    end_with(cudaErrorStreamCaptureInvalidated);
    // and its streams for no others.
    EXPECT_EQ(cudaEventRecord(event, b), cudaSuccess);
    begin();
    EXPECT_EQ(cudaStreamWaitEvent(a, event, 0), cudaErrorStreamCaptureIsolation);
    end_with(cudaErrorStreamCaptureInvalidated);
    EXPECT_EQ(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeThreadLocal), unsupported);
    EXPECT_EQ(cudaGetLastError(), unsupported);
    EXPECT_EQ(x.host(), zeros);
}

// Work in the default stream waits for blocking streams, so it may not come while one captures.
TEST_F(Graphs, DefaultStreamDuringACapture) {
    cudaStream_t blocking = nullptr;
    EXPECT_EQ(cudaStreamCreate(&blocking), cudaSuccess);
    DeviceArray<int> x(zeros);
    EXPECT_EQ(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    EXPECT_EQ(cudaMemsetAsync(x.data(), 0, 32, nullptr), cudaErrorStreamCaptureImplicit);
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamEndCapture(blocking, &graph), cudaErrorStreamCaptureInvalidated);
    EXPECT_EQ(cudaStreamDestroy(blocking), cudaSuccess);
    (void)cudaGetLastError();

    begin();  // which does not block
    EXPECT_EQ(cudaMemsetAsync(x.data(), 1, 32, nullptr), cudaSuccess);
    std::thread([&] { EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess); }).join();
    EXPECT_EQ(cudaGraphExecDestroy(end()), cudaSuccess);
    EXPECT_EQ(x.host(), Ints(8, 0x01010101));
}

}  // namespace
}  // namespace fbt::tests
