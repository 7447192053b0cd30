// The emulator itself: CUDA's rules as they are, and kernels with seeded bugs, each of which must
// be caught. A bug that is no longer caught is a failing test.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numeric>
#include <thread>

#include "kernels/gpu.h"
#include "tests/compare.h"
#include "tests/cuda/device.h"
#include "tests/simt/failure.h"

namespace fbt::tests {
namespace {

using kernels::Status;
using kernels::cuda::Launch;
using kernels::cuda::launch;
using simt::Order;

constexpr unsigned kAll = 0xffffffffu;

// Runs `kernel(int* out)` over blocks of 128 threads and returns out, one int a thread.
std::vector<int> outputs(void (*kernel)(int*), unsigned blocks = 1) {
    DeviceArray<int> out(std::vector<int>(blocks * 128, -1));
    EXPECT_TRUE(ok(launch(kernel, {.grid = dim3(blocks), .block = dim3(128)}, {}, out.data())));
    return out.host();
}
std::string failure_in(void (*kernel)(int*)) {
    DeviceArray<int> out(128);
    return failure_of(launch(kernel, {.grid = dim3(1), .block = dim3(128)}, {}, out.data()));
}

// ---- what correct kernels may rely on, under every schedule ----

class Emulator : public ScheduleTest {};

__global__ void write_place(uint3* thread, uint3* block) {
    const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
    const unsigned b = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    const unsigned t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    thread[b * threads + t] = threadIdx;
    block[b * threads + t] = blockIdx;
}

TEST_P(Emulator, EveryThreadOfAGridRunsOnce) {
    const dim3 grid(3, 2, 2), block(5, 3, 7);
    const unsigned threads = 5 * 3 * 7, blocks = 3 * 2 * 2;
    DeviceArray<uint3> thread(threads * blocks), place(threads * blocks);
    ASSERT_TRUE(
        ok(launch(write_place, {.grid = grid, .block = block}, {}, thread.data(), place.data())));
    const auto t = thread.host(), b = place.host();
    for (unsigned i = 0; i < threads * blocks; ++i) {
        const unsigned in_block = i % threads, of_grid = i / threads;
        EXPECT_EQ(t[i].x, in_block % 5);
        EXPECT_EQ(t[i].y, in_block / 5 % 3);
        EXPECT_EQ(t[i].z, in_block / 15);
        EXPECT_EQ(b[i].x, of_grid % 3);
        EXPECT_EQ(b[i].y, of_grid / 3 % 2);
        EXPECT_EQ(b[i].z, of_grid / 6);
    }
}

using Ints = int[128];

// Rotates values through shared memory, several times over the same array.
__global__ void rotate(int* out) {
    SHARED(Ints, values);
    int v = int(threadIdx.x);
    for (int step = 0; step < 5; ++step) {
        values[threadIdx.x] = v;
        __syncthreads();
        v = values[(threadIdx.x + 1) % 128];
        __syncthreads();
    }
    out[blockIdx.x * 128 + threadIdx.x] = v;
}

TEST_P(Emulator, BarriersOrderSharedMemory) {
    const auto out = outputs(rotate, 3);
    for (size_t i = 0; i < out.size(); ++i) EXPECT_EQ(out[i], int(i % 128 + 5) % 128);
}

// The same between the lanes of a warp.
__global__ void rotate_lanes(int* out) {
    SHARED(Ints, values);
    values[threadIdx.x] = int(threadIdx.x);
    __syncwarp();
    out[threadIdx.x] = values[threadIdx.x / 32 * 32 + (threadIdx.x + 1) % 32];
}

TEST_P(Emulator, WarpBarriersOrderSharedMemory) {
    const auto out = outputs(rotate_lanes);
    for (int i = 0; i < 128; ++i) EXPECT_EQ(out[i], i / 32 * 32 + (i + 1) % 32);
}

__global__ void shuffle_all_ways(int* out, int* narrow, double* wide) {
    const int t = int(threadIdx.x), lane = t % 32;
    out[t] = __shfl_sync(kAll, t, 3) * 1000000 + __shfl_xor_sync(kAll, t, 5) % 32 * 10000 +
             __shfl_down_sync(kAll, t, 2) % 32 * 100 + __shfl_up_sync(kAll, t, 2) % 32;
    narrow[t] = __shfl_sync(kAll, lane, 9, 8) * 1000000 +
                __shfl_xor_sync(kAll, lane, 8, 8) * 10000 +
                __shfl_down_sync(kAll, lane, 2, 8) * 100 + __shfl_up_sync(kAll, lane, 2, 8);
    wide[t] = __shfl_xor_sync(kAll, t + 0.5, 1);
}

TEST_P(Emulator, ShufflesReadTheRightLane) {
    DeviceArray<int> out(64), narrow(64);
    DeviceArray<double> wide(64);
    ASSERT_TRUE(ok(launch(shuffle_all_ways, {.grid = dim3(1), .block = dim3(64)}, {}, out.data(),
                          narrow.data(), wide.data())));
    const auto o = out.host(), n = narrow.host();
    const auto w = wide.host();
    for (int t = 0; t < 64; ++t) {
        const int lane = t % 32, group = lane / 8 * 8;
        const int down = lane + 2 < 32 ? lane + 2 : lane, up = lane >= 2 ? lane - 2 : lane;
        EXPECT_EQ(o[t], (t / 32 * 32 + 3) * 1000000 + (lane ^ 5) * 10000 + down * 100 + up);
        // In groups of 8: source 9 wraps to 1; a flip by 8 may read an earlier group, not a later.
        const int flip = (lane ^ 8) < lane ? lane ^ 8 : lane;
        const int down8 = lane + 2 < group + 8 ? lane + 2 : lane,
                  up8 = lane - 2 >= group ? lane - 2 : lane;
        EXPECT_EQ(n[t], (group + 1) * 1000000 + flip * 10000 + down8 * 100 + up8) << t;
        EXPECT_EQ(w[t], (t ^ 1) + 0.5);
    }
}

// Halves of a warp work apart, each with its own mask and a different number of times.
__global__ void halves_apart(int* out) {
    const int lane = int(threadIdx.x) % 32;
    int v = lane;
    if (lane < 16)
        v += __shfl_xor_sync(0x0000ffffu, v, 1);
    else
        for (int i = 0; i < 3; ++i) v = __shfl_xor_sync(0xffff0000u, v, 1);
    out[threadIdx.x] = v;
}

TEST_P(Emulator, MasksSplitAWarp) {
    const auto out = outputs(halves_apart);
    for (int i = 0; i < 128; ++i) {
        const int lane = i % 32;
        EXPECT_EQ(out[i], lane < 16 ? lane + (lane ^ 1) : lane ^ 1);
    }
}

__global__ void vote(int* out) {
    const int t = int(threadIdx.x), lane = t % 32;
    int bits = 0;
    if (__ballot_sync(kAll, lane % 3 == 0) == 0x49249249u) bits |= 1;
    if (__any_sync(kAll, lane == 7) && !__any_sync(kAll, lane == 32)) bits |= 2;
    if (__all_sync(kAll, lane < 32) && !__all_sync(kAll, lane < 31)) bits |= 4;
    if (__syncthreads_count(t < 100) == 100) bits |= 8;
    if (__syncthreads_or(t == 5) && !__syncthreads_or(t == 128)) bits |= 16;
    if (__syncthreads_and(t < 128) && !__syncthreads_and(t < 127)) bits |= 32;
    out[t] = bits;
}

TEST_P(Emulator, Votes) { EXPECT_EQ(outputs(vote), std::vector<int>(128, 63)); }

// A full mask in a partial warp names the lanes that exist.
__global__ void partial_warp(int* out) { out[threadIdx.x] = int(__ballot_sync(kAll, 1)); }

TEST_P(Emulator, PartialWarp) {
    DeviceArray<int> out(37);
    ASSERT_TRUE(ok(launch(partial_warp, {.grid = dim3(1), .block = dim3(37)}, {}, out.data())));
    for (int i = 0; i < 37; ++i) EXPECT_EQ(out.host()[i], i < 32 ? -1 : 0x1f);
}

using Floats = float[4];

// Shared memory is NaN at the start of every block, whatever the block before left there.
__global__ void read_fresh(int* out) {
    SHARED(Floats, fixed);
    DYNAMIC_SHARED(float, dynamic);
    if (threadIdx.x == 0) {
        bool fresh = true;
        for (int i = 0; i < 4; ++i) {
            fresh = fresh && std::isnan(fixed[i]) && std::isnan(dynamic[i]);
            fixed[i] = dynamic[i] = 0;
        }
        out[blockIdx.x] = fresh;
    }
}

TEST_P(Emulator, SharedMemoryStartsAsNan) {
    DeviceArray<int> out(3);
    const Launch shape{.grid = dim3(3), .block = dim3(32), .shared_bytes = 4 * sizeof(float)};
    ASSERT_TRUE(ok(launch(read_fresh, shape, {}, out.data())));
    EXPECT_EQ(out.host(), std::vector<int>(3, 1));
}

INSTANTIATE_TEST_SUITE_P(Simt, Emulator, testing::ValuesIn(kSchedules), schedule_name);

__global__ void fill_dynamic(int* out, int count) {
    DYNAMIC_SHARED(int, values);
    for (int i = int(threadIdx.x); i < count; i += int(blockDim.x)) values[i] = i;
    __syncthreads();
    if (threadIdx.x == 0) {
        int sum = 0;
        for (int i = 0; i < count; ++i) sum += values[i] % 7;
        *out = sum;
    }
}

// More than 48 KB needs the opt-in that launch() makes; more than 163 KB there is not.
TEST(EmulatorLimits, DynamicSharedMemory) {
    DeviceArray<int> out(1);
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(1);
    config.blockDim = dim3(32);
    config.dynamicSmemBytes = 48 * 1024 + 4;
    EXPECT_EQ(cudaLaunchKernelEx(&config, fill_dynamic, out.data(), 1), cudaErrorInvalidValue);
    EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);

