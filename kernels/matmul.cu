// Matrix products of linear layers on the GPU. In bf16 they run on tensor cores (matmul_mma.cu). In
// f32 they are plain arithmetic: a block of 16 x 16 threads computes a tile of outputs, walking the
// sum in steps whose operands lie in shared memory. Each output is one chain of fused multiply-adds
// in the order of the sum's index, whatever the tile: small and large M use different tiles and
// give the same bits.
#include <cmath>
#include <type_traits>

#include "kernels/gpu.h"
#include "kernels/matmul.h"
#include "kernels/matmul_mma.h"
#include "kernels/matmul_packed.h"

namespace fbt::kernels::cuda {
namespace {

constexpr int kSide = 16;
constexpr int kThreads = kSide * kSide;
constexpr int kDepth = kF32Depth;  // of a step: a row's 32 floats are one 128-byte line
constexpr int kWidth = kF32Width;  // a tile's columns
constexpr int kColumns = 4;        // a thread's outputs in a row, neighbours
constexpr int kTallRows = 4;       // a thread's rows: 4 where there are many,
constexpr int kShortRows = 1;      // 1 where M <= kSide, as in decoding
static_assert(kWidth == kSide * kColumns);

// The operands of one step, both with the sum's index first. a's odd row length lets forward store
// a transposed tile, and every product read one, without bank conflicts.
template <int Rows>
struct Step {
    alignas(16) float b[kDepth][kWidth];
    float a[kDepth][kSide * Rows + 1];
};

// Thread (i, j) of the block owns rows i, i + kSide, ... and columns 4 j to 4 j + 3 of the tile.
template <int Rows>
__device__ void multiply_step(float (&sum)[Rows][kColumns], const Step<Rows>& step) {
    const int i = threadIdx.x / kSide, j = threadIdx.x % kSide;
#pragma unroll 8  // all 32 at once would spill registers on sm_80
    for (int k = 0; k < kDepth; ++k) {
        const float4 b = *reinterpret_cast<const float4*>(&step.b[k][j * kColumns]);
#pragma unroll
        for (int row = 0; row < Rows; ++row) {
            const float a = step.a[k][i + row * kSide];
            sum[row][0] = std::fma(a, b.x, sum[row][0]);
            sum[row][1] = std::fma(a, b.y, sum[row][1]);
            sum[row][2] = std::fma(a, b.z, sum[row][2]);
            sum[row][3] = std::fma(a, b.w, sum[row][3]);
        }
    }
}

// Whether four neighbours of a row are one 16-byte access: a thread's columns begin at a fourth.
__device__ __forceinline__ bool quads_aligned(const float* data, int64_t columns) {
    return columns % 4 == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0;
}

// y[m,n] = sum_k x[m,k] * packed[k,n]
template <int Rows>
__global__ void __launch_bounds__(kThreads)
    matmul_forward_tile(float* __restrict__ y, const float* __restrict__ x,
                        const float* __restrict__ packed, int64_t M, int64_t N, int64_t K) {
    SHARED(Step<Rows>, step);
    const int64_t row_tiles = ceil_div(M, kSide * Rows);
    const int64_t m0 = blockIdx.x % row_tiles * kSide * Rows, n0 = blockIdx.x / row_tiles * kWidth;
    const int64_t stride = f32_packed_columns(N);
    float sum[Rows][kColumns] = {};
    for (int64_t k0 = 0; k0 < K; k0 += kDepth) {
        for (int e = threadIdx.x; e < kSide * Rows * kDepth; e += kThreads) {
            const int row = e / kDepth, k = e % kDepth;
            const bool inside = m0 + row < M && k0 + k < K;
            step.a[k][row] = inside ? x[(m0 + row) * K + k0 + k] : 0.f;
        }
        for (int e = threadIdx.x; e < kDepth * kSide; e += kThreads) {
            const int k = e / kSide, column = e % kSide * 4;
            *reinterpret_cast<float4*>(&step.b[k][column]) =
                *reinterpret_cast<const float4*>(packed + (k0 + k) * stride + n0 + column);
        }
        __syncthreads();
        multiply_step(sum, step);
        __syncthreads();  // before the next step overwrites this one
    }
    const int i = threadIdx.x / kSide, j = threadIdx.x % kSide;
    const int64_t n = n0 + j * kColumns;
    const bool quads = quads_aligned(y, N);
    for (int row = 0; row < Rows; ++row) {
        const int64_t m = m0 + i + row * kSide;
        if (m >= M) continue;
        if (quads && n < N)
            *reinterpret_cast<float4*>(y + m * N + n) =
                float4{sum[row][0], sum[row][1], sum[row][2], sum[row][3]};
        else
            for (int column = 0; column < kColumns; ++column)
                if (n + column < N) y[m * N + n + column] = sum[row][column];
    }
}

// dw[n,k] += sum_m dy[m,n] * x[m,k], m in order from 0 to M-1. The chain takes kDepth rows a step.
__global__ void __launch_bounds__(kThreads)
    matmul_dw_accum_tile(float* __restrict__ dw, const float* __restrict__ dy,
                         const float* __restrict__ x, int64_t M, int64_t N, int64_t K) {
    constexpr int kHeight = kSide * kTallRows;
    SHARED(Step<kTallRows>, step);
    const int64_t row_tiles = ceil_div(N, kHeight);
    const int64_t n0 = blockIdx.x % row_tiles * kHeight, k0 = blockIdx.x / row_tiles * kWidth;
    float sum[kTallRows][kColumns] = {};
    for (int64_t m0 = 0; m0 < M; m0 += kDepth) {
        for (int e = threadIdx.x; e < kDepth * kHeight; e += kThreads) {
            const int m = e / kHeight, n = e % kHeight;
            const bool inside = m0 + m < M && n0 + n < N;
            step.a[m][n] = inside ? dy[(m0 + m) * N + n0 + n] : 0.f;
        }
        for (int e = threadIdx.x; e < kDepth * kWidth; e += kThreads) {
            const int m = e / kWidth, k = e % kWidth;
            const bool inside = m0 + m < M && k0 + k < K;
            step.b[m][k] = inside ? x[(m0 + m) * K + k0 + k] : 0.f;
        }
        __syncthreads();
        multiply_step(sum, step);
        __syncthreads();
    }
    const int i = threadIdx.x / kSide, j = threadIdx.x % kSide;
    const int64_t k = k0 + j * kColumns;
    const bool quads = quads_aligned(dw, K);
    for (int row = 0; row < kTallRows; ++row) {
        const int64_t n = n0 + i + row * kSide;
        if (n >= N) continue;
        float* out = dw + n * K + k;
        if (quads && k < K) {
            const float4 old = *reinterpret_cast<const float4*>(out);
            *reinterpret_cast<float4*>(out) = float4{old.x + sum[row][0], old.y + sum[row][1],
                                                     old.z + sum[row][2], old.w + sum[row][3]};
        } else {
            for (int column = 0; column < kColumns; ++column)
                if (k + column < K) out[column] += sum[row][column];
        }
    }
}

// packed = w^T for w [N,K]: 32 x 32 squares go through shared memory, so that both the read and the
// write are along rows. The odd row length keeps the column read free of bank conflicts.
constexpr int kSquare = 32;
constexpr int kSquareRows = kThreads / kSquare;  // that the block moves at a time

__global__ void __launch_bounds__(kThreads)
    matmul_pack_transposing(float* __restrict__ packed, const float* __restrict__ w, int64_t N,
                            int64_t K) {
    using Square = float[kSquare][kSquare + 1];
    SHARED(Square, square);
    const int64_t stride = f32_packed_columns(N);
    const int64_t n0 = blockIdx.x % (stride / kSquare) * kSquare;
    const int64_t k0 = blockIdx.x / (stride / kSquare) * kSquare;
    const int across = threadIdx.x % kSquare;
    for (int down = threadIdx.x / kSquare; down < kSquare; down += kSquareRows) {
        const bool inside = n0 + down < N && k0 + across < K;
        square[down][across] = inside ? w[(n0 + down) * K + k0 + across] : 0.f;
    }
    __syncthreads();
    for (int down = threadIdx.x / kSquare; down < kSquare; down += kSquareRows)
        packed[(k0 + down) * stride + n0 + across] = square[across][down];
}

// packed = w for w [K,N], padded
__global__ void __launch_bounds__(kThreads)
    matmul_pack_row(float* __restrict__ packed, const float* __restrict__ w, int64_t N, int64_t K) {
    const int64_t k = blockIdx.x, stride = f32_packed_columns(N);
    for (int64_t n = threadIdx.x; n < stride; n += kThreads)
        packed[k * stride + n] = k < K && n < N ? w[k * N + n] : 0.f;
}

template <int Rows>
Status forward_tiles(float* y, const float* x, const float* packed, int64_t M, int64_t N, int64_t K,
                     Stream s) {
    return launch_blocks(matmul_forward_tile<Rows>, ceil_div(M, kSide * Rows) * ceil_div(N, kWidth),
                         kThreads, 0, s, y, x, packed, M, N, K);
}

}  // namespace

template <class T>
int64_t matmul_packed_size(int64_t N, int64_t K) {
    if constexpr (std::is_same_v<T, bf16>)
        return N * bf16_packed_depth(K);
    else
        return f32_packed_depth(K) * f32_packed_columns(N);
}

template <class T>
Status matmul_pack(T* packed, const accumulate_t<T>* w, int64_t N, int64_t K, bool transposed,
                   Stream s) {
    if (N < 1 || K < 1) return {Code::bad_argument, "matmul_pack needs N, K >= 1"};
    if constexpr (std::is_same_v<T, bf16>) {
        return mma_pack(packed, w, N, K, transposed, s);
    } else {
        const int64_t depth = f32_packed_depth(K), columns = f32_packed_columns(N);
        if (transposed)
            return launch_blocks(matmul_pack_row, depth, kThreads, 0, s, packed, w, N, K);
        return launch_blocks(matmul_pack_transposing, depth / kSquare * (columns / kSquare),
                             kThreads, 0, s, packed, w, N, K);
    }
}

template <class T>
Status matmul_forward(T* y, const T* x, const T* packed, int64_t M, int64_t N, int64_t K,
                      Stream s) {
    if (M < 0 || N < 1 || K < 1)
        return {Code::bad_argument, "matmul_forward needs M >= 0 and N, K >= 1"};
    if (M == 0) return {};
    if constexpr (std::is_same_v<T, bf16>)
        return mma_forward(y, x, packed, M, N, K, s);
    else if (M <= kSide)
        return forward_tiles<kShortRows>(y, x, packed, M, N, K, s);
    else
        return forward_tiles<kTallRows>(y, x, packed, M, N, K, s);
}

template <class T, class A>
Status matmul_dw_accum(A* dw, const T* dy, const T* x, int64_t M, int64_t N, int64_t K, Stream s) {
    if (M < 0 || N < 1 || K < 1)
        return {Code::bad_argument, "matmul_dw_accum needs M >= 0 and N, K >= 1"};
    if (M == 0) return {};
    if constexpr (std::is_same_v<T, bf16>)
        return mma_dw_accum(dw, dy, x, M, N, K, s);
    else
        return launch_blocks(matmul_dw_accum_tile,
                             ceil_div(N, kSide * kTallRows) * ceil_div(K, kWidth), kThreads, 0, s,
                             dw, dy, x, M, N, K);
}

#define INSTANTIATE(T)                                                                            \
    template int64_t matmul_packed_size<T>(int64_t, int64_t);                                     \
    template Status matmul_pack<T>(T*, const float*, int64_t, int64_t, bool, Stream);             \
    template Status matmul_forward<T>(T*, const T*, const T*, int64_t, int64_t, int64_t, Stream); \
    template Status matmul_dw_accum<T>(float*, const T*, const T*, int64_t, int64_t, int64_t,     \
                                       Stream);
INSTANTIATE(float)
INSTANTIATE(bf16)
#undef INSTANTIATE

}  // namespace fbt::kernels::cuda
