#include "kernels/matmul_bf16.h"

#include <algorithm>
#include <cstring>

#include "kernels/cpu_tile.h"

namespace fbt::kernels::cpu {
namespace {

// Blocks that stay in the L2 cache (and on a thread's stack): packed rows of one operand, and sums.
constexpr int64_t kBlockRows = 128, kBlockDepth = 1536;
constexpr int64_t kSumColumns = 512;
// Of dw: rows that are summed before they are added (the contract's chunk), and rows of dw whose
// part of dy is packed at once, whole tiles and whole vectors.
constexpr int64_t kDwChunk = 512, kDwRows = 96;

// Below this many multiply-adds, waking a second thread costs more than it saves.
constexpr int64_t kSerialWork = 1 << 16;
int threads_for(int64_t work, Stream s) { return work < kSerialWork ? 1 : s.threads; }

constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

using Pairs = uint32_t __attribute__((vector_size(64), aligned(64)));

uint32_t pair(bf16 first, bf16 second) { return first.bits | uint32_t(second.bits) << 16; }

// v[l] = the pairs (row[2l][c], row[2l+1][c]) of 16 columns c; rows and columns beyond the counts
// are 0.
template <class T>
void load_row_pairs(Pairs (&v)[16], const T* row, int64_t stride, int64_t rows, int64_t columns) {
    const bf16 zero{0.f};
    if (rows >= 32 && columns >= 16) {
        for (int l = 0; l < 16; ++l, row += 2 * stride)
            for (int c = 0; c < 16; ++c) v[l][c] = pair(bf16(row[c]), bf16(row[stride + c]));
        return;
    }
    for (int l = 0; l < 16; ++l)
        for (int c = 0; c < 16; ++c)
            v[l][c] =
                pair(2 * l < rows && c < columns ? bf16(row[2 * l * stride + c]) : zero,
                     2 * l + 1 < rows && c < columns ? bf16(row[(2 * l + 1) * stride + c]) : zero);
}

// v[l] = 16 pairs of neighbours in row l, (row[l][2c], row[l][2c+1]).
template <class T>
void load_column_pairs(Pairs (&v)[16], const T* row, int64_t stride, int64_t rows,
                       int64_t columns) {
    const bf16 zero{0.f};
    if (rows >= 16 && columns >= 32) {
        for (int l = 0; l < 16; ++l, row += stride)
            for (int c = 0; c < 16; ++c) v[l][c] = pair(bf16(row[2 * c]), bf16(row[2 * c + 1]));
        return;
    }
    for (int l = 0; l < 16; ++l)
        for (int c = 0; c < 16; ++c)
            v[l][c] =
                pair(l < rows && 2 * c < columns ? bf16(row[l * stride + 2 * c]) : zero,
                     l < rows && 2 * c + 1 < columns ? bf16(row[l * stride + 2 * c + 1]) : zero);
}

// The first `depth` columns, from x on, of `rows` rows of x: to the tile product's a, in tiles of
// `tile` rows.
void pack_rows(bf16* a, int tile, const bf16* x, int64_t stride, int64_t rows, int64_t depth) {
    const int64_t blocks = ceil_div(depth, kDotDepth);
    for (int64_t r = 0; r < round_up(rows, tile); ++r, x += stride) {
        bf16* to = a + (r / tile * blocks * tile + r % tile) * kDotDepth;
        for (int64_t block = 0; block < blocks; ++block, to += tile * kDotDepth) {
            const int64_t count =
                r < rows ? std::min<int64_t>(kDotDepth, depth - block * kDotDepth) : 0;
            if (count == kDotDepth) {
                std::memcpy(to, x + block * kDotDepth, kDotDepth * sizeof(bf16));
            } else {
                std::memset(to, 0, kDotDepth * sizeof(bf16));
                if (count > 0) std::memcpy(to, x + block * kDotDepth, count * sizeof(bf16));
            }
        }
    }
}

// The same of dy^T: columns [0, columns) of dy are the tiles' rows, `depth` rows of dy their k.
void pack_transposed(bf16* a, int tile, const bf16* dy, int64_t stride, int64_t columns,
                     int64_t depth) {
    const int64_t blocks = ceil_div(depth, kDotDepth), all = round_up(columns, tile);
    for (int64_t block = 0; block < blocks; ++block)
        for (int64_t c = 0; c < all; c += 16) {
            Pairs v[16];
            load_row_pairs(v, dy + block * kDotDepth * stride + c, stride,
                           depth - block * kDotDepth, columns - c);
            transpose(v);
            for (int64_t r = c; r < std::min(all, c + 16); ++r)
                std::memcpy(a + ((r / tile * blocks + block) * tile + r % tile) * kDotDepth,
                            &v[r - c], sizeof(Pairs));
        }
}

// `depth` rows of x, `columns` of its columns: to the tile product's b.
template <class T>
void pack_panels(bf16* b, const T* x, int64_t stride, int64_t columns, int64_t depth) {
    const int64_t panel = dot_depth(depth) * kDotColumns;
    for (int64_t k = 0; k < depth; k += kDotDepth, b += kDotDepth * kDotColumns)
        for (int64_t c = 0; c < columns; c += kDotColumns) {
            Pairs v[16];
            load_row_pairs(v, x + k * stride + c, stride, depth - k, columns - c);
            std::memcpy(b + c / kDotColumns * panel, v, sizeof v);
        }
}

// Asks for rows that will be written: else each store, rows apart, would wait for its line.
template <class T>
void fetch(const T* to, int64_t stride, int64_t rows, int64_t columns) {
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < columns; c += 64 / int64_t(sizeof(T)))
            __builtin_prefetch(to + r * stride + c, 1);
}

struct Blocks {
    alignas(64) bf16 a[kBlockRows * kBlockDepth];
    alignas(64) float sum[kBlockRows * kSumColumns];
};

}  // namespace

