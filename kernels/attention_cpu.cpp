// Attention in tiles of 64 rows by one split of keys, on vectors of 16 floats. A "row" here is one
// query head of one position: row i of a span and key head g is position first + i / (H/G), head
// g*(H/G) + i % (H/G), so the heads that share keys share a tile. Tiles are copied, as floats.
//
// Scores lie [key][row], a panel of 16 rows in one vector: what softmax does to a row it does in
// the row's lane. Nothing depends on how rows fall into tiles: every dot product is one chain over
// c, every sum over keys or rows one chain in ascending order that holds exactly those that see
// each other.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "kernels/attention.h"
#include "kernels/cpu_tile.h"

namespace fbt::kernels::cpu {
namespace {

constexpr int kRows = 64;  // rows of a tile
constexpr int kStep = 8;   // rows or keys that are handled at once
// Rows and panels of 16 columns whose sums are in registers at once.
#if defined(__AVX512F__)
constexpr int kTileRows = kStep, kTilePanels = 2;
#else
constexpr int kTileRows = kStep / 2, kTilePanels = 1;
#endif
constexpr int kMaxStride = kMaxHeadDim + kLanes;

constexpr int round_up(int a, int b) { return int(ceil_div(a, b)) * b; }

// Between rows of a copied tile: an odd number of cache lines, so that rows spread over all sets.
constexpr int tile_stride(int C) { return int(ceil_div(C, kLanes) | 1) * kLanes; }

// The tile's rows that see a key, or its keys that a row sees: those from begin to end - 1.
struct Ranges {
    int begin[kRows], end[kRows];  // both ascend
};

// out[s,r] = sum_c keys[s,c] * query[c,r]  for the keys [begin, end), rounded to kStep, and P
// panels of rows, query[panel][c][16].
template <int P>
void product(float* out, const float* keys, int64_t stride, const float* query, int begin, int end,
             int C) {
    for (int s = begin / kStep * kStep; s < end; s += kTileRows) {
        Vec sum[kTileRows][P];
        for (int r = 0; r < kTileRows; ++r)
            for (int p = 0; p < P; ++p) sum[r][p] = splat(0.f);
        multiply(sum, keys + s * stride, stride, 1, query, kLanes, C * kLanes, C);
        for (int r = 0; r < kTileRows; ++r)
            for (int p = 0; p < P; ++p) store(out + (s + r) * kRows + p * kLanes, sum[r][p]);
    }
}

// out[x,c] += sum_y w[x,y] * b[y,c]  over y in [begin[x], end[x]), for R rows and P panels of
// columns, the last one cut at `columns`; w[x,y] lies at w[x*kRow + y*kColumn].
template <int64_t kRow, int64_t kColumn, int R, int P>
void weighted_tile(float* out, int64_t out_stride, int columns, const float* w, const float* b,
                   int64_t stride, const int* begin, const int* end) {
    // In the middle all rows take part. Elsewhere a y outside of a row's range takes no part in its
    // sum, not even as 0 * b.
    const int first = begin[0], middle = begin[R - 1];
    const int middle_end = std::max(middle, end[0]), last = std::max(middle_end, end[R - 1]);
    Vec sum[R][P];
    for (int r = 0; r < R; ++r)
        for (int p = 0; p < P; ++p)
            sum[r][p] = load_first(out + r * out_stride + p * kLanes, columns - p * kLanes);
    const auto some = [&](int from, int to) {
        for (int y = from; y < to; ++y) {
            Vec v[P];
            for (int p = 0; p < P; ++p) v[p] = load(b + y * stride + p * kLanes);
            for (int r = 0; r < R; ++r) {
                if (y < begin[r] || y >= end[r]) continue;
                const Vec u = splat(w[r * kRow + y * kColumn]);
                for (int p = 0; p < P; ++p) sum[r][p] = fma(u, v[p], sum[r][p]);
            }
        }
    };
    some(first, middle);
    multiply(sum, w + middle * kColumn, kRow, kColumn, b + middle * stride, stride, kLanes,
             middle_end - middle);
    some(middle_end, last);
    for (int r = 0; r < R; ++r)
        for (int p = 0; p < P; ++p)
            store_first(out + r * out_stride + p * kLanes, sum[r][p], columns - p * kLanes);
}

// The same for n rows and all columns.
template <int64_t kRow, int64_t kColumn, int R = kTileRows>
void weighted_sum(float* out, int64_t out_stride, int n, int columns, const float* w,
                  const float* b, int64_t stride, const int* begin, const int* end) {
    int x = 0;
    for (; x + R <= n; x += R) {
        int c = 0;
        for (; c + (kTilePanels - 1) * kLanes < columns; c += kTilePanels * kLanes)
            weighted_tile<kRow, kColumn, R, kTilePanels>(out + x * out_stride + c, out_stride,
                                                         columns - c, w + x * kRow, b + c, stride,
                                                         begin + x, end + x);
        if (c < columns)
            weighted_tile<kRow, kColumn, R, 1>(out + x * out_stride + c, out_stride, columns - c,
                                               w + x * kRow, b + c, stride, begin + x, end + x);
    }
    if constexpr (R > 1)
        if (x < n)
            weighted_sum<kRow, kColumn, R / 2>(out + x * out_stride, out_stride, n - x, columns,
                                               w + x * kRow, b, stride, begin + x, end + x);
}

// Copies a row of C elements, zeros up to the next vector.
template <class T>
void copy_row(float* to, const T* from, int C) {
    for (int c = 0; c < C; c += kLanes) store(to + c, load_first(from + c, C - c));
}

// Zeros behind `count` rows, up to a multiple of kStep.
void pad_rows(float* tile, int64_t stride, int count) {
    std::fill(tile + count * stride, tile + round_up(count, kStep) * stride, 0.f);
}

// Copies `count` rows of a key store. Meanwhile it fetches as many rows at `next`: key stores are
// larger than caches, and rows of one key head too far apart for the processor to foresee them.
template <class T>
void copy_keys(float* to, int64_t stride, const T* from, const T* next, int64_t from_stride,
               int count, int C) {
    for (int r = 0; r < count; ++r) {
        for (int c = 0; c < C; c += 64 / sizeof(T)) __builtin_prefetch(next + r * from_stride + c);
        copy_row(to + r * stride, from + r * from_stride, C);
    }
    pad_rows(to, stride, count);
}

typedef float Lanes __attribute__((vector_size(4 * kLanes)));

// Exchanges lanes l + W of a with lanes l of b, for the l without the bit W.
template <int W, int... l>
inline void exchange(Lanes& a, Lanes& b, std::integer_sequence<int, l...>) {
    const Lanes low = __builtin_shufflevector(a, b, (l & W ? kLanes + l - W : l)...);
    b = __builtin_shufflevector(a, b, (l & W ? kLanes + l : l + W)...);
    a = low;
}
template <int W>
inline void exchange_all(Lanes (&x)[kLanes]) {
    for (int i = 0; i < kLanes; ++i)
        if (!(i & W)) exchange<W>(x[i], x[i + W], std::make_integer_sequence<int, kLanes>());
}

// Rows of an array [N,H,C], and once more in panels of 16 with the columns apart.
struct Tile {
    alignas(64) float row[kRows * kMaxStride];
    alignas(64) float panel[kRows * kMaxHeadDim];  // [r/16][c][r%16]

