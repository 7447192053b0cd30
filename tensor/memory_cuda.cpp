// CUDA memory: a stream-ordered pool, two streams, pinned staging, recordings. Compiled against the
// toolkit's runtime or the emulator's.
//
// Kernels run on the compute stream. Copies from and to the host run on the copy stream, through
// pinned memory: those the device can do while it computes. Events put the two in order where one
// needs the other's result.
#ifdef FBT_CUDA
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tensor/context.h"

namespace fbt::tensor {
namespace {

constexpr size_t kSharedBytes = 163 << 10;  // that kernels may ask for, of a block: sm_80's
constexpr size_t kStagingBytes = 1 << 20;   // of a slot
constexpr size_t kStagingSlots = 32;        // uploads that the host may be ahead of the device

void check(cudaError_t e, const char* what) {
    if (e == cudaSuccess) return;
    (void)cudaGetLastError();  // said here, so not to whoever asks next
    throw Error(ErrorKind::environment,
                std::string("CUDA: ") + what + ": " + cudaGetErrorString(e));
}

class Event {
  public:
    Event() { check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "create event"); }
    ~Event() {
        if (event_) (void)cudaEventDestroy(event_);
    }
    Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
    Event& operator=(Event&&) = delete;
    void record(cudaStream_t stream) { check(cudaEventRecord(event_, stream), "record event"); }
    bool try_record(cudaStream_t stream) noexcept {  // for destructors
        return cudaEventRecord(event_, stream) == cudaSuccess;
    }
    // Later work on `stream` begins when what record() saw is done.
    void order(cudaStream_t stream) {
        check(cudaStreamWaitEvent(stream, event_, 0), "wait for an event");
    }
    void wait() { check(cudaEventSynchronize(event_), "wait for the device"); }

  private:
    cudaEvent_t event_ = nullptr;
};

class Stream {
  public:
    Stream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "create stream"); }
    ~Stream() {
        (void)cudaStreamSynchronize(stream_);
        (void)cudaStreamDestroy(stream_);
    }
    Stream(const Stream&) = delete;
    operator cudaStream_t() const { return stream_; }

  private:
    cudaStream_t stream_ = nullptr;
};

class Recorded : public Recording {
  public:
    explicit Recorded(cudaGraph_t graph) {
        const cudaError_t e = cudaGraphInstantiate(&executable_, graph, 0);
        (void)cudaGraphDestroy(graph);
        check(e, "instantiate a graph");
    }
    ~Recorded() override { (void)cudaGraphExecDestroy(executable_); }
    void launch(cudaStream_t stream) {
        check(cudaGraphLaunch(executable_, stream), "launch graph");
    }

  private:
    cudaGraphExec_t executable_ = nullptr;
};

// One after the other in a ring: each is free again once its copy is done.
class Staging {
  public:
    struct Slot {
        std::byte* memory = nullptr;
        Event copied;
        bool used = false;
    };
    Staging() : slots_(kStagingSlots) {
        void* memory = nullptr;
        check(cudaMallocHost(&memory, kStagingSlots * kStagingBytes), "allocate pinned memory");
        for (size_t i = 0; i < kStagingSlots; ++i)
            slots_[i].memory = static_cast<std::byte*>(memory) + i * kStagingBytes;
    }
    ~Staging() { (void)cudaFreeHost(slots_[0].memory); }
    Slot& next() {
        Slot& slot = slots_[turn_++ % kStagingSlots];
        if (slot.used) slot.copied.wait();
        slot.used = true;
        return slot;
    }

  private:
    std::vector<Slot> slots_;
    size_t turn_ = 0;
};

// Streams, events and memory belong to the device that is the thread's when they are made.
struct Selected {
    explicit Selected(int device) { check(cudaSetDevice(device), "use the device"); }
};

