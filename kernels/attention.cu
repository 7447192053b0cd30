// Attention on the GPU: the f32 kernels, in plain fused multiply-adds, and the choice between them
// and the bf16 ones of attention_mma.cu.
//
// A block of 8 x 16 threads works on 32 rows (packed: the query heads of one key head) or, for dk
// and dv, on 32 keys. Thread (y, x) owns rows 4y .. 4y+3 and, of tiles, every 16th row or column
// from x. The row rule: a score is one chain over the columns, a sum over keys one chain over
// ascending positions in which unseen keys have weight 0, l_j a tree over the split's 64 keys.
#include <cmath>

#include "kernels/attention_tile.cuh"

namespace fbt::kernels::cuda {
namespace {

constexpr int kSide = 16;
constexpr int kOwn = 4;    // a thread's rows
constexpr int kRows = 32;  // a block's
constexpr int kThreads = kRows / kOwn * kSide;
constexpr int kPanel = 64;                // columns are padded to whole panels
constexpr int kWeightStride = kRows + 1;  // of weights [32,32]

// Between rows of a tile: odd, so that a column's 32 elements lie in different banks.
__host__ __device__ constexpr int tile_stride(int panels) { return panels * kPanel + 1; }

// Copies n rows of C floats to a tile, zeros up to Rows rows and whole panels; from(r) is row r.
template <int Rows, int Panels, class From>
__device__ void load_tile(float* tile, int n, int C, From from) {
    const int lane = threadIdx.x % 32;
    for (int r = threadIdx.x / 32; r < Rows; r += kThreads / 32) {
        const float* const row = r < n ? from(r) : nullptr;
        for (int c = lane; c < Panels * kPanel; c += 32)
            tile[r * tile_stride(Panels) + c] = row && c < C ? row[c] : 0.f;
    }
}

// out[a][b] = sum_c left[4y + a, c] right[x + 16b, c]
template <int Panels, int N>
__device__ void dot_rows(float (&out)[kOwn][N], const float* left, const float* right, int C) {
    constexpr int kStride = tile_stride(Panels);
    left += threadIdx.x / kSide * kOwn * kStride;
    right += threadIdx.x % kSide * kStride;
    for (int a = 0; a < kOwn; ++a)
        for (int b = 0; b < N; ++b) out[a][b] = 0;
    for (int c = 0; c < C; ++c) {
        float r[N];
        for (int b = 0; b < N; ++b) r[b] = right[b * kSide * kStride + c];
        for (int a = 0; a < kOwn; ++a)
            for (int b = 0; b < N; ++b)
                out[a][b] = std::fma(left[a * kStride + c], r[b], out[a][b]);
    }
}

// out[a][b] += sum_k weights[4y + a, k] tile[k, x + 16b] for K terms and, from `tile` on, N columns
template <int Panels, int K, int Stride, int N>
__device__ void add_product(float (&out)[kOwn][N], const float* weights, const float* tile) {
    weights += threadIdx.x / kSide * kOwn * Stride;
    tile += threadIdx.x % kSide;
#pragma unroll 4
    for (int k = 0; k < K; ++k) {
        float column[N];
        for (int b = 0; b < N; ++b) column[b] = tile[k * tile_stride(Panels) + b * kSide];
        for (int a = 0; a < kOwn; ++a)
            for (int b = 0; b < N; ++b)
                out[a][b] = std::fma(weights[a * Stride + k], column[b], out[a][b]);
    }
}

// Over the 16 threads of one y.
template <class F>
__device__ float side_reduce(float v, F f) {
    for (int distance = kSide / 2; distance > 0; distance /= 2)
        v = f(v, __shfl_xor_sync(0xffffffffu, v, distance));
    return v;
}

// The rows of one key head in the key store from `position` on, within its block of 64.
struct KeyRows {
    const float* first;
    int64_t stride;
    __device__ KeyRows(const float* store, const AttentionCall& call, const AttentionPlace& place,
                       int position)
        : first(store + key_row(call, place, position)), stride(int64_t(call.G) * call.C) {}
    __device__ const float* operator()(int s) const { return first + s * stride; }
    // Its first element's offset.
    __device__ static int64_t key_row(const AttentionCall& call, const AttentionPlace& place,
                                      int position) {
        const int64_t row =
            call.blocks[place.span.block + position / kKeyBlock] + position % kKeyBlock;
        return (row * call.G + place.g) * call.C;
    }
};

// A block walks the splits for 32 rows.
template <int Panels>
__global__ void __launch_bounds__(kThreads, 1)
    forward_rows(float* __restrict__ o, float* __restrict__ lse, const float* __restrict__ q,
                 const float* __restrict__ k, const float* __restrict__ v, AttentionCall call,
                 float scale) {
    constexpr int kStride = tile_stride(Panels), kKeys = kKeyBlock / kSide;
    constexpr int kColumns = kPanel / kSide, kWeights = kKeyBlock + 1;
    DYNAMIC_SHARED(float, shared);
    float *const queries = shared, *const tile = queries + kRows * kStride,
                 *const weights = tile + kKeyBlock * kStride;  // [32,64], rows kWeights apart
    const AttentionPlace place = attention_place<1>(call);
    const PackedRows rows(call, place);
    const int first_row = place.tile * kRows, C = call.C;
    if (first_row >= rows.count()) return;
    const int n = min(rows.count() - first_row, kRows);
    const int end = place.span.first + place.span.count;
    const int x = threadIdx.x % kSide, y = threadIdx.x / kSide;
    load_tile<kRows, Panels>(queries, n, C,
                             [&](int r) { return q + rows.head(first_row + r) * C; });

    int t[kOwn], lo[kOwn];  // rows past the last copy it and are not stored
    float m[kOwn], l[kOwn] = {}, sum[Panels][kOwn][kColumns] = {};
    for (int a = 0; a < kOwn; ++a) {
        t[a] = rows.position(first_row + min(y * kOwn + a, n - 1));
        lo[a] = first_visible(t[a], call.window);
        m[a] = -INFINITY;
    }
    const int begin = first_visible(rows.position(first_row), call.window) / kKeyBlock * kKeyBlock;
    const int last_t = rows.position(first_row + n - 1);
    for (int base = begin; base <= last_t; base += kKeyBlock) {
        __syncthreads();  // everyone is done with the values before, and the weights
        load_tile<kKeyBlock, Panels>(tile, end - base, C, KeyRows(k, call, place, base));
        __syncthreads();
        float score[kOwn][kKeys];
        SplitFactors factors[kOwn];
        dot_rows<Panels>(score, queries, tile, C);
        for (int a = 0; a < kOwn; ++a) {
            float m_j = -INFINITY, l_j = 0;
            for (int b = 0; b < kKeys; ++b) {
                const bool seen = visible(base + x + b * kSide, lo[a], t[a]);
                score[a][b] = seen ? scale * score[a][b] : -INFINITY;
                m_j = std::fmax(m_j, score[a][b]);
            }
            m_j = side_reduce(m_j, [](float p, float r) { return std::fmax(p, r); });
            const float shift = m_j == -INFINITY ? 0.f : m_j;  // weights of 0, not NaN
            for (int b = 0; b < kKeys; ++b) {
                score[a][b] = std::exp(score[a][b] - shift);
                l_j += score[a][b];
                weights[(y * kOwn + a) * kWeights + x + b * kSide] = score[a][b];
            }
            l_j = side_reduce(l_j, [](float p, float r) { return p + r; });
            factors[a] = combine_split(m[a], l[a], m_j, l_j, [](float p) { return std::exp(p); });
        }
        __syncthreads();  // everyone is done with the keys
        load_tile<kKeyBlock, Panels>(tile, end - base, C, KeyRows(v, call, place, base));
        __syncthreads();
#pragma unroll
        for (int p = 0; p < Panels; ++p) {
            float sum_j[kOwn][kColumns] = {};
            add_product<Panels, kKeyBlock, kWeights>(sum_j, weights, tile + p * kPanel);
            for (int a = 0; a < kOwn; ++a)
                for (int b = 0; b < kColumns; ++b)
                    sum[p][a][b] = factors[a].combine(sum[p][a][b], sum_j[a][b]);
        }
    }
    for (int a = 0; a < kOwn; ++a) {
        if (y * kOwn + a >= n) continue;
        const int64_t head = rows.head(first_row + y * kOwn + a);
#pragma unroll
        for (int p = 0; p < Panels; ++p)
            for (int b = 0; b < kColumns; ++b) {
                const int c = p * kPanel + x + b * kSide;
                if (c < C) o[head * C + c] = sum[p][a][b] / l[a];
            }
        if (lse && x == 0) lse[head] = m[a] + std::log(l[a]);
    }
}

// ---- backward ----

// delta[i] = sum_c dout[i,c]*o[i,c], a warp for each of the N*H rows
template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    delta_rows(float* __restrict__ delta, const T* __restrict__ dout, const T* __restrict__ o,
               int64_t rows, int C) {
    constexpr int kWarps = kThreads / 32;
    const int lane = threadIdx.x % 32;
    for (int64_t i = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32; i < rows;
         i += int64_t(gridDim.x) * kWarps) {
        float sum = 0;
        for (int c = lane; c < C; c += 32)
            sum = std::fma(float(dout[i * C + c]), float(o[i * C + c]), sum);
        for (int distance = 16; distance > 0; distance /= 2)
            sum += __shfl_xor_sync(0xffffffffu, sum, distance);
        if (lane == 0) delta[i] = sum;
    }
}

// Shared memory of the two kernels below: the block's own rows of two arrays, 32 others of two
// more, and weights [own,other].
template <int Panels>
struct BackwardTiles {
    float own[2][kRows * tile_stride(Panels)], other[2][kRows * tile_stride(Panels)];
    float p[kRows * kWeightStride], ds[kRows * kWeightStride];
};

// sum += weights [own,other] times a tile of others, panel by panel.
template <int Panels>
__device__ void add_panels(float (&sum)[Panels][kOwn][kPanel / kSide], const float* weights,
                           const float* others) {
#pragma unroll
    for (int p = 0; p < Panels; ++p)
        add_product<Panels, kRows, kWeightStride>(sum[p], weights, others + p * kPanel);
}

// to[c] = factor * sum of row a
template <int Panels>
__device__ void store_row(float* to, const float (&sum)[Panels][kOwn][kPanel / kSide], int a,
                          float factor, int C) {
#pragma unroll
    for (int p = 0; p < Panels; ++p)
        for (int b = 0; b < kPanel / kSide; ++b) {
            const int c = p * kPanel + threadIdx.x % kSide + b * kSide;
            if (c < C) to[c] = factor * sum[p][a][b];
        }
}

// dq for 32 rows, 32 keys at a time in ascending order:
//   ds[t,s] = p[t,s]*(dout[t].v[s] - delta[t])      dq[t] = scale * sum_s ds[t,s]*k[s]
template <int Panels>
__global__ void __launch_bounds__(kThreads, 1)
    dq_rows(float* __restrict__ dq, const float* __restrict__ delta, const float* __restrict__ dout,
            const float* __restrict__ q, const float* __restrict__ k, const float* __restrict__ v,
            const float* __restrict__ lse, AttentionCall call, float scale) {
    DYNAMIC_SHARED(BackwardTiles<Panels>, tiles);
    const AttentionPlace place = attention_place<1>(call);
    const PackedRows rows(call, place);
    const int first_row = place.tile * kRows, C = call.C;
    if (first_row >= rows.count()) return;
    const int n = min(rows.count() - first_row, kRows);
    const int end = place.span.first + place.span.count;
    const int x = threadIdx.x % kSide, y = threadIdx.x / kSide;
    const auto row_of = [&](const float* from) {
        return [&rows, from, first_row, C](int r) { return from + rows.head(first_row + r) * C; };
    };
    load_tile<kRows, Panels>(tiles->own[0], n, C, row_of(q));
    load_tile<kRows, Panels>(tiles->own[1], n, C, row_of(dout));

    int t[kOwn], lo[kOwn];
    float log_sum[kOwn], row_delta[kOwn], sum[Panels][kOwn][kPanel / kSide] = {};
    for (int a = 0; a < kOwn; ++a) {
        const int i = first_row + min(y * kOwn + a, n - 1);
        t[a] = rows.position(i);
        lo[a] = first_visible(t[a], call.window);
        log_sum[a] = lse[rows.head(i)];
        row_delta[a] = delta[rows.head(i)];
    }
    const int begin = first_visible(rows.position(first_row), call.window) / kRows * kRows;
    const int last_t = rows.position(first_row + n - 1);
    for (int base = begin; base <= last_t; base += kRows) {
        __syncthreads();
        load_tile<kRows, Panels>(tiles->other[0], end - base, C, KeyRows(k, call, place, base));
        load_tile<kRows, Panels>(tiles->other[1], end - base, C, KeyRows(v, call, place, base));
        __syncthreads();
        float score[kOwn][kRows / kSide], dp[kOwn][kRows / kSide];
        dot_rows<Panels>(score, tiles->own[0], tiles->other[0], C);
        dot_rows<Panels>(dp, tiles->own[1], tiles->other[1], C);
        for (int a = 0; a < kOwn; ++a)
            for (int b = 0; b < kRows / kSide; ++b) {
                const int s = x + b * kSide;
                const float p = visible(base + s, lo[a], t[a])
                                    ? std::exp(std::fma(scale, score[a][b], -log_sum[a]))
                                    : 0.f;
                tiles->ds[(y * kOwn + a) * kWeightStride + s] = p * (dp[a][b] - row_delta[a]);
            }
        __syncthreads();
        add_panels(sum, tiles->ds, tiles->other[0]);
    }
    for (int a = 0; a < kOwn; ++a)
        if (y * kOwn + a < n)
            store_row(dq + rows.head(first_row + y * kOwn + a) * C, sum, a, scale, C);
}

// dk and dv for 32 keys: head by head of the group, 32 positions at a time in ascending order.
//   dv[s] = sum_t p[t,s]*dout[t]      dk[s] = scale * sum_t ds[t,s]*q[t]
template <int Panels>
__global__ void __launch_bounds__(kThreads, 1)
    dkdv_keys(float* __restrict__ dk, float* __restrict__ dv, const float* __restrict__ delta,
              const float* __restrict__ dout, const float* __restrict__ q,
              const float* __restrict__ k, const float* __restrict__ v,
              const float* __restrict__ lse, AttentionCall call, float scale) {
    DYNAMIC_SHARED(BackwardTiles<Panels>, tiles);
    const AttentionPlace place = attention_place<1>(call);
    const Span& span = place.span;
    const int base = place.tile * kRows, end = span.first + span.count, C = call.C;
    if (base >= end) return;
    const int n = min(end - base, kRows), group = call.H / call.G;
    const int x = threadIdx.x % kSide, y = threadIdx.x / kSide;
    load_tile<kRows, Panels>(tiles->own[0], n, C, KeyRows(k, call, place, base));
    load_tile<kRows, Panels>(tiles->own[1], n, C, KeyRows(v, call, place, base));

    float sum_k[Panels][kOwn][kPanel / kSide] = {}, sum_v[Panels][kOwn][kPanel / kSide] = {};
    const int t_begin = max(span.first, base), t_end = rows_end(span, base + n, call.window);
    for (int h = place.g * group; h < (place.g + 1) * group; ++h)
        for (int first_t = t_begin; first_t < t_end; first_t += kRows) {
            const int64_t first_head = (span.row + (first_t - span.first)) * call.H + h;
            const int count = min(t_end - first_t, kRows);
            const auto row_of = [&](const float* from) {
                return [from, first_head, H = call.H, C](int r) {
                    return from + (first_head + int64_t(r) * H) * C;
                };
            };
            __syncthreads();
            load_tile<kRows, Panels>(tiles->other[0], count, C, row_of(q));
            load_tile<kRows, Panels>(tiles->other[1], count, C, row_of(dout));
            __syncthreads();
            float score[kOwn][kRows / kSide], dp[kOwn][kRows / kSide];
            dot_rows<Panels>(score, tiles->own[0], tiles->other[0], C);
            dot_rows<Panels>(dp, tiles->own[1], tiles->other[1], C);
            for (int b = 0; b < kRows / kSide; ++b) {
                const int r = x + b * kSide, t = first_t + r;
                const int64_t head = first_head + int64_t(min(r, count - 1)) * call.H;
                const float log_sum = lse[head], row_delta = delta[head];
                for (int a = 0; a < kOwn; ++a) {
                    const bool seen =
                        r < count && visible(base + y * kOwn + a, first_visible(t, call.window), t);
                    const float p = seen ? std::exp(std::fma(scale, score[a][b], -log_sum)) : 0.f;
                    tiles->p[(y * kOwn + a) * kWeightStride + r] = p;
                    tiles->ds[(y * kOwn + a) * kWeightStride + r] = p * (dp[a][b] - row_delta);
                }
            }
            __syncthreads();
            add_panels(sum_v, tiles->p, tiles->other[1]);
            add_panels(sum_k, tiles->ds, tiles->other[0]);
        }
    for (int a = 0; a < kOwn; ++a) {
        if (y * kOwn + a >= n) continue;
        const int64_t at = KeyRows::key_row(call, place, base) + int64_t(y * kOwn + a) * call.G * C;
        store_row(dk + at, sum_k, a, scale, C);
        store_row(dv + at, sum_v, a, 1.f, C);
    }
}

// ---- launches ----

// Calls f(Panels) as a constant.
template <class F>
Status with_panels(int C, F f) {
    switch ((C + kPanel - 1) / kPanel) {
        case 1:
            return f(std::integral_constant<int, 1>());
        case 2:
            return f(std::integral_constant<int, 2>());
        case 3:
            return f(std::integral_constant<int, 3>());
        default:
            return f(std::integral_constant<int, 4>());
    }
}

Status attention_forward_plain(float* o, float* lse, const float* q, const float* k, const float* v,
                               const SpanTable& table, const AttentionCall& call, float scale,
                               Stream s) {
    const unsigned blocks =
        attention_blocks(ceil_div(packed_rows(table, call.H, call.G), kRows), 1, call);
    return with_panels(call.C, [&](auto panels) {
        constexpr size_t kFloats =
            (kRows + kKeyBlock) * tile_stride(panels) + kRows * (kKeyBlock + 1);
        return launch(forward_rows<panels>,
                      {.grid = dim3(blocks),
                       .block = dim3(kThreads),
                       .shared_bytes = kFloats * sizeof(float)},
                      s, o, lse, q, k, v, call, scale);
    });
}

Status attention_backward_plain(float* dq, float* dk, float* dv, const float* delta,
                                const float* dout, const float* q, const float* k, const float* v,
                                const float* lse, const SpanTable& table, const AttentionCall& call,
                                float scale, Stream s) {
    const unsigned row_blocks =
        attention_blocks(ceil_div(packed_rows(table, call.H, call.G), kRows), 1, call);
    const unsigned key_blocks = attention_blocks(ceil_div(table.max_end, kRows), 1, call);
    return with_panels(call.C, [&](auto panels) {
        const Launch rows{.grid = dim3(row_blocks),
                          .block = dim3(kThreads),
                          .shared_bytes = sizeof(BackwardTiles<panels>)};
        Launch keys = rows;
        keys.grid = dim3(key_blocks);
        if (Status status =
                launch(dkdv_keys<panels>, keys, s, dk, dv, delta, dout, q, k, v, lse, call, scale);
            !status.ok())
            return status;
        return launch(dq_rows<panels>, rows, s, dq, delta, dout, q, k, v, lse, call, scale);
    });
}

}  // namespace

template <class T, class A>
Status attention_forward(T* o, A* lse, const T* q, const T* k, const T* v, const SpanTable& table,
                         int H, int G, int C, int window, A scale,
                         [[maybe_unused]] std::type_identity_t<A>* scratch, Stream s) {
    if (Status status = attention_arguments(H, G, C, window); !status.ok()) return status;
    if (!(scale > 0)) return {Code::bad_argument, "attention on the GPU needs scale > 0"};
    if (table.count == 0 || table.max_count == 0) return {};
    const AttentionCall call{table.spans, table.blocks, table.count, H, G, C, window};
    if (Status status = attention_size(table, call); !status.ok()) return status;
    if constexpr (std::is_same_v<T, bf16>)
        return attention_forward_mma(o, lse, q, k, v, table, call, scale, scratch, s);
    else
        return attention_forward_plain(o, lse, q, k, v, table, call, scale, s);
}

template <class T>
int64_t attention_scratch_size(const SpanTable& table, int H, int G, int C, int window) {
    if (std::is_same_v<T, float> || !attention_arguments(H, G, C, window).ok()) return 0;
    return attention_scratch_mma(table, {table.spans, table.blocks, table.count, H, G, C, window});
}

template <class T, class A>
Status attention_backward(T* dq, A* dk, A* dv, A* delta, const T* dout, const T* q, const T* k,
                          const T* v, const T* o, const A* lse, const SpanTable& table, int H,
                          int G, int C, int window, A scale, Stream s) {
    if (Status status = attention_arguments(H, G, C, window); !status.ok()) return status;
    if (!(scale > 0)) return {Code::bad_argument, "attention on the GPU needs scale > 0"};
    if (table.count == 0 || table.max_count == 0) return {};
    const AttentionCall call{table.spans, table.blocks, table.count, H, G, C, window};
    if (Status status = attention_size(table, call); !status.ok()) return status;
    const int64_t rows = table.rows * H;
    constexpr int64_t kMaxBlocks = 4096;  // enough to fill any GPU; each strides over the rows
    const unsigned blocks =
        unsigned(std::clamp<int64_t>(ceil_div(rows, kThreads / 32), 1, kMaxBlocks));
    if (Status status = launch(delta_rows<T>, {.grid = dim3(blocks), .block = dim3(kThreads)}, s,
                               delta, dout, o, rows, C);
        !status.ok())
        return status;
    if constexpr (std::is_same_v<T, bf16>)
        return attention_backward_mma(dq, dk, dv, delta, dout, q, k, v, lse, table, call, scale, s);
    else
        return attention_backward_plain(dq, dk, dv, delta, dout, q, k, v, lse, table, call, scale,
                                        s);
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

}  // namespace fbt::kernels::cuda
