// Choosing the next token on the GPU, without sorting the row. A block takes a row.
//
// Every cut asks the same question: in the order (logit descending, id ascending), which is the
// first token where a running sum reaches a target? For top-k the sum counts tokens, for top-p and
// for the draw it adds weights exp((logit - largest)/temperature). Since the kept tokens are always
// a prefix of that one order, each question can be asked of the whole row.
//
// The answer is found by splitting the range of ranks (below) into kParts parts, adding up what is
// in each, and going on with the part where the target falls: ids of its tokens are copied to
// scratch, in order, so that each split reads a fraction of the one before. The last kThreads
// tokens are settled by comparing each with each.
//
// Weights are rounded to integers, so sums are exact in any order. That makes the result
// independent of the split, of the thread that adds, and of every other row.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "kernels/block_reduce.cuh"
#include "kernels/sampling.h"

namespace fbt::kernels::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kParts = 8;        // of a split
constexpr int kAhead = 8;        // loads in flight of a thread
constexpr int kValueSplits = 4;  // after so many splits by value, by rank: a bound on their number
constexpr int64_t kMaxBlocks = 1024;  // enough to fill any GPU; each block strides over the rows

// A token's place in the order: a greater rank comes first, and no two are equal. The upper half
// holds the logit's bits, mapped so that they compare as integers do; the lower one ~id.
using Rank = uint64_t;

// NaN counts as -infinity, and -0 as 0.
__device__ inline uint32_t key_of(float logit) {
    const float x = logit == logit ? logit + 0.f : -std::numeric_limits<float>::infinity();
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ inline Rank rank_of(float logit, int32_t id) {
    return Rank(key_of(logit)) << 32 | uint32_t(~id);
}
__device__ inline float logit_of(Rank rank) {
    const uint32_t key = uint32_t(rank >> 32);
    return std::bit_cast<float>(key >> 31 ? key & 0x7fffffffu : ~key);
}
__device__ inline int32_t id_of(Rank rank) { return int32_t(~uint32_t(rank)); }

// exp((logit - largest)/temperature) in units: the largest is `unit`, which lets a row of V of them
// be added in 62 bits. Equal logits are not subtracted, which would make NaN of two infinities.
struct Weights {
    float largest, inverse_temperature;
    uint64_t unit;
    __device__ uint64_t operator()(float logit) const {
        if (logit == largest) return unit;
        return uint64_t(std::exp((logit - largest) * inverse_temperature) * float(unit));
    }
};

// A prefix of the order: how many tokens, and the sum of their weights.
struct Prefix {
    uint64_t weight;
    int32_t count;
};

// The row's tokens, or those in a list, whose ranks are in [low, high].
struct Candidates {
    const int32_t* ids;  // ascending; null for all of the row
    int32_t size;        // of the list or row
    Rank low, high;
    __device__ bool contain(Rank rank) const { return rank >= low && rank <= high; }
};

// Part p of a split holds the ranks from bound[p] up to the bound before; sums include the parts
// before.
struct Split {
    Rank bound[kParts];
    uint64_t weight[kParts][kWarps];  // by warp, that is, by place in the list
    int32_t count[kParts][kWarps];
    Prefix prefix[kParts];
};

struct Choice {
    int32_t id;
    uint64_t weight;  // of the prefix that ends with it
};

struct Shared {
    Split first, next;
    Rank rank[kThreads];
    uint64_t weight[kThreads];
    Choice choice;
};

// Calls f(rank) for every token of the list or row; each warp takes a run of neighbours, in order,
// and its lanes call together, with rank 0, which no token has, beyond the end.
template <class T, class F>
__device__ void walk(const T* __restrict__ logits, const Candidates& from, F f) {
    const int lane = threadIdx.x % 32;
    const int64_t run = (int64_t(from.size) + kThreads - 1) / kThreads * 32;
    const int64_t begin = threadIdx.x / 32 * run, end = min(begin + run, int64_t(from.size));
    for (int64_t first = begin; first < end; first += 32 * kAhead) {
        Rank ranks[kAhead];
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
            const int64_t i = first + a * 32 + lane;
            ranks[a] = 0;
            if (i < end) {
                const int32_t id = from.ids ? from.ids[i] : int32_t(i);
                ranks[a] = rank_of(float(logits[id]), id);
            }
        }
#pragma unroll
        for (int a = 0; a < kAhead; ++a) f(ranks[a]);
    }
}

