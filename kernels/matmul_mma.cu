// Matrix products in bf16 on tensor cores: products are exact, sums are f32.
//
// The row rule. An output is one chain of mma.m16n8k16 along the sum's index, 16 terms at a time
// and always in order from 0, with zeros up to a fixed multiple. Tiles and warps only say who
// computes an output, so every variant below gives it the same bits: 16 rows for decoding, 64 for a
// few sequences, and larger tiles for training.
//
// Memory. Both operands come through a ring of stages in shared memory, which cp.async fills some
// steps ahead. A tile's rows are cut into chunks of 8 values (16 bytes); chunk c of row r lies at
// chunk c ^ (r % 8) of its row, so that the 8 rows of an 8 x 8 matrix, which ldmatrix reads at one
// c, lie in 8 different groups of banks, as do the neighbouring chunks that a copy writes.
#include <algorithm>

#include "kernels/gpu.h"
#include "kernels/matmul_mma.h"
#include "kernels/matmul_packed.h"
#include "kernels/ptx.cuh"

namespace fbt::kernels::cuda {
namespace {

constexpr int kLanes = 32;
constexpr int kChunk = 8;  // bf16 values in 16 bytes

// Where chunk `chunk` of a tile's row `row` lies, in elements. For constant steps this is cheap to
// go on from: 8 i rows further is 8 i row lengths further, and for an even chunk number, two chunks
// further, if that only sets bits of the number, is an XOR with 16.
__device__ __forceinline__ int chunk_place(int row, int chunk, int row_chunks) {
    return (row * row_chunks + (chunk ^ (row & 7))) * kChunk;
}

// Row-major in global memory, rows `stride` apart.
struct Matrix {
    const bf16* data;
    int64_t rows, columns, stride;
};

// Copies tiles of Rows x 8 RowChunks from a matrix to shared memory, as one of Threads threads: the
// same chunk of every kStep'th row. Outside the matrix a tile is zero; with FewRows, for a matrix
// that has few of a tile's rows, the others stay as they are: they only reach outputs that nobody
// stores.
enum class SumsOver { columns, rows };
template <int Rows, int RowChunks, int Threads, SumsOver Sum, bool Aligned, bool FewRows = false>
class TileCopier {
  public:
    __device__ TileCopier(const Matrix& m, int64_t row0, int64_t column0)
        : row_(int(threadIdx.x) / RowChunks),
          place_(chunk_place(row_, int(threadIdx.x) % RowChunks, RowChunks)),
          stride_(m.stride) {
        const int64_t row = row0 + row_, column = column0 + int(threadIdx.x) % RowChunks * kChunk;
        next_ = m.data + row * stride_ + column;
        // Only the distance along the sum may be long; across it, one tile is all that matters.
        const int64_t rows = m.rows - row, columns = m.columns - column;
        across_ = int(min(Sum == SumsOver::columns ? rows : columns, int64_t(kMaxSide)));
        along_ = Sum == SumsOver::columns ? columns : rows;
    }

    // Starts to copy a tile and moves on by one tile along the sum's index.
    __device__ __forceinline__ void start(bf16* tile) {
#pragma unroll
        for (int i = 0; i < Rows / kStep; ++i) {
            const int below = i * kStep;
            const bool in_row = Sum == SumsOver::columns ? below < across_ : below < along_;
            const bool in_column = Sum == SumsOver::columns ? along_ > 0 : across_ > 0;
            if (FewRows && !in_row) continue;
            bf16* to =
                tile + (kStep % 8 == 0
                            ? place_ + below * RowChunks * kChunk
                            : chunk_place(row_ + below, int(threadIdx.x) % RowChunks, RowChunks));
            const bf16* from = next_ + below * stride_;
            if constexpr (Aligned) {
                ptx::cp_async_16(to, from, in_row && in_column ? 16 : 0);
            } else {
                const int64_t count = !in_row ? 0 : Sum == SumsOver::columns ? along_ : across_;
                alignas(16) bf16 chunk[kChunk];
#pragma unroll
                for (int e = 0; e < kChunk; ++e) chunk[e] = e < count ? from[e] : bf16(0.f);
                *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(chunk);
            }
        }
        along_ -= Sum == SumsOver::columns ? RowChunks * kChunk : Rows;
        next_ += Sum == SumsOver::columns ? RowChunks * kChunk : Rows * stride_;
    }

