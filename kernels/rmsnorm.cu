// RMSNorm on the GPU. Narrow rows take a warp each, wide ones a block. A thread takes every
// kThreads-th pack of its row, adds up its own elements in order, and the threads' sums are added
// in one fixed tree: a row's bits depend on the row and its width alone. Rows are read once where
// they fit in registers.
#include "kernels/block_reduce.cuh"
#include "kernels/rmsnorm.h"
#include "kernels/row_sums.cuh"

namespace fbt::kernels::cuda {
namespace {

constexpr int kNarrowThreads = 32, kWideThreads = 256;  // of a row
constexpr int kFewPacks = 2, kManyPacks = 8;            // that a thread can hold
constexpr int kBlockRows = 4;                           // narrow rows side by side in a block
constexpr int64_t kMaxBlocks = 4096;  // enough to fill any GPU; each block strides over the rows

// How a row is walked. kHeld packs of a thread stay in registers; with 0 every walk reads the row
// again. All ways with as many threads give the same bits.
template <int Threads, int Held, bool Whole>
struct Walk {
    static constexpr int kThreads = Threads, kHeld = Held;
    static constexpr bool kWhole = Whole;  // packs are moved whole
    static constexpr int kRows = Threads == kNarrowThreads ? kBlockRows : 1;
    static constexpr int kBlockThreads = Threads * kRows;
};

// f(k, d) for each pack of the thread: its k-th (0 where none are held), from column d on
template <class T, class W, class F>
__device__ void each_pack(int D, F f) {
    const int packs = (D - 1) / kPack<T> + 1;
    if constexpr (W::kHeld > 0) {
#pragma unroll
        for (int k = 0; k < W::kHeld; ++k) {
            const int p = k * W::kThreads + int(threadIdx.x);
            if (p < packs) f(k, p * kPack<T>);
        }
    } else {
#pragma unroll 1  // more spills registers
        for (int p = threadIdx.x; p < packs; p += W::kThreads) f(0, p * kPack<T>);
    }
}

// A thread's packs of one row.
template <class T, class W>
class RowPacks {
  public:
    __device__ RowPacks(const T* row, int D) : row_(row), D_(D) {
        if constexpr (W::kHeld > 0) each_pack<T, W>(D, [&](int k, int d) { held_[k] = read(d); });
    }
    __device__ Pack<T> at(int k, int d) const {
        if constexpr (W::kHeld > 0)
            return held_[k];
        else
            return read(d);
    }

