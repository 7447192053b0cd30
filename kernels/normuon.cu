// NorMuon on the GPU: elementwise parts in packs of 16 bytes, the row step with a block a row.
#include <algorithm>
#include <cmath>

#include "kernels/block_reduce.cuh"
#include "kernels/normuon.h"
#include "kernels/vector.cuh"

namespace fbt::kernels::cuda {
namespace {

constexpr int kThreads = 128;         // of a row; a multiprocessor holds 16 such blocks
constexpr int kTotalThreads = 512;    // of the one block that adds the rows
constexpr int64_t kMaxBlocks = 4096;  // enough to fill any GPU; each block strides over the rows

dim3 row_blocks(int64_t N) { return dim3(unsigned(std::min(N, kMaxBlocks))); }

// m = beta1*m + (1-beta1)*grad*grad_scale
__global__ void __launch_bounds__(kElementThreads)
    normuon_momentum_pack(float* __restrict__ m, const float* __restrict__ grad, int64_t n,
                          float beta1, float rest1, float grad_scale, bool aligned) {
    const int64_t i = first_element<float>(), count = n - i;
    if (count <= 0) return;
    const bool whole = aligned && count >= kPack<float>;
    Pack<float> mi = load_pack(m + i, count, whole);
    const Pack<float> gi = load_pack(grad + i, count, whole);
#pragma unroll
    for (int j = 0; j < kPack<float>; ++j)
        mi.set(j, std::fma(beta1, mi[j], rest1 * (gi[j] * grad_scale)));
    store_pack(m + i, mi, count, whole);
}

// v[n] = beta2*v[n] + (1-beta2)*mean_k o[n,k]^2
// squares[n] = sum_k (o[n,k] / (sqrt(v[n]) + eps))^2
template <class T>
__global__ void __launch_bounds__(kThreads)
    normuon_moment_block(float* __restrict__ v, float* __restrict__ squares,
                         const T* __restrict__ o, int64_t N, int64_t K, float beta2, float rest2,
                         float eps, bool whole) {
    for (int64_t n = blockIdx.x; n < N; n += gridDim.x) {
        const T* row = o + n * K;
        float sum = 0;
        for (int64_t k = int64_t(threadIdx.x) * kPack<T>; k < K; k += kThreads * kPack<T>) {
            const Pack<T> x = load_pack(row + k, K - k, whole);
#pragma unroll
            for (int j = 0; j < kPack<T>; ++j) sum = std::fma(x[j], x[j], sum);  // 0 beyond
        }
        sum = block_sum<kThreads>(sum);
        if (threadIdx.x == 0) {
            const float moment = std::fma(beta2, v[n], rest2 * (sum / float(K)));
            const float divisor = std::sqrt(moment) + eps;
            v[n] = moment;
            squares[n] = sum / (divisor * divisor);
        }
    }
}

// *scale = rms / sqrt(sum_n squares[n]),  0 for 0
__global__ void __launch_bounds__(kTotalThreads)
    normuon_scale_block(float* __restrict__ scale, const float* __restrict__ squares, int64_t N,
                        float rms) {
    float sum = 0;
    for (int64_t n = threadIdx.x; n < N; n += kTotalThreads) sum += squares[n];
    sum = block_sum<kTotalThreads>(sum);
    if (threadIdx.x == 0) *scale = sum == 0 ? 0 : rms / std::sqrt(sum);
}

// w = w*keep - lr*scale/(sqrt(v[n]) + eps) * o
template <class T>
__global__ void __launch_bounds__(kThreads)
    normuon_update_block(float* __restrict__ w, const float* __restrict__ v,
                         const T* __restrict__ o, const float* __restrict__ scale, int64_t N,
                         int64_t K, float lr, float keep, float eps, bool whole) {
    for (int64_t n = blockIdx.x; n < N; n += gridDim.x) {
        const float rate = lr * *scale / (std::sqrt(v[n]) + eps);
        for (int64_t k = int64_t(threadIdx.x) * kPack<T>; k < K; k += kThreads * kPack<T>) {
            const Pack<T> x = load_pack(o + n * K + k, K - k, whole);
            Floats<T> weights = load_floats<T>(w + n * K + k, K - k, whole);
#pragma unroll
            for (int j = 0; j < kPack<T>; ++j)
                weights.v[j] = std::fma(weights.v[j], keep, -(rate * x[j]));
            store_floats(w + n * K + k, weights, K - k, whole);
        }
    }
}

// y = x / (sqrt(*square_sum) + 1e-7)
template <class T>
__global__ void __launch_bounds__(kElementThreads)
    frobenius_normalize_pack(T* __restrict__ y, const float* __restrict__ x,
                             const double* __restrict__ square_sum, int64_t n, bool aligned) {
    const int64_t i = first_element<T>(), count = n - i;
    if (count <= 0) return;
    const bool whole = aligned && count >= kPack<T>;
    const Floats<T> from = load_floats<T>(x + i, count, whole);
    const float inverse = 1 / float(std::sqrt(*square_sum) + kNormEps);
    Pack<T> to;
#pragma unroll
    for (int j = 0; j < kPack<T>; ++j) to.set(j, T(from.v[j] * inverse));
    store_pack(y + i, to, count, whole);
}

// y = alpha*x + beta*y
template <class T>
__global__ void __launch_bounds__(kElementThreads)
    axpby_pack(T* __restrict__ y, float alpha, const T* __restrict__ x, float beta, int64_t n,
               bool aligned) {
    const int64_t i = first_element<T>(), count = n - i;
    if (count <= 0) return;
    const bool whole = aligned && count >= kPack<T>;
    const Pack<T> xi = load_pack(x + i, count, whole), yi = load_pack(y + i, count, whole);
    Pack<T> sum;
#pragma unroll
    for (int j = 0; j < kPack<T>; ++j) sum.set(j, T(std::fma(alpha, xi[j], beta * yi[j])));
    store_pack(y + i, sum, count, whole);
}

// y[k,n] = x[n,k]: a block turns a square in shared memory, so that it reads and writes whole rows.
// A row of the square is four bytes longer than it needs: a column then touches every bank once.
constexpr int kTile = 32, kTileRows = 8;
template <class T>
__global__ void __launch_bounds__(kTile* kTileRows)
    transpose_tile(T* __restrict__ y, const T* __restrict__ x, int64_t N, int64_t K,
                   int64_t tiles_k) {
    using Tile = T[kTile][kTile + 4 / sizeof(T)];
    SHARED(Tile, tile);
    const int64_t first_n = blockIdx.x / tiles_k * kTile, first_k = blockIdx.x % tiles_k * kTile;
    for (int r = threadIdx.y; r < kTile; r += kTileRows) {
        const int64_t n = first_n + r, k = first_k + threadIdx.x;
        if (n < N && k < K) tile[r][threadIdx.x] = x[n * K + k];
    }
    __syncthreads();
    for (int r = threadIdx.y; r < kTile; r += kTileRows) {
        const int64_t k = first_k + r, n = first_n + threadIdx.x;
        if (n < N && k < K) y[k * N + n] = tile[threadIdx.x][r];
    }
}

}  // namespace

template <class A>
Status normuon_momentum(A* m, const A* grad, int64_t n, double beta1, double grad_scale, Stream s) {
    if (n < 0) return {Code::bad_argument, "normuon_momentum needs n >= 0"};
    if (n == 0) return {};
    return launch(normuon_momentum_pack, element_launch<float>(n), s, m, grad, n, float(beta1),
                  float(1 - beta1), float(grad_scale), aligned16(m, grad));
}

template <class T, class A>
Status normuon_step(A* w, A* v, const T* o, int64_t N, int64_t K, const NorMuonStep& h, A* scratch,
                    Stream s) {
    if (N < 0 || K < 0) return {Code::bad_argument, "normuon_step needs N, K >= 0"};
    if (N == 0 || K == 0) return {};
    const bool whole = whole_packs<T>(K, w, o);
    Status status =
        launch(normuon_moment_block<T>, {.grid = row_blocks(N), .block = dim3(kThreads)}, s, v,
               scratch, o, N, K, float(h.beta2), float(1 - h.beta2), float(h.eps), whole);
    if (!status.ok()) return status;
    status = launch(normuon_scale_block, {.grid = dim3(1), .block = dim3(kTotalThreads)}, s,
                    scratch + N, scratch, N, float(0.2 * std::sqrt(double(N) * double(K))));
    if (!status.ok()) return status;
    return launch(normuon_update_block<T>, {.grid = row_blocks(N), .block = dim3(kThreads)}, s, w,
                  v, o, scratch + N, N, K, float(h.learning_rate),
                  float(1 - h.learning_rate * h.weight_decay), float(h.eps), whole);
}

template <class T, class A>
Status frobenius_normalize(T* y, const A* x, const double* square_sum, int64_t n, Stream s) {
    if (n < 0) return {Code::bad_argument, "frobenius_normalize needs n >= 0"};
    if (n == 0) return {};
    return launch(frobenius_normalize_pack<T>, element_launch<T>(n), s, y, x, square_sum, n,
                  aligned16(y, x));
}

template <class T, class A>
Status axpby(T* y, A alpha, const T* x, A beta, int64_t n, Stream s) {
    if (n < 0) return {Code::bad_argument, "axpby needs n >= 0"};
    if (n == 0) return {};
    return launch(axpby_pack<T>, element_launch<T>(n), s, y, alpha, x, beta, n, aligned16(y, x));
}

template <class T>
Status transpose(T* y, const T* x, int64_t N, int64_t K, Stream s) {
    if (N < 0 || K < 0) return {Code::bad_argument, "transpose needs N, K >= 0"};
    if (N == 0 || K == 0) return {};
    const int64_t tiles_n = ceil_div(N, kTile), tiles_k = ceil_div(K, kTile);
    return launch(transpose_tile<T>,
                  {.grid = dim3(unsigned(tiles_n * tiles_k)), .block = dim3(kTile, kTileRows)}, s,
                  y, x, N, K, tiles_k);
}

template Status normuon_momentum<float>(float*, const float*, int64_t, double, double, Stream);
#define FBT_INSTANTIATE(T)                                                                    \
    template Status normuon_step<T>(float*, float*, const T*, int64_t, int64_t,               \
                                    const NorMuonStep&, float*, Stream);                      \
    template Status frobenius_normalize<T>(T*, const float*, const double*, int64_t, Stream); \
    template Status axpby<T>(T*, float, const T*, float, int64_t, Stream);                    \
    template Status transpose<T>(T*, const T*, int64_t, int64_t, Stream);
FBT_INSTANTIATE(float)
FBT_INSTANTIATE(bf16)

}  // namespace fbt::kernels::cuda
