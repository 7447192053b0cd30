// What the f32 and the bf16 attention kernels share: where the rows and keys of a block lie.
#pragma once
#include <algorithm>
#include <climits>

#include "kernels/attention.h"
#include "kernels/gpu.h"

namespace fbt::kernels::cuda {

// One call, as its kernels see it. They read the spans themselves, in device memory, so that a
// captured launch follows what later stands there.
struct AttentionCall {
    const Span* spans;
    const int64_t* blocks;
    int32_t count;  // spans
    int H, G, C, window;
};

// What one block of threads works on. A grid has `tiles` blocks for each slice of columns, key head
// and span, neighbours for the tiles of one key head: they share its keys in the L2 cache.
struct AttentionPlace {
    int tile, tiles, slice, g;
    unsigned key_head;  // of all spans'
    Span span;
};
// `Slices` divide the columns of wide heads, whose sums one block's registers could not hold.
template <int Slices>
__device__ AttentionPlace attention_place(const AttentionCall& call) {
    const unsigned tiles = gridDim.x / (unsigned(call.count) * unsigned(call.G) * Slices);
    unsigned rest = blockIdx.x / tiles;
    AttentionPlace place;
    place.tile = int(blockIdx.x % tiles);
    place.tiles = int(tiles);
    place.slice = int(rest % Slices);
    rest /= Slices;
    place.key_head = rest;
    place.g = int(rest % unsigned(call.G));
    place.span = call.spans[rest / unsigned(call.G)];
    return place;
}
// The grid that attention_place takes apart.
inline unsigned attention_blocks(int64_t tiles, int slices, const AttentionCall& call) {
    return unsigned(tiles * slices * call.count * call.G);
}
// That it fits, for tiles of at least 16 rows or keys and 2 slices, and so do rows and strides in
// an int.
inline Status attention_size(const SpanTable& table, const AttentionCall& call) {
    const int64_t rows = int64_t(table.max_count) * (call.H / call.G);
    const int64_t tiles = ceil_div(std::max<int64_t>(rows, table.max_end), 16) * 2;
    if (rows <= INT_MAX && int64_t(call.H) * call.C <= INT_MAX &&
        tiles <= INT_MAX / (int64_t(call.count) * call.G))
        return {};
    return {Code::bad_argument, "attention over so many spans and rows needs several calls"};
}

// The query heads that share a key head are packed as rows: row i of a span is position
// first + i / group, head g * group + i % group.
struct PackedRows {
    Span span;
    int H, g, group;

    __device__ PackedRows(const AttentionCall& call, const AttentionPlace& place)
        : span(place.span), H(call.H), g(place.g), group(call.H / call.G) {}
    __device__ int count() const { return span.count * group; }
    __device__ int position(int i) const { return span.first + i / group; }
    // Its element in an array [N,H].
    __device__ int64_t head(int i) const {
        return (span.row + i / group) * H + g * group + i % group;
    }
};

// The splits that some of up to n packed rows, from row i0 on, see.
struct SplitRange {
    int begin, end;

    __device__ SplitRange(const PackedRows& rows, int i0, int n, int window)
        : begin(first_visible(rows.position(i0), window) / kKeyBlock),
          end(rows.position(min(i0 + n, rows.count()) - 1) / kKeyBlock + 1) {}
};

// The rows of the longest span, packed: a grid's tiles cover so many.
inline int64_t packed_rows(const SpanTable& table, int H, int G) {
    return int64_t(table.max_count) * (H / G);
}

// The positions that row t sees are [lo, t].
__device__ inline bool visible(int s, int lo, int t) { return lo <= s && s <= t; }

// The end of the positions whose rows see one of the keys [begin, end).
__device__ inline int rows_end(const Span& span, int end, int window) {
    const int last = span.first + span.count;
    return window > 0 && window < last - end + 1 ? end + window - 1 : last;
}

// How a row's sums take in those of the next split.
struct SplitFactors {
    float old_sum, new_sum;

    __device__ float combine(float sum, float sum_j) const {
        return std::fma(sum, old_sum, sum_j * new_sum);
    }
};
// m_j is the split's, m the largest before it and m_new with it. Where the row sees no key of the
// split, m_j is -inf, sum_j is 0, and combine gives exactly sum, the sign of a 0 included.
template <class Exp>
__device__ SplitFactors split_factors(float m, float m_new, float m_j, Exp exp) {
    SplitFactors factors{exp(m - m_new), exp(m_j - m_new)};
    if (m_j == -INFINITY) factors = {1.f, -0.f};
    return factors;
}
// m, l are of the splits so far and take in m_j, l_j.
template <class Exp>
__device__ SplitFactors combine_split(float& m, float& l, float m_j, float l_j, Exp exp) {
    const float m_new = std::fmax(m, m_j);
    const SplitFactors factors = split_factors(m, m_new, m_j, exp);
    l = factors.combine(l, l_j);
    m = m_new;
    return factors;
}

// The tensor-core kernels, in attention_mma.cu. For the backward, delta is already computed.
Status attention_forward_mma(bf16* o, float* lse, const bf16* q, const bf16* k, const bf16* v,
                             const SpanTable& table, const AttentionCall& call, float scale,
                             float* scratch, Stream s);
int64_t attention_scratch_mma(const SpanTable& table, const AttentionCall& call);
Status attention_backward_mma(bf16* dq, float* dk, float* dv, const float* delta, const bf16* dout,
                              const bf16* q, const bf16* k, const bf16* v, const float* lse,
                              const SpanTable& table, const AttentionCall& call, float scale,
                              Stream s);

}  // namespace fbt::kernels::cuda