    void transpose(int64_t stride, int count, int C) {
        for (int p = 0; p < ceil_div(count, kLanes); ++p)
            for (int c0 = 0; c0 < C; c0 += kLanes) {
                Lanes x[kLanes];
                for (int r = 0; r < kLanes; ++r)
                    std::memcpy(&x[r], row + (p * kLanes + r) * stride + c0, sizeof(Lanes));
                exchange_all<8>(x), exchange_all<4>(x), exchange_all<2>(x), exchange_all<1>(x);
                for (int c = c0; c < std::min(C, c0 + kLanes); ++c)
                    std::memcpy(panel + (p * C + c) * kLanes, &x[c - c0], sizeof(Lanes));
            }
    }
};

// What the rows of one span and key head share.
struct Rows {
    const Span& span;
    const int64_t* blocks;
    int H, G, C, g, window;

    int group() const { return H / G; }
    int count() const { return span.count * group(); }
    int end() const { return span.first + span.count; }  // of the positions
    int position(int i) const { return span.first + i / group(); }
    // Element of row i in an array [N,H].
    int64_t head(int i) const { return (span.row + i / group()) * H + g * group() + i % group(); }
    // Offset of position s in a key store [rows,G,C].
    int64_t key(int s) const {
        return ((blocks[span.block + s / kKeyBlock] + s % kKeyBlock) * G + g) * C;
    }
    int64_t key_stride() const { return int64_t(G) * C; }

