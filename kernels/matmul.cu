// Matrix products of linear layers on the GPU, in plain f32 arithmetic. A block of 16 x 16 threads
// computes a tile of outputs, walking the sum in steps whose operands lie in shared memory. Each
// output is one chain of fused multiply-adds in the order of the sum's index, whatever the tile:
// small and large M use different tiles and give the same bits.
#include <cmath>

#include "kernels/gpu.h"
#include "kernels/matmul.h"

namespace fbt::kernels::cuda {
namespace {

constexpr int kSide = 16;
constexpr int kThreads = kSide * kSide;
constexpr int kDepth = 32;                // of a step: a row's 32 floats are one 128-byte line
constexpr int kColumns = 4;               // a thread's outputs in a row, kSide apart
constexpr int kTallRows = 4;              // a thread's rows: 4 where there are many,
constexpr int kShortRows = 1;             // 1 where M <= kSide, as in decoding
constexpr int kWidth = kSide * kColumns;  // a tile's columns

__host__ __device__ constexpr int64_t tiles(int64_t size, int64_t tile) {
    return (size + tile - 1) / tile;
}

// Packed weights are w^T, [K', N'], both sizes rounded up to whole tiles and filled with zeros:
// forward's loads of it need no bounds, and neighbouring threads read neighbouring columns.
__host__ __device__ constexpr int64_t padded_columns(int64_t N) {
    return tiles(N, kWidth) * kWidth;
}
__host__ __device__ constexpr int64_t padded_depth(int64_t K) { return tiles(K, kDepth) * kDepth; }

// The operands of one step, both with the sum's index first. a's odd row length lets forward store
// a transposed tile, and every product read one, without bank conflicts.
template <class T, int Rows>
struct Step {
    T a[kDepth][kSide * Rows + 1];
    T b[kDepth][kWidth];
};

// Thread (i, j) of the block owns rows i, i + kSide, ... and columns j, j + kSide, ... of the tile.
template <class T, class A, int Rows>
__device__ void multiply_step(A (&sum)[Rows][kColumns], const Step<T, Rows>& step) {
    const int i = threadIdx.x / kSide, j = threadIdx.x % kSide;
#pragma unroll 8  // all 32 at once would spill registers on sm_80
    for (int k = 0; k < kDepth; ++k) {
        A b[kColumns];
#pragma unroll
        for (int column = 0; column < kColumns; ++column) b[column] = step.b[k][j + column * kSide];
#pragma unroll
        for (int row = 0; row < Rows; ++row) {
            const A a = step.a[k][i + row * kSide];
#pragma unroll
            for (int column = 0; column < kColumns; ++column)
                sum[row][column] = std::fma(a, b[column], sum[row][column]);
        }
    }
}

// y[m,n] = sum_k x[m,k] * packed[k,n]
template <class T, class A, int Rows>
__global__ void __launch_bounds__(kThreads)
    matmul_forward_tile(T* __restrict__ y, const T* __restrict__ x, const T* __restrict__ packed,
                        int64_t M, int64_t N, int64_t K) {
    using Tile = Step<T, Rows>;
    SHARED(Tile, step);
    const int64_t m0 = int64_t(blockIdx.x) * kSide * Rows, n0 = int64_t(blockIdx.y) * kWidth;
    const int64_t stride = padded_columns(N);
    A sum[Rows][kColumns] = {};
    for (int64_t k0 = 0; k0 < K; k0 += kDepth) {
        for (int e = threadIdx.x; e < kSide * Rows * kDepth; e += kThreads) {
            const int row = e / kDepth, k = e % kDepth;
            const bool inside = m0 + row < M && k0 + k < K;
            step.a[k][row] = inside ? x[(m0 + row) * K + k0 + k] : T(0);
        }
        for (int e = threadIdx.x; e < kDepth * kWidth; e += kThreads) {
            const int k = e / kWidth, column = e % kWidth;
            step.b[k][column] = packed[(k0 + k) * stride + n0 + column];
        }
        __syncthreads();
        multiply_step<T, A, Rows>(sum, step);
        __syncthreads();  // before the next step overwrites this one
    }
    const int i = threadIdx.x / kSide, j = threadIdx.x % kSide;
    for (int row = 0; row < Rows; ++row)
        for (int column = 0; column < kColumns; ++column) {
            const int64_t m = m0 + i + row * kSide, n = n0 + j + column * kSide;
            if (m < M && n < N) y[m * N + n] = T(sum[row][column]);
        }
}

// dw[n,k] += sum_m dy[m,n] * x[m,k], m in order from 0 to M-1. The chain takes kDepth rows a step.
template <class T, class A>
__global__ void __launch_bounds__(kThreads)
    matmul_dw_accum_tile(A* __restrict__ dw, const T* __restrict__ dy, const T* __restrict__ x,
                         int64_t M, int64_t N, int64_t K) {
    constexpr int kHeight = kSide * kTallRows;
    using Tile = Step<T, kTallRows>;
    SHARED(Tile, step);
    const int64_t n0 = int64_t(blockIdx.x) * kHeight, k0 = int64_t(blockIdx.y) * kWidth;
    A sum[kTallRows][kColumns] = {};
    for (int64_t m0 = 0; m0 < M; m0 += kDepth) {
        for (int e = threadIdx.x; e < kDepth * kHeight; e += kThreads) {
            const int m = e / kHeight, n = e % kHeight;
            const bool inside = m0 + m < M && n0 + n < N;
            step.a[m][n] = inside ? dy[(m0 + m) * N + n0 + n] : T(0);
        }
        for (int e = threadIdx.x; e < kDepth * kWidth; e += kThreads) {
            const int m = e / kWidth, k = e % kWidth;
            const bool inside = m0 + m < M && k0 + k < K;
            step.b[m][k] = inside ? x[(m0 + m) * K + k0 + k] : T(0);
        }
        __syncthreads();
        multiply_step<T, A, kTallRows>(sum, step);
        __syncthreads();
    }
    const int i = threadIdx.x / kSide, j = threadIdx.x % kSide;
    for (int row = 0; row < kTallRows; ++row)
        for (int column = 0; column < kColumns; ++column) {
            const int64_t n = n0 + i + row * kSide, k = k0 + j + column * kSide;
            if (n < N && k < K) dw[n * K + k] += sum[row][column];
        }
}

// packed = w^T for w [N,K]: 32 x 32 squares go through shared memory, so that both the read and the
// write are along rows. The odd row length keeps the column read free of bank conflicts.
constexpr int kSquare = 32;
constexpr int kSquareRows = kThreads / kSquare;  // that the block moves at a time

template <class T>
__global__ void __launch_bounds__(kThreads)
    matmul_pack_transposing(T* __restrict__ packed, const T* __restrict__ w, int64_t N, int64_t K) {
    using Square = T[kSquare][kSquare + 1];
    SHARED(Square, square);
    const int64_t k0 = int64_t(blockIdx.x) * kSquare, n0 = int64_t(blockIdx.y) * kSquare;
    const int across = threadIdx.x % kSquare;
    for (int down = threadIdx.x / kSquare; down < kSquare; down += kSquareRows) {
        const bool inside = n0 + down < N && k0 + across < K;
        square[down][across] = inside ? w[(n0 + down) * K + k0 + across] : T(0);
    }
    __syncthreads();
    const int64_t stride = padded_columns(N);
    for (int down = threadIdx.x / kSquare; down < kSquare; down += kSquareRows)
        packed[(k0 + down) * stride + n0 + across] = square[across][down];
}

// packed = w for w [K,N], padded
template <class T>
__global__ void __launch_bounds__(kThreads)
    matmul_pack_row(T* __restrict__ packed, const T* __restrict__ w, int64_t N, int64_t K) {
    const int64_t k = blockIdx.x, stride = padded_columns(N);
    for (int64_t n = threadIdx.x; n < stride; n += kThreads)
        packed[k * stride + n] = k < K && n < N ? w[k * N + n] : T(0);
}

}  // namespace

template <class T>
int64_t matmul_packed_size(int64_t N, int64_t K) {
    return padded_depth(K) * padded_columns(N);
}

template <class T>
Status matmul_pack(T* packed, const accumulate_t<T>* w, int64_t N, int64_t K, bool transposed,
                   Stream s) {
    if (N < 1 || K < 1) return {Code::bad_argument, "matmul_pack needs N, K >= 1"};
    const unsigned depth = unsigned(padded_depth(K)), columns = unsigned(padded_columns(N));
    if (transposed)
        return launch(matmul_pack_row<T>, {.grid = dim3(depth), .block = dim3(kThreads)}, s, packed,
                      w, N, K);
    return launch(matmul_pack_transposing<T>,
                  {.grid = dim3(depth / kSquare, columns / kSquare), .block = dim3(kThreads)}, s,
                  packed, w, N, K);
}

template <class T>
Status matmul_forward(T* y, const T* x, const T* packed, int64_t M, int64_t N, int64_t K,
                      Stream s) {
    if (M < 0 || N < 1 || K < 1)
        return {Code::bad_argument, "matmul_forward needs M >= 0 and N, K >= 1"};
    if (M == 0) return {};
    using A = accumulate_t<T>;
    const unsigned columns = unsigned(tiles(N, kWidth));
    if (M <= kSide)
        return launch(matmul_forward_tile<T, A, kShortRows>,
                      {.grid = dim3(1, columns), .block = dim3(kThreads)}, s, y, x, packed, M, N,
                      K);
    return launch(
        matmul_forward_tile<T, A, kTallRows>,
        {.grid = dim3(unsigned(tiles(M, kSide * kTallRows)), columns), .block = dim3(kThreads)}, s,
        y, x, packed, M, N, K);
}

template <class T, class A>
Status matmul_dw_accum(A* dw, const T* dy, const T* x, int64_t M, int64_t N, int64_t K, Stream s) {
    if (M < 0 || N < 1 || K < 1)
        return {Code::bad_argument, "matmul_dw_accum needs M >= 0 and N, K >= 1"};
    if (M == 0) return {};
    const dim3 grid(unsigned(tiles(N, kSide * kTallRows)), unsigned(tiles(K, kWidth)));
    return launch(matmul_dw_accum_tile<T, A>, {.grid = grid, .block = dim3(kThreads)}, s, dw, dy, x,
                  M, N, K);
}

template int64_t matmul_packed_size<float>(int64_t, int64_t);
template Status matmul_pack<float>(float*, const float*, int64_t, int64_t, bool, Stream);
template Status matmul_forward<float>(float*, const float*, const float*, int64_t, int64_t, int64_t,
                                      Stream);
template Status matmul_dw_accum<float>(float*, const float*, const float*, int64_t, int64_t,
                                       int64_t, Stream);

}  // namespace fbt::kernels::cuda
