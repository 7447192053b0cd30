// Attention: the loops against a naive softmax and difference quotients, the cpu kernel against the
// loops, and the row rule: whole sequences, any cut, single rows and paged stores, bit for bit.
#include "kernels/attention.h"

#include <algorithm>
#include <numeric>

#include "tests/kernels/kernel_test.h"

namespace fbt::tests {
namespace {

using namespace kernels;

// Sequences laid end to end; q [rows,H,C], k and v [rows,G,C].
template <class T>
struct Problem {
    using A = accumulate_t<T>;
    int H, G, C, window;
    A scale;
    std::vector<int> lengths;
    std::vector<T> q, k, v, dout;

    Problem(int H, int G, int C, int window, std::vector<int> lengths, double spread = 1)
        : H(H), G(G), C(C), window(window), scale(A(1 / std::sqrt(double(C)))), lengths(lengths) {
        const size_t rows = std::accumulate(lengths.begin(), lengths.end(), size_t(0));
        q = normal<T>(rows * size_t(H * C), 1, spread);
        k = normal<T>(rows * size_t(G * C), 2, spread);
        v = normal<T>(rows * size_t(G * C), 3, spread);
        dout = normal<T>(rows * size_t(H * C), 4);
    }
    int64_t rows() const { return int64_t(q.size()) / (H * C); }
    int64_t first_row(int sequence) const {
        return std::accumulate(lengths.begin(), lengths.begin() + sequence, int64_t(0));
    }
    template <class U>
    Problem<U> as() const {
        Problem<U> p(H, G, C, window, lengths);
        p.scale = accumulate_t<U>(scale);
        p.q = cast<U>(q), p.k = cast<U>(k), p.v = cast<U>(v), p.dout = cast<U>(dout);
        return p;
    }
};

struct Cut {
    int sequence, first, count;
};

template <class T>
std::vector<Cut> whole(const Problem<T>& p) {
    std::vector<Cut> cuts;
    for (int i = 0; i < int(p.lengths.size()); ++i) cuts.push_back({i, 0, p.lengths[size_t(i)]});
    return cuts;
}

enum class Store { contiguous, paged };

// One call's view of a problem: the packed rows of the cuts, and a key store in which every row
// that no span of the call may read is NaN.
template <class T>
struct Call {
    const Problem<T>& p;
    std::vector<Cut> cuts;
    std::vector<Span> spans;
    std::vector<int64_t> blocks;
    std::vector<int64_t> query_rows;  // the problem's row of each packed row
    std::vector<int64_t> store_rows;  // the problem's row of each row of the store, or -1
    SpanTable table;

    Call(const Problem<T>& problem, std::vector<Cut> the_cuts, Store store)
        : p(problem), cuts(the_cuts) {
        std::vector<int64_t> first_block;
        std::vector<int> ends(p.lengths.size(), 0);
        for (const Cut& cut : cuts)
            ends[size_t(cut.sequence)] =
                std::max(ends[size_t(cut.sequence)], cut.first + cut.count);
        int64_t next = 0, total_blocks = 0;
        for (size_t i = 0; i < ends.size(); ++i) {
            first_block.push_back(int64_t(blocks.size()));
            for (int s = 0; s < ends[i]; s += kKeyBlock) {
                blocks.push_back(store == Store::paged ? total_blocks : next + s);
                ++total_blocks;
            }
            next += ends[i];
        }
        if (store == Store::paged) {  // blocks in a scrambled order, with unused ones between
            std::mt19937 generator(5);
            std::shuffle(blocks.begin(), blocks.end(), generator);
            for (int64_t& block : blocks) block = (2 * block + 1) * kKeyBlock;
            next = (2 * total_blocks + 1) * kKeyBlock;
        }
        store_rows.assign(size_t(next), -1);
        for (size_t i = 0; i < ends.size(); ++i)
            for (int s = 0; s < ends[i]; ++s)
                store_rows[size_t(blocks[size_t(first_block[i] + s / kKeyBlock)] + s % kKeyBlock)] =
                    p.first_row(int(i)) + s;
        for (const Cut& cut : cuts) {
            spans.push_back({int64_t(query_rows.size()), first_block[size_t(cut.sequence)],
                             cut.first, cut.count});
            for (int n = 0; n < cut.count; ++n)
                query_rows.push_back(p.first_row(cut.sequence) + cut.first + n);
            table.max_count = std::max(table.max_count, cut.count);
            table.max_end = std::max(table.max_end, cut.first + cut.count);
        }
        table.spans = spans.data();
        table.blocks = blocks.data();
        table.count = int32_t(spans.size());
        table.rows = int64_t(query_rows.size());
    }
    Call(const Call&) = delete;

