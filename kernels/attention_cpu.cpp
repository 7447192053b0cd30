// Attention in tiles of 128 rows by one split of keys, on vectors of 16 floats. A "row" here is one
// query head of one position: row i of a span and key head g is position first + i / (H/G), head
// g*(H/G) + i % (H/G), so the heads that share keys share a tile. Tiles are copied, as floats.
//
// Scores lie [key][row], a panel of 16 rows in one vector: what softmax does to a row it does in
// the row's lane. Few rows, as in decoding, would leave lanes empty: theirs lie [row][key], and
// their keys are not copied, as there is nothing to use a copy for again.
//
// Nothing depends on how rows fall into tiles: every dot product is one chain over c, every sum
// over keys or rows one chain in ascending order that holds exactly those that see each other.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>
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
constexpr int kFewHeads = kRows / kLanes;  // that are then handled together
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

// Of a softmax's rows, what combines their sums so far with a split's.
struct Factors {
    const float *of_old, *of_new;
};
Factors from_row(Factors factors, int x) { return {factors.of_old + x, factors.of_new + x}; }
bool from_row(bool add, int) { return add; }

// sum[x,c] = sum_y w[x,y] * b[y,c]  over y in [begin[x], end[x]), for R rows and P panels of
// columns, the last one cut at `columns`; w[x,y] lies at w[x*kRow + y*kColumn].
//   out[x,c] = sum[x,c]    for Into = bool, the sum going on from out[x,c] where it is true
//   out[x,c] = out[x,c]*of_old[x] + sum[x,c]*of_new[x]    for Factors, where [begin, end) is not
//                                                         empty
template <int64_t kRow, int64_t kColumn, int R, int P, class Into, class T>
void weighted_tile(float* out, int64_t out_stride, int columns, Into into, const float* w,
                   const T* b, int64_t stride, const int* begin, const int* end) {
    // In the middle all rows take part. Elsewhere a y outside of a row's range takes no part in its
    // sum, not even as 0 * b.
    const int first = begin[0], middle = begin[R - 1];
    const int middle_end = std::max(middle, end[0]), last = std::max(middle_end, end[R - 1]);
    constexpr bool kCombine = std::is_same_v<Into, Factors>;
    const auto old = [&](int r, int p) {
        return load_first(out + r * out_stride + p * kLanes, columns - p * kLanes);
    };
    Vec sum[R][P];
    for (int r = 0; r < R; ++r)
        for (int p = 0; p < P; ++p) {
            sum[r][p] = splat(0.f);
            if constexpr (!kCombine)
                if (into) sum[r][p] = old(r, p);
        }
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
    for (int r = 0; r < R; ++r) {
        if constexpr (kCombine) {
            if (begin[r] >= end[r]) continue;
            const Vec of_old = splat(into.of_old[r]), of_new = splat(into.of_new[r]);
            for (int p = 0; p < P; ++p) sum[r][p] = fma(old(r, p), of_old, sum[r][p] * of_new);
        }
        for (int p = 0; p < P; ++p)
            store_first(out + r * out_stride + p * kLanes, sum[r][p], columns - p * kLanes);
    }
}

