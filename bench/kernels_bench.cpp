// Every CPU kernel at the shapes of two models: checked against the reference, then timed.
//
// A line reads  op/model/shape/dtype/kernel/threads, median time, spread, FLOP/s or bytes/s, and
// that rate's share of the peak of as many threads, measured at the start of the same run (a
// --benchmark_filter that leaves the peaks out leaves the share out too).
#include <algorithm>
#include <array>
#include <chrono>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>

#include "bench/report.h"
#include "kernels/adamw.h"
#include "kernels/attention.h"
#include "kernels/carry.h"
#include "kernels/cpu_tile.h"
#include "kernels/cross_entropy.h"
#include "kernels/kv_store.h"
#include "kernels/matmul.h"
#include "kernels/qk_norm_rope.h"
#include "kernels/rmsnorm.h"
#include "kernels/swiglu.h"

namespace fbt::bench {
namespace {

using namespace kernels;

// What one call must do at least: the numerator of its rate.
struct Work {
    enum class Unit { flop, byte } unit;
    double amount;
};
Work flops(double amount) { return {Work::Unit::flop, amount}; }
Work floats_moved(double count) { return {Work::Unit::byte, count * sizeof(float)}; }

struct Array {
    int64_t count;
    float low = -1, high = 1;  // starts uniform on [low, high)
};

// Passes when |cpu - ref| <= absolute + relative*|ref|, ref computed in double.
struct Bound {
    double absolute, relative = 0;
};
// Relative error of n roundings to float (Higham, Accuracy and Stability, eq. 3.3).
double gamma(double n) {
    const double u = std::numeric_limits<float>::epsilon() / 2;
    return n * u / (1 - n * u);
}

template <class T>
using Call = std::function<Status(T* const* a, Stream s)>;

struct Op {
    std::string name, shape;
    Work work;
    std::vector<Array> arrays;   // what a[0], a[1], ... point to
    std::vector<Bound> outputs;  // of a[0], a[1], ...: as many as are checked
    Call<float> cpu;
    Call<double> ref;
    Call<float> cpu_prepare = {};  // once, before the first call: what the op takes as given
    Call<double> ref_prepare = {};
};

// One expression, called on both backends: in float for `cpu` and in double for `ref`.
#define FBT_CALL(...)                               \
    [=](float* const* a, Stream s) -> Status {      \
        namespace backend = fbt::kernels::cpu;      \
        using T [[maybe_unused]] = float;           \
        return __VA_ARGS__;                         \
    },                                              \
        [=](double* const* a, Stream s) -> Status { \
            namespace backend = fbt::kernels::ref;  \
            using T [[maybe_unused]] = double;      \
            return __VA_ARGS__;                     \
        }

struct Model {
    std::string name;
    int64_t N;  // rows of a training step: N/T sequences of T
    int D, H, G, C, F, V, T;
};
const Model kQuickstart{"quickstart", 2048, 128, 4, 2, 32, 352, 257, 128};
const Model kLarger{"larger", 2048, 512, 8, 4, 64, 1408, 8192, 512};
// Only checked: two splits of keys, two chunks of rows, no multiple of a vector's width.
const Model kSmall{"check", 140, 37, 4, 2, 6, 45, 41, 70};

// Logits exist for so many rows at a time (autograd/ops.h).
int64_t logit_rows(const Model& m) { return std::min<int64_t>(256, m.N); }

std::string by(std::initializer_list<int64_t> sizes) {
    std::string text;
    for (int64_t n : sizes) text += (text.empty() ? "" : "x") + std::to_string(n);
    return text;
}

template <class T>
std::shared_ptr<std::vector<T>> shuffled(int64_t n) {
    auto v = std::make_shared<std::vector<T>>(n);
    std::iota(v->begin(), v->end(), T(0));
    std::shuffle(v->begin(), v->end(), std::mt19937(1));
    return v;
}

// ---- matmul: 2 M N K FLOPs. Of one row (decoding) the weights are all there is to move.

Op matmul_forward_op(int64_t M, int64_t N, int64_t K) {
    const int64_t packed = std::max(cpu::matmul_packed_size<float>(N, K),  //
                                    ref::matmul_packed_size<double>(N, K));
    return {"matmul_forward",
            by({M, N, K}),
            M == 1 ? floats_moved(double(K + N * K + N)) : flops(2.0 * double(M * N * K)),
            {{M * N}, {M * K}, {packed}, {N * K}},  // y, x, packed, w
            {{gamma(double(K)) * double(K)}},       // K products of at most 1
            FBT_CALL(backend::matmul_forward(a[0], a[1], a[2], M, N, K, s)),
            FBT_CALL(backend::matmul_pack(a[2], a[3], N, K, false, s))};
}

Op matmul_dw_op(int64_t M, int64_t N, int64_t K) {
    return {"matmul_dw_accum",
            by({M, N, K}),
            flops(2.0 * double(M * N * K)),
            {{N * K}, {M * N}, {M * K}},               // dw, dy, x
            {{gamma(double(M + 2)) * double(M + 1)}},  // M products and what was there
            FBT_CALL(backend::matmul_dw_accum(a[0], a[1], a[2], M, N, K, s))};
}

// ---- attention: every row of a sequence of T sees itself and all before it.

double visible_pairs(const Model& m) { return double(m.N) * (m.T + 1) / 2; }

struct Spans {
    std::vector<Span> spans;
    std::vector<int64_t> blocks;
    SpanTable table;
};
std::shared_ptr<const Spans> spans_of(const Model& m) {
    auto all = std::make_shared<Spans>();
    for (int64_t row = 0; row < m.N; row += m.T) {
        all->spans.push_back({row, int64_t(all->blocks.size()), 0, m.T});
        for (int t = 0; t < m.T; t += kKeyBlock) all->blocks.push_back(row + t);
    }
    all->table = {all->spans.data(), all->blocks.data(), int32_t(all->spans.size()), m.T, m.T, m.N};
    return all;
}

// Rounding errors of attention where queries and keys are at most 1/2 and all else at most 1.
// Scores are then at most S = sqrt(C)/4, and p[t,s] <= exp(2S)/(t+1): a row's p add up to 1, and a
// column's, over the H/G heads that share a key head, to at most H/G exp(2S) (1 + log T).
struct AttentionError {
    double scale, o, lse, dq, dk, dv;
    explicit AttentionError(const Model& m) {
        const double C = m.C, T = m.T, S = std::sqrt(C) / 4, heads = m.H / m.G;
        scale = 1 / std::sqrt(C);
        const double score = gamma(C + 1) * S;
        // exp(score - max), rescaled in each split, over a sum of T such
        const double splits = T / kKeyBlock + 2;
        const double weight =
            std::expm1(2 * ((2 * score + gamma(1) * (2 * S + 3)) * splits + gamma(T + 3 * splits)));
        o = weight + gamma(T);
        lse = weight + gamma(2) * (S + std::log(T));
        // p = exp(score - lse), relative;  ds = p (dp - delta), both at most C, relative to p
        const double p = std::expm1(score + lse + gamma(3) * (1 + 2 * S + std::log(T)));
        const double ds = 2 * C * p + 2 * C * gamma(C + 2) + C * o;
        const double column = heads * std::exp(2 * S) * (1 + std::log(T)), terms = heads * T;
        dq = scale / 2 * (ds + 2 * C * gamma(T + 2));
        dk = scale / 2 * column * (ds + 2 * C * gamma(terms + 2));
        dv = column * (p + gamma(terms));
    }
};

std::string attention_shape(const Model& m) {
    return by({m.N / m.T, m.T}) + "_H" + std::to_string(m.H) + "_G" + std::to_string(m.G) + "_C" +
           std::to_string(m.C);
}

// Two products of C multiply-adds for each visible pair and head: q.k and p v.
Op attention_forward_op(const Model& m) {
    const auto spans = spans_of(m);
    const AttentionError error(m);
    const Array queries{m.N * m.H * m.C, -0.5, 0.5}, keys{m.N * m.G * m.C, -0.5, 0.5};
    const Array values{keys.count}, statistic{m.N * m.H};
    return {"attention_forward",
            attention_shape(m),
            flops(4.0 * m.C * m.H * visible_pairs(m)),
            {queries, statistic, queries, keys, values},  // o, lse, q, k, v
            {{error.o}, {error.lse}},
            FBT_CALL(backend::attention_forward(a[0], a[1], a[2], a[3], a[4], spans->table, m.H,
                                                m.G, m.C, 0, T(error.scale), nullptr, s))};
}

// Five products: q.k and dout.v again, then dv, dq and dk.
Op attention_backward_op(const Model& m) {
    const auto spans = spans_of(m);
    const AttentionError error(m);
    const Array queries{m.N * m.H * m.C, -0.5, 0.5}, keys{m.N * m.G * m.C, -0.5, 0.5};
    const Array outputs{queries.count}, values{keys.count}, statistic{m.N * m.H};
    return {"attention_backward",
            attention_shape(m),
            flops(10.0 * m.C * m.H * visible_pairs(m)),
            {queries, keys, values, statistic,                     // dq, dk, dv, delta
             outputs, queries, keys, values, outputs, statistic},  // dout, q, k, v, o, lse
            {{error.dq}, {error.dk}, {error.dv}},
            FBT_CALL(backend::attention_backward(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7],
                                                 a[8], a[9], spans->table, m.H, m.G, m.C, 0,
                                                 T(error.scale), s)),
            FBT_CALL(backend::attention_forward(a[8], a[9], a[5], a[6], a[7], spans->table, m.H,
                                                m.G, m.C, 0, T(error.scale), nullptr, s))};
}

// ---- norms: x is read and y written, and what else an op takes of that size. Where x is at least
// 1/2 and below 3/2, rstd is at most 2 and xhat at most 3.

Op rmsnorm_forward_op(const Model& m) {
    const int64_t N = m.N, D = m.D;
    return {"rmsnorm_forward",
            by({N, D}),
            floats_moved(2.0 * double(N * D)),
            {{N * D}, {N}, {N * D}, {D}},  // y, rstd, x, gain
            {{0, gamma(double(D + 10))}, {0, gamma(double(D + 10))}},
            FBT_CALL(backend::rmsnorm_forward(a[0], a[1], a[2], a[3], N, int(D), T(1e-6), s))};
}

Op residual_rmsnorm_forward_op(const Model& m) {
    const int64_t N = m.N, D = m.D;
    return {"residual_rmsnorm_forward",
            by({N, D}),
            floats_moved(3.0 * double(N * D)),
            {{N * D}, {N}, {N * D}, {N * D, 0.5, 1.5}, {D}},  // y, rstd, x, branch, gain
            {{4 * gamma(double(D + 12))}, {0, gamma(double(D + 10))}},
            FBT_CALL(backend::residual_rmsnorm_forward(a[0], a[1], a[2], a[3], a[4], T(0.35), N,
                                                       int(D), T(1e-6), s))};
}

Op rmsnorm_backward_op(const Model& m) {
    const int64_t N = m.N, D = m.D;
    return {"rmsnorm_backward",
            by({N, D}),
            floats_moved(3.0 * double(N * D)),
            // dx, dgain, dy, x, gain, rstd, scratch, y
            {{N * D}, {D}, {N * D}, {N * D, 0.5, 1.5}, {D}, {N}, {row_chunks(N) * D}, {N * D}},
            // dx = rstd (g - xhat mean(g xhat)), the mean at most 1;  dgain: N terms of at most 3
            {{8 * gamma(2.0 * double(D + 10))}, {double(3 * N + 1) * gamma(double(N + D + 10))}},
            FBT_CALL(backend::rmsnorm_backward(a[0], a[1], a[2], a[3], a[4], a[5], T(1), N, int(D),
                                               a[6], s)),
            FBT_CALL(backend::rmsnorm_forward(a[7], a[5], a[3], a[4], N, int(D), T(1e-6), s))};
}

Op qk_norm_rope_forward_op(const Model& m) {
    const int64_t N = m.N, row = int64_t(m.H) * m.C;
    auto positions = std::make_shared<std::vector<int32_t>>(N);
    for (int64_t n = 0; n < N; ++n) (*positions)[n] = int32_t(n % m.T);
    return {"qk_norm_rope_forward",
            by({N, m.H, m.C}),
            floats_moved(2.0 * double(N * row)),
            // y, rstd, x, gain, cos, sin: two terms of at most 3
            {{N * row}, {N * m.H}, {N * row, 0.5, 1.5}, {m.C}, {m.T * m.C / 2}, {m.T * m.C / 2}},
            {{6 * gamma(m.C + 14)}, {0, gamma(m.C + 10)}},
            FBT_CALL(backend::qk_norm_rope_forward(a[0], a[1], a[2], a[3], a[4], a[5],
                                                   positions->data(), N, m.H, m.C, T(1e-6), s))};
}

// ---- swiglu: two arrays in and one out, or three in and two out. A sigmoid takes ten roundings.

Op swiglu_forward_op(const Model& m) {
    const int64_t n = m.N * m.F;
    return {"swiglu_forward",
            by({m.N, m.F}),
            floats_moved(3.0 * double(n)),
            {{n}, {n}, {n}},  // y, gate, up
            {{0, gamma(12)}},
            FBT_CALL(backend::swiglu_forward(a[0], a[1], a[2], n, s))};
}

Op swiglu_backward_op(const Model& m) {
    const int64_t n = m.N * m.F;
    return {"swiglu_backward",
            by({m.N, m.F}),
            floats_moved(5.0 * double(n)),
            {{n}, {n}, {n}, {n}, {n}},  // dgate, dup, dy, gate, up
            {{2 * gamma(26)}, {0, gamma(12)}},
            FBT_CALL(backend::swiglu_backward(a[0], a[1], a[2], a[3], a[4], n, s))};
}

// ---- cross-entropy: the logits are read; backward also writes as many.

// Of log sum_v exp(logit), logits at most 1.
double lse_error(int V) { return gamma(V + 12) + gamma(4) * (3 + std::log(double(V))); }

std::shared_ptr<const std::vector<int32_t>> targets_of(const Model& m) {
    auto targets = std::make_shared<std::vector<int32_t>>(logit_rows(m));
    std::mt19937 random(1);
    for (int32_t& t : *targets) t = int32_t(random() % unsigned(m.V));
    return targets;
}

Op cross_entropy_forward_op(const Model& m) {
    const int64_t N = logit_rows(m);
    const auto targets = targets_of(m);
    return {"cross_entropy_forward",
            by({N, m.V}),
            floats_moved(double(N * m.V)),
            {{N}, {N}, {N * m.V}},  // ce, lse, logits
            {{lse_error(m.V)}, {lse_error(m.V)}},
            FBT_CALL(backend::cross_entropy_forward(a[0], a[1], a[2], targets->data(), N, m.V, s))};
}

Op cross_entropy_backward_op(const Model& m) {
    const int64_t N = logit_rows(m);
    const auto targets = targets_of(m);
    return {"cross_entropy_backward",
            by({N, m.V}),
            floats_moved(2.0 * double(N * m.V)),
            {{N * m.V}, {N * m.V}, {N}, {N}, {N}},  // dlogits, logits, lse, weight, ce
            {{2 * (lse_error(m.V) + gamma(12) * (3 + std::log(double(m.V))))}},
            FBT_CALL(backend::cross_entropy_backward(a[0], a[1], a[2], targets->data(), a[3],
                                                     T(1e-4), N, m.V, s)),
            FBT_CALL(backend::cross_entropy_forward(a[4], a[2], a[1], targets->data(), N, m.V, s))};
}

// ---- the carried state: every row of a feedback pass but each sequence's first, half of them
// from pass 1, with jitter (whose random numbers, not the moved bytes, take the time).

Op carry_forward_op(const Model& m) {
    const int64_t R = m.N - m.N / m.T, D = m.D;
    auto source = std::make_shared<std::vector<int64_t>>();
    auto sequence = std::make_shared<std::vector<int64_t>>();
    auto position = std::make_shared<std::vector<int32_t>>();
    for (int64_t row = 0; row < m.N; ++row) {
        const int32_t t = int32_t(row % m.T);
        if (t + 1 == m.T) continue;  // no row carries the last state
        source->push_back(t < m.T / 2 ? -1 - row : row);
        sequence->push_back(row / m.T);
        position->push_back(t);
    }
    const PhiloxKey key = philox_key(1, Draw::jitter);
    return {"carry_forward",
            by({R, D}),
            floats_moved(2.0 * double(R * D)),
            {{R * D}, {m.N * D}, {m.N * D}},  // y, first, previous
            {{2 * gamma(4)}},
            FBT_CALL(backend::carry_forward(
                a[0], a[1], a[2], source->data(), static_cast<const T*>(nullptr),
                Jitter<T>{T(0.02), key, sequence->data(), position->data()}, R, int(D), s))};
}

// ---- AdamW on the largest matrix: w, m, v and the gradient are read, the first three written.

Op adamw_op(const Model& model) {
    const int64_t n = int64_t(model.D) * std::max(model.F, model.V);
    const AdamWStep h{1e-3, 0.9, 0.95, 1e-8, 0.01, 1, 10};
    // sqrt(v) stays above 0.48 and |m|/(1 - 0.9^10) below 1.6, so an update is below 4 * 1e-3.
    return {"adamw_step",
            by({n}),
            floats_moved(7.0 * double(n)),
            {{n}, {n}, {n, 0.25, 1}, {n}},  // w, m, v, grad
            {{gamma(4) + 4e-3 * gamma(40)}, {2 * gamma(4)}, {0, gamma(6)}},
            FBT_CALL(backend::adamw_step(a[0], a[1], a[2], a[3], n, h, s))};
}

// ---- rows of keys to their slots of a store: each is read and written.

Op copy_rows_op(const Model& m) {
    const int64_t N = m.N, W = int64_t(m.G) * m.C;
    const auto slots = shuffled<int64_t>(N);
    return {"copy_rows",
            by({N, W}),
            floats_moved(2.0 * double(N * W)),
            {{N * W}, {N * W}},  // dst, src
            {{0}},
            FBT_CALL(backend::copy_rows(a[0], slots->data(), a[1],
                                        static_cast<const int64_t*>(nullptr), N, W, s))};
}

std::vector<Op> ops_of(const Model& m) {
    return {matmul_forward_op(m.N, m.F, m.D),            // the feed-forward's up
            matmul_forward_op(m.N, m.D, m.F),            // and down
            matmul_forward_op(logit_rows(m), m.V, m.D),  // logits
            matmul_forward_op(1, m.F, m.D),              // decoding
            matmul_dw_op(m.N, m.F, m.D),
            attention_forward_op(m),
            attention_backward_op(m),
            rmsnorm_forward_op(m),
            residual_rmsnorm_forward_op(m),
            rmsnorm_backward_op(m),
            qk_norm_rope_forward_op(m),
            swiglu_forward_op(m),
            swiglu_backward_op(m),
            cross_entropy_forward_op(m),
            cross_entropy_backward_op(m),
            carry_forward_op(m),
            adamw_op(m),
            copy_rows_op(m)};
}

// Array number `which` of every op starts with the same numbers.
void fill(float* out, const Array& array, uint32_t which) {
    for (int64_t i = 0; i < array.count; ++i) {
        uint32_t h = (uint32_t(i) + which * 0x01000193u) * 0x9E3779B9u;  // murmur3's finalizer
        h = (h ^ (h >> 16)) * 0x85EBCA6Bu;
        h = (h ^ (h >> 13)) * 0xC2B2AE35u;
        out[i] = array.low + (array.high - array.low) * uniform_float(h ^ (h >> 16));
    }
}

// ---- the check

template <class T>
std::string prepare_and_run(const Call<T>& prepare, const Call<T>& run,
                            std::vector<std::vector<T>>& arrays, Stream s) {
    std::vector<T*> a;
    for (auto& array : arrays) a.push_back(array.data());
    if (prepare)
        if (const Status status = prepare(a.data(), s); !status.ok()) return status.message;
    const Status status = run(a.data(), s);
    return status.ok() ? "" : status.message;
}

// Empty, or what is wrong.
std::string check(const Op& op) {
    std::vector<std::vector<float>> got;
    std::vector<std::vector<double>> want;
    for (const Array& array : op.arrays) {
        std::vector<float> values(array.count);
        fill(values.data(), array, uint32_t(got.size()));
        want.emplace_back(values.begin(), values.end());
        got.push_back(std::move(values));
    }
    std::string error = prepare_and_run(op.cpu_prepare, op.cpu, got, {nullptr, 2});
    if (error.empty()) error = prepare_and_run(op.ref_prepare, op.ref, want, {nullptr, 1});
    for (size_t k = 0; k < op.outputs.size() && error.empty(); ++k)
        for (size_t i = 0; i < want[k].size() && error.empty(); ++i) {
            const double bound =
                op.outputs[k].absolute + op.outputs[k].relative * std::abs(want[k][i]);
            if (std::abs(got[k][i] - want[k][i]) <= bound) continue;  // NaN fails
            std::array<char, 128> text;
            std::snprintf(text.data(), text.size(),
                          "output %zu[%zu] is %.9g, expected %.9g +- %.1e", k, i, double(got[k][i]),
                          want[k][i], bound);
            error = text.data();
        }
    return error;
}

// ---- timing

// Calls walk through so many bytes, so that no call finds its arrays in a core's own caches. The
// peaks of memory walk through the same memory: op and peak find it in the same place.
constexpr int64_t kFootprint = int64_t(256) << 20;

constexpr int64_t kLine = 64 / sizeof(float);
constexpr int64_t lines(int64_t count) { return (count + kLine - 1) / kLine * kLine; }

float* memory() {
    static std::vector<float> floats(kFootprint / sizeof(float) + kLine, 1.f);
    const auto past_line = reinterpret_cast<uintptr_t>(floats.data()) % 64 / sizeof(float);
    return floats.data() + (past_line > 0 ? kLine - int64_t(past_line) : 0);
}

// An op's arrays, as many sets of them as the footprint holds, each filled and prepared.
class Rotation {
  public:
    explicit Rotation(const Op& op) {
        int64_t size = 0;
        for (const Array& array : op.arrays) size += lines(array.count);
        int64_t sets = kFootprint / int64_t(sizeof(float)) / size;
        if (sets < 1) throw std::length_error(op.name + " does not fit into kFootprint");
        float* at = memory();
        for (; sets > 0; --sets) {
            std::vector<float*>& a = sets_.emplace_back();
            for (const Array& array : op.arrays) {
                fill(at, array, uint32_t(a.size()));
                a.push_back(at);
                at += lines(array.count);
            }
            if (!op.cpu_prepare) continue;
            if (const Status status = op.cpu_prepare(a.data(), {nullptr, 2}); !status.ok())
                throw std::runtime_error(status.message);
        }
    }
    float* const* next() { return sets_[turn_++ % sets_.size()].data(); }

