// The only file with Thrust: on the GPU its radix sort, under the emulator its C++ backend, queued
// as host work in the stream's order.
#ifdef FBT_SIMT
#define THRUST_DEVICE_SYSTEM THRUST_DEVICE_SYSTEM_CPP
#include <thrust/system/cpp/execution_policy.h>
#else
#include <thrust/system/cuda/execution_policy.h>
#endif
#include <thrust/sort.h>

#include <exception>
#include <new>

#include "kernels/gpu.h"
#include "kernels/sort.h"

namespace fbt::kernels::cuda {
namespace {

#ifdef FBT_SIMT
cudaError_t queue_sort(int32_t* keys, int32_t* values, int64_t n, cudaStream_t stream) {
    return simt::enqueue(
        stream, [=] { thrust::stable_sort_by_key(thrust::cpp::par, keys, keys + n, values); });
}
#else
// Scratch from the stream's memory pool, so that neither allocating nor freeing waits.
struct StreamAllocator {
    using value_type = char;
    cudaStream_t stream;

    char* allocate(std::ptrdiff_t bytes) {
        void* memory = nullptr;
        if (cudaMallocAsync(&memory, size_t(bytes), stream) != cudaSuccess) throw std::bad_alloc();
        return static_cast<char*>(memory);
    }
    void deallocate(char* memory, size_t) { (void)cudaFreeAsync(memory, stream); }
};

cudaError_t queue_sort(int32_t* keys, int32_t* values, int64_t n, cudaStream_t stream) {
    StreamAllocator allocator{stream};
    try {
        thrust::stable_sort_by_key(thrust::cuda::par_nosync(allocator).on(stream), keys, keys + n,
                                   values);
    } catch (const std::bad_alloc&) {
        return cudaErrorMemoryAllocation;
    } catch (const std::exception&) {
        return cudaErrorUnknown;
    }
    return cudaSuccess;
}
#endif

}  // namespace

Status sort_by_key(int32_t* keys, int32_t* values, int64_t n, Stream s) {
    if (n < 0) return {Code::bad_argument, "sort_by_key needs n >= 0"};
    if (n == 0) return {};
    const cudaError_t error = queue_sort(keys, values, n, static_cast<cudaStream_t>(s.handle));
    if (error == cudaSuccess) return {};
    (void)cudaGetLastError();  // reported here, so not to whoever asks next
    return {Code::device_error, cudaGetErrorString(error)};
}

}  // namespace fbt::kernels::cuda
