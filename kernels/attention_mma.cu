// bf16 attention on tensor cores, in the manner of FlashAttention-2 (arXiv:2307.08691): scores stay
// in registers, where the accumulators of one product are already laid out as the left operand of
// the next. A warp owns 16 rows (packed: the query heads of one key head) or, for dk and dv,
// 16 keys; all widths are padded with zero columns to W.
//
// The row rule: a score is one chain of mma over the columns; m_j, l_j and o_j of a split of keys
// are computed from scratch, o_j as one chain of mma over the split's 64 keys with weights
// exp(score - m_j) rounded to bf16; l_j is the sum of the rounded weights, by the same mma with a
// column of ones, so that weights still add up to 1. forward_tile, forward_few and forward_split
// differ in which warp does that, not in what is done. Weights of keys that a row does not see are
// 0, and adding 0 changes nothing.
//
// exp(x) is 2^(x log2 e), the factor folded into the scale; with ex2's 2 ulp the relative error of
// a weight exp(scale*s - scale*m) is below (2 |scale*s| + 2 |scale*m| + 4) 2^-24, beside the
// score's.
#include <cmath>

#include "kernels/attention_tile.cuh"
#include "kernels/ptx.cuh"

namespace fbt::kernels::cuda {
namespace {

constexpr int kWarpRows = 16;  // m of the mma
constexpr int kTileWarps = 8;  // of forward_tile and dq_tile, 16 rows each
constexpr int kKeyWarps = 4;   // of dkdv_tile, 16 keys each
constexpr int kRowStep = 32;   // rows that dkdv_tile takes at a time; keys that dq_tile does
constexpr int kPad = 8;        // 16 bytes: rows of a tile then begin in different banks, an odd
                               // number of 16 bytes apart, as ldmatrix wants
constexpr float kLog2e = 1.44269504f, kLn2 = 0.693147181f;
constexpr uint32_t kOnes = 0x3f803f80;  // two bf16

// Columns of o, dq, dk, dv that one block computes.
__host__ __device__ constexpr int slice_width(int W) { return W <= 128 ? W : W / 2; }
__host__ __device__ constexpr int slices(int W) { return W / slice_width(W); }
__host__ __device__ constexpr int tile_size(int rows, int W) { return rows * (W + kPad); }

// What 16-byte copies and 4-byte accesses need; the same bits come without.
struct Aligned {
    bool keys;          // k and v: rows of whole, aligned 16 bytes
    bool rows = false;  // the same of q and dout, where they are copied
    bool pairs;         // q, dout, o, dq: aligned to two elements
    bool sums = false;  // the same of dk, dv
};

// ---- tiles in shared memory ----

// Starts to copy rows [0, n) of `columns` elements, `stride` apart, to a tile of Rows x W, zeros
// elsewhere. `thread` is one of Threads, each of which keeps to its 8 columns.
template <int Rows, int W, int Threads>
__device__ void load_tile(bf16* tile, const bf16* from, int stride, int n, int columns,
                          bool aligned, int thread) {
    constexpr int kChunks = W / 8, kRowsAtOnce = Threads / kChunks;
    static_assert(kRowsAtOnce > 0);
    const int first = thread / kChunks, c = thread % kChunks * 8;
    if (first >= kRowsAtOnce) return;  // Threads is no multiple of kChunks
    bf16* to = tile + first * (W + kPad) + c;
    const bf16* row = from + int64_t(first) * stride + c;
    const int inside = c < columns ? n : 0;  // rows that have these columns
    if (aligned) {
#pragma unroll 1
        for (int r = first; r < Rows; r += kRowsAtOnce) {  // unrolled it would cost registers
            ptx::cp_async_16(to, r < inside ? row : from, r < inside ? 16 : 0);
            to += kRowsAtOnce * (W + kPad);
            row += kRowsAtOnce * int64_t(stride);
        }
    } else {
        for (int r = first; r < Rows; r += kRowsAtOnce) {
            for (int e = 0; e < 8; ++e) to[e] = r < inside && c + e < columns ? row[e] : bf16(0.f);
            to += kRowsAtOnce * (W + kPad);
            row += kRowsAtOnce * int64_t(stride);
        }
    }
}

// Stores two neighbours, unless they are past `columns`, which is even.
__device__ inline void store_pair(bf16* row, int c, float lower, float upper, int columns,
                                  bool aligned) {
    if (c >= columns) return;
    const uint32_t pair = ptx::pack_bf16(lower, upper);
    if (aligned) {
        *reinterpret_cast<uint32_t*>(row + c) = pair;
    } else {
        row[c].bits = uint16_t(pair);
        row[c + 1].bits = uint16_t(pair >> 16);
    }
}
__device__ inline void store_pair(float* row, int c, float lower, float upper, int columns,
                                  bool aligned) {
    if (c >= columns) return;
    if (aligned) {
        *reinterpret_cast<float2*>(row + c) = {lower, upper};
    } else {
        row[c] = lower;
        row[c + 1] = upper;
    }
}

// ---- products ----

// The left operand of an mma, [16,16].
struct Fragment {
    uint32_t r[4];
};

// From rows of a tile of width W.
template <int W>
__device__ Fragment left_operand(const bf16* tile) {
    const int lane = threadIdx.x % 32;
    Fragment a;
    ptx::ldmatrix_x4(a.r, tile + lane % 16 * (W + kPad) + lane / 16 * 8);
    return a;
}

// From accumulators of 16 x 16 elements, rounded.
__device__ inline Fragment left_operand(const float (&left)[4], const float (&right)[4]) {
    return {{ptx::pack_bf16(left[0], left[1]), ptx::pack_bf16(left[2], left[3]),
             ptx::pack_bf16(right[0], right[1]), ptx::pack_bf16(right[2], right[3])}};
}

// out[m,n] = sum_c a[m,c] b[n,c] for 16 x 8N elements: b's rows lie in a tile of width W, and
// a(i) is the fragment of columns 16 i and on.
template <int W, int N, class Left>
__device__ void dot_rows(float (&out)[N][4], Left a, const bf16* b) {
    const int lane = threadIdx.x % 32;
    const bf16* const mine = b + (lane % 8 + lane / 16 * 8) * (W + kPad) + lane / 8 % 2 * 8;
#pragma unroll
    for (int n = 0; n < N; ++n) out[n][0] = out[n][1] = out[n][2] = out[n][3] = 0;
#pragma unroll
    for (int i = 0; i < W / 16; ++i) {
        const Fragment left = a(i);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            uint32_t r[4];
            ptx::ldmatrix_x4(r, mine + n * 8 * (W + kPad) + i * 16);
            ptx::mma_m16n8k16(out[n], left.r, {r[0], r[1]});
            ptx::mma_m16n8k16(out[n + 1], left.r, {r[2], r[3]});
        }
    }
}

// out[m,n] += sum_k a[m,k] b[k,n] for 16 x 8N elements and 16K terms; b in a tile of width W.
template <int W, int K, int N>
__device__ void add_product(float (&out)[N][4], const Fragment (&a)[K], const bf16* b) {
    const int lane = threadIdx.x % 32;
    const bf16* const mine = b + lane % 16 * (W + kPad) + lane / 16 * 8;
#pragma unroll
    for (int k = 0; k < K; ++k)
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            uint32_t r[4];
            ptx::ldmatrix_x4_trans(r, mine + k * 16 * (W + kPad) + n * 8);
            ptx::mma_m16n8k16(out[n], a[k].r, {r[0], r[1]});
            ptx::mma_m16n8k16(out[n + 1], a[k].r, {r[2], r[3]});
        }
}