  private:
    static constexpr int kStep = Threads / RowChunks, kMaxSide = 1 << 20;
    static_assert(Threads % RowChunks == 0 && Rows % kStep == 0);
    int row_, place_;
    int across_;     // rows, or columns, of the matrix from this thread's first on
    int64_t along_;  // the same along the sum, from this tile on
    const bf16* next_;
    int64_t stride_;
};

// The operands of a warp's tile for `Terms` terms of the sum, in 16s: rows in 16s, columns in 8s.
template <int Rows, int Columns, int Terms>
struct Fragments {
    uint32_t a[Terms / 16][Rows / 16][4], b[Terms / 16][Columns / 8][2];
};
template <int Rows, int Columns>
using Sums = float[Rows / 16][Columns / 8][4];

template <int Rows, int Columns, int Terms>
__device__ __forceinline__ void multiply(Sums<Rows, Columns>& sum,
                                         const Fragments<Rows, Columns, Terms>& f) {
#pragma unroll
    for (int t = 0; t < Terms / 16; ++t)
#pragma unroll
        for (int i = 0; i < Rows / 16; ++i)
#pragma unroll
            for (int j = 0; j < Columns / 8; ++j)
                ptx::mma_m16n8k16(sum[i][j], f.a[t][i], f.b[t][j]);
}

// Two neighbouring operands b from the four 8 x 8 matrices that one ldmatrix reads.
__device__ __forceinline__ void set_pair(uint32_t (&first)[2], uint32_t (&second)[2],
                                         const uint32_t (&r)[4]) {
    first[0] = r[0];
    first[1] = r[1];
    second[0] = r[2];
    second[1] = r[3];
}

// Blocks run about in the order of their index, so those that run together are given tiles of a
// compact region: they share rows of x and of the weights in the L2 cache. A region is a band of
// `band` tile rows, walked column by column. (Counts of tiles fit 32 bits, as a grid must.)
struct TilePlace {
    unsigned row, column;
};
__device__ __forceinline__ TilePlace tile_place(unsigned index, unsigned rows, unsigned columns,
                                                unsigned band) {
    const unsigned area = min(band, rows) * columns;
    const unsigned first = index / area * band, within = index % area;
    const unsigned height = min(band, rows - first);
    return {first + within % height, within / height};
}
constexpr int kBandElements = 2048;  // a band's height: 16 tiles of 128

// A block's tile of Rows x Columns outputs, cut among WarpRows x WarpColumns warps, and its ring.
template <int Rows, int Columns, int WarpRows, int WarpColumns, int Depth, int Stages>
struct Tiling {
    static constexpr int kRows = Rows, kColumns = Columns;
    static constexpr int kDepth = Depth, kTerms = 16, kStages = Stages;
    static constexpr int kThreads = kLanes * WarpRows * WarpColumns;
    static constexpr int kWarpColumns = WarpColumns;
    static constexpr int kWarpTileRows = Rows / WarpRows, kWarpTileColumns = Columns / WarpColumns;
    static constexpr int kStage = (Rows + Columns) * Depth;  // elements
    static constexpr size_t kSharedBytes = size_t(kStage) * Stages * sizeof(bf16);
    static constexpr int kBand = kBandElements / Rows;
    using WarpSums = Sums<kWarpTileRows, kWarpTileColumns>;
    using WarpFragments = Fragments<kWarpTileRows, kWarpTileColumns, kTerms>;
};
// Warps of 64 x 64 read little shared memory for much arithmetic; where such tiles would leave
// multiprocessors idle, smaller ones are faster.
using ForwardLarge = Tiling<128, 256, 2, 4, 64, 3>;
using ForwardMiddle = Tiling<128, 128, 2, 2, 64, 3>;
using ForwardSmall = Tiling<64, 64, 2, 2, 64, 3>;
using DwLarge = Tiling<128, 256, 2, 4, 32, 4>;
using DwMiddle = Tiling<128, 128, 2, 2, 32, 4>;
using DwSmall = Tiling<64, 64, 2, 2, 32, 4>;

// The walk along the sum, in `steps` stages. start(stage) starts to fill one, load(f, stage, part)
// reads the operands of its part'th Tile::kTerms terms. Operands are read while the previous ones
// multiply, across stages too.
template <class Tile, class Start, class Load>
__device__ __forceinline__ void walk(typename Tile::WarpSums& sum, bf16* ring, int64_t steps,
                                     Start start, Load load) {
    constexpr int kParts = Tile::kDepth / Tile::kTerms, kAhead = Tile::kStages - 1;
    static_assert(kParts % 2 == 0);
    for (int i = 0; i < kAhead; ++i) {
        if (i < steps) start(ring + i * Tile::kStage);
        ptx::cp_async_commit();
    }
    ptx::cp_async_wait<kAhead - 1>();
    __syncthreads();
    typename Tile::WarpFragments f[2];
    load(f[0], ring, 0);
    int reading = 0, filling = kAhead;
    for (int64_t step = 0; step < steps; ++step) {
        const bf16* stage = ring + reading * Tile::kStage;
        reading = reading + 1 == Tile::kStages ? 0 : reading + 1;
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
            if (part + 1 < kParts) {
                load(f[(part + 1) % 2], stage, part + 1);
            } else {
                // The next stage has landed, and everyone has read all of this one. After the last
                // step the operands read here are not used.
                ptx::cp_async_wait<kAhead - 1>();
                __syncthreads();
                load(f[0], ring + reading * Tile::kStage, 0);
            }
            if (part == 0) {  // into the stage before this one
                if (step + kAhead < steps) start(ring + filling * Tile::kStage);
                ptx::cp_async_commit();
                filling = filling + 1 == Tile::kStages ? 0 : filling + 1;
            }
            multiply(sum, f[part % 2]);
        }
    }
    ptx::cp_async_wait<0>();
}

// y[m,n] = sum_k x[m,k] * w[n,k]
template <class Tile, bool Aligned>
__global__ void __launch_bounds__(Tile::kThreads)
    matmul_forward_mma_tile(bf16* __restrict__ y, const bf16* __restrict__ x,
                            const bf16* __restrict__ packed, int64_t M, int64_t N, int64_t K) {
    constexpr int kRowChunks = Tile::kDepth / kChunk;
    constexpr int kWarpM = Tile::kWarpTileRows, kWarpN = Tile::kWarpTileColumns;
    DYNAMIC_SHARED(bf16, ring);
    const TilePlace tile = tile_place(blockIdx.x, unsigned(ceil_div(M, Tile::kRows)),
                                      unsigned(ceil_div(N, Tile::kColumns)), Tile::kBand);
    const int64_t m0 = int64_t(tile.row) * Tile::kRows, n0 = int64_t(tile.column) * Tile::kColumns;
    const int lane = int(threadIdx.x) % kLanes, warp = int(threadIdx.x) / kLanes;
    const int warp_m = warp / Tile::kWarpColumns * kWarpM,
              warp_n = warp % Tile::kWarpColumns * kWarpN;

    const int64_t depth = bf16_packed_depth(K);
    TileCopier<Tile::kRows, kRowChunks, Tile::kThreads, SumsOver::columns, Aligned> copy_x(
        {x, M, K, K}, m0, 0);
    TileCopier<Tile::kColumns, kRowChunks, Tile::kThreads, SumsOver::columns, true> copy_w(
        {packed, N, depth, depth}, n0, 0);

    // Of four 8 x 8 matrices, a lane names a row of one. For a they are the quarters of 16 x 16,
    // down first; for b two columns of 8 x 8, each with its 16 terms.
    const int a_place = chunk_place(warp_m + lane % 16, lane / 16, kRowChunks);
    const int b_place = chunk_place(warp_n + lane / 16 * 8 + lane % 8, lane / 8 % 2, kRowChunks);
    typename Tile::WarpSums sum = {};
    walk<Tile>(
        sum, ring, depth / Tile::kDepth,
        [&](bf16* stage) {
            copy_x.start(stage);
            copy_w.start(stage + Tile::kRows * Tile::kDepth);
        },
        [&](typename Tile::WarpFragments& f, const bf16* stage, int part) {
            const bf16* a = stage + (a_place ^ part * 16);
            const bf16* b = stage + Tile::kRows * Tile::kDepth + (b_place ^ part * 16);
#pragma unroll
            for (int i = 0; i < kWarpM / 16; ++i)
                ptx::ldmatrix_x4(f.a[0][i], a + i * 16 * Tile::kDepth);
#pragma unroll
            for (int j = 0; j < kWarpN / 16; ++j) {
                uint32_t r[4];
                ptx::ldmatrix_x4(r, b + j * 16 * Tile::kDepth);
                set_pair(f.b[0][2 * j], f.b[0][2 * j + 1], r);
            }
        });

    // Through shared memory, so that a row is written as whole lines. A pitch of one chunk more
    // keeps both the writes and the reads free of bank conflicts.
    constexpr int kPitch = Tile::kColumns + kChunk;
    static_assert(size_t(Tile::kRows) * kPitch * sizeof(bf16) <= Tile::kSharedBytes);
    __syncthreads();  // the ring has been read
#pragma unroll
    for (int i = 0; i < kWarpM / 16; ++i)
#pragma unroll
        for (int j = 0; j < kWarpN / 8; ++j)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = warp_m + i * 16 + half * 8 + lane / 4;
                const int column = warp_n + j * 8 + lane % 4 * 2;
                *reinterpret_cast<uint32_t*>(ring + row * kPitch + column) =
                    ptx::pack_bf16(sum[i][j][half * 2], sum[i][j][half * 2 + 1]);
            }
    __syncthreads();
    if (N % kChunk == 0 && reinterpret_cast<uintptr_t>(y) % 16 == 0) {
        constexpr int kChunks = Tile::kColumns / kChunk;
        for (int e = int(threadIdx.x); e < Tile::kRows * kChunks; e += Tile::kThreads) {
            const int row = e / kChunks, column = e % kChunks * kChunk;
            if (m0 + row < M && n0 + column < N)
                *reinterpret_cast<uint4*>(y + (m0 + row) * N + n0 + column) =
                    *reinterpret_cast<const uint4*>(ring + row * kPitch + column);
        }
    } else {
        for (int e = int(threadIdx.x); e < Tile::kRows * Tile::kColumns; e += Tile::kThreads) {
            const int row = e / Tile::kColumns, column = e % Tile::kColumns;
            if (m0 + row < M && n0 + column < N)
                y[(m0 + row) * N + n0 + column] = ring[row * kPitch + column];
        }
    }
}