class CudaMemory : public Memory {
  public:
    explicit CudaMemory(int device) : device_(device), selected_(device) {
        cudaMemPool_t pool;
        check(cudaDeviceGetDefaultMemPool(&pool, device_), "get the memory pool");
        uint64_t keep = UINT64_MAX;  // what the arena gives back is soon wanted again
        check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep),
              "set the memory pool up");
    }
    ~CudaMemory() override { (void)cudaStreamSynchronize(copies_); }

    void* allocate(size_t bytes) override {
        refuse_while_recording("memory");
        void* p = nullptr;
        const cudaError_t e = cudaMallocAsync(&p, bytes, compute_);
        if (e == cudaErrorMemoryAllocation) {
            (void)cudaGetLastError();  // running out is the arena's to handle
            return nullptr;
        }
        check(e, "allocate");
        return p;
    }
    void release(void* p) override { (void)cudaFreeAsync(p, compute_); }
    void trim() override {
        cudaMemPool_t pool;
        synchronize();
        check(cudaDeviceGetDefaultMemPool(&pool, device_), "get the memory pool");
        check(cudaMemPoolTrimTo(pool, 0), "trim the memory pool");
    }

    void copy_in(void* device, const void* host, size_t n) override {
        naming_the_op([&] { copy_to_device(device, host, n); });
    }
    void copy_out(void* host, const void* device, size_t n) override {
        naming_the_op([&] { copy_to_host(host, device, n); });
    }
    void synchronize() override {
        naming_the_op([&] {
            check(cudaStreamSynchronize(copies_), "copies");
            check(cudaStreamSynchronize(compute_), "kernels");
        });
    }
    void queued(const char* op, const Shape& shape) override {
        last_op_ = op;
        last_shape_ = shape;
    }
    void copy(void* to, const void* from, size_t n) override {
        if (n)
            check(cudaMemcpyAsync(to, from, n, cudaMemcpyDeviceToDevice, compute_),
                  "copy on the device");
    }
    void zero(void* p, size_t n) override {
        if (n) check(cudaMemsetAsync(p, 0, n, compute_), "zero");
    }

    void inbox_taken(void* p) override { inboxes_[p].fresh = true; }
    void inbox_released(void* p) override {
        Inbox& inbox = inboxes_.at(p);
        // A recording would keep the event for itself: then, as after a failure, the next copy
        // waits for all that is queued.
        inbox.released = !recording_ && inbox.free.try_record(compute_);
    }
    void inbox_forgotten(void* p) override { inboxes_.erase(p); }

    void* stream() override { return compute_; }

    void begin_recording() override {
        check(cudaStreamBeginCapture(compute_, cudaStreamCaptureModeThreadLocal), "record a graph");
        recording_ = true;
    }
    std::unique_ptr<Recording> end_recording() override {
        recording_ = false;
        cudaGraph_t graph = nullptr;
        check(cudaStreamEndCapture(compute_, &graph), "record a graph");
        return std::make_unique<Recorded>(graph);
    }
    void replay(Recording& recording) override {
        static_cast<Recorded&>(recording).launch(compute_);
    }

  private:
    struct Inbox {
        Event free;  // recorded when it was released: work queued before may still use it
        bool released = false;
        bool fresh = true;  // nothing queued since it was taken uses it
    };
    void copy_to_device(void* device, const void* host, size_t n) {
        refuse_while_recording("a copy from the host");
        const auto inbox = inboxes_.find(device);
        if (inbox != inboxes_.end() && inbox->second.fresh && inbox->second.released) {
            inbox->second.free.order(copies_);
        } else {  // queued work may use this memory, or allocate it
            reached_.record(compute_);
            reached_.order(copies_);
        }
        if (inbox != inboxes_.end()) inbox->second.fresh = false;
        for (size_t at = 0; at < n; at += kStagingBytes) {
            const size_t part = std::min(kStagingBytes, n - at);
            Staging::Slot& slot = staging_.next();
            std::memcpy(slot.memory, static_cast<const std::byte*>(host) + at, part);
            check(cudaMemcpyAsync(static_cast<std::byte*>(device) + at, slot.memory, part,
                                  cudaMemcpyHostToDevice, copies_),
                  "copy to the device");
            slot.copied.record(copies_);
            if (at + part == n) slot.copied.order(compute_);
        }
    }
    void copy_to_host(void* host, const void* device, size_t n) {
        refuse_while_recording("a copy to the host");
        reached_.record(compute_);
        reached_.order(copies_);
        for (size_t at = 0; at < n; at += kStagingBytes) {
            const size_t part = std::min(kStagingBytes, n - at);
            Staging::Slot& slot = staging_.next();
            check(cudaMemcpyAsync(slot.memory, static_cast<const std::byte*>(device) + at, part,
                                  cudaMemcpyDeviceToHost, copies_),
                  "copy to the host");
            slot.copied.record(copies_);
            slot.copied.wait();
            std::memcpy(static_cast<std::byte*>(host) + at, slot.memory, part);
        }
    }
    void refuse_while_recording(const char* what) const {
        if (recording_)
            throw Error(ErrorKind::internal,
                        std::string(what) + " wanted while a graph is being recorded");
    }
    // Failures of queued work come to light here.
    template <class F>
    void naming_the_op(F f) {
        try {
            f();
        } catch (const Error& e) {
            std::string text = std::string(e.what()) + " (queued last: " + last_op_ + ", [";
            for (size_t i = 0; i < last_shape_.size(); ++i)
                text += (i ? "," : "") + std::to_string(last_shape_[i]);
            throw Error(e.kind(), text + "])");
        }
    }

    int device_;
    Selected selected_;  // before all that follows
    Stream compute_, copies_;
    Event reached_;
    Staging staging_;
    std::map<void*, Inbox> inboxes_;
    bool recording_ = false;
    const char* last_op_ = "no op";
    Shape last_shape_;
};

}  // namespace