// ---- a warp's 16 rows ----

// The two of them that a lane holds: i0 + lane / 4 and 8 further. Rows past the last copy it; they
// are not stored.
struct LaneRows {
    int64_t head[2];  // elements in [N,H]
    bool stored[2];

    __device__ LaneRows(const PackedRows& rows, int i0) {
        const int last = rows.count() - 1;
        for (int half = 0; half < 2; ++half) {
            const int i = i0 + threadIdx.x % 32 / 4 + 8 * half;
            head[half] = rows.head(min(i, last));
            stored[half] = i <= last;
        }
    }
};

// The positions of a warp's rows, and which keys they see.
struct WarpRows {
    int window;
    int t[2];             // of the lane's rows
    int first_t, last_t;  // of the warp; last_t is -1 when all its rows are past the last

    __device__ WarpRows(const PackedRows& rows, int i0, int the_window) : window(the_window) {
        const int last = rows.count() - 1;
        for (int half = 0; half < 2; ++half) {
            const int i = i0 + threadIdx.x % 32 / 4 + 8 * half;
            t[half] = rows.position(min(i, last));
        }
        first_t = rows.position(min(i0, last));
        last_t = i0 <= last ? rows.position(min(i0 + kWarpRows - 1, last)) : -1;
    }
    // Whether some row sees one of the keys [base, base + n), or not every row sees all of them.
    __device__ bool some(int base, int n) const {
        return base <= last_t && base + n > first_visible(first_t, window);
    }
    __device__ bool masked(int base, int n) const {
        return base + n - 1 > first_t || base < first_visible(last_t, window);
    }
};

// Loads a warp's rows as a left operand from an array [N,H,C], zeros from column C on.
template <int W>
__device__ void load_rows(Fragment (&a)[W / 16], const bf16* from, const LaneRows& rows, int C,
                          bool aligned) {
    const int first = threadIdx.x % 4 * 2;
    const bf16* const row[2] = {from + rows.head[0] * C + first, from + rows.head[1] * C + first};
    const auto load = [&](auto pair) {
#pragma unroll
        for (int i = 0; i < W / 16; ++i)
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const int c = i * 16 + r / 2 * 8;
                a[i].r[r] = first + c < C ? pair(row[r % 2] + c) : 0;
            }
    };
    if (aligned)
        load([](const bf16* p) { return *reinterpret_cast<const uint32_t*>(p); });
    else
        load([](const bf16* p) { return p[0].bits | uint32_t(p[1].bits) << 16; });
}

// Sets to -inf the scores of unseen keys, for keys base and on.
template <int N>
__device__ void mask(float (&score)[N][4], const WarpRows& rows, int base) {
    if (!rows.masked(base, 8 * N)) return;
    const int first = base + threadIdx.x % 4 * 2;
    const int lo[2] = {first_visible(rows.t[0], rows.window),
                       first_visible(rows.t[1], rows.window)};
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
            if (!visible(first + n * 8 + e % 2, lo[e / 2], rows.t[e / 2])) score[n][e] = -INFINITY;
}

// The splits that a block of kTileWarps warps walks for its 128 rows: W columns of k and V of v,
// the next split on its way to shared memory while the warps work on this one.
template <int W, int V>
struct SplitWalk : SplitRange {
    static constexpr int kKeys = tile_size(kKeyBlock, W), kStage = kKeys + tile_size(kKeyBlock, V);
    static constexpr int kThreads = kTileWarps * 32, kRows = kTileWarps * kWarpRows;

    bf16* shared;       // two stages
    const bf16 *k, *v;  // their key head, v from its first column on
    const int64_t* blocks;
    int stride, columns, v_columns, rows_end;
    int64_t next_block;  // read a split ahead
    bool aligned;