// The same for few rows, where reading the weights is what takes time: a warp takes 8 columns and
// all of the sum, so that many blocks stream weights at once, through a deep ring. Rows are up to
// 16 RowTiles. An mma waits for the one before it, so nothing else may: 32 terms are read ahead.
template <int RowTiles, int Warps, int Stages>
struct Strip {
    static constexpr int kRows = 16 * RowTiles, kColumns = 8 * Warps, kThreads = kLanes * Warps;
    static constexpr int kDepth = kBf16Depth, kTerms = 32, kStages = Stages;
    static constexpr int kRowTiles = RowTiles;
    static constexpr int kStage = (kRows + kColumns) * kDepth;
    static constexpr size_t kSharedBytes = size_t(kStage) * Stages * sizeof(bf16);
    using WarpSums = Sums<kRows, 8>;
    using WarpFragments = Fragments<kRows, 8, kTerms>;
};
using DecodeWide = Strip<1, 4, 6>;
using DecodeNarrow = Strip<1, 1, 16>;  // more, smaller blocks, each with as many bytes in flight
using DecodeMany = Strip<4, 2, 4>;

template <class Tile, bool Aligned>
__global__ void __launch_bounds__(Tile::kThreads)
    matmul_forward_mma_strip(bf16* __restrict__ y, const bf16* __restrict__ x,
                             const bf16* __restrict__ packed, int64_t M, int64_t N, int64_t K) {
    constexpr int kRowChunks = Tile::kDepth / kChunk;
    DYNAMIC_SHARED(bf16, ring);
    const int64_t n0 = int64_t(blockIdx.x) * Tile::kColumns, depth = bf16_packed_depth(K);
    const int lane = int(threadIdx.x) % kLanes, warp_n = int(threadIdx.x) / kLanes * 8;
    TileCopier<Tile::kRows, kRowChunks, Tile::kThreads, SumsOver::columns, Aligned, true> copy_x(
        {x, M, K, K}, 0, 0);
    TileCopier<Tile::kColumns, kRowChunks, Tile::kThreads, SumsOver::columns, true> copy_w(
        {packed, N, depth, depth}, n0, 0);
    const int a_place = chunk_place(lane % 16, lane / 16, kRowChunks);
    const int b_place = chunk_place(warp_n + lane % 8, lane / 8, kRowChunks);
    typename Tile::WarpSums sum = {};
    walk<Tile>(
        sum, ring, depth / Tile::kDepth,
        [&](bf16* stage) {
            copy_x.start(stage);
            copy_w.start(stage + Tile::kRows * Tile::kDepth);
        },
        [&](typename Tile::WarpFragments& f, const bf16* stage, int part) {
            uint32_t r[4];  // 8 columns, each with its 32 terms
            ptx::ldmatrix_x4(r, stage + Tile::kRows * Tile::kDepth + (b_place ^ part * 32));
            set_pair(f.b[0][0], f.b[1][0], r);
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int i = 0; i < Tile::kRowTiles; ++i)
                    ptx::ldmatrix_x4(f.a[half][i], stage + (a_place ^ (part * 32 + half * 16)) +
                                                       i * 16 * Tile::kDepth);
        });
