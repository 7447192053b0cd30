// The rest of the CUDA runtime API that fbt's device layer calls: the device's properties, errors'
// texts, memory and copies, for one emulated device. Streams are in streams.cpp.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>

#include "tests/simt/device_memory.h"
#include "tests/simt/scheduler.h"
#include "tests/simt/streams.h"

using namespace fbt::simt;

namespace {

constexpr int kThreadsPerMultiprocessor = 2048, kBlocksPerMultiprocessor = 32;
constexpr int kSharedPerMultiprocessor = 164 * 1024, kSharedPerBlock = 163 * 1024;
constexpr int kReservedSharedPerBlock = 1024;
constexpr int kL2Bytes = 50 << 20, kMemoryClockKhz = 2619000, kClockKhz = 1980000;

// The default pool: what stream-ordered allocations hold, and what it keeps of those freed.
struct Pool {
    uint64_t release_threshold = 0;
    uint64_t used = 0, kept = 0;
    uint64_t used_high = 0, reserved_high = 0;
};
Pool pool;
std::map<const void*, size_t> pooled;  // sizes of the pool's allocations
std::map<const char*, size_t> pinned;  // host memory that the device may read late

int device_count = 1;
thread_local int current_device = 0;

bool is_device(int device) { return device >= 0 && device < device_count; }

bool is_pinned(const void* p, size_t bytes) {
    const char* address = static_cast<const char*>(p);
    const auto after = pinned.upper_bound(address);
    if (after == pinned.begin()) return false;
    const auto& [start, size] = *std::prev(after);
    return address + bytes <= start + size;
}

void shrink_pool(uint64_t reserved) {
    pool.kept = std::min(pool.kept, reserved > pool.used ? reserved - pool.used : 0);
}

cudaError_t outside(const char* what, const void* p, size_t bytes) {
    char text[256];
    std::snprintf(text, sizeof text, "%s: %zu bytes at %p are not of one allocation", what, bytes,
                  p);
    set_last_error(text);
    return cudaErrorIllegalAddress;
}

// A place for `bytes`, after all queued work if memory is short: what that frees is then free.
void* reserve(size_t bytes) {
    void* place = reserve_device_memory(bytes);
    if (place) return place;
    (void)run_everything();
    return reserve_device_memory(bytes);
}

}  // namespace

// ---- errors ----

const char* cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaSuccess:
            return "no error";
        case cudaErrorInvalidValue:
            return "invalid argument";
        case cudaErrorMemoryAllocation:
            return "out of memory";
        case cudaErrorInvalidConfiguration:
            return "invalid launch configuration";
        case cudaErrorInvalidDevice:
            return "invalid device ordinal";
        case cudaErrorInvalidResourceHandle:
            return "invalid resource handle";
        case cudaErrorIllegalState:
            return "the operation cannot be performed in the present state";
        case cudaErrorNotReady:
            return "device not ready";
        case cudaErrorNotPermitted:
            return "operation not permitted";
        case cudaErrorNotSupported:
            return "operation not supported";
        case cudaErrorStreamCaptureUnsupported:
            return "operation not permitted when stream is capturing";
        case cudaErrorStreamCaptureInvalidated:
            return "operation failed due to a previous error during capture";
        case cudaErrorStreamCaptureMerge:
            return "operation would result in a merge of separate capture sequences";
        case cudaErrorStreamCaptureUnmatched:
            return "capture was not ended in the same stream as it began";
        case cudaErrorStreamCaptureUnjoined:
            return "capturing stream has unjoined work";
        case cudaErrorStreamCaptureIsolation:
            return "dependency created on uncaptured work in another stream";
        case cudaErrorStreamCaptureImplicit:
            return "operation would make the legacy stream depend on a capturing blocking stream";
        case cudaErrorCapturedEvent:
            return "operation not permitted on an event last recorded in a capturing stream";
        case cudaErrorStreamCaptureWrongThread:
            return "attempt to terminate a thread-local capture sequence from another thread";
        case cudaErrorLaunchFailure:
        case cudaErrorIllegalAddress:
            return last_error();
        default:
            return "an error that the emulator does not give";
    }
}

// ---- the device ----

void fbt::simt::set_device_count(int count) { device_count = count; }

cudaError_t cudaGetDeviceCount(int* count) {
    *count = device_count;
    return cudaSuccess;
}

