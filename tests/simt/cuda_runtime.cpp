// The part of the CUDA runtime API that fbt's device layer calls, for one emulated device whose
// memory is host memory. Streams run their work at once, so everything queued is already done.
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "tests/simt/emu.h"

namespace {

thread_local cudaError_t kept_error = cudaSuccess;

// A stream handle only has to be distinct and not null.
struct Stream {};

}  // namespace

cudaError_t fbt::simt::keep_error(cudaError_t error) {
    if (error != cudaSuccess) kept_error = error;
    return error;
}
using fbt::simt::keep_error;

// ---- errors ----

cudaError_t cudaGetLastError() {
    const cudaError_t error = kept_error;
    kept_error = cudaSuccess;
    return error;
}

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
        case cudaErrorLaunchFailure:
            return fbt::simt::last_error();
        default:
            return "an error that the emulator does not give";
    }
}

// ---- the device ----

cudaError_t cudaGetDeviceCount(int* count) {
    *count = 1;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    return keep_error(device == 0 ? cudaSuccess : cudaErrorInvalidDevice);
}

cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
    if (device != 0) return keep_error(cudaErrorInvalidDevice);
    size_t free_bytes = 0, total_bytes = 0;
    cudaMemGetInfo(&free_bytes, &total_bytes);
    *properties = cudaDeviceProp{};
    std::snprintf(properties->name, sizeof properties->name, "simt");
    properties->totalGlobalMem = total_bytes;
    properties->major = 9;  // what the emulated limits are those of
    properties->minor = 0;
    properties->multiProcessorCount = 1;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024;
    properties->sharedMemPerBlock = 48 * 1024;
    properties->sharedMemPerBlockOptin = 227 * 1024;
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

// The host's memory.
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
    unsigned long long total_kb = 0, available_kb = 0;
    if (FILE* file = std::fopen("/proc/meminfo", "r")) {
        char line[256];
        while (std::fgets(line, sizeof line, file)) {
            (void)std::sscanf(line, "MemTotal: %llu", &total_kb);
            (void)std::sscanf(line, "MemAvailable: %llu", &available_kb);
        }
        std::fclose(file);
    }
    *free_bytes = size_t(available_kb) * 1024;
    *total_bytes = size_t(total_kb) * 1024;
    return cudaSuccess;
}

// ---- memory ----

// Fresh memory is all ones (NaN in float), so that reading it before writing it shows.
cudaError_t cudaMalloc(void** memory, size_t bytes) {
    static const size_t limit = [] {
        size_t free_bytes = 0, total_bytes = 0;
        cudaMemGetInfo(&free_bytes, &total_bytes);
        return total_bytes;
    }();
    *memory = bytes <= limit ? std::malloc(bytes > 0 ? bytes : 1) : nullptr;
    if (!*memory) return keep_error(cudaErrorMemoryAllocation);
    std::memset(*memory, 0xff, bytes);
    return cudaSuccess;
}

cudaError_t cudaFree(void* memory) {
    std::free(memory);
    return cudaSuccess;
}

cudaError_t cudaMallocAsync(void** memory, size_t bytes, cudaStream_t) {
    return cudaMalloc(memory, bytes);
}

cudaError_t cudaFreeAsync(void* memory, cudaStream_t) { return cudaFree(memory); }

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
    if (bytes > 0) std::memcpy(to, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t) {
    return cudaMemcpy(to, from, bytes, kind);
}

cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
    if (bytes > 0) std::memset(memory, value, bytes);
    return cudaSuccess;
}

// ---- streams ----

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
    *stream = reinterpret_cast<cudaStream_t>(new Stream);
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    delete reinterpret_cast<Stream*>(stream);
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }

// ---- kernels ----

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0)
        return keep_error(cudaErrorInvalidValue);
    return keep_error(fbt::simt::allow_dynamic_shared(kernel, size_t(value)));
}