    // Fills a tile with rows [i, i+n) of an array [N,H,C], zeros behind them.
    template <class T>
    void gather(Tile& to, int64_t stride, const T* from, int i, int n) const {
        for (int r = 0; r < n; ++r) copy_row(to.row + r * stride, from + head(i + r) * C, C);
        std::fill(to.row + n * stride, to.row + kRows * stride, 0.f);
        to.transpose(stride, n, C);
    }
    // The keys [base, base+count) that the tile's rows [i, i+n) see, counted from base. Rows of
    // padding copy the last row's.
    void keys_of_rows(Ranges& keys, int i, int n, int base, int count) const {
        for (int r = 0; r < round_up(n, kLanes); ++r) {
            const int t = position(i + std::min(r, n - 1));
            keys.begin[r] = std::clamp(first_visible(t, window) - base, 0, count);
            keys.end[r] = std::clamp(t + 1 - base, 0, count);
        }
    }
    // The other way: which of the rows see each key, counted from i.
    void rows_of_keys(Ranges& rows, int i, int n, int base, int count) const {
        const auto clamped = [&](int64_t t) {  // the tile's first row at position t or later
            return int(std::clamp<int64_t>((t - span.first) * group() - i, 0, n));
        };
        for (int s = 0; s < count; ++s) {
            rows.begin[s] = clamped(base + s);
            rows.end[s] = window > 0 ? clamped(int64_t(base) + s + window) : n;
        }
    }
};

// f(panels, r0, begin, end) for the tile's rows from r0 on, `panels` panels at a time (a constant),
// and the keys that any of them sees.
template <class F>
void for_panels(const Ranges& keys, int n, F f) {
    const int panels = ceil_div(n, kLanes);
    int p = 0;
    const auto next = [&](auto width) {
        const int r0 = p * kLanes;
        const int begin = keys.begin[r0], end = keys.end[r0 + width * kLanes - 1];
        if (begin < end) f(width, r0, begin, end);
        p += width;
    };
    while (p + kTilePanels <= panels) next(std::integral_constant<int, kTilePanels>());
    while (p < panels) next(std::integral_constant<int, 1>());
}

// One tile of the forward, rows [i0, i0+n).
template <class T>
void forward_tile(T* o, float* lse, const T* q, const T* k, const T* v, const Rows& rows, int i0,
                  int n, float scale) {
    const int C = rows.C, stride = tile_stride(C), columns = round_up(C, kLanes);
    alignas(64) float keys[kKeyBlock * kMaxStride], values[kKeyBlock * kMaxStride];
    Tile query;
    alignas(64) float p[kKeyBlock * kRows];  // scores, then exp(score - m_j): [key][row]
    alignas(64) float sum[kRows * kMaxStride], sum_j[kStep * kMaxStride];  // o, o_j
    alignas(64) float m[kRows], l[kRows], old_factor[kRows], new_factor[kRows];
    Ranges seen;

    rows.gather(query, stride, q, i0, n);
    std::fill(m, m + kRows, -INFINITY);
    std::fill(l, l + kRows, 0.f);
    std::fill_n(sum, n * stride, 0.f);

    const int lo = first_visible(rows.position(i0), rows.window);
    const int hi = rows.position(i0 + n - 1) + 1;
    for (int j = lo / kKeyBlock; j * kKeyBlock < hi; ++j) {
        const int base = std::max(lo, j * kKeyBlock);
        const int count = std::min(hi, (j + 1) * kKeyBlock) - base;
        const int64_t at = rows.key(base), next = base + count < hi ? rows.key(base + count) : at;
        copy_keys(keys, stride, k + at, k + next, rows.key_stride(), count, C);
        copy_keys(values, stride, v + at, v + next, rows.key_stride(), count, C);
        rows.keys_of_rows(seen, i0, n, base, count);
        for_panels(seen, n, [&](auto panels, int r0, int begin, int end) {
            product<panels>(p + r0, keys, stride, query.panel + r0 * C, begin, end, C);
        });
        for (int r0 = 0; r0 < n; r0 += kLanes) {
            const int *begin = seen.begin + r0, *end = seen.end + r0;
            float m_j[kLanes], l_j[kLanes] = {};
            std::fill(m_j, m_j + kLanes, -INFINITY);
            for (int s = begin[0]; s < end[kLanes - 1]; ++s) {
                float* score = p + s * kRows + r0;
#pragma omp simd
                for (int r = 0; r < kLanes; ++r) {
                    const bool visible = begin[r] <= s && s < end[r];
                    score[r] = visible ? scale * score[r] : -INFINITY;
                    m_j[r] = score[r] > m_j[r] ? score[r] : m_j[r];
                }
            }
            for (int s = begin[0]; s < end[kLanes - 1]; ++s) {
                float* score = p + s * kRows + r0;
#pragma omp simd
                for (int r = 0; r < kLanes; ++r) {
                    score[r] = exp(score[r] - m_j[r]);
                    l_j[r] += score[r];  // + 0, exactly, for a key that is not visible
                }
            }
#pragma omp simd
            for (int r = 0; r < kLanes; ++r) {
                const float m_new = m_j[r] > m[r0 + r] ? m_j[r] : m[r0 + r];
                const bool visible = begin[r] < end[r];
                old_factor[r0 + r] = visible ? exp(m[r0 + r] - m_new) : 1.f;
                new_factor[r0 + r] = exp(m_j[r] - m_new);
                l[r0 + r] = visible ? l[r0 + r] * old_factor[r0 + r] + l_j[r] * new_factor[r0 + r]
                                    : l[r0 + r];
                m[r0 + r] = visible ? m_new : m[r0 + r];
            }
        }
        for (int r0 = 0; r0 < n; r0 += kStep) {
            const int count_here = std::min(kStep, n - r0);
            std::fill_n(sum_j, count_here * stride, 0.f);
            weighted_sum<1, kRows>(sum_j, stride, count_here, columns, p + r0, values, stride,
                                   seen.begin + r0, seen.end + r0);
            for (int r = 0; r < count_here; ++r) {
                if (seen.begin[r0 + r] >= seen.end[r0 + r]) continue;
                const float a = old_factor[r0 + r], b = new_factor[r0 + r];
                float* to = sum + (r0 + r) * stride;
                const float* from = sum_j + r * stride;
#pragma omp simd
                for (int c = 0; c < C; ++c) to[c] = std::fma(to[c], a, from[c] * b);
            }
        }
    }
    for (int r = 0; r < n; ++r) {
        T* out = o + rows.head(i0 + r) * C;
#pragma omp simd
        for (int c = 0; c < C; ++c) out[c] = T(sum[r * stride + c] / l[r]);
        if (lse) lse[rows.head(i0 + r)] = m[r] + std::log(l[r]);
    }
}

// The backward's arguments; dq or dk and dv are null where they are not asked for.
template <class T>
struct Backward {
    T* dq;
    float *dk, *dv, *delta;
    const T *dout, *q, *k, *v, *o;
    const float* lse;
    float scale;
};

// Rows [i0, i0+n) against the keys of the splits [split, split_end): dq of the rows, and what they
// add to dv and, but for the factor `scale`, to dk.
template <class T>
void backward_tile(const Backward<T>& a, const Rows& rows, int i0, int n, int split,
                   int split_end) {
    const int C = rows.C, stride = tile_stride(C), columns = round_up(C, kLanes);
    alignas(64) float keys[kKeyBlock * kMaxStride], values[kKeyBlock * kMaxStride];
    Tile query, grad;                                                      // rows of q, dout
    alignas(64) float p[kKeyBlock * kRows], ds[kKeyBlock * kRows];         // [key][row]
    alignas(64) float sum[kRows * kMaxStride], sum_j[kStep * kMaxStride];  // dq, a split's part
    alignas(64) float lse[kRows] = {}, delta[kRows] = {};
    Ranges seen, seeing;

    rows.gather(query, stride, a.q, i0, n);
    rows.gather(grad, stride, a.dout, i0, n);
    for (int r = 0; r < n; ++r) {
        const int64_t head = rows.head(i0 + r);
        if (a.dq)
            a.delta[head] = row_dot(
                C, [&](int64_t c) { return grad.row[r * stride + c]; },
                [&](int64_t c) { return float(a.o[head * C + c]); });
        lse[r] = a.lse[head];
        delta[r] = a.delta[head];
    }
    std::fill_n(sum, n * stride, 0.f);

    const int lo = std::max(split * kKeyBlock, first_visible(rows.position(i0), rows.window));
    const int hi = std::min<int64_t>(int64_t(split_end) * kKeyBlock, rows.position(i0 + n - 1) + 1);
    for (int j = lo / kKeyBlock; j * kKeyBlock < hi; ++j) {
        const int base = std::max(lo, j * kKeyBlock);
        const int count = std::min(hi, (j + 1) * kKeyBlock) - base;
        const int64_t at = rows.key(base), next = base + count < hi ? rows.key(base + count) : at;
        copy_keys(keys, stride, a.k + at, a.k + next, rows.key_stride(), count, C);
        copy_keys(values, stride, a.v + at, a.v + next, rows.key_stride(), count, C);
        rows.keys_of_rows(seen, i0, n, base, count);
        rows.rows_of_keys(seeing, i0, n, base, count);
        for_panels(seen, n, [&](auto panels, int r0, int begin, int end) {
            product<panels>(p + r0, keys, stride, query.panel + r0 * C, begin, end, C);
            product<panels>(ds + r0, values, stride, grad.panel + r0 * C, begin, end, C);
            for (int s = begin; s < end; ++s) {
                float *p_s = p + s * kRows, *ds_s = ds + s * kRows;
#pragma omp simd
                for (int r = r0; r < r0 + panels * kLanes; ++r) {
                    p_s[r] = exp(a.scale * p_s[r] - lse[r]);
                    ds_s[r] = p_s[r] * (ds_s[r] - delta[r]);
                }
            }
        });
        // dq += ds k, over the split's keys in order
        for (int r0 = 0; a.dq && r0 < n; r0 += kStep) {
            const int count_here = std::min(kStep, n - r0);
            std::fill_n(sum_j, count_here * stride, 0.f);
            weighted_sum<1, kRows>(sum_j, stride, count_here, columns, ds + r0, keys, stride,
                                   seen.begin + r0, seen.end + r0);
            for (int r = 0; r < count_here; ++r) {
                float* to = sum + (r0 + r) * stride;
                const float* from = sum_j + r * stride;
#pragma omp simd
                for (int c = 0; c < C; ++c) to[c] = std::fma(a.scale, from[c], to[c]);
            }
        }
        // dv += p^T dout and dk += ds^T q, over the tile's rows in order
        if (a.dk) {
            weighted_sum<kRows, 1>(a.dv + at, rows.key_stride(), count, C, p, grad.row, stride,
                                   seeing.begin, seeing.end);
            weighted_sum<kRows, 1>(a.dk + at, rows.key_stride(), count, C, ds, query.row, stride,
                                   seeing.begin, seeing.end);
        }
    }
    for (int r = 0; a.dq && r < n; ++r) {
        T* out = a.dq + rows.head(i0 + r) * C;
#pragma omp simd
        for (int c = 0; c < C; ++c) out[c] = T(sum[r * stride + c]);
    }
}

// dk and dv of the splits [split, split_end), which are one thread's, tile by tile of the rows that
// see them; dq of these rows too where it is asked for.
template <class T>
void backward_keys(const Backward<T>& a, const Rows& rows, int split, int split_end) {
    const int base = split * kKeyBlock;
    const int hi = std::min<int64_t>(int64_t(split_end) * kKeyBlock, rows.end());
    for (int s = base; s < hi; ++s) {
        std::fill_n(a.dk + rows.key(s), rows.C, 0.f);
        std::fill_n(a.dv + rows.key(s), rows.C, 0.f);
    }
    const int first_t = std::max(0, base - rows.span.first);
    const int64_t last_t = rows.window > 0 ? int64_t(hi) + rows.window - 1 : rows.end();
    const int end_row =
        std::max<int64_t>(0, std::min<int64_t>(last_t, rows.end()) - rows.span.first) *
        rows.group();
    for (int i0 = first_t * rows.group(); i0 < end_row; i0 += kRows)
        backward_tile(a, rows, i0, std::min(kRows, end_row - i0), split, split_end);
    for (int s = base; s < hi; ++s) {
        float* out = a.dk + rows.key(s);
#pragma omp simd
        for (int c = 0; c < rows.C; ++c) out[c] *= a.scale;
    }
}

}  // namespace

template <class T, class A>
Status attention_forward(T* o, A* lse, const T* q, const T* k, const T* v, const SpanTable& table,
                         int H, int G, int C, int window, A scale, std::type_identity_t<A>*,
                         Stream s) {
    if (Status status = attention_arguments(H, G, C, window); !status.ok()) return status;
    const int64_t tiles = (int64_t(table.max_count) * (H / G) + kRows - 1) / kRows;
    // Items of work: tile by span by key head, shorter spans' missing tiles skipped.
    const int64_t spans = table.count;
    // Waking a second thread for a short sequence's next position costs more than it saves.
    const int threads = table.rows * H * C * table.max_end < (1 << 16) ? 1 : s.threads;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t item = 0; item < tiles * spans * G; ++item) {
        const Rows rows{
            table.spans[item / G % spans], table.blocks, H, G, C, int(item % G), window};
        const int64_t i0 = item / G / spans * kRows;
        if (i0 < rows.count())
            forward_tile(o, lse, q, k, v, rows, int(i0),
                         int(std::min<int64_t>(kRows, rows.count() - i0)), scale);
    }
    return {};
}

