// Attention in tiles of 64 rows by one split of keys, on vectors of 16 floats. A "row" here is one
// query head of one position: row i of a span and key head g is position first + i / (H/G), head
// g*(H/G) + i % (H/G), so the heads that share keys share a tile.
//
// Nothing depends on how rows fall into tiles: every dot product is one chain over c, every sum
// over keys one chain over ascending positions that holds exactly the keys that the row sees.
#include <algorithm>
#include <cmath>

#include "kernels/attention.h"
#include "kernels/cpu_tile.h"

namespace fbt::kernels::cpu {
namespace {

constexpr int kRows = 64;  // rows of a tile
constexpr int kStep = 8;   // rows that `product` handles at once
// Rows and panels of 16 columns whose sums are in registers at once.
#if defined(__AVX512F__)
constexpr int kTileRows = kStep, kTilePanels = 2;
#else
constexpr int kTileRows = kStep / 2, kTilePanels = 1;
#endif
constexpr int kStride = kMaxHeadDim + kLanes;  // between rows of a copied tile: no power of two,
                                               // which would crowd a few sets of the L1 cache

constexpr int round_up(int a, int b) { return int(ceil_div(a, b)) * b; }

// out[r,c] = (add ? out[r,c] : 0) + sum_k a[r,k] * b[k,c]  for R rows by P panels of 16 columns;
// operands as in `multiply`.
template <int64_t kRow, int64_t kColumn, int R, int P>
void product_tile(float* out, int64_t stride, const float* a, const float* b, int64_t step,
                  int64_t panel, int K, bool add) {
    Vec sum[R][P];
    for (int r = 0; r < R; ++r)
        for (int p = 0; p < P; ++p)
            sum[r][p] = add ? load(out + r * stride + p * kLanes) : splat(0.f);
    multiply(sum, a, kRow, kColumn, b, step, panel, K);
    for (int r = 0; r < R; ++r)
        for (int p = 0; p < P; ++p) store(out + r * stride + p * kLanes, sum[r][p]);
}

// The same for kStep rows and `panels` panels.
template <int64_t kRow, int64_t kColumn>
void product(float* out, int64_t stride, int panels, const float* a, const float* b, int64_t step,
             int64_t panel, int K, bool add) {
    for (int r = 0; r < kStep; r += kTileRows) {
        float* to = out + r * stride;
        const float* from = a + r * kRow;
        int p = 0;
        for (; p + kTilePanels <= panels; p += kTilePanels)
            product_tile<kRow, kColumn, kTileRows, kTilePanels>(to + p * kLanes, stride, from,
                                                                b + p * panel, step, panel, K, add);
        if (p < panels)
            product_tile<kRow, kColumn, kTileRows, 1>(to + p * kLanes, stride, from, b + p * panel,
                                                      step, panel, K, add);
    }
}

// The same for one row of `out`, to which it adds.
void product_row(float* out, int panels, const float* a, int64_t a_step, const float* b, int K) {
    for (int p = 0; p < panels; ++p) {
        Vec sum = load(out + p * kLanes);
        for (int k = 0; k < K; ++k)
            sum = fma(splat(a[k * a_step]), load(b + k * kStride + p * kLanes), sum);
        store(out + p * kLanes, sum);
    }
}

// Copies `count` rows of C floats to distance kStride, zeros up to the next vector and kStep rows.
// Meanwhile it fetches as many rows at `next`: key stores are larger than caches, and rows of one
// key head too far apart for the processor to foresee them.
void copy_rows(float* to, const float* from, const float* next, int64_t stride, int count, int C) {
    for (int r = 0; r < count; ++r)
        for (int c = 0; c < C; c += kLanes) {
            __builtin_prefetch(next + r * stride + c);
            store(to + r * kStride + c, load_first(from + r * stride + c, C - c));
        }
    for (int r = count; r < round_up(count, kStep); ++r)
        for (int c = 0; c < C; c += kLanes) store(to + r * kStride + c, splat(0.f));
}

// Panels of 16 rows with the columns apart: to[r/16][c][r%16], from rows kStride apart; zeros up to
// 16 rows.
void transpose(float* to, const float* from, int count, int C) {
    for (int p = 0; p < ceil_div(count, kLanes); ++p)
        for (int c = 0; c < C; ++c)
            for (int l = 0; l < kLanes; ++l) {
                const int r = p * kLanes + l;
                to[(p * C + c) * kLanes + l] = r < count ? from[r * kStride + c] : 0.f;
            }
}

// What the rows of one span and key head share.
struct Rows {
    const Span& span;
    const int64_t* blocks;
    int H, G, C, g;