std::unique_ptr<Memory> make_cuda_memory(int index) {
    const CudaDevice device = cuda_device(index);
    if (!device.usable)
        throw Error(ErrorKind::usage,
                    "no CUDA device: " + device.description + "; use --device cpu");
    return std::make_unique<CudaMemory>(device.number);
}

namespace {

// How many the process sees, and if none, why.
std::pair<int, std::string> count_devices() {
    int devices = 0;  // stays 0 where there is no driver: the call then leaves it untouched
    const cudaError_t e = cudaGetDeviceCount(&devices);
    if (e == cudaSuccess && devices > 0) return {devices, ""};
    (void)cudaGetLastError();
    return {0, e == cudaSuccess || e == cudaErrorNoDevice ? "no GPU"
               : e == cudaErrorInsufficientDriver ? "no NVIDIA driver, or one too old for this CUDA"
                                                  : cudaGetErrorString(e)};
}

CudaDevice describe(int number) {
    cudaDeviceProp p{};
    int driver = 0;
    check(cudaGetDeviceProperties(&p, number), "ask for the device's properties");
    check(cudaDriverGetVersion(&driver), "ask for the driver's version");
    const auto version = [](int major, int minor) {
        return std::to_string(major) + "." + std::to_string(minor);
    };
    const auto kib = [](size_t bytes) { return std::to_string(bytes >> 10) + " KB"; };
    if (p.sharedMemPerBlockOptin < kSharedBytes)
        return {false,
                std::string(p.name) + " has " + kib(p.sharedMemPerBlockOptin) +
                    " of shared memory a block, needed " + kib(kSharedBytes) +
                    " (A100, H100, H200 and their successors)",
                number};
    if (p.major < 8)
        return {false,
                std::string(p.name) + " has compute capability " + version(p.major, p.minor) +
                    ", needed 8.0 or newer",
                number};
    return {true,
            std::string(p.name) + ", compute capability " + version(p.major, p.minor) + ", " +
                std::to_string(p.totalGlobalMem >> 20) + " MiB, driver for CUDA " +
                version(driver / 1000, driver % 1000 / 10),
            number};
}

}  // namespace

CudaDevice cuda_device(int index) {
    const auto [devices, why_none] = count_devices();
    if (devices == 0) return {false, why_none};
    if (devices == 1) index = 0;
    if (index < 0 || index >= devices)
        return {false, "local rank " + std::to_string(index) + " needs " +
                           std::to_string(index + 1) + " GPUs, " + std::to_string(devices) +
                           " are visible"};
    return describe(index);
}

std::vector<CudaDevice> cuda_devices() {
    std::vector<CudaDevice> all;
    for (int i = 0; i < count_devices().first; ++i) all.push_back(describe(i));
    return all;
}

}  // namespace fbt::tensor
#endif
