// The twins of kernels/ptx.cuh: what the instructions do, and seeded bugs in their use, each of
// which must be caught.
#include "kernels/ptx.cuh"

#include <cmath>
#include <cstdlib>

#include "tests/compare.h"
#include "tests/cuda/device.h"
#include "tests/simt/failure.h"

namespace fbt::tests {
namespace {

namespace ptx = kernels::cuda::ptx;
using kernels::bf16;
using kernels::Status;
using kernels::cuda::launch;

class Ptx : public ScheduleTest {};

// ---- ldmatrix ----

constexpr int kPitch = 24;  // elements between rows: any multiple of 8
using Matrix = uint16_t[32][kPitch];

// Element (row, column) of the shared matrix is 100 row + column.
__global__ void load_matrices(uint32_t* plain, uint32_t* transposed) {
    SHARED(Matrix, matrix);
    for (int column = 0; column < 8 && threadIdx.x < 32; ++column)
        matrix[threadIdx.x][column] = uint16_t(100 * threadIdx.x + column);
    __syncthreads();
    uint32_t r[4];
    ptx::ldmatrix_x4(r, matrix[threadIdx.x % 32]);
    for (int i = 0; i < 4; ++i) plain[threadIdx.x * 4 + i] = r[i];
    ptx::ldmatrix_x4_trans(r, matrix[threadIdx.x % 32]);
    for (int i = 0; i < 4; ++i) transposed[threadIdx.x * 4 + i] = r[i];
}

TEST_P(Ptx, LdmatrixGivesEachLaneItsPair) {
    DeviceArray<uint32_t> plain(64 * 4), transposed(64 * 4);
    ASSERT_TRUE(ok(launch(load_matrices, {.grid = dim3(1), .block = dim3(64)}, {}, plain.data(),
                          transposed.data())));
    const auto p = plain.host(), t = transposed.host();
    const auto element = [](int matrix, int row, int column) {
        return uint32_t(100 * (matrix * 8 + row) + column);
    };
    for (int thread = 0; thread < 64; ++thread)
        for (int m = 0; m < 4; ++m) {
            const int lane = thread % 32, group = lane / 4, pair = lane % 4 * 2;
            EXPECT_EQ(p[thread * 4 + m], element(m, group, pair) | element(m, group, pair + 1)
                                                                       << 16);
            EXPECT_EQ(t[thread * 4 + m], element(m, pair, group) | element(m, pair + 1, group)
                                                                       << 16);
        }
}

__global__ void load_misaligned(uint32_t* out) {
    SHARED(Matrix, matrix);
    uint32_t r[4];
    ptx::ldmatrix_x4(r, &matrix[threadIdx.x][threadIdx.x == 5 ? 4 : 0]);
    out[threadIdx.x] = r[0];
}

// A bug: the lane whose row is not aligned is named.
TEST_P(Ptx, AMisalignedRowIsCaught) {
    DeviceArray<uint32_t> out(32);
    const Status status =
        launch(load_misaligned, {.grid = dim3(1), .block = dim3(32)}, {}, out.data());
    EXPECT_TRUE(fails_with(status, "thread (5,0,0): ldmatrix: the row is not aligned"));
}

// ---- mma ----

// d = c + a b for one tile: a [16,16] and b [16,8] row-major, loaded as ptx.cuh states.
__global__ void multiply_tile(float* d, const float* c, const bf16* a, const bf16* b) {
    const int g = int(threadIdx.x) / 4, p = int(threadIdx.x) % 4 * 2;
    const auto pair = [](bf16 lower, bf16 upper) {
        return uint32_t(lower.bits) | uint32_t(upper.bits) << 16;
    };
    uint32_t ra[4], rb[2];
    float rd[4];
    for (int r = 0; r < 4; ++r) {
        const bf16* at = a + (g + r % 2 * 8) * 16 + p + r / 2 * 8;
        ra[r] = pair(at[0], at[1]);
        rd[r] = c[(g + r / 2 * 8) * 8 + p + r % 2];
    }
    for (int r = 0; r < 2; ++r) {
        const bf16* at = b + (p + r * 8) * 8 + g;
        rb[r] = pair(at[0], at[8]);
    }
    ptx::mma_m16n8k16(rd, ra, rb);
    for (int r = 0; r < 4; ++r) d[(g + r / 2 * 8) * 8 + p + r % 2] = rd[r];
}

TEST_P(Ptx, MmaAddsProductsInOrder) {
    const auto c = normal<float>(16 * 8, 1);
    const auto a = normal<bf16>(16 * 16, 2), b = normal<bf16>(16 * 8, 3);
    DeviceArray<float> dev_c(c), dev_d(16 * 8);
    DeviceArray<bf16> dev_a(a), dev_b(b);
    ASSERT_TRUE(ok(launch(multiply_tile, {.grid = dim3(1), .block = dim3(32)}, {}, dev_d.data(),
                          dev_c.data(), dev_a.data(), dev_b.data())));
    std::vector<float> want = c;
    for (int row = 0; row < 16; ++row)
        for (int column = 0; column < 8; ++column)
            for (int k = 0; k < 16; ++k)
                want[row * 8 + column] += float(a[row * 16 + k]) * float(b[k * 8 + column]);
    EXPECT_TRUE(same_bits(dev_d.host(), want));
}

// The usual way to the fragments: a [16,16] and bt [8 columns,16] row-major in shared memory.
// Matrices 0 to 3 of a are its quarters, down first.
using TileA = bf16[16][kPitch];
using TileB = bf16[16][kPitch];
__global__ void multiply_through_ldmatrix(float* d, const bf16* a, const bf16* b) {
    SHARED(TileA, sa);
    SHARED(TileB, sb);
    const int lane = int(threadIdx.x);
    for (int i = lane; i < 256; i += 32) {
        sa[i / 16][i % 16] = a[i];
        sb[i / 16][i % 16] = b[i];
    }
    __syncwarp();
    uint32_t ra[4], rb[4];
    ptx::ldmatrix_x4(ra, &sa[lane % 16][lane / 16 * 8]);
    ptx::ldmatrix_x4_trans(rb, &sb[lane % 16][lane / 16 * 8]);  // b is [16,16]: two mmas' operands
    for (int half = 0; half < 2; ++half) {
        const uint32_t operand[2] = {rb[half * 2], rb[half * 2 + 1]};
        float rd[4] = {};
        ptx::mma_m16n8k16(rd, ra, operand);
        for (int r = 0; r < 4; ++r)
            d[(lane / 4 + r / 2 * 8) * 16 + half * 8 + lane % 4 * 2 + r % 2] = rd[r];
    }
}

TEST_P(Ptx, LdmatrixFeedsMma) {
    const auto a = normal<bf16>(256, 2), b = normal<bf16>(256, 3);
    DeviceArray<float> dev_d(256);
    DeviceArray<bf16> dev_a(a), dev_b(b);
    ASSERT_TRUE(ok(launch(multiply_through_ldmatrix, {.grid = dim3(1), .block = dim3(32)}, {},
                          dev_d.data(), dev_a.data(), dev_b.data())));
    std::vector<float> want(256);
    for (int row = 0; row < 16; ++row)
        for (int column = 0; column < 16; ++column)
            for (int k = 0; k < 16; ++k)
                want[row * 16 + column] += float(a[row * 16 + k]) * float(b[k * 16 + column]);
    EXPECT_TRUE(same_bits(dev_d.host(), want));
}

__global__ void multiply_without_lane_7(float* d) {
    if (threadIdx.x == 7) return;
    const uint32_t a[4] = {}, b[2] = {};
    float rd[4] = {};
    ptx::mma_m16n8k16(rd, a, b);
    d[threadIdx.x] = rd[0];
}

// A bug: mma needs the whole warp, and a whole warp.
TEST_P(Ptx, AnAbsentLaneIsCaught) {
    DeviceArray<float> d(32);
    const auto run = [&](unsigned threads) {
        return launch(multiply_without_lane_7, {.grid = dim3(1), .block = dim3(threads)}, {},
                      d.data());
    };
    EXPECT_TRUE(fails_with(run(32), "mma"));
    EXPECT_TRUE(fails_with(run(24), "mma in a warp of fewer than 32 threads"));
}

// ---- cp.async ----

using Floats = float[32 * 8];

// Every way to copy 8 floats a thread, of which the first `filled` bytes are the source's.
template <int Bytes>
__global__ void copy_floats(float* out, const float* in, int filled) {
    SHARED(Floats, floats);
    for (int part = 0; part < 32 / Bytes; ++part) {
        const int left = max(0, min(Bytes, filled - part * Bytes));
        const unsigned at = threadIdx.x * 8 + unsigned(part) * Bytes / 4;
        if constexpr (Bytes == 16)
            ptx::cp_async_16(floats + at, left > 0 ? in + at : in, uint32_t(left));
        else
            ptx::cp_async_small<Bytes>(floats + at, left > 0 ? in + at : in, uint32_t(left));
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();
    for (int i = 0; i < 8; ++i) out[i * 32 + threadIdx.x] = floats[i * 32 + threadIdx.x];
}

TEST_P(Ptx, CopiesFillTheRestWithZeros) {
    const auto in = normal<float>(256, 1);
    DeviceArray<float> dev_in(in), dev_out(256);
    for (const int filled : {0, 4, 8, 12, 16, 20, 24, 28, 32})
        for (const auto kernel : {copy_floats<16>, copy_floats<8>, copy_floats<4>}) {
            ASSERT_TRUE(ok(launch(kernel, {.grid = dim3(1), .block = dim3(32)}, {}, dev_out.data(),
                                  dev_in.data(), filled)));
            std::vector<float> want = in;
            for (int i = 0; i < 256; ++i)
                if (i % 8 * 4 >= filled) want[i] = 0;
            EXPECT_TRUE(same_bits(dev_out.host(), want)) << filled << " bytes";
        }
}

template <int To, int From, int Bytes, bool Wait>
__global__ void copy_wrongly(float* out, const float* in) {
    SHARED(Floats, floats);
    const bool wrong = threadIdx.x == 9;
    ptx::cp_async_16(floats + threadIdx.x * 8 + (wrong ? To : 0), in + (wrong ? From : 0),
                     wrong ? Bytes : 16);
    ptx::cp_async_commit();
    if (Wait || !wrong) ptx::cp_async_wait<0>();
    out[threadIdx.x] = 0;
}

// Bugs: misaligned addresses, a source larger than the copy, an exit with copies in flight.
TEST_P(Ptx, ImpossibleCopiesAreCaught) {
    DeviceArray<float> in(256), out(256);
    const auto run = [&](void (*kernel)(float*, const float*)) {
        return launch(kernel, {.grid = dim3(1), .block = dim3(32)}, {}, out.data(), in.data());
    };
    EXPECT_TRUE(fails_with(run(copy_wrongly<0, 1, 16, true>),
                           "thread (9,0,0): cp.async: the source is not"));
    EXPECT_TRUE(
        fails_with(run(copy_wrongly<1, 0, 16, true>), "thread (9,0,0): cp.async: the destination"));
    EXPECT_TRUE(fails_with(run(copy_wrongly<0, 0, 17, true>),
                           "thread (9,0,0): cp.async: more source bytes"));
    EXPECT_TRUE(fails_with(run(copy_wrongly<0, 0, 16, false>),
                           "thread (9,0,0): the thread exits while this cp.async is in flight"));
    // and none of this is left over for the next launch
    EXPECT_EQ(failure_of(launch(copy_floats<16>, {.grid = dim3(1), .block = dim3(1)}, {},
                                out.data(), in.data(), 0)),
              "");
}

// A pipeline as products have it: 64 threads sum `steps` groups of 64 floats through `kStages`
// buffers, thread i of each group's i'th neighbour. `Leave` groups stay in flight at the wait: one
// too many is a bug. `Barrier` stands between the sum and the copy that overwrites its buffer.
constexpr int kStages = 3;
using Stages = float[kStages][64 * 4];

template <int Leave, bool Barrier>
__global__ void sum_in_stages(float* out, const float* in, int steps) {
    SHARED(Stages, stages);
    const int thread = int(threadIdx.x), neighbour = (thread + 33) % 64;
    const auto start = [&](int step) {
        if (step < steps)
            ptx::cp_async_16(&stages[step % kStages][thread * 4], in + (step * 64 + thread) * 4);
        ptx::cp_async_commit();
    };
    float sum = 0;
    for (int step = 0; step < kStages - 1; ++step) start(step);
    for (int step = 0; step < steps; ++step) {
        ptx::cp_async_wait<Leave>();
        if (Barrier) __syncthreads();
        start(step + kStages - 1);
        for (int i = 0; i < 4; ++i) sum += stages[step % kStages][neighbour * 4 + i];
    }
    ptx::cp_async_wait<0>();
    out[thread] = sum;
}

template <int Leave, bool Barrier>
testing::AssertionResult sums_are_right() {
    const int steps = 7;
    const auto in = normal<float>(steps * 256, 1);
    DeviceArray<float> dev_in(in), dev_out(64);
    const Status status =
        launch(sum_in_stages<Leave, Barrier>, {.grid = dim3(1), .block = dim3(64)}, {},
               dev_out.data(), dev_in.data(), steps);
    if (!status.ok()) return testing::AssertionFailure() << status.message;
    std::vector<float> want(64);
    for (int thread = 0; thread < 64; ++thread)
        for (int step = 0; step < steps; ++step)
            for (int i = 0; i < 4; ++i)
                want[thread] += in[(step * 64 + (thread + 33) % 64) * 4 + i];
    return same_bits(dev_out.host(), want);
}

TEST_P(Ptx, APipelineSeesItsData) { EXPECT_TRUE((sums_are_right<kStages - 2, true>())); }

// A bug: the wait is one group too weak. It is caught under every schedule; ThreadSanitizer, if it
// sees the late landing, reports a race besides, and ends its process with 66.
TEST_P(Ptx, AWeakWaitIsCaught) {
#if FBT_TEST_TSAN
    EXPECT_EXIT(
        std::exit((sums_are_right<kStages - 1, true>()) ? 1 : 0),
        [](int status) {
            return WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == 66);
        },
        "");
#else
    EXPECT_FALSE((sums_are_right<kStages - 1, true>()));
#endif
}

INSTANTIATE_TEST_SUITE_P(Simt, Ptx, testing::ValuesIn(kSchedules), schedule_name);

// A bug: without the barrier a thread reads what its neighbour has not yet waited for, or has
// begun to overwrite. Some schedule shows it, and ThreadSanitizer under any.
TEST(PtxPipeline, AMissingBarrierIsCaught) {
#if FBT_TEST_TSAN
    // 66 is how ThreadSanitizer ends a process in which it saw a race.
    EXPECT_EXIT(
        {
            (void)(sums_are_right<kStages - 2, false>());
            std::exit(0);
        },
        testing::ExitedWithCode(66), "data race");
#else
    int caught = 0;
    for (const Schedule& schedule : kSchedules) {
        simt::set_schedule(schedule);
        caught += !sums_are_right<kStages - 2, false>();
    }
    simt::set_schedule({});
    EXPECT_GT(caught, 0);
#endif
}

#if FBT_TEST_ASAN
__global__ void load_past_the_end(uint32_t* out) {
    SHARED(Matrix, matrix);
    uint32_t r[4];
    ptx::ldmatrix_x4(r, matrix[threadIdx.x + 1]);  // the last lane's row is not there
    out[threadIdx.x] = r[0];
}

// Bugs: what is out of bounds is blamed on the copy's and on ldmatrix's own loads.
TEST(PtxOverrun, AddressSanitizerSeesLoads) {
    DeviceArray<float> in(255), out(256);
    const kernels::cuda::Launch shape{.grid = dim3(1), .block = dim3(32)};
    EXPECT_DEATH(failure_of(launch(copy_floats<16>, shape, {}, out.data(), in.data(), 32)),
                 "AddressSanitizer: use-after-poison");
    DeviceArray<uint32_t> loaded(32);
    EXPECT_DEATH(failure_of(launch(load_past_the_end, shape, {}, loaded.data())),
                 "AddressSanitizer: use-after-poison");
}
#endif

// The halfway point of bf16 rounding goes to even; 2^x is zero where it would be subnormal.
TEST(PtxArithmetic, PacksAndRaises) {
    EXPECT_EQ(ptx::pack_bf16(1.f, -2.f), 0xc0003f80u);
    EXPECT_EQ(ptx::pack_bf16(1.f + 0x1p-8f, 1.f + 0x3p-8f), 0x3f823f80u);
    EXPECT_EQ(ptx::ex2(3.f), 8.f);
    EXPECT_EQ(ptx::ex2(-126.f), 0x1p-126f);
    EXPECT_EQ(ptx::ex2(-126.5f), 0.f);
    EXPECT_EQ(ptx::ex2(-INFINITY), 0.f);
    EXPECT_EQ(ptx::ex2(INFINITY), INFINITY);
    EXPECT_TRUE(std::isnan(ptx::ex2(NAN)));
}

}  // namespace
}  // namespace fbt::tests