#pragma unroll
    for (int i = 0; i < Tile::kRowTiles; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int64_t m = i * 16 + half * 8 + lane / 4, n = n0 + warp_n + lane % 4 * 2;
            // rounded by the same instruction as in other variants: a NaN's bits agree too
            const uint32_t pair = ptx::pack_bf16(sum[i][0][half * 2], sum[i][0][half * 2 + 1]);
            if (m < M && n < N) y[m * N + n].bits = uint16_t(pair);
            if (m < M && n + 1 < N) y[m * N + n + 1].bits = uint16_t(pair >> 16);
        }
}

// dw[n,k] += sum_m dy[m,n] * x[m,k], m in order from 0, in steps of Tile::kDepth rows. Both
// operands lie with the sum's index first, so ldmatrix transposes them.
template <class Tile, bool Aligned>
__global__ void __launch_bounds__(Tile::kThreads)
    matmul_dw_mma_tile(float* __restrict__ dw, const bf16* __restrict__ dy,
                       const bf16* __restrict__ x, int64_t M, int64_t N, int64_t K) {
    constexpr int kDyChunks = Tile::kRows / kChunk, kXChunks = Tile::kColumns / kChunk;
    constexpr int kWarpN = Tile::kWarpTileRows, kWarpK = Tile::kWarpTileColumns;
    DYNAMIC_SHARED(bf16, ring);
    const TilePlace tile = tile_place(blockIdx.x, unsigned(ceil_div(N, Tile::kRows)),
                                      unsigned(ceil_div(K, Tile::kColumns)), Tile::kBand);
    const int64_t n0 = int64_t(tile.row) * Tile::kRows, k0 = int64_t(tile.column) * Tile::kColumns;
    const int lane = int(threadIdx.x) % kLanes, warp = int(threadIdx.x) / kLanes;
    const int warp_n = warp / Tile::kWarpColumns * kWarpN,
              warp_k = warp % Tile::kWarpColumns * kWarpK;

    TileCopier<Tile::kDepth, kDyChunks, Tile::kThreads, SumsOver::rows, Aligned> copy_dy(
        {dy, M, N, N}, 0, n0);
    TileCopier<Tile::kDepth, kXChunks, Tile::kThreads, SumsOver::rows, Aligned> copy_x({x, M, K, K},
                                                                                       0, k0);

    const int a_place =
        chunk_place(lane / 16 * 8 + lane % 8, warp_n / kChunk + lane / 8 % 2, kDyChunks);
    const int b_place = chunk_place(lane % 16, warp_k / kChunk + lane / 16, kXChunks);
    typename Tile::WarpSums sum = {};
    walk<Tile>(
        sum, ring, ceil_div(M, Tile::kDepth),
        [&](bf16* stage) {
            copy_dy.start(stage);
            copy_x.start(stage + Tile::kRows * Tile::kDepth);
        },
        [&](typename Tile::WarpFragments& f, const bf16* stage, int part) {
            const bf16* a = stage + part * 16 * Tile::kRows;
            const bf16* b = stage + Tile::kRows * Tile::kDepth + part * 16 * Tile::kColumns;
#pragma unroll
            for (int i = 0; i < kWarpN / 16; ++i)
                ptx::ldmatrix_x4_trans(f.a[0][i], a + (a_place ^ i * 16));
#pragma unroll
            for (int j = 0; j < kWarpK / 16; ++j) {
                uint32_t r[4];
                ptx::ldmatrix_x4_trans(r, b + (b_place ^ j * 16));
                set_pair(f.b[0][2 * j], f.b[0][2 * j + 1], r);
            }
        });

    // Four lanes hold 8 neighbours of a row: one whole 32-byte sector.
    const bool pairs = K % 2 == 0 && reinterpret_cast<uintptr_t>(dw) % 8 == 0;
#pragma unroll
    for (int i = 0; i < kWarpN / 16; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int64_t n = n0 + warp_n + i * 16 + half * 8 + lane / 4;
            if (n >= N) continue;
#pragma unroll
            for (int j = 0; j < kWarpK / 8; ++j) {
                const int64_t k = k0 + warp_k + j * 8 + lane % 4 * 2;
                const float* s = sum[i][j] + half * 2;
                float* out = dw + n * K + k;
                if (pairs && k < K) {
                    float2 v = *reinterpret_cast<float2*>(out);
                    v.x += s[0];
                    v.y += s[1];
                    *reinterpret_cast<float2*>(out) = v;
                } else {
                    if (k < K) out[0] += s[0];
                    if (k + 1 < K) out[1] += s[1];
                }
            }
        }
}