// Where there is a span and key head for every thread, one thread does all of theirs, and scores
// are computed once. Otherwise they are computed twice, for dq of each tile of rows and for dk and
// dv of each split of keys. Every sum has the same order in both.
template <class T, class A>
Status attention_backward(T* dq, A* dk, A* dv, A* delta, const T* dout, const T* q, const T* k,
                          const T* v, const T* o, const A* lse, const SpanTable& table, int H,
                          int G, int C, int window, A scale, Stream s) {
    if (Status status = attention_arguments(H, G, C, window); !status.ok()) return status;
    const int64_t heads = int64_t(table.count) * G;
    const auto rows = [&](int64_t i) {
        return Rows{table.spans[i / G], table.blocks, H, G, C, int(i % G), window};
    };
    const int64_t splits = ceil_div(table.max_end, kKeyBlock);
    const Backward<T> all{dq, dk, dv, delta, dout, q, k, v, o, lse, scale};
    // 7 products instead of 5 pay where threads would idle for more than 2/7 of the time.
    if (ceil_div(heads, s.threads) * s.threads * 5 <= heads * 7) {
#pragma omp parallel for num_threads(s.threads) schedule(dynamic)
        for (int64_t i = 0; i < heads; ++i) backward_keys(all, rows(i), 0, int(splits));
        return {};
    }
    Backward<T> queries = all, keys = all;
    queries.dk = queries.dv = nullptr;
    keys.dq = nullptr;
    const int64_t tiles = ceil_div(int64_t(table.max_count) * (H / G), kRows);
#pragma omp parallel num_threads(s.threads)
    {
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < tiles * heads; ++item) {
            const Rows r = rows(item % heads);
            const int64_t i0 = item / heads * kRows;
            if (i0 < r.count())
                backward_tile(queries, r, int(i0), int(std::min<int64_t>(kRows, r.count() - i0)), 0,
                              int(splits));
        }
#pragma omp for schedule(dynamic)
        for (int64_t item = 0; item < splits * heads; ++item)
            backward_keys(keys, rows(item % heads), int(item / heads), int(item / heads + 1));
    }
    return {};
}

template <class T>
int64_t attention_scratch_size(const SpanTable&, int, int, int, int) {
    return 0;
}

#define INSTANTIATE(T)                                                                       \
    template Status attention_forward<T, float>(T*, float*, const T*, const T*, const T*,    \
                                                const SpanTable&, int, int, int, int, float, \
                                                float*, Stream);                             \
    template int64_t attention_scratch_size<T>(const SpanTable&, int, int, int, int);        \
    template Status attention_backward<T, float>(                                            \
        T*, float*, float*, float*, const T*, const T*, const T*, const T*, const T*,        \
        const float*, const SpanTable&, int, int, int, int, float, Stream);
INSTANTIATE(float)
INSTANTIATE(bf16)
#undef INSTANTIATE

}  // namespace fbt::kernels::cpu