// Waits for nobody: a thread may choose its device while another runs work.
cudaError_t cudaSetDevice(int device) {
    if (!is_device(device)) return call([] { return cudaErrorInvalidDevice; });
    current_device = device;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
    *device = current_device;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

// An H100's limits, with the host's memory.
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
    return call([&] {
        if (!is_device(device)) return cudaErrorInvalidDevice;
        *properties = cudaDeviceProp{};
        std::snprintf(properties->name, sizeof properties->name, "emulated device");
        properties->totalGlobalMem = memory_use().limit;
        properties->major = 9;
        properties->minor = 0;
        properties->multiProcessorCount = 1;
        properties->warpSize = 32;
        properties->maxThreadsPerBlock = 1024;
        properties->maxThreadsPerMultiProcessor = kThreadsPerMultiprocessor;
        properties->maxBlocksPerMultiProcessor = kBlocksPerMultiprocessor;
        properties->sharedMemPerBlock = 48 * 1024;
        properties->sharedMemPerBlockOptin = kSharedPerBlock;
        properties->sharedMemPerMultiprocessor = kSharedPerMultiprocessor;
        properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
        properties->l2CacheSize = kL2Bytes;
        properties->memoryBusWidth = 5120;
        properties->asyncEngineCount = 1;
        properties->concurrentKernels = 1;
        properties->unifiedAddressing = 1;
        properties->memoryPoolsSupported = 1;
        return cudaSuccess;
    });
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    if (!is_device(device)) return call([] { return cudaErrorInvalidDevice; });
    cudaDeviceProp p;
    if (const cudaError_t error = cudaGetDeviceProperties(&p, 0)) return error;
    return call([&] {
        switch (attribute) {
            case cudaDevAttrMaxThreadsPerBlock:
                *value = p.maxThreadsPerBlock;
                return cudaSuccess;
            case cudaDevAttrMaxSharedMemoryPerBlock:
                *value = int(p.sharedMemPerBlock);
                return cudaSuccess;
            case cudaDevAttrMaxSharedMemoryPerBlockOptin:
                *value = int(p.sharedMemPerBlockOptin);
                return cudaSuccess;
            case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
                *value = int(p.sharedMemPerMultiprocessor);
                return cudaSuccess;
            case cudaDevAttrReservedSharedMemoryPerBlock:
                *value = kReservedSharedPerBlock;
                return cudaSuccess;
            case cudaDevAttrWarpSize:
                *value = p.warpSize;
                return cudaSuccess;
            case cudaDevAttrMultiProcessorCount:
                *value = p.multiProcessorCount;
                return cudaSuccess;
            case cudaDevAttrMaxThreadsPerMultiProcessor:
                *value = p.maxThreadsPerMultiProcessor;
                return cudaSuccess;
            case cudaDevAttrMaxBlocksPerMultiprocessor:
                *value = p.maxBlocksPerMultiProcessor;
                return cudaSuccess;
            case cudaDevAttrL2CacheSize:
                *value = p.l2CacheSize;
                return cudaSuccess;
            case cudaDevAttrClockRate:
                *value = kClockKhz;
                return cudaSuccess;
            case cudaDevAttrMemoryClockRate:
                *value = kMemoryClockKhz;
                return cudaSuccess;
            case cudaDevAttrGlobalMemoryBusWidth:
                *value = p.memoryBusWidth;
                return cudaSuccess;
            case cudaDevAttrComputeCapabilityMajor:
                *value = p.major;
                return cudaSuccess;
            case cudaDevAttrComputeCapabilityMinor:
                *value = p.minor;
                return cudaSuccess;
            case cudaDevAttrMemoryPoolsSupported:
                *value = 1;
                return cudaSuccess;
            default:
                return cudaErrorInvalidValue;
        }
    });
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
    return call([&] {
        const auto [limit, reserved] = memory_use();
        const size_t held = reserved + pool.kept;
        *free_bytes = held < limit ? limit - held : 0;
        *total_bytes = limit;
        return cudaSuccess;
    });
}

// ---- memory ----

cudaError_t cudaMalloc(void** memory, size_t bytes) {
    return call([&] {
        *memory = nullptr;
        if (const cudaError_t error = check_no_capture()) return error;
        void* place = reserve(bytes);
        if (!place) return cudaErrorMemoryAllocation;
        *memory = place;
        return run_now([=] {
            begin_life(place);
            return cudaSuccess;
        });
    });
}