// Bounds of kParts parts: logits at equal distances below the best, or, where `span` is no
// distance, ranks at equal distances.
__device__ inline void choose_bounds(Rank (&bound)[kParts], const Candidates& of, float span) {
    const bool by_value = span > 0 && span < std::numeric_limits<float>::infinity();
    const float best = logit_of(of.high);
    const Rank step = (of.high - of.low) / kParts;
#pragma unroll
    for (int p = 0; p < kParts - 1; ++p) {
        const float fraction = float(p + 1) / kParts;
        bound[p] = by_value ? Rank(key_of(best - span * fraction)) << 32 : of.high - step * (p + 1);
    }
    bound[kParts - 1] = of.low;
}

// Adds up the parts of the candidates.
template <class T>
__device__ void measure(Split& split, const T* __restrict__ logits, const Weights& weight_of,
                        const Candidates& candidates, float span) {
    Rank bound[kParts];
    choose_bounds(bound, candidates, span);
    uint64_t weight[kParts] = {};
    int32_t count[kParts] = {};
    walk(logits, candidates, [&](Rank rank) {
        if (!candidates.contain(rank)) return;
        const uint64_t w = weight_of(logit_of(rank));
#pragma unroll
        for (int p = 0; p < kParts; ++p)
            if (rank >= bound[p]) {
                weight[p] += w;
                ++count[p];
            }
    });
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
        for (int distance = 16; distance > 0; distance /= 2) {
            weight[p] += __shfl_xor_sync(0xffffffffu, weight[p], distance);
            count[p] += __shfl_xor_sync(0xffffffffu, count[p], distance);
        }
        if (lane == 0) {
            split.bound[p] = bound[p];
            split.weight[p][warp] = weight[p];
            split.count[p][warp] = count[p];
        }
    }
    __syncthreads();
    if (threadIdx.x < kParts) {
        Prefix sum{};
        for (int w = 0; w < kWarps; ++w) {
            sum.weight += split.weight[threadIdx.x][w];
            sum.count += split.count[threadIdx.x][w];
        }
        split.prefix[threadIdx.x] = sum;
    }
    __syncthreads();
}