    int group() const { return H / G; }
    int count() const { return span.count * group(); }
    int position(int i) const { return span.first + i / group(); }
    // Element of row i in an array [N,H].
    int64_t head(int i) const { return (span.row + i / group()) * H + g * group() + i % group(); }
    // Offset of position s in a key store [rows,G,C].
    int64_t key(int s) const {
        return ((blocks[span.block + s / kKeyBlock] + s % kKeyBlock) * G + g) * C;
    }
    // Copies rows [i, i+n) of an array [N,H,C] as copy_rows does.
    void gather(float* to, const float* from, int i, int n) const {
        for (int r = 0; r < n; ++r) {
            const float* row = from + head(i + r) * C;
            for (int c = 0; c < C; c += kLanes)
                store(to + r * kStride + c, load_first(row + c, C - c));
        }
        for (int r = n; r < round_up(n, kStep); ++r)
            for (int c = 0; c < C; c += kLanes) store(to + r * kStride + c, splat(0.f));
    }
};

// One tile of the forward, rows [i0, i0+n).
void forward_tile(float* o, float* lse, const float* q, const float* k, const float* v,
                  const Rows& rows, int i0, int n, int window, float scale) {
    const int C = rows.C, panels = ceil_div(C, kLanes), row_panels = ceil_div(n, kLanes);
    alignas(64) float keys[kKeyBlock * kStride], values[kKeyBlock * kStride];
    alignas(64) float query[kRows * kMaxHeadDim];  // [row/16][C][row%16]
    alignas(64) float p[kKeyBlock * kRows];        // scores, then exp(score - m_j): [key][row]
    alignas(64) float sum[kRows * kStride], sum_j[kRows * kStride];  // o, o_j
    alignas(64) float m[kRows], l[kRows], old_factor[kRows], new_factor[kRows];
    int begin[kRows], end[kRows];  // the keys of this split that a row sees

    rows.gather(sum, q, i0, n);
    transpose(query, sum, n, C);
    std::fill(m, m + kRows, -INFINITY);
    std::fill(l, l + kRows, 0.f);
    for (int r = 0; r < n; ++r) std::fill_n(sum + r * kStride, C, 0.f);

    const int lo = first_visible(rows.position(i0), window), hi = rows.position(i0 + n - 1) + 1;
    for (int j = lo / kKeyBlock; j * kKeyBlock < hi; ++j) {
        const int base = std::max(lo, j * kKeyBlock);
        const int count = std::min(hi, (j + 1) * kKeyBlock) - base;
        const int64_t at = rows.key(base), next = base + count < hi ? rows.key(base + count) : at;
        copy_rows(keys, k + at, k + next, int64_t(rows.G) * C, count, C);
        copy_rows(values, v + at, v + next, int64_t(rows.G) * C, count, C);
        for (int s = 0; s < count; s += kStep)
            product<kStride, 1>(p + s * kRows, kRows, row_panels, keys + s * kStride, query, kLanes,
                                C * kLanes, C, false);
        // Rows of padding copy the last row's range and are not read.
        for (int r = 0; r < row_panels * kLanes; ++r) {
            const int t = rows.position(i0 + std::min(r, n - 1));
            begin[r] = std::clamp(first_visible(t, window) - base, 0, count);
            end[r] = std::clamp(t + 1 - base, 0, count);
        }
        for (int r0 = 0; r0 < n; r0 += kLanes) {
            float m_j[kLanes], l_j[kLanes] = {};
            std::fill(m_j, m_j + kLanes, -INFINITY);
            for (int s = 0; s < count; ++s) {
                float* score = p + s * kRows + r0;
#pragma omp simd
                for (int r = 0; r < kLanes; ++r) {
                    const bool visible = begin[r0 + r] <= s && s < end[r0 + r];
                    score[r] = visible ? scale * score[r] : -INFINITY;
                    m_j[r] = score[r] > m_j[r] ? score[r] : m_j[r];
                }
            }
            for (int s = 0; s < count; ++s) {
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
                const bool visible = begin[r0 + r] < end[r0 + r];
                old_factor[r0 + r] = visible ? exp(m[r0 + r] - m_new) : 1.f;
                new_factor[r0 + r] = exp(m_j[r] - m_new);
                l[r0 + r] = visible ? l[r0 + r] * old_factor[r0 + r] + l_j[r] * new_factor[r0 + r]
                                    : l[r0 + r];
                m[r0 + r] = visible ? m_new : m[r0 + r];
            }
        }
        // o_j: the keys that all kStep rows see in one product, those before and after row by row.
        // A key that a row does not see takes no part in its sum, not even as 0 * v.
        for (int r0 = 0; r0 < n; r0 += kStep) {
            int all_begin = 0, all_end = count;
            for (int r = r0; r < r0 + kStep; ++r) {
                all_begin = std::max(all_begin, begin[r]);
                all_end = std::min(all_end, end[r]);
            }
            all_end = std::max(all_begin, all_end);
            const int rows_here = std::min(kStep, n - r0);
            float* out = sum_j + r0 * kStride;
            for (int r = 0; r < kStep; ++r) std::fill_n(out + r * kStride, panels * kLanes, 0.f);
            const auto some = [&](int r, int from, int to) {
                if (from < to)
                    product_row(out + r * kStride, panels, p + from * kRows + r0 + r, kRows,
                                values + from * kStride, to - from);
            };
            for (int r = 0; r < rows_here; ++r)
                some(r, begin[r0 + r], std::min(all_begin, end[r0 + r]));
            product<1, kRows>(out, kStride, panels, p + all_begin * kRows + r0,
                              values + all_begin * kStride, kStride, kLanes, all_end - all_begin,
                              true);
            for (int r = 0; r < rows_here; ++r) some(r, all_end, end[r0 + r]);
        }
        for (int r = 0; r < n; ++r) {
            if (begin[r] >= end[r]) continue;
            const float a = old_factor[r], b = new_factor[r];
            float* to = sum + r * kStride;
            const float* from = sum_j + r * kStride;
#pragma omp simd
            for (int c = 0; c < C; ++c) to[c] = std::fma(to[c], a, from[c] * b);
        }
    }
    for (int r = 0; r < n; ++r) {
        float* out = o + rows.head(i0 + r) * C;
#pragma omp simd
        for (int c = 0; c < C; ++c) out[c] = sum[r * kStride + c] / l[r];
        if (lse) lse[rows.head(i0 + r)] = m[r] + std::log(l[r]);
    }
}

// The whole backward of one span and key head, so that one thread alone adds to its rows of dq, dk
// and dv: split by split of the keys, and for each, tile by tile of the rows that see it.
void backward_span(float* dq, float* dk, float* dv, float* delta, const float* dout, const float* q,
                   const float* k, const float* v, const float* o, const float* lse,
                   const Rows& rows, int window, float scale) {
    const int C = rows.C, panels = ceil_div(C, kLanes), group = rows.group();
    const int64_t key_stride = int64_t(rows.G) * C;
    const int hi = rows.span.first + rows.span.count;
    alignas(64) float keys[kKeyBlock * kStride];
    alignas(64) float keys_t[kKeyBlock * kMaxHeadDim],
        values_t[kKeyBlock * kMaxHeadDim];                            // transposed
    alignas(64) float query[kRows * kStride], grad[kRows * kStride];  // rows of q, dout
    alignas(64) float p[kRows * kKeyBlock], ds[kRows * kKeyBlock];    // [row][key]
    alignas(64) float sum_k[kKeyBlock * kStride], sum_v[kKeyBlock * kStride];
    alignas(64) float sum_q[kStep * kStride];

    for (int i = 0; i < rows.count(); ++i) {
        const int64_t at = rows.head(i) * C;
        std::fill_n(dq + at, C, 0.f);
        delta[rows.head(i)] = row_dot(
            C, [&](int64_t c) { return dout[at + c]; }, [&](int64_t c) { return o[at + c]; });
    }
    for (int base = 0; base < hi; base += kKeyBlock) {
        const int count = std::min(kKeyBlock, hi - base);
        const int64_t at = rows.key(base);
        copy_rows(keys, v + at, k + at, key_stride, count, C);
        transpose(values_t, keys, count, C);
        copy_rows(keys, k + at, k + at, key_stride, count, C);
        transpose(keys_t, keys, count, C);
        for (int s = 0; s < round_up(count, kStep); ++s) {
            std::fill_n(sum_k + s * kStride, panels * kLanes, 0.f);
            std::fill_n(sum_v + s * kStride, panels * kLanes, 0.f);
        }

        // Rows whose position is base or later and whose window reaches back into the split.
        const int first_row = std::max(0, base - rows.span.first) * group;
        const int last_t =
            window > 0 ? std::min<int64_t>(hi, int64_t(base) + count + window - 1) : hi;
        const int end_row = std::max(0, last_t - rows.span.first) * group;
        for (int i0 = first_row; i0 < end_row; i0 += kRows) {
            const int n = std::min(kRows, end_row - i0);
            rows.gather(query, q, i0, n);
            rows.gather(grad, dout, i0, n);
            for (int r0 = 0; r0 < n; r0 += kStep) {
                // These kStep rows see none of the keys from `seen` on.
                const int last = rows.position(i0 + std::min(r0 + kStep, n) - 1);
                const int seen = std::min(count, last + 1 - base);
                const int key_panels = ceil_div(seen, kLanes);
                float *scores = p + r0 * kKeyBlock, *dscores = ds + r0 * kKeyBlock;
                product<kStride, 1>(scores, kKeyBlock, key_panels, query + r0 * kStride, keys_t,
                                    kLanes, C * kLanes, C, false);
                product<kStride, 1>(dscores, kKeyBlock, key_panels, grad + r0 * kStride, values_t,
                                    kLanes, C * kLanes, C, false);
                for (int r = 0; r < kStep; ++r) {
                    const bool exists = r0 + r < n;
                    const int64_t head = exists ? rows.head(i0 + r0 + r) : 0;
                    const int t = exists ? rows.position(i0 + r0 + r) : 0;
                    const int begin = exists ? first_visible(t, window) - base : 0;
                    const int end = exists ? t + 1 - base : 0;
                    const float lse_r = exists ? lse[head] : 0, delta_r = exists ? delta[head] : 0;
                    float *p_r = scores + r * kKeyBlock, *ds_r = dscores + r * kKeyBlock;
#pragma omp simd
                    for (int s = 0; s < key_panels * kLanes; ++s) {
                        const bool visible = begin <= s && s < end;
                        const float e = exp(scale * p_r[s] - lse_r);
                        p_r[s] = visible ? e : 0.f;
                        ds_r[s] = visible ? e * (ds_r[s] - delta_r) : 0.f;
                    }
                }
                // dq += ds k, over the split's keys in order
                for (int r = 0; r < kStep; ++r)
                    std::fill_n(sum_q + r * kStride, panels * kLanes, 0.f);
                product<kKeyBlock, 1>(sum_q, kStride, panels, dscores, keys, kStride, kLanes, seen,
                                      false);
                for (int r = 0; r < std::min(kStep, n - r0); ++r) {
                    float* out = dq + rows.head(i0 + r0 + r) * C;
#pragma omp simd
                    for (int c = 0; c < C; ++c)
                        out[c] = std::fma(scale, sum_q[r * kStride + c], out[c]);
                }
            }
            // dv += p^T dout and dk += ds^T q, over the tile's rows in order, from the first row
            // that sees key s0 on. (Rows before it have no score there.)
            for (int s0 = 0; s0 < count; s0 += kStep) {
                const int seeing = std::max(0, base + s0 - rows.span.first) * group;
                const int r = std::max(0, seeing - i0);
                if (r >= n) break;
                product<1, kKeyBlock>(sum_v + s0 * kStride, kStride, panels, p + r * kKeyBlock + s0,
                                      grad + r * kStride, kStride, kLanes, n - r, true);
                product<1, kKeyBlock>(sum_k + s0 * kStride, kStride, panels,
                                      ds + r * kKeyBlock + s0, query + r * kStride, kStride, kLanes,
                                      n - r, true);
            }
        }
        for (int s = 0; s < count; ++s) {
            float *out_k = dk + rows.key(base + s), *out_v = dv + rows.key(base + s);
#pragma omp simd
            for (int c = 0; c < C; ++c) {
                out_k[c] = scale * sum_k[s * kStride + c];
                out_v[c] = sum_v[s * kStride + c];
            }
        }
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
        const Rows rows{table.spans[item / G % spans], table.blocks, H, G, C, int(item % G)};
        const int64_t i0 = item / G / spans * kRows;
        if (i0 < rows.count())
            forward_tile(o, lse, q, k, v, rows, int(i0),
                         int(std::min<int64_t>(kRows, rows.count() - i0)), window, scale);
    }
    return {};
}

// Items of work are a span by a key head: dk and dv of a split and dq of a row are then one
// thread's, and scores are computed once (cutting further would need a second pass for dq). Batches
// of sequences give threads enough of them.
template <class T, class A>
Status attention_backward(T* dq, A* dk, A* dv, A* delta, const T* dout, const T* q, const T* k,
                          const T* v, const T* o, const A* lse, const SpanTable& table, int H,
                          int G, int C, int window, A scale, Stream s) {
    if (Status status = attention_arguments(H, G, C, window); !status.ok()) return status;
#pragma omp parallel for num_threads(s.threads) schedule(dynamic)
    for (int64_t item = 0; item < int64_t(table.count) * G; ++item)
        backward_span(dq, dk, dv, delta, dout, q, k, v, o, lse,
                      Rows{table.spans[item / G], table.blocks, H, G, C, int(item % G)}, window,
                      scale);
    return {};
}

template <class T>
int64_t attention_scratch_size(const SpanTable&, int, int, int, int) {
    return 0;
}

template Status attention_forward<float, float>(float*, float*, const float*, const float*,
                                                const float*, const SpanTable&, int, int, int, int,
                                                float, float*, Stream);
template int64_t attention_scratch_size<float>(const SpanTable&, int, int, int, int);
template Status attention_backward<float, float>(float*, float*, float*, float*, const float*,
                                                 const float*, const float*, const float*,
                                                 const float*, const float*, const SpanTable&, int,
                                                 int, int, int, float, Stream);

}  // namespace fbt::kernels::cpu