// Waits for all work, as cudaFree does.
cudaError_t cudaFree(void* memory) {
    return freeing_call([&] {
        if (!memory) return cudaSuccess;
        if (const cudaError_t error = check_no_capture()) return error;
        if (!is_reserved(memory)) return cudaErrorInvalidValue;
        release(memory);
        (void)run_everything();
        pool.used -= pooled[memory];
        pooled.erase(memory);
        return run_now([=] {
            end_life(memory);
            return cudaSuccess;
        });
    });
}

cudaError_t cudaMallocAsync(void** memory, size_t bytes, cudaStream_t stream) {
    return call([&] {
        *memory = nullptr;
        if (is_capturing(stream)) return invalidate_capture(stream);  // graphs own no memory here
        void* place = reserve(bytes);
        if (!place) return cudaErrorMemoryAllocation;
        const cudaError_t error = submit(stream, [=] {
            begin_life(place);
            return cudaSuccess;
        });
        if (error != cudaSuccess) {
            (void)run_now([=] {
                end_life(place);
                return cudaSuccess;
            });
            return error;
        }
        pooled[place] = bytes;
        pool.used += bytes;
        pool.kept -= std::min<uint64_t>(pool.kept, bytes);
        pool.used_high = std::max(pool.used_high, pool.used);
        pool.reserved_high = std::max(pool.reserved_high, pool.used + pool.kept);
        *memory = place;
        return cudaSuccess;
    });
}

cudaError_t cudaFreeAsync(void* memory, cudaStream_t stream) {
    return freeing_call([&] {
        if (!memory) return cudaSuccess;
        if (is_capturing(stream)) return invalidate_capture(stream);
        if (!is_reserved(memory)) return cudaErrorInvalidValue;
        const cudaError_t error = submit(stream, [=] {
            const uint64_t bytes = pooled[memory];
            pooled.erase(memory);
            pool.used -= bytes;
            pool.kept += bytes;
            shrink_pool(pool.release_threshold);
            end_life(memory);
            return cudaSuccess;
        });
        if (error == cudaSuccess) release(memory);
        return error;
    });
}

cudaError_t cudaMallocHost(void** memory, size_t bytes) {
    return call([&] {
        *memory = nullptr;
        if (const cudaError_t error = check_no_capture()) return error;
        void* place = std::aligned_alloc(4096, (std::max(bytes, size_t(1)) + 4095) / 4096 * 4096);
        if (!place) return cudaErrorMemoryAllocation;
        pinned[static_cast<char*>(place)] = bytes;
        *memory = place;
        return cudaSuccess;
    });
}

cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
    return cudaMallocHost(memory, bytes);
}

// Waits for all work, as cudaFreeHost does.
cudaError_t cudaFreeHost(void* memory) {
    return freeing_call([&] {
        if (!memory) return cudaSuccess;
        if (const cudaError_t error = check_no_capture()) return error;
        if (pinned.erase(static_cast<char*>(memory)) == 0) return cudaErrorInvalidValue;
        (void)run_everything();
        std::free(memory);
        return cudaSuccess;
    });
}

// ---- copies ----

namespace {

cudaError_t check_kind(const void* to, const void* from, cudaMemcpyKind kind) {
    if (kind == cudaMemcpyDefault) return cudaSuccess;
    const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    return to_device == is_device_memory(to) && from_device == is_device_memory(from)
               ? cudaSuccess
               : cudaErrorInvalidValue;
}

cudaError_t copy(void* to, const void* from, size_t bytes) {
    if (is_device_memory(to) && !lives(to, bytes)) return outside("copy", to, bytes);
    if (is_device_memory(from) && !lives(from, bytes)) return outside("copy", from, bytes);
    std::memcpy(to, from, bytes);
    return cudaSuccess;
}

cudaError_t set(void* memory, int value, size_t bytes) {
    if (!lives(memory, bytes)) return outside("memset", memory, bytes);
    std::memset(memory, value, bytes);
    return cudaSuccess;
}

}  // namespace

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
    return call([&] {
        if (bytes == 0) return cudaSuccess;
        if (const cudaError_t error = check_kind(to, from, kind)) return error;
        if (const cudaError_t error = check_stream(nullptr)) return error;
        if (const cudaError_t error = check_no_capture()) return error;
        (void)submit(nullptr, [=] { return copy(to, from, bytes); });
        return run_stream(nullptr);
    });
}

