// Attention in tiles of 128 rows by one split of keys, on vectors of 16 floats. A "row" here is one
// query head of one position: row i of a span and key head g is position first + i / (H/G), head
// g*(H/G) + i % (H/G), so the heads that share keys share a tile. Tiles are copied, as floats.
//
// Scores lie [key][row], a panel of 16 rows in one vector: what softmax does to a row it does in
// the row's lane. Few rows, as in decoding, would leave lanes empty: theirs lie [row][key].
//
// Nothing depends on how rows fall into tiles: every dot product is one chain over c, every sum
// over keys or rows one chain in ascending order that holds exactly those that see each other.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "kernels/attention.h"
#include "kernels/cpu_tile.h"

namespace fbt::kernels::cpu {
namespace {

constexpr int kRows = 128;  // rows of a tile
constexpr int kStep = 8;    // rows or keys that are handled at once
// Rows and panels of 16 columns whose sums are in registers at once.
#if defined(__AVX512VL__)
constexpr int kTileRows = kStep, kTilePanels = 2;
#else
constexpr int kTileRows = kStep / 2, kTilePanels = 1;
#endif
constexpr int kChunk = 4;  // splits whose dk and dv are one item of work where heads are few
constexpr int kFew = 4;    // rows of a tile, up to which their scores lie in rows
constexpr int kMaxStride = kMaxHeadDim + kLanes;

template <int n>
constexpr std::integral_constant<int, n> constant;

constexpr int round_up(int a, int b) { return int(ceil_div(a, b)) * b; }

// Between rows of a copied tile: an odd number of cache lines, so that rows spread over all sets.
constexpr int tile_stride(int C) { return int(ceil_div(C, kLanes) | 1) * kLanes; }

// The tile's rows that see a key, or its keys that a row sees: those from begin to end - 1.
struct Ranges {
    static constexpr int kSize = std::max(kRows, kKeyBlock);
    int begin[kSize], end[kSize];  // neither ever falls
};

// out[x,y] = sum_c a[x,c] * b[y,c]  for x from `begin`, rounded down to kStep, to the step that
// holds end - 1, and P panels of y: b[panel][c][16].
template <int P, int R = kTileRows>
void product(float* out, int64_t out_stride, const float* a, int64_t stride, const float* b,
             int begin, int end, int C) {
    for (int x = begin / kStep * kStep; x < end; x += R) {
        Vec sum[R][P];
        for (int r = 0; r < R; ++r)
            for (int p = 0; p < P; ++p) sum[r][p] = splat(0.f);
        multiply(sum, a + x * stride, stride, 1, b, kLanes, C * kLanes, C);
        for (int r = 0; r < R; ++r)
            for (int p = 0; p < P; ++p) store(out + (x + r) * out_stride + p * kLanes, sum[r][p]);
    }
}

// out[x,c] = (add ? out[x,c] : 0) + sum_y w[x,y] * b[y,c]  over y in [begin[x], end[x]), for R rows
// and P panels of columns, the last one cut at `columns`; w[x,y] lies at w[x*kRow + y*kColumn].
template <int64_t kRow, int64_t kColumn, int R, int P>
void weighted_tile(float* out, int64_t out_stride, int columns, bool add, const float* w,
                   const float* b, int64_t stride, const int* begin, const int* end) {
    // In the middle all rows take part. Elsewhere a y outside of a row's range takes no part in its
    // sum, not even as 0 * b.
    const int first = begin[0], middle = begin[R - 1];
    const int middle_end = std::max(middle, end[0]), last = std::max(middle_end, end[R - 1]);
    Vec sum[R][P];
    for (int r = 0; r < R; ++r)
        for (int p = 0; p < P; ++p)
            sum[r][p] = add ? load_first(out + r * out_stride + p * kLanes, columns - p * kLanes)
                            : splat(0.f);
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
void weighted_sum(float* out, int64_t out_stride, int n, int columns, bool add, const float* w,
                  const float* b, int64_t stride, const int* begin, const int* end) {
    int x = 0;
    for (; x + R <= n; x += R) {
        const auto tile = [&](auto panels, int c) {
            weighted_tile<kRow, kColumn, R, panels>(out + x * out_stride + c, out_stride,
                                                    columns - c, add, w + x * kRow, b + c, stride,
                                                    begin + x, end + x);
        };
        int c = 0;
        for (; c + (kTilePanels - 1) * kLanes < columns; c += kTilePanels * kLanes)
            tile(constant<kTilePanels>, c);
        if (c < columns) tile(constant<1>, c);
    }
    if constexpr (R > 1)
        if (x < n)
            weighted_sum<kRow, kColumn, R / 2>(out + x * out_stride, out_stride, n - x, columns,
                                               add, w + x * kRow, b, stride, begin + x, end + x);
}

// Copies a row of C elements, zeros up to the next vector.
template <class T>
void copy_row(float* to, const T* from, int C) {
    for (int c = 0; c < C; c += kLanes) store(to + c, load_first(from + c, C - c));
}

// Copies `count` rows of a key store, zeros up to the next 16. Meanwhile it fetches as many rows at
// `next`: key stores are larger than caches, and rows of one key head too far apart for the
// processor to foresee them.
template <class T>
void copy_keys(float* to, int64_t stride, const T* from, const T* next, int64_t from_stride,
               int count, int C) {
    for (int r = 0; r < count; ++r) {
        for (int c = 0; c < C; c += 64 / sizeof(T)) __builtin_prefetch(next + r * from_stride + c);
        copy_row(to + r * stride, from + r * from_stride, C);
    }
    std::fill(to + count * stride, to + round_up(count, kLanes) * stride, 0.f);
}

typedef float Lanes __attribute__((vector_size(4 * kLanes)));

// Copied rows, and once more in panels of 16 with the columns apart.
struct Tile {
    alignas(64) float row[kRows * kMaxStride];
    alignas(64) float panel[kRows * kMaxHeadDim];  // [r/16][c][r%16]

    void transpose(int64_t stride, int count, int C) {
        for (int p = 0; p < ceil_div(count, kLanes); ++p)
            for (int c0 = 0; c0 < C; c0 += kLanes) {
                Lanes x[kLanes];
                for (int r = 0; r < kLanes; ++r)
                    std::memcpy(&x[r], row + (p * kLanes + r) * stride + c0, sizeof(Lanes));
                cpu::transpose(x);
                for (int c = c0; c < std::min(C, c0 + kLanes); ++c)
                    std::memcpy(panel + (p * C + c) * kLanes, &x[c - c0], sizeof(Lanes));
            }
    }
};

// p[row][key], the scores of n <= kFew rows, for all panels of keys at a time.
template <int R = kFew>
void few_scores(float* p, const float* query, int64_t stride, const float* keys, int n, int C) {
    constexpr int kPanels = R <= 2 ? 4 : kTilePanels;  // enough sums to hide an addition's latency
    if (n <= R / 2) {
        if constexpr (R > 1) few_scores<R / 2>(p, query, stride, keys, n, C);
        return;
    }
    for (int s = 0; s < kKeyBlock; s += kPanels * kLanes)
        product<kPanels, R>(p + s, kKeyBlock, query, stride, keys + s * C, 0, n, C);
}

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
    while (p + kTilePanels <= panels) next(constant<kTilePanels>);
    while (p < panels) next(constant<1>);
}

// The softmax of a tile's rows over the splits so far, and the factors that combine it with the
// next one's.
struct Softmax {
    alignas(64) float m[kRows], l[kRows], old_factor[kRows], new_factor[kRows];

