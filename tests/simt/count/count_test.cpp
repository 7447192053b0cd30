// How the kernels access memory: bank conflicts and uncoalesced accesses, counted under the
// emulator and printed. First the counter itself, on kernels whose counts are known.
#include <cstdio>
#include <functional>

#include "kernels/gpu.h"
#include "kernels/rmsnorm.h"
#include "tests/compare.h"
#include "tests/cuda/device.h"
#include "tests/simt/count/counters.h"

namespace fbt::tests {
namespace {

using kernels::cuda::launch;
using simt::Counts;

// ---- the counter ----

Counts count(void (*kernel)(float*), unsigned threads = 32) {
    DeviceArray<float> x(std::vector<float>(4096));
    simt::start_counting();
    EXPECT_TRUE(ok(launch(kernel, {.grid = dim3(1), .block = dim3(threads)}, {}, x.data())));
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    const auto counts = simt::stop_counting();
    EXPECT_EQ(counts.size(), 1u);
    return counts.at(0);
}

using Table = float[32][32];
using Padded = float[32][33];
using Vectors = float4[64];

__global__ void read_column(float* out) {
    SHARED(Table, table);
    for (int i = 0; i < 32; ++i) table[i][threadIdx.x] = 1;  // rows: no conflict
    __syncthreads();
    out[threadIdx.x] = table[threadIdx.x][3];
}
TEST(Counter, ColumnOfASharedTableConflictsInEveryLane) {
    const Counts c = count(read_column);
    EXPECT_EQ(c.kernel, "read_column");
    EXPECT_EQ(c.launches, 1u);
    EXPECT_EQ(c.shared_accesses, 33u);
    EXPECT_EQ(c.extra_wavefronts, 31u);
    EXPECT_EQ(c.stores, 1u);
    EXPECT_EQ(c.sectors, 4u);
    EXPECT_EQ(c.ideal_sectors, 4u);
}

__global__ void read_padded_column(float* out) {
    SHARED(Padded, table);
    for (int i = 0; i < 32; ++i) table[i][threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = table[threadIdx.x][3];
}
TEST(Counter, PaddingRemovesTheConflicts) {
    EXPECT_EQ(count(read_padded_column).extra_wavefronts, 0u);
}

__global__ void read_one_word(float* out) {
    SHARED(Table, table);
    if (threadIdx.x == 0) table[0][0] = 1;
    __syncwarp();
    out[threadIdx.x] = table[0][0];
}
TEST(Counter, OneWordForAllLanesIsNoConflict) {
    const Counts c = count(read_one_word);
    EXPECT_EQ(c.shared_accesses, 2u);
    EXPECT_EQ(c.extra_wavefronts, 0u);
}

// Quarters of the warp read 8 vectors of 16 bytes each: at 16 bytes' distance they fill the banks
// once; at 32 bytes' they use every other group of four banks twice.
template <int kDistance>
__global__ void read_vectors(float* out) {
    SHARED(Vectors, vectors);
    vectors[threadIdx.x] = float4{1, 2, 3, 4};
    vectors[threadIdx.x + 32] = float4{1, 2, 3, 4};
    __syncwarp();
    const float4 v = vectors[threadIdx.x * kDistance];
    reinterpret_cast<float4*>(out)[threadIdx.x] = v;
}
TEST(Counter, VectorsGoByQuartersOfAWarp) {
    const Counts near = count(read_vectors<1>);
    EXPECT_EQ(near.shared_accesses, 3u);
    EXPECT_EQ(near.extra_wavefronts, 0u);
    EXPECT_EQ(near.stores, 1u);
    EXPECT_EQ(near.sectors, 16u);
    EXPECT_EQ(near.ideal_sectors, 16u);
    const Counts apart = count(read_vectors<2>);
    EXPECT_EQ(apart.shared_accesses, 3u);
    EXPECT_EQ(apart.extra_wavefronts, 4u);
}

template <int kStride, int kStart = 0>
__global__ void copy_strided(float* x) {
    x[2048 + threadIdx.x] = x[threadIdx.x * kStride + kStart];
}
TEST(Counter, GlobalSectors) {
    const Counts dense = count(copy_strided<1>, 64);
    EXPECT_EQ(dense.loads, 2u);
    EXPECT_EQ(dense.stores, 2u);
    EXPECT_EQ(dense.sectors, 16u);
    EXPECT_EQ(dense.sector_ratio(), 1);
    const Counts strided = count(copy_strided<32>);  // a sector for every lane, where 4 would do
    EXPECT_EQ(strided.sectors, 32u + 4u);
    EXPECT_EQ(strided.ideal_sectors, 8u);
    const Counts shifted = count(copy_strided<1, 1>);
    EXPECT_EQ(shifted.sectors, 5u + 4u);
    const Counts one = count(copy_strided<0>);
    EXPECT_EQ(one.sectors, 1u + 4u);
    EXPECT_EQ(one.ideal_sectors, 1u + 4u);
}

// Lanes that leave a loop early leave the others' accesses together.
__global__ void unequal_loops(float* x) {
    float sum = 0;
    for (unsigned i = 0; i <= threadIdx.x % 2; ++i) sum += x[i * 32 + threadIdx.x];
    x[2048 + threadIdx.x] = sum;
}
TEST(Counter, UnequalLoops) {
    const Counts c = count(unequal_loops);
    EXPECT_EQ(c.loads, 2u);
    EXPECT_EQ(c.sectors, 4u + 4u + 4u);
}

__global__ void told(float* x) {
    simt::count_access(x + threadIdx.x * 4, 16, false, simt::Where::current());
    const simt::Uncounted stand_in;
    for (int i = 0; i < 4; ++i) x[threadIdx.x * 4 + i] += 1;
}
TEST(Counter, AccessesOfStandInsForInstructions) {
    const Counts c = count(told);
    EXPECT_EQ(c.loads, 1u);
    EXPECT_EQ(c.stores, 0u);
    EXPECT_EQ(c.sectors, 16u);
}

__global__ void stray(float* x) {
    if (threadIdx.x == 0) __syncthreads();
    x[0] = 1;
}
TEST(Counter, FailedLaunchLeavesNothingBehind) {
    DeviceArray<float> x(4096);
    simt::start_counting();
    EXPECT_TRUE(ok(launch(stray, {.grid = dim3(1), .block = dim3(32)}, {}, x.data())));
    EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorLaunchFailure);
    simt::clear_failure();
    (void)simt::stop_counting();
    EXPECT_EQ(count(copy_strided<1>).loads, 1u);
}

// ---- the kernels ----

// A launch of an op, and how far its kernels may be from perfect.
struct Case {
    const char* name;
    std::function<kernels::Status()> run;
    double sector_ratio;  // at most
    double conflicts;     // a shared access, at most
};

struct Arrays {
    const int64_t N = 64;
    const int D = 1024;
    DeviceArray<float> x{normal<float>(N * D, 1)}, y{normal<float>(N * D, 2)},
        gain{normal<float>(D, 3)}, rstd{normal<float>(N, 4)}, dgain{normal<float>(D, 5)},
        scratch{size_t(kernels::row_chunks(N) * D)};
};

// To count another op, add its line.
std::vector<Case> cases(Arrays& m) {
    namespace cuda = kernels::cuda;
    return {
        {"rmsnorm_forward",
         [&] {
             return cuda::rmsnorm_forward<float>(m.y.data(), m.rstd.data(), m.x.data(),
                                                 m.gain.data(), m.N, m.D, 1e-5f, {});
         },
         1.05, 0},
        {"residual_rmsnorm_forward",
         [&] {
             return cuda::residual_rmsnorm_forward<float>(m.y.data(), m.rstd.data(), m.x.data(),
                                                          m.y.data(), m.gain.data(), 0.5f, m.N, m.D,
                                                          1e-5f, {});
         },
         1.05, 0},
        {"rmsnorm_backward",
         [&] {
             return cuda::rmsnorm_backward<float>(m.y.data(), m.dgain.data(), m.y.data(),
                                                  m.x.data(), m.gain.data(), m.rstd.data(), 1.f,
                                                  m.N, m.D, m.scratch.data(), {});
         },
         1.05, 0},
    };
}

TEST(KernelAccesses, AreCoalescedAndWithoutBankConflicts) {
    Arrays arrays;
    std::vector<Counts> all;
    for (const Case& c : cases(arrays)) {
        simt::start_counting();
        EXPECT_TRUE(ok(c.run())) << c.name;
        EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess) << c.name;
        for (const Counts& counts : simt::stop_counting()) {
            EXPECT_LE(counts.sector_ratio(), c.sector_ratio) << c.name << ": " << counts.kernel;
            EXPECT_LE(double(counts.extra_wavefronts), c.conflicts * double(counts.shared_accesses))
                << c.name << ": " << counts.kernel;
            EXPECT_GT(counts.loads, 0u) << c.name << ": " << counts.kernel;
            all.push_back(counts);
        }
    }
    std::fputs(simt::table(all).c_str(), stdout);
}

}  // namespace
}  // namespace fbt::tests