// ---- packing ----

// packed[n,k] = w[k,n] for w [K,N], through shared memory, so that both the read and the write are
// along rows. The odd row length keeps the column read free of bank conflicts.
constexpr int kSquare = 32;
constexpr int kPackThreads = 128;
constexpr int kSquareRows = kPackThreads / kSquare;  // that the block moves at a time

__global__ void __launch_bounds__(kPackThreads)
    matmul_pack_mma_transposing(bf16* __restrict__ packed, const float* __restrict__ w, int64_t N,
                                int64_t K) {
    using Square = float[kSquare][kSquare + 1];
    SHARED(Square, square);
    const int64_t depth = bf16_packed_depth(K);
    const unsigned across_tiles = unsigned(depth / kSquare);
    const int64_t k0 = int64_t(blockIdx.x % across_tiles) * kSquare,
                  n0 = int64_t(blockIdx.x / across_tiles) * kSquare;
    const int across = int(threadIdx.x) % kSquare, first = int(threadIdx.x) / kSquare;
    for (int down = first; down < kSquare; down += kSquareRows) {
        const bool inside = k0 + down < K && n0 + across < N;
        square[down][across] = inside ? w[(k0 + down) * N + n0 + across] : 0.f;
    }
    __syncthreads();
    for (int down = first; down < kSquare; down += kSquareRows)
        if (n0 + down < N) packed[(n0 + down) * depth + k0 + across] = bf16(square[across][down]);
}

