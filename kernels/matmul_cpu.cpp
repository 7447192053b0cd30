// Matrix products on vectors of 16 floats. Every element of y is one chain of fused multiply-adds,
//   acc = fma(x[m,k], w[n,k], acc),  k = 0, 1, ..., K-1,
// whatever tile it is computed in, so the row rule holds by construction.
#include <omp.h>

#include <algorithm>

#include "kernels/cpu_tile.h"
#include "kernels/matmul.h"

namespace fbt::kernels::cpu {
namespace {

// A tile of sums, kTileRows rows by kTilePanels panels of 16 columns, must leave registers for the
// operands: AVX-512 has 32 registers of one Vec each, AVX2 has 16 of half a Vec each.
#if defined(__AVX512F__)
constexpr int kTileRows = 12, kTilePanels = 2, kWidePanels = 8;
#else
constexpr int kTileRows = 6, kTilePanels = 1, kWidePanels = 2;
#endif
// Up to this many rows (decoding) tiles are kWidePanels wide instead, to keep as many sums going.
constexpr int kFewRows = 3;

// Columns of x that are multiplied before the next ones: a tile's operands then fit the L1 cache.
constexpr int64_t kDepth = 256;
// Rows of x are copied before use, to this distance: a constant, which leaves the compiler one
// pointer to keep instead of one a row, and no power of two, which would crowd a few sets of the
// L1 cache.
constexpr int64_t kStride = kDepth + kLanes;
constexpr int64_t kBlockRows = 2 * kTileRows;

// Sums over rows for dw: rows in one chunk, rows of dw in one strip, columns of x copied at once
// (kDwChunk * kDwColumns floats, 256 KB of stack, which stay in the L2 cache).
constexpr int64_t kDwChunk = 256, kDwRows = kTileRows, kDwColumns = 256;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Below this many multiply-adds, waking a second thread costs more than it saves.
constexpr int64_t kSerialWork = 1 << 16;
int threads_for(int64_t work, Stream s) { return work < kSerialWork ? 1 : s.threads; }

// One call of forward: what its blocks share.
struct Forward {
    float* y;
    const float* x;
    const float* packed;
    int64_t M, N, K;
};

// Adds columns [k, k+depth) of x, copied to `rows`, into R rows by P panels of y, from row m and
// column n on. Columns of y beyond N are computed (their weights are 0) and not stored.
template <int R, int P>
void forward_tile(const Forward& f, const float* rows, int64_t m, int64_t n, int64_t k,
                  int64_t depth) {
    float* y = f.y + m * f.N + n;
    const int64_t columns = f.N - n;
    Vec sum[R][P];
    for (int r = 0; r < R; ++r)
        for (int p = 0; p < P; ++p)
            sum[r][p] =
                k == 0 ? splat(0.f) : load_first(y + r * f.N + p * kLanes, columns - p * kLanes);
    multiply<kStride, 1>(sum, rows, f.packed + n * f.K + k * kLanes, kLanes, f.K * kLanes, depth);
    for (int r = 0; r < R; ++r)
        for (int p = 0; p < P; ++p)
            store_first(y + r * f.N + p * kLanes, sum[r][p], columns - p * kLanes);
}

// The same for `count` rows, in tiles of R rows and a smaller one.
template <int R, int P>
void forward_rows(const Forward& f, const float* rows, int64_t count, int64_t m, int64_t n,
                  int64_t k, int64_t depth) {
    for (; count >= R; count -= R, m += R, rows += R * kStride)
        forward_tile<R, P>(f, rows, m, n, k, depth);
    if constexpr (R > 1)
        if (count > 0) forward_rows<R - 1, P>(f, rows, count, m, n, k, depth);
}

// The same for the columns [n, end) of y, P panels at a time, then one.
template <int R, int P>
void forward_columns(const Forward& f, const float* rows, int64_t count, int64_t m, int64_t n,
                     int64_t end, int64_t k, int64_t depth) {
    for (; n + (P - 1) * kLanes < end; n += P * kLanes)
        forward_rows<R, P>(f, rows, count, m, n, k, depth);
    for (; n < end; n += kLanes) forward_rows<R, 1>(f, rows, count, m, n, k, depth);
}

// Rows [m, m+count) and columns [n, end) of y; count <= kBlockRows.
void forward_block(const Forward& f, int64_t m, int64_t count, int64_t n, int64_t end) {
    alignas(64) float rows[kBlockRows * kStride];
    for (int64_t k = 0; k < f.K; k += kDepth) {
        const int64_t depth = std::min(kDepth, f.K - k);
        for (int64_t r = 0; r < count; ++r)
            for (int64_t c = 0; c < depth; c += kLanes)
                store(rows + r * kStride + c, load_first(f.x + (m + r) * f.K + k + c, depth - c));
        if (count <= kFewRows)
            forward_columns<kFewRows, kWidePanels>(f, rows, count, m, n, end, k, depth);
        else
            forward_columns<kTileRows, kTilePanels>(f, rows, count, m, n, end, k, depth);
    }
}

// dw[r, p*16 + lane] += sum_m dy[m,r] * x[m, p*16 + lane] over a chunk of rows: dy copied as
// [rows][kDwRows], x as panels [rows][16] kDwChunk rows apart. Of the tile, row_count rows and
// `columns` columns exist.
template <int P>
void dw_tile(float* dw, const float* dy, const float* x, int64_t rows, int64_t row_count,
             int64_t columns, int64_t K) {
    Vec sum[kDwRows][P];
    for (auto& row : sum)
        for (Vec& v : row) v = splat(0.f);
    multiply<1, kDwRows>(sum, dy, x, kLanes, kDwChunk * kLanes, rows);
    for (int r = 0; r < kDwRows; ++r) {
        if (r == row_count) break;
        for (int p = 0; p < P; ++p) {
            float* out = dw + r * K + p * kLanes;
            const int64_t count = columns - p * kLanes;
            store_first(out, add(load_first(out, count), sum[r][p]), count);
        }
    }
}

}  // namespace

// Weights are packed as panels [N/16][K][16], zeros where n >= N: one Vec holds the weights of one
// k and 16 outputs.
template <class T>
int64_t matmul_packed_size(int64_t N, int64_t K) {
    return ceil_div(N, kLanes) * kLanes * K;
}

template <class T>
Status matmul_pack(T* packed, const T* w, int64_t N, int64_t K, bool transposed, Stream s) {
    if (N < 1 || K < 1) return {Code::bad_argument, "matmul_pack needs N, K >= 1"};
    const int64_t n_step = transposed ? 1 : K, k_step = transposed ? N : 1;
#pragma omp parallel for num_threads(threads_for(N* K, s)) schedule(static)
    for (int64_t panel = 0; panel < ceil_div(N, kLanes); ++panel) {
        T* out = packed + panel * K * kLanes;
        const T* in = w + panel * kLanes * n_step;
        const int64_t count = std::min<int64_t>(kLanes, N - panel * kLanes);
        for (int64_t k = 0; k < K; ++k)
            for (int64_t l = 0; l < kLanes; ++l)
                out[k * kLanes + l] = l < count ? in[l * n_step + k * k_step] : T(0);
    }
    return {};
}

template <class T>
Status matmul_forward(T* y, const T* x, const T* packed, int64_t M, int64_t N, int64_t K,
                      Stream s) {
    if (M < 0 || N < 1 || K < 1)
        return {Code::bad_argument, "matmul_forward needs M >= 0 and N, K >= 1"};
    const Forward f{y, x, packed, M, N, K};
    // Blocks of rows are the items of work; where they are few (decoding), blocks of columns too.
    const int threads = threads_for(M * N * K, s);
    const int64_t row_blocks = ceil_div(M, kBlockRows);
    const int64_t columns = row_blocks >= 8 * threads ? N : kWidePanels * kLanes;
    const int64_t column_blocks = ceil_div(N, columns);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t item = 0; item < row_blocks * column_blocks; ++item) {
        const int64_t m = item / column_blocks * kBlockRows, n = item % column_blocks * columns;
        forward_block(f, m, std::min(kBlockRows, M - m), n, std::min(N, n + columns));
    }
    return {};
}