    __device__ SplitWalk(bf16* the_shared, const bf16* the_k, const bf16* the_v,
                         const AttentionCall& call, const AttentionPlace& place,
                         const PackedRows& rows, int first_row, int first_column, bool is_aligned)
        : SplitRange(rows, first_row, kRows, call.window),
          shared(the_shared),
          k(the_k + place.g * call.C),
          v(the_v + place.g * call.C + first_column),
          blocks(call.blocks + place.span.block),
          stride(call.G * call.C),
          columns(call.C),
          v_columns(call.C - first_column),
          rows_end(place.span.first + place.span.count),
          aligned(is_aligned) {
        load(begin, blocks[begin]);
        next_block = begin + 1 < end ? blocks[begin + 1] : 0;
    }
    // The tile of split j's keys, its values kKeys further; to be called for every j in turn.
    __device__ const bf16* take(int j) {
        ptx::cp_async_wait<0>();
        __syncthreads();  // split j is there, and everyone is done with the one before
        if (j + 1 < end) load(j + 1, next_block);
        if (j + 2 < end) next_block = blocks[j + 2];
        return stage(j);
    }

  private:
    __device__ bf16* stage(int j) const { return shared + (j - begin) % 2 * kStage; }
    __device__ void load(int j, int64_t block) {
        const int n = rows_end - j * kKeyBlock;
        load_tile<kKeyBlock, W, kThreads>(stage(j), k + block * stride, stride, n, columns, aligned,
                                          threadIdx.x);
        load_tile<kKeyBlock, V, kThreads>(stage(j) + kKeys, v + block * stride, stride, n,
                                          v_columns, aligned, threadIdx.x);
        ptx::cp_async_commit();
    }
};

// ---- forward ----

// One split for 16 rows. m_j, before it is scaled, and l_j are those of a lane's two rows; -inf and
// 0 where one sees no key.
struct Split {
    Fragment weight[kKeyBlock / 16];
    float m[2], l[2];
};

// exp(scale * x), the scale including log2 e. As a product it enters no sum, which a compiler might
// fuse in one kernel and not in another: m is scaled after the subtractions.
struct ScaledExp {
    float scale;
    __device__ float operator()(float x) const { return ptx::ex2(scale * x); }
};

// keys: a tile of the 64 keys from position `base` on.
template <int W>
__device__ void weigh_split(Split& split, const Fragment (&q)[W / 16], const bf16* keys,
                            const WarpRows& rows, int base, float scale) {
    constexpr int N = kKeyBlock / 8;
    float score[N][4];
    dot_rows<W>(
        score, [&](int i) { return q[i]; }, keys);
    mask(score, rows, base);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float m = -INFINITY;
#pragma unroll
        for (int n = 0; n < N; ++n)
            m = std::fmax(m, std::fmax(score[n][2 * half], score[n][2 * half + 1]));
        m = std::fmax(m, __shfl_xor_sync(0xffffffffu, m, 1));
        m = std::fmax(m, __shfl_xor_sync(0xffffffffu, m, 2));
        split.m[half] = m;
        const float shift = m == -INFINITY ? 0.f : -scale * m;  // weights of 0, not NaN
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
            for (int e = 2 * half; e < 2 * half + 2; ++e)
                score[n][e] = ptx::ex2(std::fma(score[n][e], scale, shift));
    }
    float sum[4] = {};
#pragma unroll
    for (int k = 0; k < kKeyBlock / 16; ++k) {
        split.weight[k] = left_operand(score[2 * k], score[2 * k + 1]);
        ptx::mma_m16n8k16(sum, split.weight[k].r, {kOnes, kOnes});
    }
    split.l[0] = sum[0], split.l[1] = sum[2];
}

__device__ inline float log_sum(float m, float l, float scale) {
    return std::fma(scale * m, kLn2, std::log(l));
}

// A block walks the splits for 128 rows, the next split's keys and values on their way to shared
// memory while the warps work on this one's.
template <int W>
__global__ void __launch_bounds__(kTileWarps * 32, 1)
    forward_tile(bf16* __restrict__ o, float* __restrict__ lse, const bf16* __restrict__ q,
                 const bf16* __restrict__ k, const bf16* __restrict__ v, AttentionCall call,
                 float scale, Aligned aligned) {
    constexpr int kSlice = slice_width(W), kColumns = 4;  // o_j is computed in groups of 4 mma
    constexpr int kRows = kTileWarps * kWarpRows;
    DYNAMIC_SHARED(bf16, shared);
    const AttentionPlace place = attention_place<slices(W)>(call);
    const PackedRows packed(call, place);
    // The longest tiles, the last ones, start first.
    const int first_row = (place.tiles - 1 - place.tile) * kRows;
    if (first_row >= packed.count()) return;
    const int lane = threadIdx.x % 32, C = call.C, first_column = place.slice * kSlice;
    const int warp_row = first_row + threadIdx.x / 32 * kWarpRows;
    const WarpRows rows(packed, warp_row, call.window);

    SplitWalk<W, kSlice> splits(shared, k, v, call, place, packed, first_row, first_column,
                                aligned.keys);

    Fragment query[W / 16];
    load_rows<W>(query, q, LaneRows(packed, warp_row), C, aligned.pairs);
    float m[2] = {-INFINITY, -INFINITY}, l[2] = {}, sum[kSlice / 8][4] = {};

    for (int j = splits.begin; j < splits.end; ++j) {
        const bf16* const keys = splits.take(j);
        if (!rows.some(j * kKeyBlock, kKeyBlock)) continue;
        Split split;
        weigh_split<W>(split, query, keys, rows, j * kKeyBlock, scale);
        SplitFactors factors[2];
#pragma unroll
        for (int half = 0; half < 2; ++half)
            factors[half] =
                combine_split(m[half], l[half], split.m[half], split.l[half], ScaledExp{scale});
#pragma unroll
        for (int n = 0; n < kSlice / 8; n += kColumns) {
            float sum_j[kColumns][4] = {};
            add_product<kSlice>(sum_j, split.weight, keys + splits.kKeys + n * 8);
#pragma unroll
            for (int x = 0; x < kColumns; ++x)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    sum[n + x][e] = factors[e / 2].combine(sum[n + x][e], sum_j[x][e]);
        }
    }
    // The span is read again: registers are scarce in the loop.
    const LaneRows mine(PackedRows(call, attention_place<slices(W)>(call)), warp_row);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (!mine.stored[half]) continue;
        const float inverse = 1.f / l[half];
        bf16* const row = o + mine.head[half] * C;
#pragma unroll
        for (int n = 0; n < kSlice / 8; ++n)
            store_pair(row, first_column + n * 8 + lane % 4 * 2, sum[n][2 * half] * inverse,
                       sum[n][2 * half + 1] * inverse, C, aligned.pairs);
        if (lse && place.slice == 0 && lane % 4 == 0)
            lse[mine.head[half]] = log_sum(m[half], l[half], scale);
    }
}

