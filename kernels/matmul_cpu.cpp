// matmul on the CPU: oneDNN where it keeps the row rule, our own chain elsewhere. Which one is a
// function of the shape [N,K] alone, never of M or of the thread count. Gradients of weights are
// our own for every shape: their sums over rows are cut into fixed chunks, which oneDNN has no
// primitive for.
#include <omp.h>

#include <algorithm>
#include <vector>

#include "kernels/cpu_tile.h"
#include "kernels/matmul.h"
#include "kernels/matmul_chain.h"
#include "kernels/matmul_onednn.h"

namespace fbt::kernels::cpu {
namespace {

// Sums over rows for dw: rows in one chunk, columns of x copied at once (256 KB of stack, which
// stay in the L2 cache), rows of dw in one strip and panels of its columns in one tile.
constexpr int64_t kDwChunk = 256, kDwColumns = 256;
#if defined(__AVX512VL__)
constexpr int kDwRows = 12, kDwPanels = 2;
#else
constexpr int kDwRows = 6, kDwPanels = 1;
#endif

// Below this many multiply-adds, waking a second thread costs more than it saves.
constexpr int64_t kSerialWork = 1 << 18;
int threads_for(int64_t work, Stream s) { return work < kSerialWork ? 1 : s.threads; }

// dw[r, p*16 + lane] += sum_m dy[m,r] * x[m, p*16 + lane] over a chunk of rows: dy copied as
// [rows][kDwRows], x as panels [rows][16] kDwChunk rows apart. Of the tile, row_count rows and
// `columns` columns exist.
template <int P>
void dw_tile(float* dw, const float* dy, const float* x, int64_t rows, int64_t row_count,
             int64_t columns, int64_t K) {
    Vec sum[kDwRows][P];
    for (auto& row : sum)
        for (Vec& v : row) v = splat(0.f);
    multiply(sum, dy, 1, kDwRows, x, kLanes, kDwChunk * kLanes, rows);
    for (int r = 0; r < kDwRows; ++r) {  // a constant bound, so that sums stay in registers
        if (r == row_count) break;
        for (int p = 0; p < P; ++p) {
            float* out = dw + r * K + p * kLanes;
            const int64_t count = columns - p * kLanes;
            store_first(out, load_first(out, count) + sum[r][p], count);
        }
    }
}

}  // namespace

template <class T>
int64_t matmul_packed_size(int64_t N, int64_t K) {
    if (const OneDnnMatmul* plan = OneDnnMatmul::find(N, K)) return plan->packed_size();
    return chain_packed_size(N, K);
}

template <class T>
Status matmul_pack(T* packed, const accumulate_t<T>* w, int64_t N, int64_t K, bool transposed,
                   Stream s) {
    if (N < 1 || K < 1) return {Code::bad_argument, "matmul_pack needs N, K >= 1"};
    if (const OneDnnMatmul* plan = OneDnnMatmul::find(N, K))
        return plan->pack(packed, w, transposed, s);
    return chain_pack(packed, w, N, K, transposed, s);
}

template <class T>
Status matmul_forward_each(std::span<const MatmulOutput<T>> outputs, const T* x, int64_t M,
                           int64_t K, Stream s) {
    std::vector<OneDnnMatmul::Output> planned;
    for (const MatmulOutput<T>& o : outputs) {
        if (M < 0 || o.N < 1 || K < 1)
            return {Code::bad_argument, "matmul_forward needs M >= 0 and N, K >= 1"};
        if (const OneDnnMatmul* plan = OneDnnMatmul::find(o.N, K))
            planned.push_back({plan, o.y, o.packed});
        else if (Status status = chain_forward(o.y, x, o.packed, M, o.N, K, s); !status.ok())
            return status;
    }
    return OneDnnMatmul::forward(planned, x, M, s);
}

template <class T>
Status matmul_forward(T* y, const T* x, const T* packed, int64_t M, int64_t N, int64_t K,
                      Stream s) {
    const MatmulOutput<T> output{y, packed, N};
    return matmul_forward_each<T>({&output, 1}, x, M, K, s);
}

template <class T, class A>
Status matmul_dw_accum(A* dw, const T* dy, const T* x, int64_t M, int64_t N, int64_t K, Stream s) {
    if (M < 0 || N < 1 || K < 1)
        return {Code::bad_argument, "matmul_dw_accum needs M >= 0 and N, K >= 1"};
    // A strip of dw's rows by a block of its columns (all about as wide) is an item of work. A
    // thread takes consecutive ones, strips first, so that it seldom copies another block of x.
    const int64_t strips = ceil_div(N, kDwRows), blocks = ceil_div(K, kDwColumns);
    const int64_t width = ceil_div(ceil_div(K, blocks), kLanes) * kLanes, items = strips * blocks;
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
                const int64_t n = item % strips * kDwRows, k = item / strips * width;
                const int64_t columns = std::min(width, K - k);
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
                for (; c + (kDwPanels - 1) * kLanes < columns; c += kDwPanels * kLanes)
                    dw_tile<kDwPanels>(out + c, dy_chunk, x_chunk + c * kDwChunk, rows, N - n,
                                       columns - c, K);
                if (c < columns)
                    dw_tile<1>(out + c, dy_chunk, x_chunk + c * kDwChunk, rows, N - n, columns - c,
                               K);
            }
        }
    }
    return {};
}

template int64_t matmul_packed_size<float>(int64_t, int64_t);
template Status matmul_pack<float>(float*, const float*, int64_t, int64_t, bool, Stream);
template Status matmul_forward_each<float>(std::span<const MatmulOutput<float>>, const float*,
                                           int64_t, int64_t, Stream);
template Status matmul_forward<float>(float*, const float*, const float*, int64_t, int64_t, int64_t,
                                      Stream);
template Status matmul_dw_accum<float, float>(float*, const float*, const float*, int64_t, int64_t,
                                              int64_t, Stream);

}  // namespace fbt::kernels::cpu