  private:
    std::vector<std::vector<float*>> sets_;
    size_t turn_ = 0;
};

// The repetitions of one op follow each other and share its rotation.
Rotation& rotation_of(const Op& op) {
    static const Op* owner = nullptr;
    static std::unique_ptr<Rotation> rotation;
    if (owner != &op) rotation = std::make_unique<Rotation>(op);
    owner = &op;
    return *rotation;
}

// The best single call of each peak, FLOP/s and bytes/s, by threads.
std::map<int64_t, double> peak_flops, peak_bytes;

double& peak_of(Work::Unit unit, int64_t threads) {
    return unit == Work::Unit::flop ? peak_flops[threads] : peak_bytes[threads];
}

void report(benchmark::State& state, const Work& work) {
    using benchmark::Counter;
    const bool flop = work.unit == Work::Unit::flop;
    state.counters[flop ? "FLOP/s" : "B/s"] =
        Counter(work.amount, Counter::kIsIterationInvariantRate);
}

void time_op(benchmark::State& state, const Op& op) {
    Rotation& rotation = rotation_of(op);
    const Stream s{nullptr, int(state.range(0))};
    for (auto _ : state)
        if (const Status status = op.cpu(rotation.next(), s); !status.ok()) {
            state.SkipWithError(status.message);
            break;
        }
    report(state, op.work);
    if (const double peak = peak_of(op.work.unit, state.range(0)); peak > 0)
        state.counters["% of peak"] = benchmark::Counter(
            100 * op.work.amount / peak, benchmark::Counter::kIsIterationInvariantRate);
}

// Times `run`, which does `work`; the best rate of a single call is the peak.
template <class F>
void time_peak(benchmark::State& state, const Work& work, F run) {
    double& best = peak_of(work.unit, state.range(0));
    for (auto _ : state) {
        const auto start = std::chrono::steady_clock::now();
        run();
        const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
        best = std::max(best, work.amount / elapsed.count());
    }
    report(state, work);
}

// Independent chains of fused multiply-adds that stay in registers: enough of them to hide the
// latency (4 cycles, two a cycle), as many as there are registers for.
#if defined(__AVX512F__)
constexpr int kChains = 12;
#else
constexpr int kChains = 5;  // of two registers each
#endif

void time_peak_flops(benchmark::State& state) {
    constexpr int64_t kSteps = 100000;
    const int threads = int(state.range(0));
    time_peak(state, flops(2.0 * threads * kSteps * kChains * cpu::kLanes), [&] {
#pragma omp parallel num_threads(threads)
        {
            float x = 0.5f;
            benchmark::DoNotOptimize(x);
            const cpu::Vec factor = cpu::splat(x);
            cpu::Vec sum[kChains];
            for (cpu::Vec& v : sum) v = factor;
            for (int64_t i = 0; i < kSteps; ++i)
                for (cpu::Vec& v : sum) v = cpu::fma(v, factor, factor);
            for (cpu::Vec& v : sum) benchmark::DoNotOptimize(v);
        }
    });
}

void time_peak_read(benchmark::State& state) {
    constexpr int64_t kStep = 8 * cpu::kLanes, kSteps = kFootprint / int64_t(sizeof(float)) / kStep;
    const int threads = int(state.range(0));
    const float* const from = memory();
    time_peak(state, floats_moved(double(kSteps * kStep)), [&] {
#pragma omp parallel num_threads(threads)
        {
            cpu::Vec sum[8];
            for (cpu::Vec& v : sum) v = cpu::splat(0.f);
#pragma omp for schedule(static)
            for (int64_t i = 0; i < kSteps; ++i)
                for (int v = 0; v < 8; ++v)
                    sum[v] = sum[v] + cpu::load(from + i * kStep + v * cpu::kLanes);
            for (cpu::Vec& v : sum) benchmark::DoNotOptimize(v);
        }
    });
}

// The same memory read and written in place. A core waits for what it reads and not for what it
// writes, so this moves more bytes a second; the better of the two is the peak.
void time_peak_update(benchmark::State& state) {
    constexpr int64_t kSteps = kFootprint / int64_t(sizeof(float)) / cpu::kLanes;
    const int threads = int(state.range(0));
    float* const x = memory();
    time_peak(state, floats_moved(2.0 * kSteps * cpu::kLanes), [&] {
#pragma omp parallel for schedule(static) num_threads(threads)
        for (int64_t i = 0; i < kSteps; ++i) {
            float* const at = x + i * cpu::kLanes;
            cpu::store(at, cpu::fma(cpu::load(at), cpu::splat(0.5f), cpu::splat(0.5f)));
        }
    });
}

int run_all(int argc, char** argv) {
    for (const Op& op : ops_of(kSmall))
        if (const std::string error = check(op); !error.empty()) {
            std::fprintf(stderr, "kernels_bench: %s at %s is wrong, nothing was timed: %s\n",
                         op.name.c_str(), op.shape.c_str(), error.c_str());
            return 1;
        }

    const auto with_threads = [](benchmark::internal::Benchmark* b) {
        b->ArgName("threads")->Arg(1)->Arg(2)->UseRealTime();
    };
    with_threads(benchmark::RegisterBenchmark("peak_flops/f32", time_peak_flops));
    with_threads(benchmark::RegisterBenchmark("peak_read/f32", time_peak_read));
    with_threads(benchmark::RegisterBenchmark("peak_update/f32", time_peak_update));
    std::vector<std::vector<Op>> models;
    for (const Model& m : {kQuickstart, kLarger}) {
        models.push_back(ops_of(m));  // moving a vector leaves its ops where they are
        for (const Op& op : models.back())
            with_threads(benchmark::RegisterBenchmark(
                (op.name + "/" + m.name + "/" + op.shape + "/f32/cpu").c_str(),
                [&op](benchmark::State& state) { time_op(state, op); }));
    }
    return run(argc, argv);
}

}  // namespace
}  // namespace fbt::bench

int main(int argc, char** argv) { return fbt::bench::run_all(argc, argv); }