// ---- decoding: few rows and many keys ----

// The tiles of one split that a warp copies for itself.
template <int W>
struct WarpTiles {
    static constexpr int kSlice = slice_width(W), kKeys = tile_size(kKeyBlock, W);
    static constexpr int kStage = kKeys + tile_size(kKeyBlock, kSlice);

    bf16 *keys, *values;
    const bf16 *k, *v;  // their key head, v from the slice's first column on
    const int64_t* blocks;
    int stride, columns, v_columns, rows_end;
    bool aligned;

    __device__ WarpTiles(bf16* stage, const bf16* the_k, const bf16* the_v,
                         const AttentionCall& call, const AttentionPlace& place, bool is_aligned)
        : keys(stage),
          values(stage + kKeys),
          k(the_k + place.g * call.C),
          v(the_v + place.g * call.C + place.slice * kSlice),
          blocks(call.blocks + place.span.block),
          stride(call.G * call.C),
          columns(call.C),
          v_columns(call.C - place.slice * kSlice),
          rows_end(place.span.first + place.span.count),
          aligned(is_aligned) {}
    // Each is one group of asynchronous copies.
    __device__ void load_keys(int j) { load<W>(keys, k, j, columns); }
    __device__ void load_values(int j) { load<kSlice>(values, v, j, v_columns); }

  private:
    template <int Width>
    __device__ void load(bf16* tile, const bf16* from, int j, int n) {
        load_tile<kKeyBlock, Width, 32>(tile, from + blocks[j] * stride, stride,
                                        rows_end - j * kKeyBlock, n, aligned, threadIdx.x % 32);
        ptx::cp_async_commit();
    }
};

// The warps of a block share 16 rows, warp w takes splits w, w + Warps, ... After every round the
// splits' sums are combined in order, each thread two neighbouring columns, and further ones, of
// one row.
__host__ __device__ constexpr int few_warps(int W) { return W <= 192 ? 4 : 2; }

template <int W>
__global__ void __launch_bounds__(few_warps(W) * 32, 1)
    forward_few(bf16* __restrict__ o, float* __restrict__ lse, const bf16* __restrict__ q,
                const bf16* __restrict__ k, const bf16* __restrict__ v, AttentionCall call,
                float scale, Aligned aligned) {
    using Tiles = WarpTiles<W>;
    constexpr int kSlice = slice_width(W), kWarps = few_warps(W);
    constexpr int kSumStride = kSlice + kPad;
    constexpr int kRowThreads = kWarps * 32 / kWarpRows, kPairs = kSlice / 2 / kRowThreads;
    // A warp's sums take its values' place.
    static_assert(kWarpRows * kSumStride * sizeof(float) <=
                  tile_size(kKeyBlock, kSlice) * sizeof(bf16));
    struct Partial {
        float m[kWarpRows], l[kWarpRows];
    };
    using Partials = Partial[kWarps];
    SHARED(Partials, partials);
    DYNAMIC_SHARED(bf16, shared);
    const AttentionPlace place = attention_place<slices(W)>(call);
    const PackedRows packed(call, place);
    const int first_row = place.tile * kWarpRows;
    if (first_row >= packed.count()) return;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int C = call.C, first_column = place.slice * kSlice;
    const SplitRange splits(packed, first_row, kWarpRows, call.window);
    const WarpRows rows(packed, first_row, call.window);

    Tiles tiles(shared + warp * Tiles::kStage, k, v, call, place, aligned.keys);
    if (splits.begin + warp < splits.end) {
        tiles.load_keys(splits.begin + warp);
        tiles.load_values(splits.begin + warp);
    }
    Fragment query[W / 16];
    load_rows<W>(query, q, LaneRows(packed, first_row), C, aligned.pairs);
    // What this thread combines.
    const int my_row = threadIdx.x / kRowThreads, my_pair = threadIdx.x % kRowThreads;
    float m = -INFINITY, l = 0, sum[kPairs][2] = {};

    for (int round = splits.begin; round < splits.end; round += kWarps) {
        const int j = round + warp;
        const bool more = j + kWarps < splits.end;
        if (j < splits.end) {
            ptx::cp_async_wait<1>();  // all but the values
            __syncwarp();
            Split split;
            weigh_split<W>(split, query, tiles.keys, rows, j * kKeyBlock, scale);
            __syncwarp();
            if (more) {
                tiles.load_keys(j + kWarps);
                ptx::cp_async_wait<1>();  // all but those keys
            } else {
                ptx::cp_async_wait<0>();
            }
            __syncwarp();
            float sum_j[kSlice / 8][4] = {};
            add_product<kSlice>(sum_j, split.weight, tiles.values);
            __syncwarp();
            float* const sums = reinterpret_cast<float*>(tiles.values);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int r = lane / 4 + 8 * half;
#pragma unroll
                for (int n = 0; n < kSlice / 8; ++n)
                    *reinterpret_cast<float2*>(sums + r * kSumStride + n * 8 + lane % 4 * 2) = {
                        sum_j[n][2 * half], sum_j[n][2 * half + 1]};
                if (lane % 4 == 0) {
                    partials[warp].m[r] = split.m[half];
                    partials[warp].l[r] = split.l[half];
                }
            }
        }
        __syncthreads();
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            if (round + w >= splits.end) break;
            const SplitFactors factors =
                combine_split(m, l, partials[w].m[my_row], partials[w].l[my_row], ScaledExp{scale});
            const float* const sums =
                reinterpret_cast<const float*>(shared + w * Tiles::kStage + Tiles::kKeys) +
                my_row * kSumStride + my_pair * 2;
#pragma unroll
            for (int p = 0; p < kPairs; ++p) {
                const float2 sum_j = *reinterpret_cast<const float2*>(sums + p * kRowThreads * 2);
                sum[p][0] = factors.combine(sum[p][0], sum_j.x);
                sum[p][1] = factors.combine(sum[p][1], sum_j.y);
            }
        }
        __syncthreads();
        if (more) tiles.load_values(j + kWarps);
    }
    if (first_row + my_row >= packed.count()) return;
    const int64_t head = packed.head(first_row + my_row);
    const float inverse = 1.f / l;