// The same for n rows and all columns.
template <int64_t kRow, int64_t kColumn, int R = kTileRows, class Into, class T>
void weighted_sum(float* out, int64_t out_stride, int n, int columns, Into into, const float* w,
                  const T* b, int64_t stride, const int* begin, const int* end) {
    constexpr int kPanels = (R <= 2 ? 2 : 1) * kTilePanels;  // enough sums to hide their latency
    int x = 0;
    for (; x + R <= n; x += R) {
        int c = 0;
        const auto tiles = [&](auto panels) {
            for (; c + (panels - 1) * kLanes < columns; c += panels * kLanes)
                weighted_tile<kRow, kColumn, R, panels>(
                    out + x * out_stride + c, out_stride, columns - c, from_row(into, x),
                    w + x * kRow, b + c, stride, begin + x, end + x);
        };
        tiles(constant<kPanels>);
        if constexpr (kPanels > 2) tiles(constant<2>);
        tiles(constant<1>);
    }
    if constexpr (R > 1)
        if (x < n)
            weighted_sum<kRow, kColumn, R / 2>(out + x * out_stride, out_stride, n - x, columns,
                                               from_row(into, x), w + x * kRow, b, stride,
                                               begin + x, end + x);
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

using Lanes = float __attribute__((vector_size(4 * kLanes)));

// In each lane a if it is the larger one, else b, even if a is NaN.
Vec larger(Vec a, Vec b) {
    return lanewise([](auto x, auto y) { return x > y ? x : y; }, a, b);
}

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

// Keys and values that will be needed soon: `rows` rows of both stores, `width` elements each.
// Lines are asked for in the order of their addresses, which a processor's own prefetchers follow,
// and a few at a time, as it stops where too many are on their way.
template <class T>
struct Fetch {
    static constexpr int kLine = 64 / sizeof(T);
    const T *k = nullptr, *v = nullptr;
    int64_t stride = 0;
    int rows = 0, width = 0, column = 0;

    int lines() const { return int(rows * ceil_div(width, kLine)); }
    void some(int lines) {
        for (; lines > 0 && rows > 0; --lines) {
            __builtin_prefetch(k + column, 0, 2);
            __builtin_prefetch(v + column, 0, 2);
            column += kLine;
            if (column < width) continue;
            column = 0;
            k += stride;
            v += stride;
            --rows;
        }
    }
};

// 16 columns of floats, or 32 of bf16, of a split's keys, transposed: words[w][s/16] holds a float
// or a pair of bf16 of 16 keys.
using Words = uint32_t __attribute__((vector_size(4 * kLanes)));
using Transposed = Words[kLanes][kKeyBlock / kLanes];
template <class T>
constexpr int kElements = 4 / sizeof(T);  // of a word

template <class T>
void transpose_keys(Transposed& words, const T* keys, int64_t stride, int count, int columns,
                    Fetch<T>& fetch, int lines) {
    constexpr int kColumns = kLanes * kElements<T>;
    int s = 0;
    for (; s < count; s += kLanes, keys += kLanes * stride) {
        fetch.some(lines);
        const int here = std::min(count - s, kLanes);
        const T* from = keys;
        int64_t from_stride = stride;
        T part[kLanes * kColumns];
        if (here < kLanes || columns < kColumns) {
            std::fill_n(part, kLanes * kColumns, T(0.f));
            for (int l = 0; l < here; ++l)
                std::copy_n(keys + l * stride, columns, part + l * kColumns);
            from = part;
            from_stride = kColumns;
        }
        Words x[kLanes];
        for (int l = 0; l < kLanes; ++l) std::memcpy(&x[l], from + l * from_stride, sizeof x[l]);
        cpu::transpose(x);
        for (int w = 0; w < kLanes; ++w) words[w][s / kLanes] = x[w];
    }
    for (; s < kKeyBlock; s += kLanes)
        for (int w = 0; w < kLanes; ++w) words[w][s / kLanes] = Words{};
}

// p[row][key] += sum_c query[row,c] * key[c]  over those columns, of n <= kFew rows
template <class T, int R = kFew>
void few_scores(float* p, const float* query, int64_t stride, int n, const Transposed& words,
                int columns) {
    constexpr int kPanels = R <= 2 ? 4 : kTilePanels;  // enough sums to hide an addition's latency
    if (n <= R / 2) {
        if constexpr (R > 1) few_scores<T, R / 2>(p, query, stride, n, words, columns);
        return;
    }
    for (int s = 0; s < kKeyBlock; s += kPanels * kLanes) {
        Vec sum[R][kPanels];
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < kPanels; ++i) sum[r][i] = load(p + r * kKeyBlock + s + i * kLanes);
        for (int c = 0; c < columns; c += kElements<T>) {
            const Words* keys = words[c / kElements<T>] + s / kLanes;
            for (int e = 0; e < kElements<T>; ++e) {
                Vec key[kPanels];
                for (int i = 0; i < kPanels; ++i) {
                    Words word = keys[i];
                    if (kElements<T> == 2) word = e == 0 ? word << 16 : word & 0xffff0000u;
                    key[i] = std::bit_cast<Vec>(word);
                }
                for (int r = 0; r < R; ++r) {
                    const Vec u = splat(query[r * stride + c + e]);
                    for (int i = 0; i < kPanels; ++i) sum[r][i] = fma(u, key[i], sum[r][i]);
                }
            }
        }
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < kPanels; ++i) store(p + r * kKeyBlock + s + i * kLanes, sum[r][i]);
    }
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
        std::fill(to.row + n * stride, to.row + round_up(n, kLanes) * stride, 0.f);
        to.transpose(stride, n, C);
    }
    // The positions of rows [i, i+n), the last one's also for the rows of padding.
    void positions(int* t, int i, int n) const {
        int here = position(i), left = group() - i % group();
        for (int r = 0; r < round_up(n, kLanes); ++r) {
            t[r] = here;
            if (--left == 0 && r + 1 < n) {
                left = group();
                ++here;
            }
        }
    }
    // Which of the keys [base, base+count) rows at n positions see, counted from base.
    void keys_of_rows(Ranges& keys, const int* t, int n, int base, int count) const {
#pragma omp simd
        for (int r = 0; r < round_up(n, kLanes); ++r) {
            keys.begin[r] = std::clamp(first_visible(t[r], window) - base, 0, count);
            keys.end[r] = std::clamp(t[r] + 1 - base, 0, count);
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

    // Of P panels of rows from r0 on, in lanes: p[key][row], scores, become exp(score - m_j).
    template <int P>
    void add_lanes(int r0, float* p, int64_t stride, const int* begin, const int* end,
                   float scale) {
        const int last = P * kLanes - 1;
        const int middle = begin[last], middle_end = std::max(middle, end[0]);
        // In the middle all rows see a key. Elsewhere a score that does not count is -infinity.
        const auto hide = [&](int from, int to) {
            for (int s = from; s < to; ++s) {
                float* score = p + s * stride;
#pragma omp simd
                for (int r = 0; r < P * kLanes; ++r) {
                    // Without && and stores on a condition this stays free of branches.
                    const float x = scale * score[r];
                    const float y = begin[r] <= s ? x : -INFINITY;
                    score[r] = s < end[r] ? y : -INFINITY;
                }
            }
        };
        hide(begin[0], middle);
        hide(middle_end, end[last]);
        Vec m_j[P], l_j[P];
        for (int i = 0; i < P; ++i) m_j[i] = splat(-INFINITY);
        for (int i = 0; i < P; ++i) l_j[i] = splat(0.f);
        for (int s = begin[0]; s < end[last]; ++s)
            for (int i = 0; i < P; ++i) {
                float* score = p + s * stride + i * kLanes;
                Vec x = load(score);
                if (s >= middle && s < middle_end) store(score, x = x * splat(scale));
                m_j[i] = larger(x, m_j[i]);
            }
        for (int s = begin[0]; s < end[last]; ++s)
            for (int i = 0; i < P; ++i) {
                float* score = p + s * stride + i * kLanes;
                const Vec x = exp(load(score) - m_j[i]);
                l_j[i] = l_j[i] + x;  // + 0, exactly, for a key that is not visible
                store(score, x);
            }
        for (int i = 0; i < P; ++i)
            combine(r0 + i * kLanes, m_j[i], l_j[i], begin + i * kLanes, end + i * kLanes);
    }

    // Of n <= 16 rows from r0 on, each with its keys in lanes: p[row][key].
    void add_few(int r0, int n, float* p, int64_t stride, const int* begin, const int* end,
                 float scale) {
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
        combine(r0, load(m_j), load(l_j), begin, end);
    }

  private:
    void combine(int r0, Vec m_j, Vec l_j, const int* begin, const int* end) {
        float m_new[kLanes], l_new[kLanes];
        const Vec most = larger(m_j, load(m + r0));
        const Vec a = exp(load(m + r0) - most), b = exp(m_j - most);
        store(m_new, most);
        store(l_new, load(l + r0) * a + l_j * b);
        store(old_factor + r0, a);
        store(new_factor + r0, b);
#pragma omp simd
        for (int r = 0; r < kLanes; ++r) {
            const bool visible = begin[r] < end[r];
            old_factor[r0 + r] = visible ? old_factor[r0 + r] : 1.f;
            l[r0 + r] = visible ? l_new[r] : l[r0 + r];
            m[r0 + r] = visible ? m_new[r] : m[r0 + r];
        }
    }
};

// o = o*old_factor + o_j*new_factor, of n rows, the softmax's rows from r0 on
void combine(float* o, const float* o_j, int64_t stride, const Softmax& softmax, int r0,
             const int* begin, const int* end, int n, int C) {
    for (int r = 0; r < n; ++r) {
        if (begin[r] >= end[r]) continue;
        const float a = softmax.old_factor[r0 + r], b = softmax.new_factor[r0 + r];
        float* to = o + r * stride;
        const float* from = o_j + r * stride;
#pragma omp simd
        for (int c = 0; c < C; ++c) to[c] = std::fma(to[c], a, from[c] * b);
    }
}

// o / l of rows [i0, i0+n), the softmax's rows from r0 on
template <class T>
void finish(T* o, float* lse, const float* sum, int64_t stride, const Softmax& softmax, int r0,
            const Rows& rows, int i0, int n) {
    for (int r = 0; r < n; ++r) {
        T* out = o + rows.head(i0 + r) * rows.C;
        const float l = softmax.l[r0 + r];
        for (int c = 0; c < rows.C; c += kLanes)
            store_first(out + c, load(sum + r * stride + c) / splat(l), rows.C - c);
        if (lse) lse[rows.head(i0 + r)] = softmax.m[r0 + r] + std::log(l);
    }
}

// One tile of the forward, rows [i0, i0+n).
template <class T>
void forward_tile(T* o, float* lse, const T* q, const T* k, const T* v, const Rows& rows, int i0,
                  int n, float scale) {
    constexpr int kWidth = kTilePanels * kLanes;
    const int C = rows.C, stride = tile_stride(C), columns = round_up(C, kLanes);
    Tile query, keys;
    alignas(64) float values[kKeyBlock * kMaxStride];
    alignas(64) float p[kKeyBlock * kWidth];    // scores, then exp(score - m_j)
    alignas(64) float sum[kRows * kMaxStride];  // o
    Softmax softmax;
    Ranges seen;
    int positions[kRows];

    rows.positions(positions, i0, n);
    rows.gather(query, stride, q, i0, n);
    std::fill_n(sum, n * stride, 0.f);
    const int lo = first_visible(rows.position(i0), rows.window);
    const int hi = rows.position(i0 + n - 1) + 1;
    for (int j = lo / kKeyBlock; j * kKeyBlock < hi; ++j) {
        const int base = std::max(lo, j * kKeyBlock);
        const int count = std::min(hi, (j + 1) * kKeyBlock) - base;
        const int64_t at = rows.key(base), next = base + count < hi ? rows.key(base + count) : at;
        copy_keys(keys.row, stride, k + at, k + next, rows.key_stride(), count, C);
        copy_keys(values, stride, v + at, v + next, rows.key_stride(), count, C);
        rows.keys_of_rows(seen, positions, n, base, count);
        for_panels(seen, n, [&](auto panels, int r0, int begin, int end) {
            // Keys behind the ends of all panels but the last are that panel's alone.
            constexpr int own = (panels - 1) * kLanes;
            int shared = end;
            if constexpr (own > 0) shared = std::min(end, round_up(seen.end[r0 + own - 1], kStep));
            product<panels>(p, kWidth, keys.row, stride, query.panel + r0 * C, begin, shared, C);
            if (shared < end)
                product<1>(p + own, kWidth, keys.row, stride, query.panel + (r0 + own) * C, shared,
                           end, C);
            softmax.add_lanes<panels>(r0, p, kWidth, seen.begin + r0, seen.end + r0, scale);
            weighted_sum<1, kWidth>(sum + r0 * stride, stride, std::min(n - r0, panels * kLanes),
                                    columns,
                                    Factors{softmax.old_factor + r0, softmax.new_factor + r0}, p,
                                    values, stride, seen.begin + r0, seen.end + r0);
        });
    }
    finish(o, lse, sum, stride, softmax, 0, rows, i0, n);
}

// Rows [i0, i0+n), n <= kFew, of each of `heads` key heads, at most kFewHeads, from rows.g on.
struct FewRows {
    Rows rows;
    int heads, i0, n;

    int begin() const { return first_visible(rows.position(i0), rows.window); }
    int end() const { return rows.position(i0 + n - 1) + 1; }  // of the keys
    int split_end(int base) const { return std::min(end(), (base / kKeyBlock + 1) * kKeyBlock); }
    template <class T>
    Fetch<T> fetch(const T* k, const T* v, int base) const {
        return {k + rows.key(base), v + rows.key(base), rows.key_stride(), split_end(base) - base,
                heads * rows.C};
    }
};

// Their forward, as in decoding, where keys take longer to come from memory than all else: they are
// read where they lie, split by split for all heads, while the next split's are on their way; after
// the last split, `next`.
template <class T>
void forward_few(T* o, float* lse, const T* q, const T* k, const T* v, const FewRows& few,
                 float scale, Fetch<T> next) {
    const int C = few.rows.C, n = few.n, stride = tile_stride(C), columns = round_up(C, kLanes);
    constexpr int kColumns = kLanes * kElements<T>;
    alignas(64) float query[kFewHeads * kFew * kMaxStride], sum[kFewHeads * kFew * kMaxStride];
    alignas(64) float p[kFew * kKeyBlock];  // scores, then exp(score - m_j)
    alignas(64) float sum_j[kFew * kMaxStride], values[kKeyBlock * kMaxHeadDim];
    Transposed words;
    Softmax softmax;  // of head h from row h*kLanes on
    Ranges seen;

    const int padded = int(std::bit_ceil(unsigned(n)));  // rows that few_scores takes
    const auto rows_of = [&](int h) {
        Rows rows = few.rows;
        rows.g += h;
        return rows;
    };
    for (int h = 0; h < few.heads; ++h) {
        float* to = query + h * padded * stride;
        for (int r = 0; r < n; ++r)
            copy_row(to + r * stride, q + rows_of(h).head(few.i0 + r) * C, C);
        std::fill(to + n * stride, to + padded * stride, 0.f);
    }
    std::fill_n(sum, few.heads * n * stride, 0.f);
    int positions[kLanes];
    few.rows.positions(positions, few.i0, n);
    for (int base = few.begin(), end; base < few.end(); base = end) {
        end = few.split_end(base);
        const int count = end - base;
        few.rows.keys_of_rows(seen, positions, n, base, count);
        Fetch<T> fetch = end < few.end() ? few.fetch(k, v, end) : next;
        // So many lines at each step: 16 keys of some columns transposed, or their values added.
        const int steps =
            few.heads * (int(ceil_div(C, kColumns)) + 1) * int(ceil_div(count, kLanes));
        const int lines = int(ceil_div(fetch.lines(), steps));
        for (int h = 0; h < few.heads; ++h) {
            const int64_t at = few.rows.key(base) + h * C;
            std::fill_n(p, padded * kKeyBlock, 0.f);
            for (int c = 0; c < C; c += kColumns) {
                const int some = std::min(C - c, kColumns);
                transpose_keys(words, k + at + c, few.rows.key_stride(), count, some, fetch, lines);
                few_scores<T>(p, query + h * padded * stride + c, stride, n, words, some);
            }
            softmax.add_few(h * kLanes, n, p, kKeyBlock, seen.begin, seen.end, scale);
            // o_j, a few keys at a time, so that the fetching goes on
            for (int s = 0; s < count; s += kLanes) {
                fetch.some(lines);
                int from[kFew], to[kFew];
                for (int r = 0; r < n; ++r) {
                    from[r] = std::max(seen.begin[r], s);
                    to[r] = std::min(seen.end[r], s + kLanes);
                }
                const auto add_values = [&](const auto* values, int64_t values_stride) {
                    weighted_sum<kKeyBlock, 1, kFew>(sum_j, stride, n, columns, s > 0, p, values,
                                                     values_stride, from, to);
                };
                if (C % kLanes == 0) {
                    add_values(v + at, few.rows.key_stride());
                } else {
                    for (int i = s; i < std::min(count, s + kLanes); ++i)
                        copy_row(values + i * columns, v + at + i * few.rows.key_stride(), C);
                    add_values(static_cast<const float*>(values), columns);
                }
            }
            combine(sum + h * n * stride, sum_j, stride, softmax, h * kLanes, seen.begin, seen.end,
                    n, C);
        }
    }
    for (int h = 0; h < few.heads; ++h)
        finish(o, lse, sum + h * n * stride, stride, softmax, h * kLanes, rows_of(h), few.i0, n);
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
    int positions[kRows];

    rows.positions(positions, i0, n);
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
        rows.keys_of_rows(seen, positions, n, base, count);
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
    // Waking a second thread for a short sequence's next position costs more than it saves.
    const int threads = table.rows * H * C * table.max_end < (1 << 16) ? 1 : s.threads;
    const int64_t most_rows = int64_t(table.max_count) * (H / G);
    if (most_rows <= kFew) {
        // Items of work: span by some of the key heads. A thread takes its next one before it
        // computes, to know which keys to fetch.
        const int64_t parts =
            std::clamp<int64_t>(2 * threads / std::max(table.count, 1), ceil_div(G, kFewHeads), G);
        const int64_t items = table.count * parts;
        const auto few_of = [&](int64_t item) {
            const Span& span = table.spans[item / parts];
            const int g = int(item % parts * G / parts), end = int((item % parts + 1) * G / parts);
            return FewRows{
                {span, table.blocks, H, G, C, g, window}, end - g, 0, span.count * (H / G)};
        };
        std::atomic<int64_t> taken = 0;
#pragma omp parallel num_threads(threads)
        for (int64_t item = taken++, after; item < items; item = after) {
            after = taken++;
            const FewRows few = few_of(item);
            Fetch<T> next;
            if (after < items) {
                const FewRows then = few_of(after);
                if (then.n > 0) next = then.fetch(k, v, then.begin());
            }
            if (few.n > 0) forward_few(o, lse, q, k, v, few, scale, next);
        }
        return {};
    }
    // Items of work: span by key head by tile, so that a head's keys stay in the cache; the last
    // tile, which sees most keys, first; shorter spans' missing tiles skipped.
    const int64_t tiles = ceil_div(most_rows, kRows);
    const int64_t items = int64_t(table.count) * G * tiles;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t item = 0; item < items; ++item) {
        const int64_t head = item / tiles;
        const Rows rows{table.spans[head / G], table.blocks, H, G, C, int(head % G), window};
        const int64_t i0 = (tiles - 1 - item % tiles) * kRows;
        const int n = int(std::min<int64_t>(kRows, rows.count() - i0));
        if (n > kFew)
            forward_tile(o, lse, q, k, v, rows, int(i0), n, scale);
        else if (n > 0)
            forward_few(o, lse, q, k, v, {rows, 1, int(i0), n}, scale, {});
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