int64_t bf16_packed_size(int64_t N, int64_t K) {
    return ceil_div(N, kDotColumns) * kDotColumns * dot_depth(K);
}

Status bf16_pack(bf16* packed, const float* w, int64_t N, int64_t K, bool transposed, Stream s) {
    const int64_t panel = dot_depth(K) * kDotColumns;
    const int threads = threads_for(N * K, s);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t n = 0; n < N; n += kDotColumns) {
        bf16* to = packed + n / kDotColumns * panel;
        if (transposed) {
            pack_panels(to, w + n, N, std::min<int64_t>(kDotColumns, N - n), K);
            continue;
        }
        for (int64_t k = 0; k < K; k += kDotDepth) {
            Pairs v[16];
            load_column_pairs(v, w + n * K + k, K, N - n, K - k);
            transpose(v);
            std::memcpy(to + k * kDotColumns, v, sizeof v);
        }
    }
    return {};
}

// y = x w^T, a block of rows of x and a group of columns of y at a time. Where K is more than one
// block deep, the sums of the group wait in float for the next.
Status bf16_forward(const DotKernel& kernel, std::span<const MatmulOutput<bf16>> outputs,
                    const bf16* x, int64_t M, int64_t K, Stream s) {
    const bool few = M <= kernel.few_rows;
    const DotTile multiply = few ? kernel.few : kernel.multiply;
    const int64_t tile = few ? std::max<int64_t>(M, 1) : kernel.rows;
    const int64_t strip = int64_t(kernel.panels) * kDotColumns;
    const int64_t depths = ceil_div(K, kBlockDepth), panel = dot_depth(K) * kDotColumns;
    const int64_t block_depth = dot_depth(ceil_div(K, depths));
    const int64_t group = depths == 1 ? strip : kSumColumns;
    int64_t strips = 0, columns_of_all = 0;  // those of all outputs, one after the other
    for (const auto& output : outputs) {
        strips += ceil_div(output.N, strip);
        columns_of_all += output.N;
    }
    const auto panels_of = [=](int64_t columns) {
        return int(ceil_div(std::clamp<int64_t>(columns, 0, strip), kDotColumns));
    };
    // Items of work are blocks of rows, as many for each thread. Where there are fewer blocks than
    // threads (decoding), each is cut into parts of the strips, so that a weight is read once.
    const int threads = threads_for(M * columns_of_all * K, s);
    const int64_t most_rows = kBlockRows / tile * tile;
    int64_t row_blocks = ceil_div(M, most_rows), parts = 1;
    if (row_blocks >= threads) {
        row_blocks = round_up(row_blocks, threads);
    } else {
        parts = std::min<int64_t>(threads, strips);
        row_blocks =
            std::max(row_blocks, std::min(ceil_div(threads, parts), ceil_div(M, 2 * tile)));
    }
    const int64_t block_rows = round_up(ceil_div(M, std::max<int64_t>(row_blocks, 1)), tile);
#pragma omp parallel num_threads(threads)
    {
        Blocks blocks;
        // Columns [begin, end) of rows [m, m+rows).
        const auto columns_of = [&](const MatmulOutput<bf16>& output, int64_t m, int64_t rows,
                                    int64_t begin, int64_t end, bool& packed) {
            const int64_t tiles = ceil_div(rows, tile);
            for (int64_t n = begin; n < end; n += group) {
                const int64_t columns = std::min(group, end - n);
                for (int64_t k = 0; k < K; k += block_depth) {
                    const int64_t depth = std::min(block_depth, K - k);
                    if (depths > 1 || !packed)
                        pack_rows(blocks.a, int(tile), x + m * K + k, K, rows, depth);
                    packed = true;
                    for (int64_t c = 0; c < columns; c += strip) {
                        const int panels = panels_of(columns - c);
                        // The next strip, a share of which each tile of rows asks for.
                        const int next = panels_of((depths == 1 ? end - n : columns) - c - strip);
                        const bf16* b =
                            output.packed + (n + c) / kDotColumns * panel + k * kDotColumns;
                        for (int64_t t = 0; t < tiles; ++t) {
                            const int64_t r = t * tile, share = t * next / tiles;
                            multiply(blocks.sum + r * group + c, group,
                                     blocks.a + r * dot_depth(depth), b, panel, dot_depth(depth),
                                     int(std::min(tile, rows - r)), panels, k > 0,
                                     b + (kernel.panels + share) * panel,
                                     int((t + 1) * next / tiles - share));
                        }
                    }
                }
                for (int64_t r = 0; r < rows; ++r) {
                    bf16* to = output.y + (m + r) * output.N + n;
                    const float* from = blocks.sum + r * group;
#pragma omp simd
                    for (int64_t c = 0; c < columns; ++c) store(to[c], from[c]);
                }
            }
        };
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < row_blocks * parts; ++item) {
            const int64_t m = item / parts * block_rows, rows = std::min(block_rows, M - m);
            if (rows <= 0) continue;
            int64_t first = item % parts * strips / parts;  // strips of the outputs to come
            int64_t last = (item % parts + 1) * strips / parts;
            bool packed = false;
            for (const auto& output : outputs) {
                const int64_t own = ceil_div(output.N, strip);
                columns_of(output, m, rows, std::max<int64_t>(first, 0) * strip,
                           std::min(output.N, last * strip), packed);
                first -= own;
                last -= own;
            }
        }
    }
    return {};
}