#pragma unroll
    for (int p = 0; p < kPairs; ++p)
        store_pair(o + head * C, first_column + (my_pair + p * kRowThreads) * 2,
                   sum[p][0] * inverse, sum[p][1] * inverse, C, aligned.pairs);
    if (lse && place.slice == 0 && my_pair == 0) lse[head] = log_sum(m, l, scale);
}

// Where blocks of few rows would not fill the device, forward_split gives every split a block, of
// one warp, and combine_splits goes over what they leave here: o_j [C], m_j and l_j of each packed
// row, for the splits that its tile of 16 rows sees. Only what is written is read.
struct SplitSums {
    float* scratch;
    int rows, splits;  // of a key head and of a tile, at most

    __host__ __device__ static constexpr int width(int C) { return C + 2; }
    __device__ float* at(const AttentionPlace& place, int row, int split, int C) const {
        return scratch + ((int64_t(place.key_head) * rows + row) * splits + split) * width(C);
    }
};

template <int W>
__global__ void __launch_bounds__(32, 1)
    forward_split(SplitSums sums, const bf16* __restrict__ q, const bf16* __restrict__ k,
                  const bf16* __restrict__ v, AttentionCall call, float scale, Aligned aligned) {
    constexpr int kSlice = slice_width(W);
    DYNAMIC_SHARED(bf16, shared);
    const AttentionPlace place = attention_place<slices(W)>(call);
    const PackedRows packed(call, place);
    const int first_row = place.tile / sums.splits * kWarpRows, index = place.tile % sums.splits;
    if (first_row >= packed.count()) return;
    const SplitRange splits(packed, first_row, kWarpRows, call.window);
    const int j = splits.begin + index;
    if (j >= splits.end) return;
    const int lane = threadIdx.x, C = call.C, first_column = place.slice * kSlice;

    WarpTiles<W> tiles(shared, k, v, call, place, aligned.keys);
    tiles.load_keys(j);
    tiles.load_values(j);
    Fragment query[W / 16];
    load_rows<W>(query, q, LaneRows(packed, first_row), C, aligned.pairs);
    const WarpRows rows(packed, first_row, call.window);

    ptx::cp_async_wait<1>();  // all but the values
    __syncwarp();
    Split split;
    weigh_split<W>(split, query, tiles.keys, rows, j * kKeyBlock, scale);
    ptx::cp_async_wait<0>();
    __syncwarp();
    float sum_j[kSlice / 8][4] = {};
    add_product<kSlice>(sum_j, split.weight, tiles.values);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = first_row + lane / 4 + 8 * half;
        if (row >= packed.count()) continue;
        float* const to = sums.at(place, row, index, C);
#pragma unroll
        for (int n = 0; n < kSlice / 8; ++n)
            store_pair(to, first_column + n * 8 + lane % 4 * 2, sum_j[n][2 * half],
                       sum_j[n][2 * half + 1], C, true);
        if (place.slice == 0 && lane % 4 == 0)
            *reinterpret_cast<float2*>(to + C) = {split.m[half], split.l[half]};
    }
}

// A block for each packed row, a thread for two columns. m is a maximum, so each lane of a warp
// finds the factors of one split in 32; what remains in order is one multiply-add a split.
__global__ void __launch_bounds__(kMaxHeadDim / 2, 1)
    combine_splits(bf16* __restrict__ o, float* __restrict__ lse, SplitSums sums,
                   AttentionCall call, float scale, bool aligned) {
    constexpr int kWarp = 32;
    const AttentionPlace place = attention_place<1>(call);
    const PackedRows packed(call, place);
    const int row = place.tile, C = call.C, column = threadIdx.x * 2, lane = threadIdx.x % kWarp;
    if (row >= packed.count()) return;
    const SplitRange range(packed, row / kWarpRows * kWarpRows, kWarpRows, call.window);
    const int splits = range.end - range.begin;
    const auto pair = [&](int split, int c) {
        return *reinterpret_cast<const float2*>(sums.at(place, row, split, C) + c);
    };

    float m = -INFINITY, l = 0, sum[2] = {};
    for (int first = 0; first < splits; first += kWarp) {
        float2 sum_j[kWarp];  // all on their way at once; zeros past the last split
#pragma unroll
        for (int s = 0; s < kWarp; ++s)
            sum_j[s] = first + s < splits && column < C ? pair(first + s, column) : float2{0, 0};
        const float2 mine = first + lane < splits ? pair(first + lane, C) : float2{-INFINITY, 0};
        float m_new = std::fmax(m, mine.x);  // of all splits up to the lane's
        for (int distance = 1; distance < kWarp; distance *= 2)
            m_new = std::fmax(m_new, __shfl_up_sync(0xffffffffu, m_new, unsigned(distance)));
        const float m_before = __shfl_up_sync(0xffffffffu, m_new, 1);
        const SplitFactors my_factors =
            split_factors(lane == 0 ? m : m_before, m_new, mine.x, ScaledExp{scale});
        m = __shfl_sync(0xffffffffu, m_new, kWarp - 1);
#pragma unroll
        for (int s = 0; s < kWarp; ++s) {
            const SplitFactors factors{__shfl_sync(0xffffffffu, my_factors.old_sum, s),
                                       __shfl_sync(0xffffffffu, my_factors.new_sum, s)};
            l = factors.combine(l, __shfl_sync(0xffffffffu, mine.y, s));
            sum[0] = factors.combine(sum[0], sum_j[s].x);
            sum[1] = factors.combine(sum[1], sum_j[s].y);
        }
    }
    const int64_t head = packed.head(row);
    const float inverse = 1.f / l;
    store_pair(o + head * C, column, sum[0] * inverse, sum[1] * inverse, C, aligned);
    if (lse && column == 0) lse[head] = log_sum(m, l, scale);
}

