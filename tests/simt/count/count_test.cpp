// How the kernels access memory: bank conflicts and uncoalesced accesses, counted under the
// emulator and printed. First the counter itself, on kernels whose counts are known.
#include <cstdio>
#include <functional>

#include "kernels/adamw.h"
#include "kernels/attention.h"
#include "kernels/carry.h"
#include "kernels/cross_entropy.h"
#include "kernels/elementwise.h"
#include "kernels/embedding.h"
#include "kernels/gate.h"
#include "kernels/gpu.h"
#include "kernels/kv_store.h"
#include "kernels/matmul.h"
#include "kernels/qk_norm_rope.h"
#include "kernels/rmsnorm.h"
#include "kernels/square_sum.h"
#include "kernels/swiglu.h"
#include "tests/compare.h"
#include "tests/cuda/device.h"
#include "tests/simt/count/counters.h"

namespace fbt::tests {
namespace {

using kernels::bf16;
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
    double sector_ratio;  // at most
    double conflicts;     // a shared access, at most
    std::function<kernels::Status()> run;
};

// Enough for every case; what is in them hardly matters.
template <class T>
struct Arrays {
    static constexpr int64_t N = 64;
    static constexpr int D = 1024;
    static constexpr int64_t kSize = N * D;
    DeviceArray<T> x{normal<T>(kSize, 1)}, y{normal<T>(kSize, 2)}, z{normal<T>(kSize, 3)},
        w{normal<T>(kSize, 4)}, packed{kSize};
    DeviceArray<float> a{normal<float>(kSize, 5)}, b{normal<float>(kSize, 6)},
        c{normal<float>(kSize, 7)}, scratch{kSize}, gain{normal<float>(D, 8)},
        rstd{normal<float>(kSize, 9)}, dgain{normal<float>(D, 10)};
    DeviceArray<double> sums{kSize};
    DeviceArray<int64_t> rows{numbers<int64_t>(N, 37)};      // a permutation
    DeviceArray<int32_t> tokens{numbers<int32_t>(N, 5)};     // another
    DeviceArray<int32_t> positions{numbers<int32_t>(N, 1)};  // 0 to N - 1
    DeviceArray<int32_t> ids{kSize};
    // One sequence of 256 positions.
    DeviceArray<kernels::Span> span{std::vector<kernels::Span>{{0, 0, 0, 256}}};
    DeviceArray<int64_t> blocks{block_rows()};
    kernels::SpanTable table{span.data(), blocks.data(), 1, 256, 256, 256};