    // Rows of `width` elements, in the call's order; NaN where there is no row.
    template <class U>
    static std::vector<U> gather(const std::vector<U>& from, const std::vector<int64_t>& rows,
                                 int width) {
        std::vector<U> to;
        for (const int64_t row : rows)
            for (int c = 0; c < width; ++c)
                to.push_back(row < 0 ? U(NAN) : from[size_t(row * width + c)]);
        return to;
    }
    std::vector<T> queries(const std::vector<T>& from) const {
        return gather(from, query_rows, p.H * p.C);
    }
    std::vector<T> keys(const std::vector<T>& from) const {
        return gather(from, store_rows, p.G * p.C);
    }
};

// The problem's rows of the call, the others NaN.
template <class T>
struct Output {
    std::vector<T> o;
    std::vector<accumulate_t<T>> lse;
};

struct Ref {
    template <class... Args>
    static Status forward(Args... args) {
        return ref::attention_forward(args...);
    }
    template <class... Args>
    static Status backward(Args... args) {
        return ref::attention_backward(args...);
    }
};
struct Cpu {
    template <class... Args>
    static Status forward(Args... args) {
        return cpu::attention_forward(args...);
    }
    template <class... Args>
    static Status backward(Args... args) {
        return cpu::attention_backward(args...);
    }
};

template <class Backend, class T>
Output<T> forward(const Problem<T>& p, const std::vector<Cut>& cuts, Store store, Stream stream) {
    const Call<T> call(p, cuts, store);
    const auto q = call.queries(p.q), k = call.keys(p.k), v = call.keys(p.v);
    using A = accumulate_t<T>;
    std::vector<T> o(q.size(), T(NAN));
    std::vector<A> lse(size_t(call.table.rows * p.H), A(NAN));
    EXPECT_TRUE(ok(Backend::forward(o.data(), lse.data(), q.data(), k.data(), v.data(), call.table,
                                    p.H, p.G, p.C, p.window, p.scale, nullptr, stream)));
    Output<T> out{std::vector<T>(p.q.size(), T(NAN)),
                  std::vector<A>(size_t(p.rows() * p.H), A(NAN))};
    for (size_t n = 0; n < call.query_rows.size(); ++n) {
        const int64_t row = call.query_rows[n];
        std::copy_n(o.begin() + int64_t(n) * p.H * p.C, p.H * p.C, out.o.begin() + row * p.H * p.C);
        std::copy_n(lse.begin() + int64_t(n) * p.H, p.H, out.lse.begin() + row * p.H);
    }
    return out;
}

template <class T>
struct Gradients {
    std::vector<T> dq;
    std::vector<accumulate_t<T>> dk, dv;  // rows of the store, 7 where never written
};

template <class Backend, class T>
Gradients<T> backward(const Call<T>& call, const std::vector<T>& o,
                      const std::vector<accumulate_t<T>>& lse, Stream stream) {
    using A = accumulate_t<T>;
    const Problem<T>& p = call.p;
    const auto q = call.queries(p.q), k = call.keys(p.k), v = call.keys(p.v);
    const auto dout = call.queries(p.dout), out = call.queries(o);
    const auto l = Call<T>::gather(lse, call.query_rows, p.H);
    Gradients<T> g{std::vector<T>(q.size(), T(7)), std::vector<A>(k.size(), A(7)),
                   std::vector<A>(k.size(), A(7))};
    std::vector<A> delta(l.size());
    EXPECT_TRUE(ok(Backend::backward(
        g.dq.data(), g.dk.data(), g.dv.data(), delta.data(), dout.data(), q.data(), k.data(),
        v.data(), out.data(), l.data(), call.table, p.H, p.G, p.C, p.window, p.scale, stream)));
    return g;
}

// The formula, a row at a time, without splits.
Output<double> naive(const Problem<double>& p) {
    Output<double> out{std::vector<double>(p.q.size()), {}};
    for (const Cut& sequence : whole(p))
        for (int t = 0; t < sequence.count; ++t)
            for (int h = 0; h < p.H; ++h) {
                const int64_t base = p.first_row(sequence.sequence);
                const int g = h / (p.H / p.G);
                const int64_t at = ((base + t) * p.H + h) * p.C;
                double total = 0;
                for (int s = p.window ? std::max(0, t - p.window + 1) : 0; s <= t; ++s) {
                    const int64_t key = ((base + s) * p.G + g) * p.C;
                    double score = 0;
                    for (int c = 0; c < p.C; ++c)
                        score += p.scale * p.q[size_t(at + c)] * p.k[size_t(key + c)];
                    total += std::exp(score);
                    for (int c = 0; c < p.C; ++c)
                        out.o[size_t(at + c)] += std::exp(score) * p.v[size_t(key + c)];
                }
                for (int c = 0; c < p.C; ++c) out.o[size_t(at + c)] /= total;
                out.lse.push_back(std::log(total));
            }
    return out;
}

// Bounds of rounding errors in T, from the largest norms of the problem's vectors.
template <class T>
struct Tolerance {
    double u = std::numeric_limits<T>::epsilon() / 2;
    double q = 0, k = 0, v = 0, dout = 0;  // largest Euclidean norms
    double score;                          // error of a score
    double weight;                         // relative error of a softmax weight
    double keys;                           // the most keys of one row
    Problem<double> p;