  private:
    __device__ Pack<T> read(int d) const { return load_pack(row_ + d, D_ - d, W::kWhole); }
    const T* row_;
    int D_;
    Pack<T> held_[W::kHeld > 0 ? W::kHeld : 1];
};

// The sum of v over a row's threads, the same bits in all of them.
template <class W>
__device__ float row_sum(float v) {
    if constexpr (W::kThreads > 32)
        return block_sum<W::kThreads>(v);
    else
        return lanes_sum(v);
}

// 1/sqrt(mean_d x[d]^2 + eps). Elements beyond D are 0. The mean is a product with inv_D = 1/D, and
// rsqrtf a single instruction: divisions and roots call subroutines, around which registers spill.
template <class T, class W>
__device__ float row_rstd(const RowPacks<T, W>& x, int D, float inv_D, float eps) {
    float sum = 0;
    each_pack<T, W>(D, [&](int k, int d) {
        const Pack<T> v = x.at(k, d);
#pragma unroll
        for (int j = 0; j < kPack<T>; ++j) sum = std::fma(v[j], v[j], sum);
    });
    return rsqrtf(std::fma(row_sum<W>(sum), inv_D, eps));
}

__device__ inline int64_t row_stride() { return int64_t(gridDim.x) * blockDim.y; }

// y[n,d] = x[n,d] * rstd[n] * gain[d]. y may be x: an element is read for the last time by the
// thread that then writes it.
template <class T, class W>
__global__ void __launch_bounds__(W::kBlockThreads)
    rmsnorm_forward_row(T* y, float* __restrict__ rstd, const T* x, const float* __restrict__ gain,
                        int64_t N, int D, float inv_D, float eps) {
    for (int64_t n = block_row(); n < N; n += row_stride()) {
        T* const yn = y + n * D;
        const RowPacks<T, W> xn(x + n * D, D);
        const float r = row_rstd(xn, D, inv_D, eps);
        if (rstd && threadIdx.x == 0) rstd[n] = r;
        each_pack<T, W>(D, [&](int k, int d) {
            const Pack<T> v = xn.at(k, d);
            const Floats<T> g = load_floats<T>(gain + d, D - d, W::kWhole);
            Pack<T> out;
#pragma unroll
            for (int j = 0; j < kPack<T>; ++j) out.set(j, T(v[j] * r * g.v[j]));
            store_pack(yn + d, out, D - d, W::kWhole);
        });
    }
}

// y[n,d] = x[n,d] + alpha * branch[n,d] * rstd[n] * gain[d],  rstd of `branch`
template <class T, class W>
__global__ void __launch_bounds__(W::kBlockThreads)
    residual_rmsnorm_forward_row(T* y, float* __restrict__ rstd, const T* x, const T* branch,
                                 const float* __restrict__ gain, float alpha, int64_t N, int D,
                                 float inv_D, float eps) {
    for (int64_t n = block_row(); n < N; n += row_stride()) {
        T* const yn = y + n * D;
        const RowPacks<T, W> xn(x + n * D, D), bn(branch + n * D, D);
        const float r = row_rstd(bn, D, inv_D, eps);
        if (rstd && threadIdx.x == 0) rstd[n] = r;
        each_pack<T, W>(D, [&](int k, int d) {
            const Pack<T> v = xn.at(k, d), b = bn.at(k, d);
            const Floats<T> g = load_floats<T>(gain + d, D - d, W::kWhole);
            Pack<T> out;
#pragma unroll
            for (int j = 0; j < kPack<T>; ++j)
                out.set(j, T(std::fma(alpha, b[j] * r * g.v[j], v[j])));
            store_pack(yn + d, out, D - d, W::kWhole);
        });
    }
}

// dx = rstd*(g - xhat*mean_d(g*xhat)),  g = scale*dy*gain,  xhat = x*rstd, of one row. dx may be
// dy: an element is read for the last time by the thread that then writes it.
template <class T, class W>
__device__ void backward_row(T* dx, const RowPacks<T, W>& dy, const RowPacks<T, W>& x,
                             const float* gain, float r, float scale, int D, float inv_D) {
    float sum = 0;
    each_pack<T, W>(D, [&](int k, int d) {
        const Pack<T> up = dy.at(k, d), v = x.at(k, d);
        const Floats<T> g = load_floats<T>(gain + d, D - d, W::kWhole);
#pragma unroll
        for (int j = 0; j < kPack<T>; ++j) sum = std::fma(scale * up[j] * g.v[j], v[j] * r, sum);
    });
    const float mean = row_sum<W>(sum) * inv_D;
    each_pack<T, W>(D, [&](int k, int d) {
        const Pack<T> up = dy.at(k, d), v = x.at(k, d);
        const Floats<T> g = load_floats<T>(gain + d, D - d, W::kWhole);
        Pack<T> out;
#pragma unroll
        for (int j = 0; j < kPack<T>; ++j)
            out.set(j, T(r * std::fma(-(v[j] * r), mean, scale * up[j] * g.v[j])));
        store_pack(dx + d, out, D - d, W::kWhole);
    });
}

template <class T, class W>
__global__ void __launch_bounds__(W::kBlockThreads)
    rmsnorm_backward_row(T* dx, const T* dy, const T* __restrict__ x,
                         const float* __restrict__ gain, const float* __restrict__ rstd,
                         float scale, int64_t N, int D, float inv_D) {
    for (int64_t n = block_row(); n < N; n += row_stride()) {
        const RowPacks<T, W> dyn(dy + n * D, D), xn(x + n * D, D);
        backward_row(dx + n * D, dyn, xn, gain, rstd[n], scale, D, inv_D);
    }
}

// partial[c,d] = sum of dy[n,d]*x[n,d]*rstd[n] over chunk c's rows: the block's warps take the
// chunk's rows in turn, and their sums are added in order. Here a block has 32 packs of columns.
constexpr int kGainWarps = 8;  // one block a multiprocessor is enough: registers hold the loads

template <class T, bool Whole>
__global__ void __launch_bounds__(32 * kGainWarps, 1)
    rmsnorm_dgain_chunk(float* __restrict__ partial, const T* __restrict__ dy,
                        const T* __restrict__ x, const float* __restrict__ rstd, int64_t N, int D) {
    constexpr int kColumns = 32 * kPack<T>;
    constexpr int kGroup = 4;  // rows whose loads are under way together
    const int64_t c = blockIdx.x, end = min((c + 1) * kRowChunk, N);
    for (int64_t d0 = int64_t(blockIdx.y) * kColumns; d0 < D; d0 += int64_t(gridDim.y) * kColumns) {
        const int64_t d = d0 + threadIdx.x * kPack<T>, count = D - d;
        Floats<T> sum{};
        for (int64_t first = c * kRowChunk + threadIdx.y; first < end && count > 0;
             first += kGroup * kGainWarps) {
            Pack<T> up[kGroup], v[kGroup];
            float r[kGroup];
#pragma unroll
            for (int g = 0; g < kGroup; ++g) {
                const int64_t n = first + g * kGainWarps;
                up[g] = v[g] = {};
                r[g] = 0;
                if (n >= end) continue;
                up[g] = load_pack(dy + n * D + d, count, Whole);
                v[g] = load_pack(x + n * D + d, count, Whole);
                r[g] = rstd[n];
            }
#pragma unroll
            for (int g = 0; g < kGroup; ++g)
#pragma unroll
                for (int j = 0; j < kPack<T>; ++j)
                    sum.v[j] = std::fma(up[g][j], v[g][j] * r[g], sum.v[j]);
        }
        add_warps<kGainWarps>(
            sum, d0, D, [&](int64_t column, float total) { partial[c * D + column] = total; });
    }
}

// Both at once, with the same bits, for narrow rows that are held: dy and x are read once.
template <class T, class W>
__global__ void __launch_bounds__(32 * kGainWarps, 1)
    rmsnorm_backward_chunk(T* dx, float* __restrict__ partial, const T* dy, const T* __restrict__ x,
                           const float* __restrict__ gain, const float* __restrict__ rstd,
                           float scale, int64_t N, int D, float inv_D) {
    const int64_t c = blockIdx.x, end = min((c + 1) * kRowChunk, N);
    Floats<T> dgain[W::kHeld] = {};
    for (int64_t n = c * kRowChunk + threadIdx.y; n < end; n += kGainWarps) {
        const RowPacks<T, W> dyn(dy + n * D, D), xn(x + n * D, D);
        const float r = rstd[n];
        each_pack<T, W>(D, [&](int k, int d) {
            const Pack<T> up = dyn.at(k, d), v = xn.at(k, d);
#pragma unroll
            for (int j = 0; j < kPack<T>; ++j)
                dgain[k].v[j] = std::fma(up[j], v[j] * r, dgain[k].v[j]);
        });
        backward_row(dx + n * D, dyn, xn, gain, r, scale, D, inv_D);
    }
#pragma unroll
    for (int k = 0; k < W::kHeld; ++k)
        add_warps<kGainWarps>(
            dgain[k], int64_t(k) * 32 * kPack<T>, D,
            [&](int64_t column, float total) { partial[c * D + column] = total; });
}

// Calls run(Walk, shape) with the way to walk rows of D elements of T.
template <class T, class F>
Status with_walk(int64_t N, int D, bool whole, F run) {
    const auto call = [&]<class W>(W) {
        const int64_t blocks = std::min(ceil_div(N, W::kRows), kMaxBlocks);
        return run(W{},
                   Launch{.grid = dim3(unsigned(blocks)), .block = dim3(W::kThreads, W::kRows)});
    };
    const int64_t packs = ceil_div(D, kPack<T>);
    if (packs <= kNarrowThreads * kManyPacks) {
        if (!whole) return call(Walk<kNarrowThreads, 0, false>{});
        if (packs <= kNarrowThreads * kFewPacks)
            return call(Walk<kNarrowThreads, kFewPacks, true>{});
        return call(Walk<kNarrowThreads, kManyPacks, true>{});
    }
    if (!whole) return call(Walk<kWideThreads, 0, false>{});
    if (packs <= kWideThreads * kManyPacks) return call(Walk<kWideThreads, kManyPacks, true>{});
    return call(Walk<kWideThreads, 0, true>{});
}

}  // namespace

template <class T, class A>
Status rmsnorm_forward(T* y, A* rstd, const T* x, const A* gain, int64_t N, int D, A eps,
                       Stream s) {
    if (N < 0 || D < 1) return {Code::bad_argument, "rmsnorm_forward needs N >= 0, D >= 1"};
    if (N == 0) return {};
    return with_walk<T>(N, D, whole_packs<T>(D, y, x, gain), [&](auto walk, const Launch& shape) {
        return launch(rmsnorm_forward_row<T, decltype(walk)>, shape, s, y, rstd, x, gain, N, D,
                      1.f / float(D), eps);
    });
}

template <class T, class A>
Status residual_rmsnorm_forward(T* y, A* rstd, const T* x, const T* branch, const A* gain, A alpha,
                                int64_t N, int D, A eps, Stream s) {
    if (N < 0 || D < 1)
        return {Code::bad_argument, "residual_rmsnorm_forward needs N >= 0, D >= 1"};
    if (N == 0) return {};
    return with_walk<T>(
        N, D, whole_packs<T>(D, y, x, branch, gain), [&](auto walk, const Launch& shape) {
            return launch(residual_rmsnorm_forward_row<T, decltype(walk)>, shape, s, y, rstd, x,
                          branch, gain, alpha, N, D, 1.f / float(D), eps);
        });
}

template <class T, class A>
Status rmsnorm_backward(T* dx, A* dgain_accum, const T* dy, const T* x, const A* gain,
                        const A* rstd, A scale, int64_t N, int D, A* scratch, Stream s) {
    if (N < 0 || D < 1) return {Code::bad_argument, "rmsnorm_backward needs N >= 0, D >= 1"};
    if (N == 0) return {};
    const int64_t chunks = row_chunks(N);
    const bool whole = whole_packs<T>(D, dx, dy, x, gain);
    const Status status =
        with_walk<T>(N, D, whole, [&](auto walk, [[maybe_unused]] const Launch& shape) {
            using W = decltype(walk);
            const float inv_D = 1.f / float(D);
            if constexpr (W::kThreads == kNarrowThreads && W::kHeld > 0) {
                return launch(rmsnorm_backward_chunk<T, W>,
                              {.grid = dim3(unsigned(chunks)), .block = dim3(32, kGainWarps)}, s,
                              dx, scratch, dy, x, gain, rstd, scale, N, D, inv_D);
            } else {  // dgain first: it reads dy, which dx may overwrite
                const int64_t slices = std::min<int64_t>(ceil_div(D, 32 * kPack<T>), 65535);
                const dim3 grid{unsigned(chunks), unsigned(slices)};
                const Status done = launch(rmsnorm_dgain_chunk<T, W::kWhole>,
                                           {.grid = grid, .block = dim3(32, kGainWarps)}, s,
                                           scratch, dy, x, rstd, N, D);
                if (!done.ok()) return done;
                return launch(rmsnorm_backward_row<T, W>, shape, s, dx, dy, x, gain, rstd, scale, N,
                              D, inv_D);
            }
        });
    if (!status.ok()) return status;
    return add_chunks(dgain_accum, scratch, scale, chunks, D, s);
}

#define FBT_INSTANTIATE(T)                                                                      \
    template Status rmsnorm_forward<T>(T*, float*, const T*, const float*, int64_t, int, float, \
                                       Stream);                                                 \
    template Status residual_rmsnorm_forward<T>(T*, float*, const T*, const T*, const float*,   \
                                                float, int64_t, int, float, Stream);            \
    template Status rmsnorm_backward<T>(T*, float*, const T*, const T*, const float*,           \
                                        const float*, float, int64_t, int, float*, Stream);
FBT_INSTANTIATE(float)
FBT_INSTANTIATE(bf16)

}  // namespace fbt::kernels::cuda