    template <class I>
    static std::vector<I> numbers(int64_t n, int64_t step) {
        std::vector<I> v;
        for (int64_t i = 0; i < n; ++i) v.push_back(I(i * step % n));
        return v;
    }
    static std::vector<int64_t> block_rows() {
        std::vector<int64_t> v;
        for (int64_t row = 0; row < 256; row += kernels::kKeyBlock) v.push_back(row);
        return v;
    }
};

// To count another op, add its line.
template <class T>
std::vector<Case> cases(Arrays<T>& m) {
    namespace cuda = kernels::cuda;
    const auto N = m.N, n = m.kSize;
    const auto D = m.D;
    const int H = 8, C = 64, V = 1024, S = 256;  // S: sides of a matmul
    const float eps = 1e-5f;
    T *x = m.x.data(), *y = m.y.data(), *z = m.z.data(), *w = m.w.data(), *packed = m.packed.data();
    float *a = m.a.data(), *b = m.b.data(), *c = m.c.data(), *scratch = m.scratch.data(),
          *gain = m.gain.data(), *rstd = m.rstd.data(), *dgain = m.dgain.data();
    double* sums = m.sums.data();
    const int64_t* rows = m.rows.data();
    const int32_t *tokens = m.tokens.data(), *positions = m.positions.data();
    int32_t* ids = m.ids.data();
    const kernels::SpanTable table = m.table;
    const kernels::AdamWStep step{1e-3, .9, .99, 1e-8, .1, 1, 1};
    const kernels::Jitter<float> jitter{};
    // Beside 16 bytes of bf16 a lane reads 32 bytes of floats, in two loads of half sectors.
    const double floats = sizeof(T) == 2 ? 1.75 : 1.05;
    return {
        {"rmsnorm_forward", floats, 0,
         [=] { return cuda::rmsnorm_forward<T>(y, rstd, x, gain, N, D, eps, {}); }},
        {"residual_rmsnorm_forward", floats, 0,
         [=] {
             return cuda::residual_rmsnorm_forward<T>(y, rstd, x, z, gain, .5f, N, D, eps, {});
         }},
        {"rmsnorm_backward", floats, 0,
         [=] {
             return cuda::rmsnorm_backward<T>(y, dgain, z, x, gain, rstd, 1.f, N, D, scratch, {});
         }},
        {"qk_norm_rope_forward", floats, 0,
         [=] {
             return cuda::qk_norm_rope_forward<T>(y, rstd, x, gain, a, b, positions, N, H, C, eps,
                                                  {});
         }},
        {"qk_norm_rope_backward", floats, 0,
         [=] {
             return cuda::qk_norm_rope_backward<T>(y, dgain, z, x, gain, rstd, a, b, positions, N,
                                                   H, C, scratch, {});
         }},
        {"swiglu_forward", 1.05, 0, [=] { return cuda::swiglu_forward<T>(y, x, z, n, {}); }},
        {"swiglu_backward", 1.05, 0,
         [=] { return cuda::swiglu_backward<T>(y, w, x, z, z, n, {}); }},
        {"gate_forward", 1.05, 0, [=] { return cuda::gate_forward<T>(y, x, z, N, D, {}); }},
        {"gate_backward", 1.05, 0, [=] { return cuda::gate_backward<T>(y, w, x, z, z, N, D, {}); }},
        {"add", 1.05, 0, [=] { return cuda::add<T>(y, x, z, n, {}); }},
        {"concat_columns", 1.05, 0,
         [=] { return cuda::concat_columns<T>(y, x, z, N, D / 2, D / 2, {}); }},
        {"carry_forward", 1.05, 0,
         [=] { return cuda::carry_forward<T, float>(y, x, x, rows, nullptr, jitter, N, D, {}); }},
        {"carry_backward", 1.05, 0,
         [=] { return cuda::carry_backward_accum<T>(x, x, y, rows, N, D, {}); }},
        {"copy_rows", 1.05, 0, [=] { return cuda::copy_rows<T>(y, rows, x, rows, N, D, {}); }},
        {"embedding_forward", floats, 0,
         [=] { return cuda::embedding_forward<T>(y, tokens, a, N, D, {}); }},
        {"embedding_backward", floats, 0,
         [=] { return cuda::embedding_backward_accum<T>(a, y, tokens, N, D, int(N), ids, {}); }},
        {"cross_entropy_forward", 1.05, 0,
         [=] { return cuda::cross_entropy_forward<T>(a, b, x, tokens, N, V, {}); }},
        {"cross_entropy_backward", 1.05, 0,
         [=] { return cuda::cross_entropy_backward<T>(y, x, b, tokens, a, 0.f, N, V, {}); }},
        {"attention_forward", 1.45, .02,
         [=] {
             return cuda::attention_forward<T>(y, a, x, z, w, table, 4, 2, C, 0, .125f, nullptr,
                                               {});
         }},
        {"attention_backward", 1.55, .01,
         [=] {
             return cuda::attention_backward<T>(packed, b, c, scratch, y, x, z, w, y, a, table, 4,
                                                2, C, 0, .125f, {});
         }},
        {"adamw_step", 1.05, 0, [=] { return cuda::adamw_step<float>(a, b, c, c, n, step, {}); }},
        {"square_sum", 1.05, 0, [=] { return cuda::square_sum<float>(sums, a, n, sums + 64, {}); }},
        {"matmul_pack", 1.67, 0, [=] { return cuda::matmul_pack<T>(packed, a, S, S, false, {}); }},
        {"matmul_pack, transposed", 1.05, 0,
         [=] { return cuda::matmul_pack<T>(packed, a, S, S, true, {}); }},
        {"matmul_forward", 1.05, 0,
         [=] { return cuda::matmul_forward<T>(y, x, packed, S, S, S, {}); }},
        {"matmul_forward, 8 rows", 1.05, 0,
         [=] { return cuda::matmul_forward<T>(y, x, packed, 8, S, S, {}); }},
        {"matmul_dw", 1.6, 0, [=] { return cuda::matmul_dw_accum<T>(scratch, y, x, S, S, S, {}); }},
    };
}

template <class T>
class KernelAccesses : public testing::Test {};
using Storage = testing::Types<float, bf16>;
TYPED_TEST_SUITE(KernelAccesses, Storage);

TYPED_TEST(KernelAccesses, AreCoalescedAndWithoutBankConflicts) {
    Arrays<TypeParam> arrays;
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