    explicit Tolerance(const Problem<double>& problem) : p(problem) {
        const auto norm = [&](const std::vector<double>& rows) {
            double largest = 0;
            for (size_t i = 0; i < rows.size(); i += size_t(p.C)) {
                double sum = 0;
                for (int c = 0; c < p.C; ++c) sum += rows[i + size_t(c)] * rows[i + size_t(c)];
                largest = std::max(largest, std::sqrt(sum));
            }
            return largest;
        };
        q = norm(p.q), k = norm(p.k), v = norm(p.v), dout = norm(p.dout);
        keys = *std::max_element(p.lengths.begin(), p.lengths.end());
        if (p.window > 0) keys = std::min(keys, double(p.window));
        // Cauchy: sum_c |q_c k_c| <= |q| |k|. C roundings of the sum, one of the scale.
        score = gamma<T>(p.C + 1) * p.scale * q * k;
        // exp(score - m) carries the score's error twice (m is one too), the rounding of the
        // difference of at most 2 |score|, and exp's own 2.2 u; each of the splits rescales by
        // two more such factors and three roundings; l is a sum over the keys.
        const double once = 2 * score + u * (2 * p.scale * q * k) + 3 * u;
        const double splits = keys / kKeyBlock + 2;
        weight = std::expm1(2 * (once * splits + gamma<T>(keys + 3 * splits)));
    }
    // o is a mean of v's elements.
    double o() const { return max_abs(p.v) * (weight + gamma<T>(keys + 1)); }
    double lse() const { return score + weight + u * (p.scale * q * k + std::log(keys)); }
    // p = exp(score - lse) with lse given (rounded to T) and at most |score| + log(keys)
    double p_error() const {
        return std::expm1(score + 2 * u * (2 * p.scale * q * k + std::log(keys)) + 3 * u);
    }
    // Rounding of sum_i p_i f_i over n terms, with sum_i p_i <= weights and |f_i| <= factor, f
    // itself a dot product of C elements, or the difference of two, and a few factors.
    double sum(double n, double weights, double factor) const {
        return weights * factor * (p_error() + gamma<T>(n + 3 * p.C + 6));
    }
    double rows() const { return keys * p.H / p.G; }  // that see one key, at p <= 1 each
    // |dout.v| + |dout.o|, o a mean of v that may be rounded to bf16
    double ds() const { return (2 + unit_roundoff<bf16>()) * dout * v; }
    double dv() const { return sum(rows(), rows(), max_abs(p.dout)); }
    double dk() const { return sum(rows(), rows(), p.scale * ds() * max_abs(p.q)); }
    double dq() const { return sum(keys, 1, p.scale * ds() * max_abs(p.k)); }
};

const Problem<double> kProblems[] = {
    {1, 1, 2, 0, {1}},         {4, 2, 16, 0, {37, 1, 3}}, {3, 3, 6, 5, {70, 64}},
    {4, 1, 20, 70, {193, 65}}, {6, 2, 32, 0, {193, 130}}, {2, 1, 96, 100, {257}},
    {2, 2, 256, 0, {66}},      {5, 1, 34, 64, {131}},     {130, 1, 4, 9, {67}},
    {4, 1, 64, 70, {200}},
};

template <class T>
class AttentionStored : public testing::Test {};
TYPED_TEST_SUITE(AttentionStored, Storage);

TEST(Attention, RefIsTheFormula) {
    for (const Problem<double>& p : kProblems) {
        const auto got = forward<Ref>(p, whole(p), Store::contiguous, kOneThread), want = naive(p);
        const Tolerance<double> tolerance(p);
        EXPECT_TRUE(close(got.o, want.o, 2 * tolerance.o()));  // both round
        EXPECT_TRUE(close(got.lse, want.lse, 2 * tolerance.lse()));
    }
}

TEST(Attention, RefGradientsMatchDifferences) {
    for (const int window : {0, 3}) {
        // Vectors shorter than 2: a step of 1/2 in the complex plane changes weights less than 2x.
        Problem<double> p(4, 2, 4, window, {5, 1, 2}, 0.3);
        const Call<double> call(p, whole(p), Store::contiguous);
        const auto F = [&] {
            const auto out = forward<Ref>(p, whole(p), Store::contiguous, kOneThread);
            return sum_products(out.o, p.dout);
        };
        const auto out = forward<Ref>(p, whole(p), Store::contiguous, kOneThread);
        const auto g = backward<Ref>(call, out.o, out.lse, kOneThread);
        const double size = max_abs(p.v) * sum_products(p.dout, p.dout);
        const double tolerance = slope_tolerance(size, double(p.q.size() + 40));
        const auto check = [&](std::vector<double>& x, const std::vector<double>& dx) {
            std::vector<double> slopes(x.size());
            for (size_t i = 0; i < x.size(); ++i) slopes[i] = slope(F, x[i]);
            return close(dx, slopes, tolerance);
        };
        EXPECT_TRUE(check(p.q, g.dq));
        EXPECT_TRUE(check(p.k, g.dk));
        EXPECT_TRUE(check(p.v, g.dv));
    }
}

// What T, where it is narrower than the arithmetic, adds to the error of an output that is rounded
// once: |round(x) - want| <= |x - want| + u |x| <= (1 + u) |x - want| + u |want|.
template <class T>
testing::AssertionResult close_rounded(const std::vector<T>& got, const std::vector<double>& want,
                                       double tolerance) {
    const double u = std::is_same_v<T, bf16> ? unit_roundoff<bf16>() : 0;
    return close(got, want, (1 + u) * tolerance, u);
}

TYPED_TEST(AttentionStored, CpuMatchesRef) {
    using T = TypeParam;
    for (const Problem<double>& problem : kProblems)
        for (const Store store : {Store::contiguous, Store::paged}) {
            const auto pt = problem.as<T>();
            const auto p = pt.template as<double>();
            SCOPED_TRACE(testing::Message() << p.H << " " << p.G << " " << p.C << " " << p.window);
            const Tolerance<float> tolerance(p);
            const auto want = forward<Ref>(p, whole(p), store, kOneThread);
            const auto got = forward<Cpu>(pt, whole(p), store, kTwoThreads);
            EXPECT_TRUE(close_rounded(got.o, want.o, tolerance.o()));
            EXPECT_TRUE(close(got.lse, want.lse, tolerance.lse()));

            // Gradients of the same o and lse, so that their errors do not count here.
            const auto o = cast<T>(want.o);
            const auto lse = cast<float>(want.lse);
            const Call<double> call(p, whole(p), store);
            const Call<T> callt(pt, whole(p), store);
            const auto dwant = backward<Ref>(call, cast<double>(o), cast<double>(lse), kOneThread);
            const auto dgot = backward<Cpu>(callt, o, lse, kTwoThreads);
            EXPECT_TRUE(close_rounded(dgot.dq, dwant.dq, tolerance.dq()));
            EXPECT_TRUE(close(dgot.dk, dwant.dk, tolerance.dk()));
            EXPECT_TRUE(close(dgot.dv, dwant.dv, tolerance.dv()));
        }
}

// A suffix [first, T) over a stored prefix, as in a feedback pass.
TEST(Attention, GradientsOfSuffixes) {
    for (const int window : {0, 70}) {
        const Problem<double> p(4, 2, 16, window, {193, 3, 130});
        const std::vector<Cut> cuts{{0, 70, 123}, {1, 2, 1}, {2, 128, 2}};
        const auto pf = p.as<float>();
        const Tolerance<float> tolerance(p);
        const auto out = forward<Ref>(p, cuts, Store::paged, kOneThread);
        const auto o = cast<float>(out.o), lse = cast<float>(out.lse);
        const Call<double> call(p, cuts, Store::paged);
        const Call<float> callf(pf, cuts, Store::paged);
        const auto want = backward<Ref>(call, cast<double>(o), cast<double>(lse), kOneThread);
        const auto got = backward<Cpu>(callf, o, lse, kOneThread);
        EXPECT_TRUE(close(got.dq, want.dq, tolerance.dq()));
        EXPECT_TRUE(close(got.dk, want.dk, tolerance.dk()));
        EXPECT_TRUE(close(got.dv, want.dv, tolerance.dv()));
        // Overwritten, with zeros where nothing attends; untouched where no position lies.
        for (size_t row = 0; row < callf.store_rows.size(); ++row) {
            const int64_t at = callf.store_rows[row];
            const float dv = got.dv[row * size_t(p.G * p.C)];
            EXPECT_EQ(dv == 7, at < 0) << row;
            bool unseen = false;
            for (const Cut& cut : cuts) {
                const int64_t position = at - p.first_row(cut.sequence);
                if (window > 0 && position >= 0 && position <= cut.first - window) unseen = true;
            }
            EXPECT_EQ(dv == 0, unseen) << row;
        }
    }
}

// Threads share heads or, where these are few, the rows and keys of each.
TYPED_TEST(AttentionStored, ResultsDoNotDependOnThreads) {
    using T = TypeParam;
    for (const Problem<T>& p :
         {Problem<T>(4, 2, 20, 70, {193, 37, 130}), Problem<T>(2, 1, 34, 0, {330})}) {
        const Call<T> call(p, whole(p), Store::contiguous);
        const auto out = forward<Cpu>(p, whole(p), Store::contiguous, kOneThread);
        const auto one = backward<Cpu>(call, out.o, out.lse, kOneThread);
        for (const int threads : {2, 3, 5}) {
            const Stream stream{nullptr, threads};
            const auto again = forward<Cpu>(p, whole(p), Store::contiguous, stream);
            EXPECT_TRUE(same_bits(out.o, again.o));
            EXPECT_TRUE(same_bits(out.lse, again.lse));
            const auto many = backward<Cpu>(call, out.o, out.lse, stream);
            EXPECT_TRUE(same_bits(one.dq, many.dq));
            EXPECT_TRUE(same_bits(one.dk, many.dk));
            EXPECT_TRUE(same_bits(one.dv, many.dv));
        }
    }
}

// The row rule. Windows that start inside a split, at one, and none at all.
TYPED_TEST(AttentionStored, RowsHaveTheSameBitsInEveryCall) {
    using T = TypeParam;
    const int length = 3 * kKeyBlock + 1;
    for (const int window : {0, 1, 64, 70, 150})
        for (const auto [H, G, C] :
             {std::array{4, 2, 20}, std::array{3, 3, 16}, std::array{9, 1, 6},
              std::array{11, 11, 34}, std::array{6, 2, 64}}) {
            SCOPED_TRACE(testing::Message() << H << " " << G << " " << C << " window " << window);
            const Problem<T> p(H, G, C, window, {length, 67});
            const auto want = forward<Cpu>(p, whole(p), Store::contiguous, kOneThread);
            const auto same = [&](const Output<T>& got, const std::vector<Cut>& cuts) {
                for (const Cut& cut : cuts)
                    for (int n = 0; n < cut.count; ++n) {
                        const int64_t row = p.first_row(cut.sequence) + cut.first + n;
                        const auto part = [&](const auto& v, int width) {
                            return std::vector(v.begin() + row * width,
                                               v.begin() + (row + 1) * width);
                        };
                        if (!same_bits(part(got.o, p.H * p.C), part(want.o, p.H * p.C)) ||
                            !same_bits(part(got.lse, p.H), part(want.lse, p.H)))
                            return testing::AssertionFailure() << "position " << cut.first + n;
                    }
                return testing::AssertionSuccess();
            };
            for (const Store store : {Store::contiguous, Store::paged})
                for (const Stream& stream : {kOneThread, kTwoThreads}) {
                    EXPECT_TRUE(same(forward<Cpu>(p, whole(p), store, stream), whole(p)));
                    const std::vector<Cut> cuts[] = {
                        {{0, 0, 1}, {0, 1, 62}, {0, 63, 2}, {0, 65, 100}, {1, 5, 62}, {0, 165, 28}},
                        {{1, 66, 1}, {0, 100, 93}},
                        {{0, 7, 130}},
                        {{0, 128, 1}},
                        {{0, 192, 1}, {1, 5, 1}, {0, 64, 0}, {0, 63, 1}, {1, 64, 1}, {0, 0, 1}},
                        {{0, 0, 64}, {0, 64, 64}, {0, 128, 64}, {0, 192, 1}},
                    };
                    for (const auto& cut : cuts)
                        EXPECT_TRUE(same(forward<Cpu>(p, cut, store, stream), cut));
                }
            // Decoding: each row alone, with nothing but NaN behind it.
            for (int t = 0; t < length; ++t) {
                const std::vector<Cut> step{{0, t, 1}};
                EXPECT_TRUE(same(forward<Cpu>(p, step, Store::paged, kOneThread), step));
            }
        }
}

// What a row does not see cannot touch it, nor can the row touch that: not even infinities, or NaN,
// in its tile.
TYPED_TEST(AttentionStored, TheUnseenCountsForNothing) {
    using T = TypeParam;
    const Problem<T> p(4, 2, 20, 30, {100});
    const Call<T> call(p, whole(p), Store::contiguous);
    const auto want = forward<Cpu>(p, whole(p), Store::contiguous, kOneThread);
    const auto dwant = backward<Cpu>(call, want.o, want.lse, kOneThread);
    const int bad = 50, width = p.G * p.C;

    Problem<T> poisoned = p;
    std::fill_n(poisoned.k.begin() + bad * width, width, T(INFINITY));
    std::fill_n(poisoned.v.begin() + bad * width, width, T(NAN));
    const auto got = forward<Cpu>(poisoned, whole(p), Store::contiguous, kOneThread);
    const Call<T> bad_key(poisoned, whole(p), Store::contiguous);
    auto dgot = backward<Cpu>(bad_key, want.o, want.lse, kOneThread);
    for (int t = 0; t < 100; ++t) {
        if (t >= bad && t < bad + p.window) continue;
        for (int at = t * p.H * p.C; at < (t + 1) * p.H * p.C; ++at) {
            EXPECT_EQ(wide(got.o[size_t(at)]), wide(want.o[size_t(at)])) << t;
            EXPECT_EQ(wide(dgot.dq[size_t(at)]), wide(dwant.dq[size_t(at)])) << t;
        }
    }

    poisoned = p;
    std::fill_n(poisoned.q.begin() + bad * p.H * p.C, p.H * p.C, T(INFINITY));
    std::fill_n(poisoned.dout.begin() + bad * p.H * p.C, p.H * p.C, T(NAN));
    const Call<T> bad_row(poisoned, whole(p), Store::contiguous);
    dgot = backward<Cpu>(bad_row, want.o, want.lse, kOneThread);
    for (int s = 0; s < 100; ++s) {
        if (s <= bad && s > bad - p.window) continue;
        for (int at = s * width; at < (s + 1) * width; ++at) {
            EXPECT_EQ(dgot.dk[size_t(at)], dwant.dk[size_t(at)]) << s;
            EXPECT_EQ(dgot.dv[size_t(at)], dwant.dv[size_t(at)]) << s;
        }
    }
}

TEST(Attention, RejectsImpossibleShapes) {
    const SpanTable none;
    float x = 0;
    const auto code = [&](int H, int G, int C, int window) {
        return cpu::attention_forward(&x, &x, &x, &x, &x, none, H, G, C, window, 1.f, nullptr,
                                      kOneThread)
            .code;
    };
    EXPECT_EQ(code(4, 2, 16, 0), Code::ok);
    EXPECT_EQ(code(3, 2, 16, 0), Code::bad_argument);
    EXPECT_EQ(code(4, 2, 15, 0), Code::bad_argument);
    EXPECT_EQ(code(4, 2, 258, 0), Code::bad_argument);
    EXPECT_EQ(code(4, 2, 16, -1), Code::bad_argument);
}

}  // namespace
}  // namespace fbt::tests