// dw += dy^T x. An item of work is a range of dw's rows by a group of its columns, for which
// the thread packs what it needs of dy and x, chunk by chunk.
Status bf16_dw_accum(const DotKernel& kernel, float* dw, const bf16* dy, const bf16* x, int64_t M,
                     int64_t N, int64_t K, Stream s) {
    const int64_t tile = kernel.rows, strip = int64_t(kernel.panels) * kDotColumns;
    constexpr int64_t kColumns = kBlockRows * kBlockDepth / kDwChunk;  // as many as blocks.a holds
    const int threads = threads_for(M * N * K, s);
    const int64_t groups = ceil_div(K, kColumns), ranges = ceil_div(threads, groups);
    const int64_t group = round_up(ceil_div(K, groups), kDotColumns);
    const int64_t range = round_up(ceil_div(N, ranges), tile);
#pragma omp parallel num_threads(threads)
    {
        alignas(64) bf16 b[kColumns * kDwChunk], a[kDwRows * kDwChunk];
        alignas(64) float sum[kDotMaxRows * kDotMaxPanels * kDotColumns];
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < groups * ranges; ++item) {
            const int64_t n0 = item % ranges * range, n1 = std::min(N, n0 + range);
            const int64_t k0 = item / ranges * group, columns = std::min(group, K - k0);
            for (int64_t m = 0; m < M && n0 < n1; m += kDwChunk) {
                const int64_t depth = std::min(kDwChunk, M - m);
                const int64_t panel = dot_depth(depth) * kDotColumns;
                pack_panels(b, x + m * K + k0, K, columns, depth);
                for (int64_t n = n0; n < n1; n += kDwRows) {
                    const int64_t rows = std::min(kDwRows, n1 - n);
                    pack_transposed(a, int(tile), dy + m * N + n, N, rows, depth);
                    for (int64_t c = 0; c < columns; c += strip) {
                        const int64_t here = std::min(strip, columns - c);
                        for (int64_t r = 0; r < rows; r += tile) {
                            const int count = int(std::min(tile, rows - r));
                            fetch(dw + (n + r) * K + k0 + c, K, count, here);
                            kernel.multiply(sum, strip, a + r * dot_depth(depth),
                                            b + c / kDotColumns * panel, panel, dot_depth(depth),
                                            count, int(ceil_div(here, kDotColumns)), false, nullptr,
                                            0);
                            for (int64_t i = 0; i < count; ++i) {
                                float* to = dw + (n + r + i) * K + k0 + c;
#pragma omp simd
                                for (int64_t l = 0; l < here; ++l) to[l] += sum[i * strip + l];
                            }
                        }
                    }
                }
            }
        }
    }
    return {};
}