    const int count = 163 * 1024 / 4;
    Launch shape{.grid = dim3(1), .block = dim3(32), .shared_bytes = size_t(count) * 4};
    ASSERT_TRUE(ok(launch(fill_dynamic, shape, {}, out.data(), count)));
    int want = 0;
    for (int i = 0; i < count; ++i) want += i % 7;
    EXPECT_EQ(out.host()[0], want);
    shape.shared_bytes += 4;
    const Status status = launch(fill_dynamic, shape, {}, out.data(), count);
    EXPECT_STREQ(status.message, "invalid argument");
}

TEST(EmulatorLimits, GridsAndBlocks) {
    DeviceArray<int> out(1);
    const dim3 one(1);
    for (const Launch& shape :
         {Launch{.grid = one, .block = dim3(1025)}, Launch{.grid = one, .block = dim3(1, 1, 65)},
          Launch{.grid = one, .block = dim3(0)}, Launch{.grid = dim3(0), .block = one},
          Launch{.grid = dim3(1, 65536), .block = one},
          Launch{.grid = dim3(1, 1, 65536), .block = one}})
        EXPECT_STREQ(launch(fill_dynamic, shape, {}, out.data(), 0).message,
                     "invalid launch configuration");
}

// ---- the runtime's calls ----

TEST(EmulatedRuntime, OneDeviceNamedSimt) {
    int count = 0;
    EXPECT_EQ(cudaGetDeviceCount(&count), cudaSuccess);
    EXPECT_EQ(count, 1);
    EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
    EXPECT_EQ(cudaSetDevice(1), cudaErrorInvalidDevice);
    EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
    cudaDeviceProp properties;
    ASSERT_EQ(cudaGetDeviceProperties(&properties, 0), cudaSuccess);
    EXPECT_STREQ(properties.name, "emulated device");
    size_t free_bytes = 0, total_bytes = 0;
    ASSERT_EQ(cudaMemGetInfo(&free_bytes, &total_bytes), cudaSuccess);
    EXPECT_GT(free_bytes, 0u);
    EXPECT_LE(free_bytes, total_bytes);
    EXPECT_EQ(total_bytes, properties.totalGlobalMem);
}

TEST(EmulatedRuntime, SeveralDevices) {
    fbt::simt::set_device_count(2);
    int device = -1;
    EXPECT_EQ(cudaSetDevice(1), cudaSuccess);
    EXPECT_EQ(cudaGetDevice(&device), cudaSuccess);
    EXPECT_EQ(device, 1);
    std::thread([&] { EXPECT_EQ(cudaGetDevice(&device), cudaSuccess); }).join();
    EXPECT_EQ(device, 0) << "a thread begins with the first";
    EXPECT_EQ(cudaSetDevice(2), cudaErrorInvalidDevice);
    EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
    EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
    fbt::simt::set_device_count(1);
}

TEST(EmulatedRuntime, WhatAKernelMayUse) {
    int value = 0;
    EXPECT_EQ(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 0), cudaSuccess);
    EXPECT_EQ(value, 1);
    EXPECT_EQ(cudaDeviceGetAttribute(&value, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0),
              cudaSuccess);
    EXPECT_EQ(value, 163 * 1024);
    EXPECT_EQ(cudaRuntimeGetVersion(&value), cudaSuccess);
    EXPECT_EQ(value, CUDART_VERSION);
    const void* kernel = reinterpret_cast<const void*>(rotate_lanes);
    const auto set = [&](int bytes) {
        return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    };
    EXPECT_EQ(set(164 * 1024), cudaErrorInvalidValue);
    EXPECT_EQ(cudaPeekAtLastError(), cudaErrorInvalidValue);
    EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
    EXPECT_EQ(set(100 * 1024), cudaSuccess);
    cudaFuncAttributes attributes;
    EXPECT_EQ(cudaFuncGetAttributes(&attributes, kernel), cudaSuccess);
    EXPECT_EQ(attributes.maxDynamicSharedSizeBytes, 100 * 1024);
    // Threads are the limit, then shared memory.
    EXPECT_EQ(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&value, kernel, 128, 0), cudaSuccess);
    EXPECT_EQ(value, 16);
    EXPECT_EQ(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&value, kernel, 128, 80 * 1024),
              cudaSuccess);
    EXPECT_EQ(value, 2);
}