    Softmax() {
        std::fill(m, m + kRows, -INFINITY);
        std::fill(l, l + kRows, 0.f);
    }

    // Of 16 rows from r0 on, in lanes: p[key][row], scores, become exp(score - m_j).
    void add_lanes(int r0, float* p, int64_t stride, const int* begin, const int* end,
                   float scale) {
        float m_j[kLanes], l_j[kLanes] = {};
        std::fill(m_j, m_j + kLanes, -INFINITY);
        for (int s = begin[0]; s < end[kLanes - 1]; ++s) {
            float* score = p + s * stride;
#pragma omp simd
            for (int r = 0; r < kLanes; ++r) {
                // Without && and stores on a condition this stays free of branches.
                const float x = scale * score[r];
                const float y = begin[r] <= s ? x : -INFINITY;
                const float z = s < end[r] ? y : -INFINITY;
                m_j[r] = z > m_j[r] ? z : m_j[r];
                score[r] = z;
            }
        }
        for (int s = begin[0]; s < end[kLanes - 1]; ++s) {
            float* score = p + s * stride;
#pragma omp simd
            for (int r = 0; r < kLanes; ++r) {
                score[r] = exp(score[r] - m_j[r]);
                l_j[r] += score[r];  // + 0, exactly, for a key that is not visible
            }
        }
        combine(r0, m_j, l_j, begin, end);
    }