// ---- backward ----

// dq for 128 rows, 32 keys at a time in ascending order:
//   ds[t,s] = p[t,s]*(dout[t].v[s] - delta[t])      dq[t] = scale * sum_s ds[t,s]*k[s]
template <int W>
__global__ void __launch_bounds__(kTileWarps * 32, 1)
    dq_tile(bf16* __restrict__ dq, const float* __restrict__ delta, const bf16* __restrict__ dout,
            const bf16* __restrict__ q, const bf16* __restrict__ k, const bf16* __restrict__ v,
            const float* __restrict__ lse, AttentionCall call, float scale, Aligned aligned) {
    constexpr int kSlice = slice_width(W), kRows = kTileWarps * kWarpRows;
    constexpr int N = kRowStep / 8;
    DYNAMIC_SHARED(bf16, shared);
    const AttentionPlace place = attention_place<slices(W)>(call);
    const PackedRows packed(call, place);
    const int first_row = (place.tiles - 1 - place.tile) * kRows;
    if (first_row >= packed.count()) return;
    const int C = call.C, first_column = place.slice * kSlice;
    const int warp_row = first_row + threadIdx.x / 32 * kWarpRows;
    const WarpRows rows(packed, warp_row, call.window);
    const LaneRows mine(packed, warp_row);

    SplitWalk<W, W> splits(shared, k, v, call, place, packed, first_row, 0, aligned.keys);

    Fragment query[W / 16], grad[W / 16];
    load_rows<W>(query, q, mine, C, aligned.pairs);
    load_rows<W>(grad, dout, mine, C, aligned.pairs);
    const float log2_sum[2] = {lse[mine.head[0]] * kLog2e, lse[mine.head[1]] * kLog2e};
    const float row_delta[2] = {delta[mine.head[0]], delta[mine.head[1]]};
    float sum[kSlice / 8][4] = {};

    for (int j = splits.begin; j < splits.end; ++j) {
        const bf16* const tile = splits.take(j);
#pragma unroll 1
        for (int s = 0; s < kKeyBlock; s += kRowStep) {
            const int base = j * kKeyBlock + s;
            if (!rows.some(base, kRowStep)) continue;
            const bf16* const keys = tile + s * (W + kPad);
            float ds[N][4], dp[N][4];
            dot_rows<W>(
                ds, [&](int i) { return query[i]; }, keys);
            dot_rows<W>(
                dp, [&](int i) { return grad[i]; }, keys + splits.kKeys);
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    ds[n][e] = std::fma(ds[n][e], scale * kLog2e, -log2_sum[e / 2]);
            mask(ds, rows, base);
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    ds[n][e] = ptx::ex2(ds[n][e]) * (dp[n][e] - row_delta[e / 2]);
            Fragment weight[N / 2];
#pragma unroll
            for (int i = 0; i < N / 2; ++i) weight[i] = left_operand(ds[2 * i], ds[2 * i + 1]);
            add_product<W>(sum, weight, keys + first_column);
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (!mine.stored[half]) continue;
        bf16* const row = dq + mine.head[half] * C;
#pragma unroll
        for (int n = 0; n < kSlice / 8; ++n)
            store_pair(row, first_column + n * 8 + threadIdx.x % 4 * 2, sum[n][2 * half] * scale,
                       sum[n][2 * half + 1] * scale, C, aligned.pairs);
    }
}

// dk and dv for the 64 keys of a block of the store: head by head of the group, 32 positions at a
// time in ascending order. Scores are transposed, [key, row], which makes them left operands.
//   dv[s] = sum_t p[t,s]*dout[t]      dk[s] = scale * sum_t ds[t,s]*q[t]
template <int W>
__global__ void __launch_bounds__(kKeyWarps * 32, 2)
    dkdv_tile(float* __restrict__ dk, float* __restrict__ dv, const float* __restrict__ delta,
              const bf16* __restrict__ dout, const bf16* __restrict__ q, const bf16* __restrict__ k,
              const bf16* __restrict__ v, const float* __restrict__ lse, AttentionCall call,
              float scale, Aligned aligned) {
    constexpr int kSlice = slice_width(W), kThreads = kKeyWarps * 32;
    constexpr int kTile = tile_size(kKeyBlock, W), kStep = tile_size(kRowStep, W);
    constexpr int N = kRowStep / 8;
    static_assert(kKeyWarps * kWarpRows == kKeyBlock && kRowStep <= kThreads);
    struct RowValues {
        float log2_sum[kRowStep], delta[kRowStep];
    };
    using Stages = RowValues[2];
    SHARED(Stages, row_values);
    DYNAMIC_SHARED(bf16, shared);
    bf16 *const keys = shared, *const values = keys + kTile, *const steps = values + kTile;
    const AttentionPlace place = attention_place<slices(W)>(call);
    const Span& span = place.span;
    const int base = place.tile * kKeyBlock, end = span.first + span.count;
    if (base >= end) return;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int C = call.C, group = call.H / call.G, first_column = place.slice * kSlice;
    const int count = min(end - base, kKeyBlock);

    const int stride = call.G * C;
    const int64_t at = (call.blocks[span.block + place.tile] * call.G + place.g) * C;

    // The positions whose rows see some of the keys.
    const int t_begin = max(span.first, base), t_end = rows_end(span, base + count, call.window);
    // Element of position t, head h of the group in [N,H].
    const auto head = [&](int h, int t) {
        return (span.row + (t - span.first)) * call.H + place.g * group + h;
    };
    const auto load = [&](int stage, int h, int t) {
        bf16* const to = steps + stage * 2 * kStep;
        const int64_t row = head(h, t) * C;
        const int row_stride = call.H * C;
        load_tile<kRowStep, W, kThreads>(to, q + row, row_stride, t_end - t, C, aligned.rows,
                                         threadIdx.x);
        load_tile<kRowStep, W, kThreads>(to + kStep, dout + row, row_stride, t_end - t, C,
                                         aligned.rows, threadIdx.x);
        ptx::cp_async_commit();
    };
    // One thread a row: these are read a step ahead too, into registers.
    float my_log2_sum = 0, my_delta = 0;
    const auto read_row = [&](int h, int t) {
        const bool exists = threadIdx.x < kRowStep && t + int(threadIdx.x) < t_end;
        my_log2_sum = exists ? lse[head(h, t + threadIdx.x)] * kLog2e : 0;
        my_delta = exists ? delta[head(h, t + threadIdx.x)] : 0;
    };
    const auto keep_row = [&](int stage) {
        if (threadIdx.x >= kRowStep) return;
        row_values[stage].log2_sum[threadIdx.x] = my_log2_sum;
        row_values[stage].delta[threadIdx.x] = my_delta;
    };
    int h = t_begin < t_end ? 0 : group, t = t_begin, stage = 0;
    if (h < group) {
        load_tile<kKeyBlock, W, kThreads>(keys, k + at, stride, count, C, aligned.keys,
                                          threadIdx.x);
        load_tile<kKeyBlock, W, kThreads>(values, v + at, stride, count, C, aligned.keys,
                                          threadIdx.x);
        load(0, h, t);
        read_row(h, t);
        keep_row(0);
    }
    const int first_key = base + warp * kWarpRows;
    const int my_key[2] = {first_key + lane / 4, first_key + lane / 4 + 8};
    float sum_k[kSlice / 8][4] = {}, sum_v[kSlice / 8][4] = {};

    while (h < group) {
        ptx::cp_async_wait<0>();
        __syncthreads();
        int next_h = h, next_t = t + kRowStep;
        if (next_t >= t_end) ++next_h, next_t = t_begin;
        if (next_h < group) {
            load(stage ^ 1, next_h, next_t);
            read_row(next_h, next_t);
        }
        const int last_t = min(t + kRowStep, t_end) - 1, last_key = first_key + kWarpRows - 1;
        if (last_t >= first_key && first_visible(t, call.window) <= last_key) {
            const bf16* const queries = steps + stage * 2 * kStep;
            const bf16* const grads = queries + kStep;
            float p[N][4], ds[N][4];
            dot_rows<W>(
                p,
                [&](int i) {
                    return left_operand<W>(keys + warp * kWarpRows * (W + kPad) + i * 16);
                },
                queries);
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    p[n][e] = std::fma(p[n][e], scale * kLog2e,
                                       -row_values[stage].log2_sum[n * 8 + lane % 4 * 2 + e % 2]);
            if (last_key > t || t + kRowStep > t_end ||
                first_visible(last_t, call.window) > first_key) {
#pragma unroll
                for (int n = 0; n < N; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const int row_t = t + n * 8 + lane % 4 * 2 + e % 2;
                        if (row_t > last_t ||
                            !visible(my_key[e / 2], first_visible(row_t, call.window), row_t))
                            p[n][e] = -INFINITY;
                    }
            }
            dot_rows<W>(
                ds,
                [&](int i) {
                    return left_operand<W>(values + warp * kWarpRows * (W + kPad) + i * 16);
                },
                grads);
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int r = n * 8 + lane % 4 * 2 + e % 2;
                    p[n][e] = ptx::ex2(p[n][e]);
                    ds[n][e] = p[n][e] * (ds[n][e] - row_values[stage].delta[r]);
                }
            Fragment weight[N / 2], dscore[N / 2];
#pragma unroll
            for (int i = 0; i < N / 2; ++i) {
                weight[i] = left_operand(p[2 * i], p[2 * i + 1]);
                dscore[i] = left_operand(ds[2 * i], ds[2 * i + 1]);
            }
            add_product<W>(sum_v, weight, grads + first_column);
            add_product<W>(sum_k, dscore, queries + first_column);
        }
        stage ^= 1;
        if (next_h < group) keep_row(stage);
        h = next_h, t = next_t;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (my_key[half] >= end) continue;
        const int64_t row = at + (my_key[half] - base) * int64_t(stride);
#pragma unroll
        for (int n = 0; n < kSlice / 8; ++n) {
            const int c = first_column + n * 8 + lane % 4 * 2;
            store_pair(dk + row, c, sum_k[n][2 * half] * scale, sum_k[n][2 * half + 1] * scale, C,
                       aligned.sums);
            store_pair(dv + row, c, sum_v[n][2 * half], sum_v[n][2 * half + 1], C, aligned.sums);
        }
    }
}

