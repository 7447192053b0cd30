// Matrix products on vectors of 16 floats.
#include "kernels/matmul_chain.h"

#include <algorithm>

#include "kernels/cpu_tile.h"

namespace fbt::kernels::cpu {
namespace {

// A tile of sums, kTileRows rows by kTilePanels panels of 16 columns, must leave registers for the
// operands: AVX-512 has 32 registers of one Vec each, AVX2 has 16 of half a Vec each. Six rows of x
// are as many as the compiler can point to without spilling pointers.
#if defined(__AVX512VL__)
constexpr int kTileRows = 6, kTilePanels = 4, kWidePanels = 8;
#else
constexpr int kTileRows = 6, kTilePanels = 1, kWidePanels = 2;
#endif
// Up to this many rows (decoding) tiles are kWidePanels wide instead, to keep as many sums going.
constexpr int kFewRows = 3;
// Rows that share the weights which a tile has brought into a cache.
constexpr int64_t kBlockRows = 16 * kTileRows;

// Below this many multiply-adds, waking a second thread costs more than it saves.
constexpr int64_t kSerialWork = 1 << 18;
int threads_for(int64_t work, Stream s) { return work < kSerialWork ? 1 : s.threads; }

// One call of forward: what its blocks share.
struct Forward {
    float* y;
    const float* x;
    const float* packed;
    int64_t M, N, K;
};

// R rows by P panels of y, from row m and column n on. Columns beyond N are computed (their weights
// are 0) and not stored.
template <int R, int P>
void forward_tile(const Forward& f, int64_t m, int64_t n) {
    Vec sum[R][P];
    for (auto& row : sum)
        for (Vec& v : row) v = splat(0.f);
    multiply(sum, f.x + m * f.K, f.K, 1, f.packed + n * f.K, kLanes, f.K * kLanes, f.K);
    float* y = f.y + m * f.N + n;
    for (int r = 0; r < R; ++r)
        for (int p = 0; p < P; ++p)
            store_first(y + r * f.N + p * kLanes, sum[r][p], f.N - n - p * kLanes);
}

// The same for `rows` rows, in tiles of R rows and a smaller one.
template <int R, int P>
void forward_rows(const Forward& f, int64_t m, int64_t rows, int64_t n) {
    for (; rows >= R; rows -= R, m += R) forward_tile<R, P>(f, m, n);
    if constexpr (R > 1)
        if (rows > 0) forward_rows<R - 1, P>(f, m, rows, n);
}

// The same for the columns [n, end), P panels at a time, then half as many.
template <int R, int P>
void forward_columns(const Forward& f, int64_t m, int64_t rows, int64_t n, int64_t end) {
    for (; n + (P - 1) * kLanes < end; n += P * kLanes) forward_rows<R, P>(f, m, rows, n);
    if constexpr (P > 1)
        if (n < end) forward_columns<R, P / 2>(f, m, rows, n, end);
}

void forward_block(const Forward& f, int64_t m, int64_t rows, int64_t n, int64_t end) {
    if (rows <= kFewRows)
        forward_columns<kFewRows, kWidePanels>(f, m, rows, n, end);
    else
        forward_columns<kTileRows, kTilePanels>(f, m, rows, n, end);
}

}  // namespace

// Weights are packed as panels [N/16][K][16], zeros where n >= N: one Vec holds the weights of one
// k and 16 outputs.
int64_t chain_packed_size(int64_t N, int64_t K) { return ceil_div(N, kLanes) * kLanes * K; }

Status chain_pack(float* packed, const float* w, int64_t N, int64_t K, bool transposed, Stream s) {
    const int64_t n_step = transposed ? 1 : K, k_step = transposed ? N : 1;
    const int threads = threads_for(N * K, s);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t panel = 0; panel < ceil_div(N, kLanes); ++panel) {
        float* out = packed + panel * K * kLanes;
        const float* in = w + panel * kLanes * n_step;
        const int64_t count = std::min<int64_t>(kLanes, N - panel * kLanes);
        for (int64_t k = 0; k < K; ++k)
            for (int64_t l = 0; l < kLanes; ++l)
                out[k * kLanes + l] = l < count ? in[l * n_step + k * k_step] : 0.f;
    }
    return {};
}

Status chain_forward(float* y, const float* x, const float* packed, int64_t M, int64_t N, int64_t K,
                     Stream s) {
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

}  // namespace fbt::kernels::cpu