template <class T, class A>
Status matmul_dw_accum(A* dw, const T* dy, const T* x, int64_t M, int64_t N, int64_t K, Stream s) {
    if (M < 0 || N < 1 || K < 1)
        return {Code::bad_argument, "matmul_dw_accum needs M >= 0 and N, K >= 1"};
    // A strip of dw's rows by a block of its columns is an item of work. A thread takes consecutive
    // ones, strips first, so that it seldom has to copy another block of x.
    const int64_t strips = ceil_div(N, kDwRows), items = strips * ceil_div(K, kDwColumns);
    const int threads = int(std::min<int64_t>(items, threads_for(M * N * K, s)));
#pragma omp parallel num_threads(threads)
    {
        alignas(64) float x_chunk[kDwChunk * kDwColumns];
        alignas(64) float dy_chunk[kDwChunk * kDwRows + kLanes];  // the last store runs over
        const int64_t team = omp_get_num_threads(), thread = omp_get_thread_num();
        const int64_t begin = items * thread / team, end = items * (thread + 1) / team;
        for (int64_t m = 0; m < M; m += kDwChunk) {
            const int64_t rows = std::min(kDwChunk, M - m);
            for (int64_t item = begin; item < end; ++item) {
                const int64_t n = item % strips * kDwRows, k = item / strips * kDwColumns;
                const int64_t columns = std::min(kDwColumns, K - k);
                if (item == begin || n == 0)
                    for (int64_t r = 0; r < rows; ++r)
                        for (int64_t c = 0; c < columns; c += kLanes)
                            store(x_chunk + c * kDwChunk + r * kLanes,
                                  load_first(x + (m + r) * K + k + c, columns - c));
                // Whole vectors, of which the next row overwrites what is beyond kDwRows.
                for (int64_t r = 0; r < rows; ++r)
                    store(dy_chunk + r * kDwRows, load_first(dy + (m + r) * N + n, N - n));
                A* out = dw + n * K + k;
                int64_t c = 0;
                for (; c + (kTilePanels - 1) * kLanes < columns; c += kTilePanels * kLanes)
                    dw_tile<kTilePanels>(out + c, dy_chunk, x_chunk + c * kDwChunk, rows, N - n,
                                         columns - c, K);
                for (; c < columns; c += kLanes)
                    dw_tile<1>(out + c, dy_chunk, x_chunk + c * kDwChunk, rows, N - n, columns - c,
                               K);
            }
        }
    }
    return {};
}

template int64_t matmul_packed_size<float>(int64_t, int64_t);
template Status matmul_pack<float>(float*, const float*, int64_t, int64_t, bool, Stream);
template Status matmul_forward<float>(float*, const float*, const float*, int64_t, int64_t, int64_t,
                                      Stream);
template Status matmul_dw_accum<float, float>(float*, const float*, const float*, int64_t, int64_t,
                                              int64_t, Stream);

}  // namespace fbt::kernels::cpu