// packed[n,k] = w[n,k] for w [N,K]: a block takes a row, a thread a chunk at a time.
__global__ void __launch_bounds__(kPackThreads)
    matmul_pack_mma(bf16* __restrict__ packed, const float* __restrict__ w, int64_t K) {
    const int64_t n = blockIdx.x, depth = bf16_packed_depth(K);
    const float* row = w + n * K;
    const bool quads = K % 4 == 0 && reinterpret_cast<uintptr_t>(w) % 16 == 0;
    for (int64_t k0 = int64_t(threadIdx.x) * kChunk; k0 < depth; k0 += kPackThreads * kChunk) {
        float v[kChunk] = {};
        if (quads && k0 + kChunk <= K) {
#pragma unroll
            for (int i = 0; i < kChunk; i += 4) {
                const float4 quad = *reinterpret_cast<const float4*>(row + k0 + i);
                v[i] = quad.x;
                v[i + 1] = quad.y;
                v[i + 2] = quad.z;
                v[i + 3] = quad.w;
            }
        } else {
#pragma unroll
            for (int i = 0; i < kChunk; ++i)
                if (k0 + i < K) v[i] = row[k0 + i];
        }
        *reinterpret_cast<uint4*>(packed + n * depth + k0) =
            uint4{ptx::pack_bf16(v[0], v[1]), ptx::pack_bf16(v[2], v[3]),
                  ptx::pack_bf16(v[4], v[5]), ptx::pack_bf16(v[6], v[7])};
    }
}

// ---- launches ----

bool rows_aligned(const bf16* data, int64_t columns) {
    return columns % kChunk == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0;
}

