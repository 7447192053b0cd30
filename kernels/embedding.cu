// Token embedding on the GPU. The gradient sorts the rows by token, so that equal tokens lie
// together in ascending n; each run of equal tokens is then summed by one warp or, where it is
// long, one block.
#include "kernels/embedding.h"
#include "kernels/row_sums.cuh"
#include "kernels/sort.h"

namespace fbt::kernels::cuda {
namespace {

// y[n,:] = T(w[tokens[n],:])
template <class T, class W>
__global__ void __launch_bounds__(kRowThreads)
    embedding_forward_row(T* __restrict__ y, const int32_t* __restrict__ tokens,
                          const W* __restrict__ w, int64_t N, int D, bool whole) {
    const int64_t n = block_row();
    if (n >= N) return;
    const W* const from = w + int64_t(tokens[n]) * D;
    for (int64_t d = threadIdx.x * kPack<T>; d < D; d += blockDim.x * kPack<T>) {
        Pack<T> out;
        if constexpr (std::is_same_v<T, W>) {
            out = load_pack(from + d, D - d, whole);
        } else {
            const Floats<T> v = load_floats<T>(from + d, D - d, whole);
#pragma unroll
            for (int j = 0; j < kPack<T>; ++j) out.set(j, T(v.v[j]));
        }
        store_pack(y + n * D + d, out, D - d, whole);
    }
}

// What is sorted: keys[n] = tokens[n], rows[n] = n
__global__ void __launch_bounds__(kElementThreads)
    embedding_backward_keys(int32_t* __restrict__ keys, int32_t* __restrict__ rows,
                            const int32_t* __restrict__ tokens, int64_t N) {
    const int64_t n = int64_t(blockIdx.x) * kElementThreads + threadIdx.x;
    if (n >= N) return;
    keys[n] = tokens[n];
    rows[n] = int32_t(n);
}

// How many of the kRowChunk sorted keys from `at` on, or with direction = -1 backwards, are `key`,
// the first ones being it. The whole warp counts.
__device__ int count_keys(const int32_t* keys, int64_t N, int64_t at, int direction, int32_t key) {
    int count = 0;
    for (int offset = 0; offset < kRowChunk; offset += 32) {
        const int64_t i = at + direction * (offset + int(threadIdx.x));
        count += std::popcount(__ballot_sync(0xffffffffu, i >= 0 && i < N && keys[i] == key));
    }
    return count;
}

// sum += dy[rows[i],d..] for the `count` entries i from `at` on, in order; kGroup loads are under
// way together.
constexpr int kGroup = 8;

template <bool Whole, class T>
__device__ void add_rows(Floats<T>& sum, const int32_t* rows, int64_t at, int count, const T* dy,
                         int D, int64_t d) {
    const auto load = [&](int i) {
        return load_pack(dy + int64_t(rows[at + i]) * D + d, D - d, Whole);
    };
    const auto add = [&](const Pack<T>& pack) {
#pragma unroll
        for (int j = 0; j < kPack<T>; ++j) sum.v[j] += pack[j];
    };
    int i = 0;
    for (; i + kGroup <= count; i += kGroup) {
        Pack<T> group[kGroup];
#pragma unroll
        for (int g = 0; g < kGroup; ++g) group[g] = load(i + g);
#pragma unroll
        for (int g = 0; g < kGroup; ++g) add(group[g]);
    }
    for (; i < count; ++i) add(load(i));
}

// dw[v,:] += the sum of a run of up to kRowChunk equal tokens v: a warp for each sorted entry, of
// which those at a run's start go on.
constexpr int kShortWarps = 8;  // (a block a multiprocessor is enough: registers hold the loads)

template <class T, bool Whole>
__global__ void __launch_bounds__(32 * kShortWarps, 1)
    embedding_backward_short_runs(float* __restrict__ dw, const T* __restrict__ dy,
                                  const int32_t* __restrict__ keys,
                                  const int32_t* __restrict__ rows, int64_t N, int D) {
    const int64_t start = int64_t(blockIdx.x) * kShortWarps + threadIdx.y;
    if (start >= N) return;
    const int32_t key = keys[start];
    if (start > 0 && keys[start - 1] == key) return;
    if (start + kRowChunk < N && keys[start + kRowChunk] == key) return;  // a long run
    const int count = count_keys(keys, N, start, 1, key);
    constexpr int kColumns = 32 * kPack<T>;
    for (int64_t d = int64_t(blockIdx.y) * kColumns + threadIdx.x * kPack<T>; d < D;
         d += int64_t(gridDim.y) * kColumns) {
        Floats<T> sum{};
        add_rows<Whole>(sum, rows, start, count, dy, D, d);
        float* const to = dw + int64_t(key) * D + d;
        Floats<T> total = load_floats<T>(to, D - d, Whole);
#pragma unroll
        for (int j = 0; j < kPack<T>; ++j) total.v[j] += sum.v[j];
        store_floats<T>(to, total, D - d, Whole);
    }
}

// The same for longer runs: the block's warps take chunks of kRowChunk entries in turn, and their
// sums are added in order. A run that long holds an entry whose index is a multiple of kRowChunk:
// there is a block for each of these, and the first one within a run takes it.
constexpr int kLongWarps = 16;

template <class T, bool Whole>
__global__ void __launch_bounds__(32 * kLongWarps, 1)
    embedding_backward_long_runs(float* __restrict__ dw, const T* __restrict__ dy,
                                 const int32_t* __restrict__ keys, const int32_t* __restrict__ rows,
                                 int64_t N, int D) {
    constexpr int kColumns = 32 * kPack<T>;
    const int64_t inner = int64_t(blockIdx.x) * kRowChunk;
    const int32_t key = keys[inner];
    if (inner > 0 && keys[inner - kRowChunk] == key) return;
    const int64_t start = inner + 1 - count_keys(keys, N, inner, -1, key);
    if (start + kRowChunk >= N || keys[start + kRowChunk] != key) return;  // a short run

    for (int64_t d0 = int64_t(blockIdx.y) * kColumns; d0 < D; d0 += int64_t(gridDim.y) * kColumns) {
        const int64_t d = d0 + threadIdx.x * kPack<T>;
        Floats<T> sum{};
        for (int64_t at = start + threadIdx.y * kRowChunk; at < N && keys[at] == key;
             at += kLongWarps * kRowChunk) {
            const int count = count_keys(keys, N, at, 1, key);
            if (d < D) add_rows<Whole>(sum, rows, at, count, dy, D, d);
        }
        add_warps<kLongWarps>(sum, d0, D, [&](int64_t column, float total) {
            dw[int64_t(key) * D + column] += total;
        });
    }
}

}  // namespace

template <class T, class W>
Status embedding_forward(T* y, const int32_t* tokens, const W* w, int64_t N, int D, Stream s) {
    if (N < 0 || D < 1) return {Code::bad_argument, "embedding_forward needs N >= 0, D >= 1"};
    if (N == 0) return {};
    return launch(embedding_forward_row<T, W>, row_launch(N, ceil_div(D, kPack<T>)), s, y, tokens,
                  w, N, D, whole_packs<T>(D, y, w));
}

template <class T, class A>
Status embedding_backward_accum(A* dw, const T* dy, const int32_t* tokens, int64_t N, int D, int V,
                                int32_t* scratch, Stream s) {
    if (N < 0 || N > INT32_MAX || D < 1 || V < 1)
        return {Code::bad_argument, "embedding_backward_accum needs N in 0..2^31-1 and D, V >= 1"};
    if (N == 0) return {};
    int32_t *const keys = scratch, *const rows = scratch + N;
    Status status = launch(
        embedding_backward_keys,
        {.grid = dim3(unsigned(ceil_div(N, kElementThreads))), .block = dim3(kElementThreads)}, s,
        keys, rows, tokens, N);
    if (!status.ok()) return status;
    status = sort_by_key(keys, rows, N, s);
    if (!status.ok()) return status;

    const unsigned slices =
        unsigned(std::min<int64_t>(ceil_div(D, 32 * kPack<T>), 65535));  // grid.y's limit
    return with_whole(whole_packs<T>(D, dw, dy), [&](auto whole) {
        constexpr bool kWhole = decltype(whole)::value;
        const Status done = launch(embedding_backward_short_runs<T, kWhole>,
                                   {.grid = dim3(unsigned(ceil_div(N, kShortWarps)), slices),
                                    .block = dim3(32, kShortWarps)},
                                   s, dw, dy, keys, rows, N, D);
        if (!done.ok() || N <= kRowChunk) return done;
        return launch(
            embedding_backward_long_runs<T, kWhole>,
            {.grid = dim3(unsigned(row_chunks(N)), slices), .block = dim3(32, kLongWarps)}, s, dw,
            dy, keys, rows, N, D);
    });
}

#define FBT_INSTANTIATE(T)                                                                        \
    template Status embedding_forward<T>(T*, const int32_t*, const float*, int64_t, int, Stream); \
    template Status embedding_backward_accum<T>(float*, const T*, const int32_t*, int64_t, int,   \
                                                int, int32_t*, Stream);
FBT_INSTANTIATE(float)
FBT_INSTANTIATE(bf16)
template Status embedding_forward<bf16>(bf16*, const int32_t*, const bf16*, int64_t, int, Stream);

}  // namespace fbt::kernels::cuda