    // Of the first n <= 16 rows, each with its keys in lanes: p[row][key].
    void add_few(int n, float* p, int64_t stride, const int* begin, const int* end, float scale) {
        float m_j[kLanes] = {}, l_j[kLanes] = {};
        for (int r = 0; r < n; ++r) {
            float* score = p + r * stride + begin[r];
            const int count = end[r] - begin[r];
            m_j[r] = row_max(count, [&](int64_t s) { return scale * score[s]; });
            const float most = m_j[r];
#pragma omp simd
            for (int s = 0; s < count; ++s) score[s] = exp(scale * score[s] - most);
            for (int s = 0; s < count; ++s) l_j[r] += score[s];
        }
        combine(0, m_j, l_j, begin, end);
    }

  private:
    void combine(int r0, const float* m_j, const float* l_j, const int* begin, const int* end) {
#pragma omp simd
        for (int r = 0; r < kLanes; ++r) {
            const float m_new = m_j[r] > m[r0 + r] ? m_j[r] : m[r0 + r];
            const bool visible = begin[r] < end[r];
            old_factor[r0 + r] = visible ? exp(m[r0 + r] - m_new) : 1.f;
            new_factor[r0 + r] = exp(m_j[r] - m_new);
            l[r0 + r] =
                visible ? l[r0 + r] * old_factor[r0 + r] + l_j[r] * new_factor[r0 + r] : l[r0 + r];
            m[r0 + r] = visible ? m_new : m[r0 + r];
        }
    }
};

// One tile of the forward, rows [i0, i0+n).
template <class T>
void forward_tile(T* o, float* lse, const T* q, const T* k, const T* v, const Rows& rows, int i0,
                  int n, float scale) {
    constexpr int kWidth = kTilePanels * kLanes;
    const int C = rows.C, stride = tile_stride(C), columns = round_up(C, kLanes);
    Tile query, keys;
    alignas(64) float values[kKeyBlock * kMaxStride];
    alignas(64) float p[kKeyBlock * kWidth];  // scores, then exp(score - m_j)
    alignas(64) float sum[kRows * kMaxStride], sum_j[kStep * kMaxStride];  // o, o_j
    Softmax softmax;
    Ranges seen;

    rows.gather(query, stride, q, i0, n);
    std::fill_n(sum, n * stride, 0.f);
    // o_j of the rows from r0 on, weights p, and its combination with o
    const auto combine = [&](auto row_step, auto key_step, int r0, const float* p) {
        const int count = std::min(kStep, n - r0);
        weighted_sum<row_step, key_step>(sum_j, stride, count, columns, false, p, values, stride,
                                         seen.begin + r0, seen.end + r0);
        for (int r = r0; r < r0 + count; ++r) {
            if (seen.begin[r] >= seen.end[r]) continue;
            const float a = softmax.old_factor[r], b = softmax.new_factor[r];
            float* to = sum + r * stride;
            const float* from = sum_j + (r - r0) * stride;
#pragma omp simd
            for (int c = 0; c < C; ++c) to[c] = std::fma(to[c], a, from[c] * b);
        }
    };

    const int lo = first_visible(rows.position(i0), rows.window);
    const int hi = rows.position(i0 + n - 1) + 1;
    for (int j = lo / kKeyBlock; j * kKeyBlock < hi; ++j) {
        const int base = std::max(lo, j * kKeyBlock);
        const int count = std::min(hi, (j + 1) * kKeyBlock) - base;
        const int64_t at = rows.key(base), next = base + count < hi ? rows.key(base + count) : at;
        copy_keys(keys.row, stride, k + at, k + next, rows.key_stride(), count, C);
        copy_keys(values, stride, v + at, v + next, rows.key_stride(), count, C);
        rows.keys_of_rows(seen, i0, n, base, count);
        if (n <= kFew) {
            keys.transpose(stride, count, C);
            few_scores(p, query.row, stride, keys.panel, n, C);
            softmax.add_few(n, p, kKeyBlock, seen.begin, seen.end, scale);
            combine(constant<kKeyBlock>, constant<1>, 0, p);
            continue;
        }
        for_panels(seen, n, [&](auto panels, int r0, int begin, int end) {
            product<panels>(p, kWidth, keys.row, stride, query.panel + r0 * C, begin, end, C);
            for (int r = r0; r < r0 + panels * kLanes; r += kLanes)
                softmax.add_lanes(r, p + r - r0, kWidth, seen.begin + r, seen.end + r, scale);
            for (int r = r0; r < std::min(n, r0 + panels * kLanes); r += kStep)
                combine(constant<1>, constant<kWidth>, r, p + r - r0);
        });
    }
    for (int r = 0; r < n; ++r) {
        T* out = o + rows.head(i0 + r) * C;
        const float l = softmax.l[r];
#pragma omp simd
        for (int c = 0; c < C; ++c) store(out[c], sum[r * stride + c] / l);
        if (lse) lse[rows.head(i0 + r)] = softmax.m[r] + std::log(l);
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
            a.delta[head] = row_dot(C, elements(grad.row + r * stride), elements(a.o + head * C));
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
            product<panels>(p + r0, kRows, keys, stride, query.panel + r0 * C, begin, end, C);
            product<panels>(ds + r0, kRows, values, stride, grad.panel + r0 * C, begin, end, C);
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
            weighted_sum<1, kRows>(sum_j, stride, count_here, columns, false, ds + r0, keys, stride,
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
            weighted_sum<kRows, 1>(a.dv + at, rows.key_stride(), count, C, true, p, grad.row,
                                   stride, seeing.begin, seeing.end);
            weighted_sum<kRows, 1>(a.dk + at, rows.key_stride(), count, C, true, ds, query.row,
                                   stride, seeing.begin, seeing.end);
        }
    }
    for (int r = 0; a.dq && r < n; ++r) {
        T* out = a.dq + rows.head(i0 + r) * C;
#pragma omp simd
        for (int c = 0; c < C; ++c) store(out[c], sum[r * stride + c]);
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
    // Items of work: span by key head by tile, so that a head's keys stay in the cache; the last
    // tile, which sees most keys, first; shorter spans' missing tiles skipped.
    const int64_t tiles = ceil_div(int64_t(table.max_count) * (H / G), kRows);
    const int64_t items = int64_t(table.count) * G * tiles;
    // Waking a second thread for a short sequence's next position costs more than it saves.
    const int threads = table.rows * H * C * table.max_end < (1 << 16) ? 1 : s.threads;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t item = 0; item < items; ++item) {
        const int64_t head = item / tiles;
        const Rows rows{table.spans[head / G], table.blocks, H, G, C, int(head % G), window};
        const int64_t i0 = (tiles - 1 - item % tiles) * kRows;
        if (i0 < rows.count())
            forward_tile(o, lse, q, k, v, rows, int(i0),
                         int(std::min<int64_t>(kRows, rows.count() - i0)), scale);
    }
    return {};
}

// Where spans and key heads are enough for all threads, each is one thread's, and scores are
// computed once. Otherwise they are computed twice, for dq of each tile of rows and for dk and dv
// of each few splits of keys. Every sum has the same order in both.
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
    // Computing them twice costs half as much again, which pays where threads would else stand idle
    // for more than a third of the time.
    if (ceil_div(heads, s.threads) * s.threads * 2 <= heads * 3) {
#pragma omp parallel for num_threads(s.threads) schedule(dynamic)
        for (int64_t i = 0; i < heads; ++i) backward_keys(all, rows(i), 0, int(splits));
        return {};
    }
    Backward<T> queries = all, keys = all;
    queries.dk = queries.dv = nullptr;
    keys.dq = nullptr;
    const int64_t tiles = ceil_div(int64_t(table.max_count) * (H / G), kRows);
    const int64_t chunks = ceil_div(splits, kChunk);
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
        for (int64_t item = 0; item < chunks * heads; ++item)
            backward_keys(keys, rows(item % heads), int(item / heads) * kChunk,
                          int(item / heads + 1) * kChunk);
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
