// The one header that every .cu includes. Under nvcc it is CUDA; where FBT_SIMT is defined, g++ or
// clang++ compile the same text against the emulator in tests/simt. For that to work, kernels write
//   SHARED(type, name);            for __shared__ type name;
//   DYNAMIC_SHARED(type, name);    for the launch's dynamic shared memory, as a type*
//   launch(kernel, {...}, ...)     for kernel<<<...>>>(...)
#pragma once
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernels/types.h"

#if defined(__CUDACC__)
#include <cuda_runtime.h>
#define SHARED(type, name) __shared__ type name
#define DYNAMIC_SHARED(type, name)                                   \
    extern __shared__ __align__(128) unsigned char dynamic_shared[]; \
    type* const name = reinterpret_cast<type*>(dynamic_shared)
#elif defined(FBT_SIMT)
#include "tests/simt/emu.h"
#else
#error "kernels compile with nvcc, or with FBT_SIMT for the emulator"
#endif

namespace fbt::kernels::cuda {

struct Launch {
    dim3 grid;
    dim3 block;
    size_t shared_bytes = 0;  // dynamic
};

// What a kernel may hold without asking; more is an opt-in of each kernel.
inline constexpr size_t kPlainSharedBytes = 48 * 1024;

// Queues `kernel` and returns at once: what goes wrong while it runs is reported by a later call
// that waits for it.
template <class... P>
Status launch(void (*kernel)(P...), const Launch& shape, Stream stream,
              std::type_identity_t<P>... arguments) {
    cudaError_t error = cudaSuccess;
    if (shape.shared_bytes > kPlainSharedBytes)
        error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                     cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     int(shape.shared_bytes));
    if (error == cudaSuccess) {
        cudaLaunchConfig_t config{};
        config.gridDim = shape.grid;
        config.blockDim = shape.block;
        config.dynamicSmemBytes = shape.shared_bytes;
        config.stream = static_cast<cudaStream_t>(stream.handle);
        error = cudaLaunchKernelEx(&config, kernel, arguments...);
    }
    if (error == cudaSuccess) return {};
    (void)cudaGetLastError();  // reported here, so not to whoever asks next
    return {Code::device_error, cudaGetErrorString(error)};
}

// A grid of that many blocks in a row, where a grid can be so long.
template <class... P>
Status launch_blocks(void (*kernel)(P...), int64_t blocks, int threads, size_t shared_bytes,
                     Stream stream, std::type_identity_t<P>... arguments) {
    if (blocks > 0x7fffffff) return {Code::unsupported, "a grid cannot have so many blocks"};
    return launch(kernel,
                  {.grid = dim3(unsigned(blocks)),
                   .block = dim3(unsigned(threads)),
                   .shared_bytes = shared_bytes},
                  stream, arguments...);
}

}  // namespace fbt::kernels::cuda