template <class Tile, bool Aligned>
Status forward_tile(bf16* y, const bf16* x, const bf16* packed, int64_t M, int64_t N, int64_t K,
                    Stream s) {
    return launch_blocks(matmul_forward_mma_tile<Tile, Aligned>,
                         ceil_div(M, Tile::kRows) * ceil_div(N, Tile::kColumns), Tile::kThreads,
                         Tile::kSharedBytes, s, y, x, packed, M, N, K);
}
template <class Tile, bool Aligned>
Status forward_strip(bf16* y, const bf16* x, const bf16* packed, int64_t M, int64_t N, int64_t K,
                     Stream s) {
    return launch_blocks(matmul_forward_mma_strip<Tile, Aligned>, ceil_div(N, Tile::kColumns),
                         Tile::kThreads, Tile::kSharedBytes, s, y, x, packed, M, N, K);
}
template <class Tile, bool Aligned>
Status dw_tile(float* dw, const bf16* dy, const bf16* x, int64_t M, int64_t N, int64_t K,
               Stream s) {
    return launch_blocks(matmul_dw_mma_tile<Tile, Aligned>,
                         ceil_div(N, Tile::kRows) * ceil_div(K, Tile::kColumns), Tile::kThreads,
                         Tile::kSharedBytes, s, dw, dy, x, M, N, K);
}

constexpr int64_t kMultiprocessors = 132;  // of an H100 or H200; an A100 has 108

// Whether a product of `rows` x `columns` outputs has at least `blocks` such tiles.
template <class Tile>
bool fills(int64_t rows, int64_t columns, int64_t blocks) {
    return ceil_div(rows, Tile::kRows) * ceil_div(columns, Tile::kColumns) >= blocks;
}

}  // namespace

Status mma_pack(bf16* packed, const float* w, int64_t N, int64_t K, bool transposed, Stream s) {
    const int64_t depth = bf16_packed_depth(K);
    if (transposed)
        return launch_blocks(matmul_pack_mma_transposing, depth / kSquare * ceil_div(N, kSquare),
                             kPackThreads, 0, s, packed, w, N, K);
    return launch_blocks(matmul_pack_mma, N, kPackThreads, 0, s, packed, w, K);
}

Status mma_forward(bf16* y, const bf16* x, const bf16* packed, int64_t M, int64_t N, int64_t K,
                   Stream s) {
    if (!rows_aligned(x, K)) {
        if (M <= DecodeWide::kRows)
            return forward_strip<DecodeWide, false>(y, x, packed, M, N, K, s);
        return forward_tile<ForwardSmall, false>(y, x, packed, M, N, K, s);
    }
    if (M <= DecodeWide::kRows) {
        // A wide block for every multiprocessor, or else as many narrow ones as there can be.
        if (fills<DecodeWide>(M, N, kMultiprocessors))
            return forward_strip<DecodeWide, true>(y, x, packed, M, N, K, s);
        return forward_strip<DecodeNarrow, true>(y, x, packed, M, N, K, s);
    }
    // Strips read x once for every 16 columns, tiles for every 64: worth it where those still
    // keep half of the multiprocessors busy.
    if (M <= DecodeMany::kRows && !fills<ForwardSmall>(M, N, kMultiprocessors / 2))
        return forward_strip<DecodeMany, true>(y, x, packed, M, N, K, s);
    if (M <= ForwardSmall::kRows) return forward_tile<ForwardSmall, true>(y, x, packed, M, N, K, s);
    if (fills<ForwardLarge>(M, N, 2 * kMultiprocessors))
        return forward_tile<ForwardLarge, true>(y, x, packed, M, N, K, s);
    if (fills<ForwardMiddle>(M, N, kMultiprocessors))
        return forward_tile<ForwardMiddle, true>(y, x, packed, M, N, K, s);
    return forward_tile<ForwardSmall, true>(y, x, packed, M, N, K, s);
}

Status mma_dw_accum(float* dw, const bf16* dy, const bf16* x, int64_t M, int64_t N, int64_t K,
                    Stream s) {
    if (!rows_aligned(dy, N) || !rows_aligned(x, K))
        return dw_tile<DwSmall, false>(dw, dy, x, M, N, K, s);
    if (fills<DwLarge>(N, K, 2 * kMultiprocessors))
        return dw_tile<DwLarge, true>(dw, dy, x, M, N, K, s);
    if (fills<DwMiddle>(N, K, kMultiprocessors))
        return dw_tile<DwMiddle, true>(dw, dy, x, M, N, K, s);
    return dw_tile<DwSmall, true>(dw, dy, x, M, N, K, s);
}

}  // namespace fbt::kernels::cuda