// ---- launches ----

bool aligned_to(const void* p, size_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }
bool aligned_rows(const void* p, int C) { return C % 8 == 0 && aligned_to(p, 16); }

// Calls f(W) as a constant, W the smallest width that has kernels for C columns.
template <class F>
Status with_width(int C, F f) {
    if (C <= 64) return f(std::integral_constant<int, 64>());
    if (C <= 96) return f(std::integral_constant<int, 96>());
    if (C <= 128) return f(std::integral_constant<int, 128>());
    if (C <= 192) return f(std::integral_constant<int, 192>());
    return f(std::integral_constant<int, 256>());
}

// ---- which forward ----

constexpr int64_t kFewRows = 4 * kWarpRows;  // up to 4 blocks then read the same keys
constexpr int64_t kFewBlocks = 256;          // of forward_few: fewer leave multiprocessors idle
constexpr int64_t kFewSplits = 8;            // so many take forward_few no longer than two kernels
constexpr int64_t kMaxScratch = 1 << 24;     // elements

// The most splits that a tile of 16 rows sees.
int64_t most_splits(const SpanTable& table, const AttentionCall& call) {
    const int64_t all = ceil_div(table.max_end, kKeyBlock);
    if (call.window == 0) return all;
    const int64_t positions = int64_t(call.window) + std::min<int>(table.max_count, kWarpRows) - 1;
    return std::min(all, ceil_div(positions - 1, kKeyBlock) + 1);
}

}  // namespace