template <>
int64_t matmul_packed_size<bf16>(int64_t N, int64_t K) {
    return bf16_packed_size(N, K);
}

template <>
Status matmul_pack<bf16>(bf16* packed, const float* w, int64_t N, int64_t K, bool transposed,
                         Stream s) {
    if (N < 1 || K < 1) return {Code::bad_argument, "matmul_pack needs N, K >= 1"};
    return bf16_pack(packed, w, N, K, transposed, s);
}

template <>
Status matmul_forward_each<bf16>(std::span<const MatmulOutput<bf16>> outputs, const bf16* x,
                                 int64_t M, int64_t K, Stream s) {
    for (const auto& output : outputs)
        if (M < 0 || output.N < 1 || K < 1)
            return {Code::bad_argument, "matmul_forward needs M >= 0 and N, K >= 1"};
    return bf16_forward(dot_kernels()[0], outputs, x, M, K, s);
}

template <>
Status matmul_forward<bf16>(bf16* y, const bf16* x, const bf16* packed, int64_t M, int64_t N,
                            int64_t K, Stream s) {
    const MatmulOutput<bf16> output{y, packed, N};
    return matmul_forward_each<bf16>({&output, 1}, x, M, K, s);
}

template <>
Status matmul_dw_accum<bf16, float>(float* dw, const bf16* dy, const bf16* x, int64_t M, int64_t N,
                                    int64_t K, Stream s) {
    if (M < 0 || N < 1 || K < 1)
        return {Code::bad_argument, "matmul_dw_accum needs M >= 0 and N, K >= 1"};
    return bf16_dw_accum(dot_kernels()[0], dw, dy, x, M, N, K, s);
}

}  // namespace fbt::kernels::cpu
