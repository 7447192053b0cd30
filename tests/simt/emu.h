// CUDA on a CPU: the device side. A kernel compiles unchanged against this header (through
// kernels/gpu.h); every CUDA thread becomes a fiber, blocks run one after another. nvcc never sees
// this file. What the emulation checks and what it cannot see is listed in README.md.
#pragma once
#include <cuda_runtime_api.h>  // types and declarations; cuda_runtime.cpp defines the functions

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>
#include <type_traits>

namespace fbt::simt {

// In which order fibers run. A correct kernel gives the same bits under all of them.
enum class Order {
    forward,  // threads and blocks by index
    reverse,  // backwards
    lifo,     // who became ready last runs first: one warp gets as far ahead as barriers allow
    random    // drawn with `seed`
};
struct Schedule {
    Order order = Order::forward;
    uint64_t seed = 1;
};
void set_schedule(Schedule schedule);

// What went wrong in the work that failed: source line, block, thread, reason. Empty at start.
const char* last_error();
// After work has failed every call reports it, as on a GPU until the process ends. Tests go on:
// this drops what is queued, and the device is fine again.
void clear_failure();

// Runs `work` on the host in the stream's order, with device memory within its reach: for code that
// has no kernel here, such as Thrust. It may not call the runtime.
cudaError_t enqueue(cudaStream_t stream, std::function<void()> work);

// How much memory the device has; 0 stands for as much as the host.
void set_memory_limit(size_t bytes);

// How many devices are seen, at first one; they differ in their numbers alone.
void set_device_count(int count);

// The place in a kernel where a barrier or warp operation stands.
struct Where {
    const char* file;
    int line;
    static constexpr Where current(const char* file = __builtin_FILE(),
                                   int line = __builtin_LINE()) {
        return {file, line};
    }
};

extern int lane;  // of the running thread in its warp

// Waits for the whole block; returns how many threads passed a true predicate. All threads must
// wait at the same line, and a thread that has exited counts as one that never comes.
int block_barrier(bool predicate, const char* op, Where where);

// Meets the lanes in `mask` and orders memory among them.
void warp_barrier(unsigned mask, Where where);

// Meets the lanes in `mask`; each gives its payload and gets the payload of lane `source`. Orders
// no memory: on hardware a shuffle does not either, so the race checker must not think it does.
struct Payload {
    alignas(16) unsigned char bytes[16];
};
void exchange(unsigned mask, Payload& payload, int source, const char* op, Where where);
unsigned ballot(unsigned mask, bool predicate, const char* op, Where where);

// Shared memory of one declaration, filled with 0xff (NaN) when a block first comes to it. The
// bytes around it are poisoned for AddressSanitizer.
struct SharedSlot {
    uint64_t block = 0;  // serial number of the block that `memory` belongs to
    void* memory = nullptr;
};
void* shared_memory(SharedSlot& slot, size_t bytes);
void* dynamic_shared_memory();

// Tag is a lambda's type, hence another one, and another slot, for every declaration.
template <class T, class Tag>
T& shared_variable(Tag) {
    static SharedSlot slot;
    return *static_cast<T*>(shared_memory(slot, sizeof(T)));
}

// Queues a kernel whose every thread calls body().
cudaError_t queue_grid(const void* kernel, const cudaLaunchConfig_t& config,
                       std::function<void()> body);

// For what stands in for an instruction that accesses shared or global memory, and reaches it in
// another way: tells the access counter, if there is one, what the running thread's instruction at
// `where` accesses, and hides from it what compiled code does while an Uncounted lives.
void count_access(const void* memory, size_t bytes, bool write, Where where);
struct Uncounted {
    Uncounted();
    ~Uncounted();
};

// ---- what kernels/ptx.cuh is emulated with ----

// Ends the launch with an error in the running thread.
[[noreturn]] void fail_launch(const char* message, Where where);

// Meets all 32 lanes of the running warp. `complete` runs once, in the last lane to arrive, on what
// each lane brought. Orders no memory.
void meet_warp(void* mine, void (*complete)(void* const* lanes), const char* op, Where where);

// Of the 32 row addresses that the lanes bring, gives this lane those of which it gets elements:
// [matrix][i], where i is 0, or with `transposed` 0 and 1.
struct MatrixRows {
    const void* row[4][2];
};
MatrixRows ldmatrix_rows(const void* row, bool transposed, Where where);

// d += a b. Products are exact; for each element of d they are added in f32, k = 0 to 15 in turn.
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Where where);

// Asynchronous copies of the running thread. An issued copy is queued, and belongs to the group
// that the next commit closes. `cp_async_landing` takes the next copy off the queue that a wait
// which leaves `groups` groups in flight has to land, and is false when there is none.
struct AsyncCopy {
    void* to;
    const void* from;
    uint32_t bytes, source_bytes;  // the rest is zeros
};
void cp_async_issue(const AsyncCopy& copy, Where where);
void cp_async_commit();
bool cp_async_landing(unsigned groups, AsyncCopy& copy);
// For the scheduler, when a thread starts, and when it ends: the place of a copy still in flight,
// or null.
void cp_async_forget();
const Where* cp_async_in_flight();