int64_t attention_scratch_mma(const SpanTable& table, const AttentionCall& call) {
    const int64_t rows = packed_rows(table, call.H, call.G), splits = most_splits(table, call);
    const int64_t key_heads = int64_t(call.count) * call.G;
    if (rows > kFewRows || splits <= kFewSplits ||
        key_heads * ceil_div(rows, kWarpRows) >= kFewBlocks)
        return 0;
    const int64_t size = key_heads * rows * splits * SplitSums::width(call.C);
    return size <= kMaxScratch ? size : 0;
}

Status attention_forward_mma(bf16* o, float* lse, const bf16* q, const bf16* k, const bf16* v,
                             const SpanTable& table, const AttentionCall& call, float scale,
                             float* scratch, Stream s) {
    const int C = call.C;
    const Aligned aligned{.keys = aligned_rows(k, C) && aligned_rows(v, C),
                          .pairs = aligned_to(q, 4) && aligned_to(o, 4)};
    const int64_t rows = packed_rows(table, call.H, call.G);
    const bool few = rows <= kFewRows, split = scratch && attention_scratch_mma(table, call) > 0;
    return with_width(C, [&](auto width) -> Status {
        constexpr int W = width;
        constexpr size_t kStage = WarpTiles<W>::kStage * sizeof(bf16);
        if (split) {
            const SplitSums sums{scratch, int(rows), int(most_splits(table, call))};
            const int64_t tiles = ceil_div(rows, kWarpRows) * sums.splits;
            if (Status status = launch(forward_split<W>,
                                       {.grid = dim3(attention_blocks(tiles, slices(W), call)),
                                        .block = dim3(32),
                                        .shared_bytes = kStage},
                                       s, sums, q, k, v, call, scale * kLog2e, aligned);
                !status.ok())
                return status;
            return launch(combine_splits,
                          {.grid = dim3(attention_blocks(rows, 1, call)),
                           .block = dim3(unsigned(ceil_div(C, 64)) * 32)},
                          s, o, lse, sums, call, scale * kLog2e, aligned.pairs);
        }
        const int tile = few ? kWarpRows : kTileWarps * kWarpRows;
        const int stages = few ? few_warps(W) : 2, warps = few ? few_warps(W) : kTileWarps;
        const unsigned blocks = attention_blocks(ceil_div(rows, tile), slices(W), call);
        return launch(few ? forward_few<W> : forward_tile<W>,
                      {.grid = dim3(blocks),
                       .block = dim3(unsigned(warps) * 32),
                       .shared_bytes = size_t(stages) * kStage},
                      s, o, lse, q, k, v, call, scale * kLog2e, aligned);
    });
}

Status attention_backward_mma(bf16* dq, float* dk, float* dv, const float* delta, const bf16* dout,
                              const bf16* q, const bf16* k, const bf16* v, const float* lse,
                              const SpanTable& table, const AttentionCall& call, float scale,
                              Stream s) {
    const int C = call.C;
    const Aligned aligned{.keys = aligned_rows(k, C) && aligned_rows(v, C),
                          .rows = aligned_rows(q, C) && aligned_rows(dout, C),
                          .pairs = aligned_to(q, 4) && aligned_to(dout, 4) && aligned_to(dq, 4),
                          .sums = aligned_to(dk, 8) && aligned_to(dv, 8)};
    return with_width(C, [&](auto width) -> Status {
        constexpr int W = width;
        constexpr size_t kTile = tile_size(kKeyBlock, W) * sizeof(bf16);
        constexpr size_t kStep = tile_size(kRowStep, W) * sizeof(bf16);
        const unsigned row_blocks = attention_blocks(
            ceil_div(packed_rows(table, call.H, call.G), kTileWarps * kWarpRows), slices(W), call);
        const unsigned key_blocks =
            attention_blocks(ceil_div(table.max_end, kKeyBlock), slices(W), call);
        if (Status status = launch(dkdv_tile<W>,
                                   {.grid = dim3(key_blocks),
                                    .block = dim3(kKeyWarps * 32),
                                    .shared_bytes = 2 * kTile + 4 * kStep},
                                   s, dk, dv, delta, dout, q, k, v, lse, call, scale, aligned);
            !status.ok())
            return status;
        return launch(
            dq_tile<W>,
            {.grid = dim3(row_blocks), .block = dim3(kTileWarps * 32), .shared_bytes = 4 * kTile},
            s, dq, delta, dout, q, k, v, lse, call, scale, aligned);
    });
}

}  // namespace fbt::kernels::cuda