// The first token of the order whose prefix has `target` tokens (by_count) or weighs `target`, at
// least 1 and at most all of the row. shared.first is the split of the row.
template <class T>
__device__ Choice select(Shared& shared, int32_t* scratch, const T* __restrict__ logits, int V,
                         const Weights& weight_of, Candidates candidates, bool by_count,
                         uint64_t target) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const auto reached = [=](const Prefix& prefix) {
        return (by_count ? uint64_t(prefix.count) : prefix.weight) >= target;
    };
    Prefix before{};  // the tokens that come before all candidates
    int32_t left = V;
    int32_t* list = scratch;  // where the next list goes: the halves of scratch take turns
    for (int level = 0; level == 0 || left > kThreads; ++level) {
        Split& split = level ? shared.next : shared.first;
        if (level > 0) {
            const float span = logit_of(candidates.high) - logit_of(candidates.low);
            measure(split, logits, weight_of, candidates, level < kValueSplits ? span : 0);
        }
        const auto with_before = [&](int p) {
            return Prefix{before.weight + split.prefix[p].weight,
                          before.count + split.prefix[p].count};
        };
        int part = 0;
        while (part < kParts - 1 && !reached(with_before(part))) ++part;

        // Go on with that part, and find how many of it the warps before this one hold.
        int32_t place = 0;
        for (int w = 0; w < warp; ++w)
            place += split.count[part][w] - (part ? split.count[part - 1][w] : 0);
        left = split.prefix[part].count - (part ? split.prefix[part - 1].count : 0);
        candidates.low = split.bound[part];
        if (part > 0) {
            candidates.high = split.bound[part - 1] - 1;
            before = with_before(part - 1);
        }
        const bool last = left <= kThreads, fits = left <= V / 2;
        Rank low = candidates.high, high = candidates.low;
        walk(logits, candidates, [&](Rank rank) {
            const bool inside = candidates.contain(rank);
            const unsigned insiders = __ballot_sync(0xffffffffu, inside);
            if (inside) {
                const int32_t at = place + std::popcount(insiders & ((1u << lane) - 1));
                if (last)
                    shared.rank[at] = rank;
                else if (fits)
                    list[at] = id_of(rank);
                low = min(low, rank);
                high = max(high, rank);
            }
            place += std::popcount(insiders);
        });
        if (!last) {
            candidates.low = block_min<kThreads>(low);
            candidates.high = block_max<kThreads>(high);
            if (fits) {
                candidates.ids = list;
                candidates.size = left;
                list = list == scratch ? scratch + V / 2 : scratch;
            }
        }
    }

    // A thread for each of the last: its own prefix tells whether it is the one.
    __syncthreads();
    const int i = threadIdx.x;
    const Rank rank = i < left ? shared.rank[i] : 0;
    const uint64_t weight = i < left ? weight_of(logit_of(rank)) : 0;
    shared.weight[i] = weight;
    __syncthreads();
    if (i < left) {
        Prefix prefix = before;
        for (int j = 0; j < left; ++j)
            if (shared.rank[j] >= rank) {
                prefix.weight += shared.weight[j];
                ++prefix.count;
            }
        if (reached(prefix) && !reached({prefix.weight - weight, prefix.count - 1}))
            shared.choice = {id_of(rank), prefix.weight};
    }
    __syncthreads();
    return shared.choice;
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    sample_row(int32_t* __restrict__ tokens, const T* __restrict__ all_logits,
               const Sampling* __restrict__ settings, const float* __restrict__ uniform, int64_t N,
               int V, int32_t* scratch_ids) {
    SHARED(Shared, shared);
    for (int64_t n = blockIdx.x; n < N; n += gridDim.x) {
        const T* logits = all_logits + n * V;
        const Sampling how = settings[n];
        Candidates row{nullptr, V, ~Rank(0), 0};
        Rank low = ~Rank(0), high = 0;
        walk(logits, row, [&](Rank rank) {
            if (rank) low = min(low, rank);
            high = max(high, rank);
        });
        row.low = block_min<kThreads>(low);
        row.high = block_max<kThreads>(high);
        if (how.temperature == 0) {
            if (threadIdx.x == 0) tokens[n] = id_of(row.high);
            continue;
        }

        const float largest = logit_of(row.high);
        const Weights weight_of{largest, 1 / how.temperature,
                                uint64_t(1) << (62 - std::bit_width(unsigned(V)))};
        // Beyond 32 temperatures weights are 0, unless the row is tiny.
        const float span = largest - logit_of(row.low), most = 32 * how.temperature;
        measure(shared.first, logits, weight_of, row, span < most ? span : most);
        const auto choose = [&](bool by_count, uint64_t target) {
            return select(shared, scratch_ids + n * V, logits, V, weight_of, row, by_count, target);
        };
        uint64_t total = shared.first.prefix[kParts - 1].weight;
        if (how.top_k > 0 && how.top_k < V) total = choose(true, uint64_t(how.top_k)).weight;
        if (how.top_p < 1) {
            const double enough = std::ceil(double(how.top_p) * double(total));
            total = choose(false, max(uint64_t(1), min(uint64_t(enough), total))).weight;
        }
        // The first prefix above uniform * total.
        const uint64_t draw = uint64_t(double(uniform[n]) * double(total));
        const Choice choice = choose(false, min(draw + 1, total));
        if (threadIdx.x == 0) tokens[n] = choice.id;
    }
}

}  // namespace

template <class T>
Status sample(int32_t* tokens, const T* logits, const Sampling* settings, const float* uniform,
              int64_t N, int V, int32_t* scratch_ids, Stream s) {
    if (N < 0 || V < 1) return {Code::bad_argument, "sample needs N >= 0, V >= 1"};
    if (N == 0) return {};
    return launch(sample_row<T>,
                  {.grid = dim3(unsigned(std::min(N, kMaxBlocks))), .block = dim3(kThreads)}, s,
                  tokens, logits, settings, uniform, N, V, scratch_ids);
}

template Status sample<float>(int32_t*, const float*, const Sampling*, const float*, int64_t, int,
                              int32_t*, Stream);
template Status sample<bf16>(int32_t*, const bf16*, const Sampling*, const float*, int64_t, int,
                             int32_t*, Stream);

}  // namespace fbt::kernels::cuda