template <class T>
T shuffle(unsigned mask, T value, int source, const char* op, Where where) {
    static_assert(sizeof(T) <= sizeof(Payload) && std::is_trivially_copyable_v<T>);
    Payload payload{};
    std::memcpy(payload.bytes, &value, sizeof(T));
    exchange(mask, payload, source, op, where);
    std::memcpy(&value, payload.bytes, sizeof(T));
    return value;
}

}  // namespace fbt::simt

// ---- CUDA's spellings ----

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __launch_bounds__
#undef __forceinline__
#define __global__
#define __device__
#define __host__
#define __shared__ static_assert(false, "write SHARED(type, name)");
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))

#define SHARED(type, name) type& name = ::fbt::simt::shared_variable<type>([] {})
#define DYNAMIC_SHARED(type, name) \
    type* const name = static_cast<type*>(::fbt::simt::dynamic_shared_memory())

// Of the running thread: the scheduler sets them at every switch. (Not macros, because
// cudaLaunchConfig_t has members of the same names.)
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

#define FBT_SIMT_WHERE ::fbt::simt::Where where = ::fbt::simt::Where::current()

inline void __syncthreads(FBT_SIMT_WHERE) {
    ::fbt::simt::block_barrier(false, "__syncthreads", where);
}
inline int __syncthreads_count(int predicate, FBT_SIMT_WHERE) {
    return ::fbt::simt::block_barrier(predicate != 0, "__syncthreads_count", where);
}
inline int __syncthreads_or(int predicate, FBT_SIMT_WHERE) {
    return ::fbt::simt::block_barrier(predicate != 0, "__syncthreads_or", where) > 0;
}
inline int __syncthreads_and(int predicate, FBT_SIMT_WHERE) {
    return ::fbt::simt::block_barrier(predicate == 0, "__syncthreads_and", where) == 0;
}
inline void __syncwarp(unsigned mask = 0xffffffffu, FBT_SIMT_WHERE) {
    ::fbt::simt::warp_barrier(mask, where);
}

// Shuffles work in groups of `width` neighbouring lanes. A source beyond the group is one's own
// lane; __shfl_sync wraps around instead, and __shfl_xor_sync may read an earlier group.
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, FBT_SIMT_WHERE) {
    const int group = ::fbt::simt::lane & ~(width - 1);
    return ::fbt::simt::shuffle(mask, value, group | (source & (width - 1)), "__shfl_sync", where);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int flip, int width = 32, FBT_SIMT_WHERE) {
    const int me = ::fbt::simt::lane, other = me ^ flip;
    const bool later = other >= (me & ~(width - 1)) + width;
    return ::fbt::simt::shuffle(mask, value, later ? me : other, "__shfl_xor_sync", where);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = 32, FBT_SIMT_WHERE) {
    const int me = ::fbt::simt::lane, other = me + int(distance);
    const bool outside = other >= (me & ~(width - 1)) + width;
    return ::fbt::simt::shuffle(mask, value, outside ? me : other, "__shfl_down_sync", where);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = 32, FBT_SIMT_WHERE) {
    const int me = ::fbt::simt::lane, other = me - int(distance);
    const bool outside = other < (me & ~(width - 1));
    return ::fbt::simt::shuffle(mask, value, outside ? me : other, "__shfl_up_sync", where);
}

inline unsigned __ballot_sync(unsigned mask, int predicate, FBT_SIMT_WHERE) {
    return ::fbt::simt::ballot(mask, predicate != 0, "__ballot_sync", where);
}
inline int __any_sync(unsigned mask, int predicate, FBT_SIMT_WHERE) {
    return ::fbt::simt::ballot(mask, predicate != 0, "__any_sync", where) != 0;
}
inline int __all_sync(unsigned mask, int predicate, FBT_SIMT_WHERE) {
    return ::fbt::simt::ballot(mask, predicate == 0, "__all_sync", where) == 0;
}

// CUDA's own functions that C++ lacks. Others are spelled std:: in kernels.
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
template <class T, class U>
constexpr std::common_type_t<T, U> min(T a, U b) {
    return a < b ? a : b;
}
template <class T, class U>
constexpr std::common_type_t<T, U> max(T a, U b) {
    return a > b ? a : b;
}

// As in cuda_runtime.h. The arguments are copied here, and again for every thread.
template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
    return ::fbt::simt::queue_grid(
        reinterpret_cast<const void*>(kernel), *config,
        [kernel, values = std::tuple<Parameters...>(std::forward<Arguments>(arguments)...)] {
            std::apply(kernel, values);
        });
}