// Ordinary host memory is copied aside at once: the caller may change it. Pinned memory is read,
// and host memory written, when the stream gets there.
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
    return call([&] {
        if (bytes == 0) return cudaSuccess;
        if (const cudaError_t error = check_kind(to, from, kind)) return error;
        if (is_device_memory(from) || is_pinned(from, bytes)) {
            if (is_capturing(stream) && !is_device_memory(to) && !is_pinned(to, bytes))
                return invalidate_capture(stream);
            return submit(stream, [=] { return copy(to, from, bytes); });
        }
        if (is_capturing(stream)) return invalidate_capture(stream);
        std::shared_ptr<char[]> staged(new char[bytes]);
        std::memcpy(staged.get(), from, bytes);
        return submit(stream, [=] { return copy(to, staged.get(), bytes); });
    });
}

cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
    return call([&] {
        if (bytes == 0) return cudaSuccess;
        if (!is_device_memory(memory)) return cudaErrorInvalidValue;
        return submit(stream, [=] { return set(memory, value, bytes); });
    });
}

cudaError_t cudaMemset(void* memory, int value, size_t bytes) {
    return cudaMemsetAsync(memory, value, bytes, nullptr);
}

// ---- pools ----

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* handle, int device) {
    return call([&] {
        if (!is_device(device)) return cudaErrorInvalidDevice;
        *handle = reinterpret_cast<cudaMemPool_t>(&pool);
        return cudaSuccess;
    });
}

cudaError_t cudaDeviceGetMemPool(cudaMemPool_t* handle, int device) {
    return cudaDeviceGetDefaultMemPool(handle, device);
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t handle, cudaMemPoolAttr attribute, void* value) {
    return call([&] {
        if (handle != reinterpret_cast<cudaMemPool_t>(&pool)) return cudaErrorInvalidValue;
        switch (attribute) {
            case cudaMemPoolAttrReleaseThreshold:
                pool.release_threshold = *static_cast<const uint64_t*>(value);
                return cudaSuccess;
            case cudaMemPoolAttrUsedMemHigh:
                pool.used_high = pool.used;
                return cudaSuccess;
            case cudaMemPoolAttrReservedMemHigh:
                pool.reserved_high = pool.used + pool.kept;
                return cudaSuccess;
            case cudaMemPoolReuseFollowEventDependencies:
            case cudaMemPoolReuseAllowOpportunistic:
            case cudaMemPoolReuseAllowInternalDependencies:
                return cudaSuccess;  // memory is reused only after it was freed
            default:
                return cudaErrorInvalidValue;
        }
    });
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t handle, cudaMemPoolAttr attribute, void* value) {
    return call([&] {
        if (handle != reinterpret_cast<cudaMemPool_t>(&pool)) return cudaErrorInvalidValue;
        uint64_t& out = *static_cast<uint64_t*>(value);
        switch (attribute) {
            case cudaMemPoolAttrReleaseThreshold:
                out = pool.release_threshold;
                return cudaSuccess;
            case cudaMemPoolAttrUsedMemCurrent:
                out = pool.used;
                return cudaSuccess;
            case cudaMemPoolAttrUsedMemHigh:
                out = pool.used_high;
                return cudaSuccess;
            case cudaMemPoolAttrReservedMemCurrent:
                out = pool.used + pool.kept;
                return cudaSuccess;
            case cudaMemPoolAttrReservedMemHigh:
                out = pool.reserved_high;
                return cudaSuccess;
            default:
                return cudaErrorInvalidValue;
        }
    });
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t handle, size_t bytes) {
    return call([&] {
        if (handle != reinterpret_cast<cudaMemPool_t>(&pool)) return cudaErrorInvalidValue;
        shrink_pool(bytes);
        return cudaSuccess;
    });
}

// ---- kernels ----

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
    return call([&] {
        if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0)
            return cudaErrorInvalidValue;
        return allow_dynamic_shared(kernel, size_t(value));
    });
}

// What does not depend on the compiler.
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
    return call([&] {
        *attributes = cudaFuncAttributes{};
        attributes->maxThreadsPerBlock = 1024;
        attributes->binaryVersion = attributes->ptxVersion = 90;
        attributes->maxDynamicSharedSizeBytes = int(dynamic_shared_limit(kernel));
        return cudaSuccess;
    });
}

// As if registers never were the limit: nobody compiled the kernel for a GPU.
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int block_size,
                                                          size_t dynamic_shared) {
    return call([&] {
        if (block_size < 1 || block_size > 1024) return cudaErrorInvalidValue;
        const int threads = (block_size + 31) / 32 * 32;
        *blocks =
            std::min({kBlocksPerMultiprocessor, kThreadsPerMultiprocessor / threads,
                      int(kSharedPerMultiprocessor / (dynamic_shared + kReservedSharedPerBlock))});
        return cudaSuccess;
    });
}