TEST(EmulatedRuntime, MemoryAndStreams) {
    cudaStream_t stream = nullptr;
    ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
    EXPECT_NE(stream, nullptr);
    void *a = nullptr, *b = nullptr;
    ASSERT_EQ(cudaMallocAsync(&a, 3 * sizeof(float), stream), cudaSuccess);
    ASSERT_EQ(cudaMallocAsync(&b, 3 * sizeof(float), stream), cudaSuccess);
    std::vector<float> host(3);
    const size_t bytes = 3 * sizeof(float);
    const auto copy = [&](void* to, const void* from, cudaMemcpyKind kind) {
        EXPECT_EQ(cudaMemcpyAsync(to, from, bytes, kind, stream), cudaSuccess);
        EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    };
    copy(host.data(), a, cudaMemcpyDeviceToHost);
    for (float x : host) EXPECT_TRUE(std::isnan(x)) << "unwritten memory";
    host = {1, 2, 3};
    copy(a, host.data(), cudaMemcpyHostToDevice);
    copy(b, a, cudaMemcpyDeviceToDevice);
    EXPECT_EQ(cudaMemsetAsync(a, 0, bytes, stream), cudaSuccess);
    std::vector<float> back(3);
    copy(back.data(), b, cudaMemcpyDefault);
    EXPECT_EQ(back, host);
    copy(back.data(), a, cudaMemcpyDeviceToHost);
    EXPECT_EQ(back, std::vector<float>(3, 0.f));
    EXPECT_EQ(cudaFreeAsync(a, stream), cudaSuccess);
    EXPECT_EQ(cudaFreeAsync(b, stream), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(cudaMalloc(&a, size_t(1) << 62), cudaErrorMemoryAllocation);
    EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
}

// ---- seeded bugs that the emulator reports, under every schedule ----

class SeededBug : public ScheduleTest {};

__global__ void divergent_barrier(int* out) {
    if (threadIdx.x < 64)
        __syncthreads();
    else
        __syncthreads();
    out[threadIdx.x] = 0;
}
TEST_P(SeededBug, DivergentBarrier) {
    EXPECT_TRUE(fails_with(failure_in(divergent_barrier), "divergent __syncthreads"));
}

__global__ void barrier_of_some(int* out) {
    if (threadIdx.x < 100) __syncthreads();
    out[threadIdx.x] = 0;
}
TEST_P(SeededBug, BarrierThatSomeThreadsSkip) {
    EXPECT_TRUE(fails_with(failure_in(barrier_of_some), "exited"));
}

__global__ void barrier_in_a_loop(int* out) {
    for (unsigned i = 0; i < threadIdx.x / 32; ++i) __syncthreads();
    out[threadIdx.x] = 0;
}
TEST_P(SeededBug, BarrierPassedUnequallyOften) {
    EXPECT_TRUE(fails_with(failure_in(barrier_in_a_loop), "exited"));
}

__global__ void lane_absent(int* out) {
    if (threadIdx.x % 32 != 5) out[threadIdx.x] = __shfl_xor_sync(kAll, int(threadIdx.x), 1);
}
TEST_P(SeededBug, LaneAbsentFromAFullMaskShuffle) {
    EXPECT_TRUE(fails_with(failure_in(lane_absent), "exited"));
}

__global__ void half_a_warp_at_the_barrier(int* out) {
    if (threadIdx.x % 32 < 16)
        __syncthreads();
    else
        out[threadIdx.x] = __shfl_xor_sync(kAll, int(threadIdx.x), 1);
}
TEST_P(SeededBug, HalfAWarpAtABarrier) {
    EXPECT_TRUE(fails_with(failure_in(half_a_warp_at_the_barrier), "deadlock"));
}

__global__ void divergent_shuffle(int* out) {
    if (threadIdx.x % 2 == 0)
        out[threadIdx.x] = __shfl_xor_sync(kAll, 1, 1);
    else
        out[threadIdx.x] = __shfl_xor_sync(kAll, 2, 1);
}
TEST_P(SeededBug, DivergentShuffle) {
    EXPECT_TRUE(fails_with(failure_in(divergent_shuffle), "divergent __shfl_xor_sync"));
}

__global__ void unequal_masks(int* out) {
    const bool even = threadIdx.x % 2 == 0;
    out[threadIdx.x] = __shfl_xor_sync(even ? 0x55555555u : kAll, 1, 2);
}
TEST_P(SeededBug, LanesDisagreeAboutTheMask) {
    // Even lanes may finish among themselves before an odd lane arrives and misses them.
    EXPECT_NE(failure_in(unequal_masks), "");
}

__global__ void reads_outside_the_mask(int* out) {
    if (threadIdx.x % 32 < 16) out[threadIdx.x] = __shfl_sync(0x0000ffffu, 1, 20);
}
TEST_P(SeededBug, ShuffleReadsALaneOutsideItsMask) {
    EXPECT_TRUE(fails_with(failure_in(reads_outside_the_mask), "reads lane 20"));
}

__global__ void not_in_the_mask(int* out) { out[threadIdx.x] = int(__ballot_sync(0x0000ffffu, 1)); }
TEST_P(SeededBug, LaneNotInItsOwnMask) {
    EXPECT_TRUE(fails_with(failure_in(not_in_the_mask), "the own lane is not in mask"));
}

using Quarter = unsigned char[114 * 1024];

__global__ void too_much_shared(int* out) {
    SHARED(Quarter, a);
    SHARED(Quarter, b);
    out[threadIdx.x] = a[0] + b[0];
}
TEST_P(SeededBug, TooMuchSharedMemory) {
    EXPECT_TRUE(fails_with(failure_in(too_much_shared), "shared memory"));
}

// The message names the line, and the next launch is a fresh start.
TEST_P(SeededBug, IsReportedWithItsPlaceAndLeavesNothingBehind) {
    EXPECT_TRUE(fails_with(failure_in(divergent_barrier), "emulator_test.cpp:"));
    EXPECT_TRUE(fails_with(failure_in(divergent_barrier), "block (0,0,0) thread ("));
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
    const auto out = outputs(rotate);
    for (size_t i = 0; i < out.size(); ++i) EXPECT_EQ(out[i], int(i % 128 + 5) % 128);
}

INSTANTIATE_TEST_SUITE_P(Simt, SeededBug, testing::ValuesIn(kSchedules), schedule_name);

// ---- seeded races: wrong results under some schedule, or ThreadSanitizer's report ----

// `kernel` would write `want` if it had no race.
void expect_race_is_caught(void (*kernel)(int*), const std::vector<int>& want) {
    const unsigned blocks = unsigned(want.size() / 128);
#if FBT_TEST_TSAN
    // 66 is how ThreadSanitizer ends a process in which it saw a race.
    EXPECT_EXIT(
        {
            outputs(kernel, blocks);
            std::exit(0);
        },
        testing::ExitedWithCode(66), "data race");
#else
    bool shown = false;
    for (const simt::Schedule& schedule : kSchedules) {
        simt::set_schedule(schedule);
        shown = outputs(kernel, blocks) != want || shown;
    }
    simt::set_schedule({});
    EXPECT_TRUE(shown) << "the race shows under no schedule";
#endif
}

std::vector<int> rotated(int by, int blocks = 1) {
    std::vector<int> want(size_t(blocks) * 128);
    for (size_t i = 0; i < want.size(); ++i) want[i] = (int(i % 128) + by) % 128;
    return want;
}

__global__ void missing_barrier(int* out) {
    SHARED(Ints, values);
    values[threadIdx.x] = int(threadIdx.x);
    out[threadIdx.x] = values[(threadIdx.x + 1) % 128];  // read before the neighbour wrote it
}
TEST(SeededRace, MissingBarrier) { expect_race_is_caught(missing_barrier, rotated(1)); }

__global__ void write_after_read(int* out) {
    SHARED(Ints, values);
    int v = int(threadIdx.x);
    for (int step = 0; step < 5; ++step) {
        values[threadIdx.x] = v;
        __syncthreads();
        v = values[(threadIdx.x + 1) % 128];  // no barrier before the next step's write
    }
    out[threadIdx.x] = v;
}
TEST(SeededRace, WriteAfterRead) { expect_race_is_caught(write_after_read, rotated(5)); }

// Two warps race although lanes of one warp are in order.
__global__ void warp_barrier_for_a_block(int* out) {
    SHARED(Ints, values);
    values[threadIdx.x] = int(threadIdx.x);
    __syncwarp();
    out[threadIdx.x] = values[(threadIdx.x + 32) % 128];
}
TEST(SeededRace, WarpBarrierWhereTheBlocksIsNeeded) {
    expect_race_is_caught(warp_barrier_for_a_block, rotated(32));
}

// Blocks are not ordered: the last writer wins, and that depends on the schedule.
__global__ void blocks_write_one_place(int* out) {
    out[blockIdx.x * 128 + threadIdx.x] = int(threadIdx.x);
    if (threadIdx.x == 0) out[0] = int(blockIdx.x);
}
TEST(SeededRace, BlocksWriteTheSamePlace) {
    auto want = rotated(0, 3);
    want[0] = 2;
    want[128] = want[256] = 0;
    expect_race_is_caught(blocks_write_one_place, want);
}

// A shuffle moves registers and orders no memory; only ThreadSanitizer can tell.
__global__ void shuffle_as_a_barrier(int* out) {
    SHARED(Ints, values);
    values[threadIdx.x] = int(threadIdx.x);
    const int other = __shfl_xor_sync(kAll, int(threadIdx.x), 1);
    out[threadIdx.x] = values[other];
}
TEST(SeededRace, ShuffleWhereABarrierIsNeeded) {
    if (!FBT_TEST_TSAN) GTEST_SKIP() << "needs a build with FBT_SANITIZE=thread";
    std::vector<int> want(128);
    for (int i = 0; i < 128; ++i) want[i] = i ^ 1;
    expect_race_is_caught(shuffle_as_a_barrier, want);
}

#if !FBT_TEST_TSAN
// Forward and reverse order alone would miss a write after a read.
TEST(SeededRace, WriteAfterReadShowsUnderLifo) {
    simt::set_schedule({Order::lifo, 1});
    EXPECT_NE(outputs(write_after_read), rotated(5));
    simt::set_schedule({});
}
#endif

// ---- seeded overruns: AddressSanitizer's report ----

#if FBT_TEST_ASAN
__global__ void shared_overrun(int* out) {
    SHARED(Ints, values);
    int* const next = values + 1;
    next[threadIdx.x] = 1;  // one past the end, in the last thread
    __syncthreads();
    out[threadIdx.x] = values[threadIdx.x];
}
__global__ void dynamic_overrun(int* out) {
    DYNAMIC_SHARED(int, values);
    values[threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = values[threadIdx.x];
}
__global__ void global_overrun(int* out) { out[threadIdx.x + 1] = 1; }
__global__ void read_freed(int* out, const int* freed) { out[threadIdx.x] = freed[threadIdx.x]; }

TEST(SeededOverrun, SharedMemory) {
    EXPECT_DEATH(outputs(shared_overrun), "AddressSanitizer: use-after-poison");
}
TEST(SeededOverrun, DynamicSharedMemory) {
    DeviceArray<int> out(128);
    const Launch shape{.grid = dim3(1), .block = dim3(128), .shared_bytes = 127 * sizeof(int)};
    EXPECT_DEATH(failure_of(launch(dynamic_overrun, shape, {}, out.data())),
                 "AddressSanitizer: use-after-poison");
}
TEST(SeededOverrun, GlobalMemory) {
    EXPECT_DEATH(outputs(global_overrun), "AddressSanitizer: use-after-poison");
}
TEST(SeededOverrun, FreedMemory) {
    DeviceArray<int> out(128);
    void* memory = nullptr;
    ASSERT_EQ(cudaMalloc(&memory, 512), cudaSuccess);
    cudaFree(memory);
    const Launch shape{.grid = dim3(1), .block = dim3(128)};
    EXPECT_DEATH(failure_of(launch(read_freed, shape, {}, out.data(), static_cast<int*>(memory))),
                 "AddressSanitizer: use-after-poison");
}
#else
TEST(SeededOverrun, SharedAndGlobalMemory) {
    GTEST_SKIP() << "needs a build with FBT_SANITIZE=address,undefined";
}
#endif

}  // namespace
}  // namespace fbt::tests
