// kernels/attention.cu and attention_mma.cu, emulated, against the plain loops in double; and the
// row rule: whole sequences, any cut, single rows, other company and paged stores, bit for bit.
#include "kernels/attention.h"

#include <algorithm>
#include <numeric>

#include "tests/compare.h"
#include "tests/cuda/device.h"

namespace fbt::tests {
namespace {

namespace cuda = kernels::cuda;
namespace ref = kernels::ref;
using kernels::bf16;
using kernels::kKeyBlock;
using kernels::Span;
using kernels::SpanTable;

// Rows [first, first+count) of a sequence.
struct Cut {
    int sequence, first, count;
};
enum class Store { contiguous, paged };

// Sequences of these lengths, laid end to end in q, dout [rows,H,C] and k, v [rows,G,C].
struct Shape {
    int H, G, C, window;
    std::vector<int> lengths;

    int64_t rows() const { return first_row(int(lengths.size())); }
    int64_t first_row(int sequence) const {
        return std::accumulate(lengths.begin(), lengths.begin() + sequence, int64_t(0));
    }
    double scale() const { return float(1 / std::sqrt(double(C))); }
    std::vector<Cut> whole() const {
        std::vector<Cut> cuts;
        for (int i = 0; i < int(lengths.size()); ++i) cuts.push_back({i, 0, lengths[size_t(i)]});
        return cuts;
    }
};
std::ostream& operator<<(std::ostream& out, const Shape& s) {
    out << "H " << s.H << " G " << s.G << " C " << s.C << " window " << s.window << " lengths";
    for (int length : s.lengths) out << ' ' << length;
    return out;
}

template <class T>
struct Problem {
    Shape shape;
    std::vector<T> q, k, v, dout;

    explicit Problem(const Shape& s)
        : shape(s),
          q(normal<T>(size_t(s.rows() * s.H * s.C), 1)),
          k(normal<T>(size_t(s.rows() * s.G * s.C), 2)),
          v(normal<T>(size_t(s.rows() * s.G * s.C), 3)),
          dout(normal<T>(size_t(s.rows() * s.H * s.C), 4)) {}
};

// The packed rows of one call, and a key store with its span table.
struct Layout {
    std::vector<Span> spans;
    std::vector<int64_t> blocks;
    std::vector<int64_t> query_rows;  // the problem's row of each packed row
    std::vector<int64_t> store_rows;  // the problem's row of each row of the store, or -1
    SpanTable table;                  // without pointers

    // `reach`: positions that the table announces, where that is more than its spans have.
    Layout(const Shape& shape, const std::vector<Cut>& cuts, Store store, int reach = 0) {
        table.max_end = reach;
        std::vector<int> ends(shape.lengths.size(), 0);
        for (const Cut& cut : cuts)
            ends[size_t(cut.sequence)] =
                std::max(ends[size_t(cut.sequence)], cut.first + cut.count);
        std::vector<int64_t> first_block;
        int64_t next = 0;
        for (const int end : ends) {
            first_block.push_back(int64_t(blocks.size()));
            for (int s = 0; s < end; s += kKeyBlock) blocks.push_back(next + s);
            next += end;
        }
        if (store == Store::paged) {  // in a scrambled order, with unused pages between
            std::iota(blocks.begin(), blocks.end(), 0);
            std::shuffle(blocks.begin(), blocks.end(), std::mt19937(5));
            for (int64_t& block : blocks) block = (2 * block + 1) * kKeyBlock;
            next = (2 * int64_t(blocks.size()) + 1) * kKeyBlock;
        }
        store_rows.assign(size_t(next), -1);
        for (size_t i = 0; i < ends.size(); ++i)
            for (int s = 0; s < ends[i]; ++s)
                store_rows[size_t(blocks[size_t(first_block[i] + s / kKeyBlock)] + s % kKeyBlock)] =
                    shape.first_row(int(i)) + s;
        for (const Cut& cut : cuts) {
            spans.push_back({int64_t(query_rows.size()), first_block[size_t(cut.sequence)],
                             cut.first, cut.count});
            for (int n = 0; n < cut.count; ++n)
                query_rows.push_back(shape.first_row(cut.sequence) + cut.first + n);
            table.max_count = std::max(table.max_count, cut.count);
            table.max_end = std::max(table.max_end, cut.first + cut.count);
        }
        table.count = int32_t(spans.size());
        table.rows = int64_t(query_rows.size());
    }
    SpanTable at(const Span* the_spans, const int64_t* the_blocks) const {
        SpanTable t = table;
        t.spans = the_spans;
        t.blocks = the_blocks;
        return t;
    }
    SpanTable host() const { return at(spans.data(), blocks.data()); }
};

// Rows of `width` elements; NaN where there is none, so that a kernel must not read it.
template <class T>
std::vector<T> gather(const std::vector<T>& from, const std::vector<int64_t>& rows, int width) {
    std::vector<T> to;
    for (const int64_t row : rows)
        for (int c = 0; c < width; ++c)
            to.push_back(row < 0 ? T(NAN) : from[size_t(row * width + c)]);
    return to;
}
// The inverse, NaN where no packed row stands.
template <class T>
std::vector<T> scatter(const std::vector<T>& from, const std::vector<int64_t>& rows, int width,
                       size_t size) {
    std::vector<T> to(size, T(NAN));
    for (size_t n = 0; n < rows.size(); ++n)
        std::copy_n(from.begin() + int64_t(n) * width, width, to.begin() + rows[n] * width);
    return to;
}

// A device array that begins `shift` elements behind an aligned address.
template <class T>
class Shifted {
  public:
    Shifted(std::vector<T> values, size_t shift) : shift_(shift), array_(pad(values, shift)) {}
    T* data() { return array_.data() + shift_; }
    std::vector<T> host() const {
        const auto all = array_.host();
        return {all.begin() + int64_t(shift_), all.end()};
    }

  private:
    static std::vector<T> pad(std::vector<T>& values, size_t shift) {
        values.insert(values.begin(), shift, T(NAN));
        return values;
    }
    size_t shift_;
    DeviceArray<T> array_;
};

// By the problem's rows, NaN where the call has none.
template <class T, class A>
struct Output {
    std::vector<T> o;
    std::vector<A> lse;
};

template <class T>
int64_t scratch_size(const Shape& s, const Layout& layout) {
    return cuda::attention_scratch_size<T>(layout.host(), s.H, s.G, s.C, s.window);
}

template <class T>
Output<T, float> forward(const Problem<T>& p, const Layout& layout, size_t shift = 0,
                         bool with_scratch = true) {
    const Shape& s = p.shape;
    const int width = s.H * s.C;
    Shifted<T> q(gather(p.q, layout.query_rows, width), shift),
        k(gather(p.k, layout.store_rows, s.G * s.C), shift),
        v(gather(p.v, layout.store_rows, s.G * s.C), shift),
        o(std::vector<T>(layout.query_rows.size() * size_t(width), T(NAN)), shift);
    DeviceArray<float> lse(layout.query_rows.size() * size_t(s.H)),
        scratch(std::vector<float>(size_t(scratch_size<T>(s, layout)), NAN));
    DeviceArray<Span> spans(layout.spans);
    DeviceArray<int64_t> blocks(layout.blocks);
    EXPECT_TRUE(ok(cuda::attention_forward<T, float>(
        o.data(), lse.data(), q.data(), k.data(), v.data(), layout.at(spans.data(), blocks.data()),
        s.H, s.G, s.C, s.window, float(s.scale()), with_scratch ? scratch.data() : nullptr, {})))
        << s;
    return {scatter(o.host(), layout.query_rows, width, p.q.size()),
            scatter(lse.host(), layout.query_rows, s.H, size_t(s.rows() * s.H))};
}

// The same by the plain loops, from the same values.
template <class T>
Output<double, double> expected(const Problem<T>& p, const Layout& layout, bool absolute_v) {
    const Shape& s = p.shape;
    const int width = s.H * s.C;
    const auto q = cast<double>(gather(p.q, layout.query_rows, width)),
               k = cast<double>(gather(p.k, layout.store_rows, s.G * s.C));
    auto v = cast<double>(gather(p.v, layout.store_rows, s.G * s.C));
    if (absolute_v)
        for (double& x : v) x = std::abs(x);
    std::vector<double> o(q.size()), lse(layout.query_rows.size() * size_t(s.H));
    EXPECT_TRUE(ok(ref::attention_forward<double>(o.data(), lse.data(), q.data(), k.data(),
                                                  v.data(), layout.host(), s.H, s.G, s.C, s.window,
                                                  s.scale(), nullptr, {})));
    return {scatter(o, layout.query_rows, width, p.q.size()),
            scatter(lse, layout.query_rows, s.H, size_t(s.rows() * s.H))};
}

template <class T, class A>
struct Gradients {
    std::vector<T> dq;      // packed rows
    std::vector<A> dk, dv;  // rows of the store, 7 where never written
};

template <class T>
Gradients<T, float> backward(const Problem<T>& p, const Layout& layout, const Output<T, float>& out,
                             size_t shift = 0) {
    const Shape& s = p.shape;
    const int width = s.H * s.C;
    const size_t rows = layout.query_rows.size(), keys = layout.store_rows.size() * s.G * s.C;
    Shifted<T> q(gather(p.q, layout.query_rows, width), shift),
        k(gather(p.k, layout.store_rows, s.G * s.C), shift),
        v(gather(p.v, layout.store_rows, s.G * s.C), shift),
        o(gather(out.o, layout.query_rows, width), shift),
        dout(gather(p.dout, layout.query_rows, width), shift),
        dq(std::vector<T>(rows * size_t(width), T(NAN)), shift);
    Shifted<float> dk(std::vector<float>(keys, 7.f), shift),
        dv(std::vector<float>(keys, 7.f), shift);
    DeviceArray<float> lse(gather(out.lse, layout.query_rows, s.H)), delta(rows * size_t(s.H));
    DeviceArray<Span> spans(layout.spans);
    DeviceArray<int64_t> blocks(layout.blocks);
    EXPECT_TRUE(ok(cuda::attention_backward<T, float>(
        dq.data(), dk.data(), dv.data(), delta.data(), dout.data(), q.data(), k.data(), v.data(),
        o.data(), lse.data(), layout.at(spans.data(), blocks.data()), s.H, s.G, s.C, s.window,
        float(s.scale()), {})))
        << s;
    return {dq.host(), dk.host(), dv.host()};
}

// Gradients in double, and the sums of their terms' magnitudes, which bound rounding errors.
struct ExpectedGradients {
    Gradients<double, double> value, size;
};
template <class T>
ExpectedGradients expected_gradients(const Problem<T>& p, const Layout& layout,
                                     const Output<T, float>& out) {
    const Shape& s = p.shape;
    const int width = s.H * s.C, C = s.C;
    const auto q = cast<double>(gather(p.q, layout.query_rows, width)),
               k = cast<double>(gather(p.k, layout.store_rows, s.G * C)),
               v = cast<double>(gather(p.v, layout.store_rows, s.G * C)),
               o = cast<double>(gather(out.o, layout.query_rows, width)),
               dout = cast<double>(gather(p.dout, layout.query_rows, width)),
               lse = cast<double>(gather(out.lse, layout.query_rows, s.H));
    Gradients<double, double> value{std::vector<double>(q.size()), std::vector<double>(k.size(), 7),
                                    std::vector<double>(k.size(), 7)},
        size{std::vector<double>(q.size()), std::vector<double>(k.size()),
             std::vector<double>(k.size())};
    std::vector<double> delta(lse.size());
    EXPECT_TRUE(ok(ref::attention_backward<double>(
        value.dq.data(), value.dk.data(), value.dv.data(), delta.data(), dout.data(), q.data(),
        k.data(), v.data(), o.data(), lse.data(), layout.host(), s.H, s.G, C, s.window, s.scale(),
        {})));
    for (const Span& span : layout.spans)
        for (int n = 0; n < span.count; ++n)
            for (int h = 0; h < s.H; ++h) {
                const int t = span.first + n, g = h / (s.H / s.G);
                const size_t head = size_t((span.row + n) * s.H + h), row = head * size_t(C);
                for (int x = kernels::first_visible(t, s.window); x <= t; ++x) {
                    const int64_t at =
                        layout.blocks[size_t(span.block + x / kKeyBlock)] + x % kKeyBlock;
                    const size_t key = size_t((at * s.G + g) * C);
                    double score = 0, ds = 0;  // ds: |dout|.|v| + |dout|.|o|
                    for (size_t c = 0; c < size_t(C); ++c) {
                        score += q[row + c] * k[key + c];
                        ds +=
                            std::abs(dout[row + c]) * (std::abs(v[key + c]) + std::abs(o[row + c]));
                    }
                    const double weight = std::exp(s.scale() * score - lse[head]);
                    for (size_t c = 0; c < size_t(C); ++c) {
                        size.dq[row + c] += s.scale() * weight * ds * std::abs(k[key + c]);
                        size.dk[key + c] += s.scale() * weight * ds * std::abs(q[row + c]);
                        size.dv[key + c] += weight * std::abs(dout[row + c]);
                    }
                }
            }
    return {value, size};
}

// |got - want| <= tolerance * size, element by element; exact where size is 0.
template <class T>
testing::AssertionResult within(const std::vector<T>& got, const std::vector<double>& want,
                                const std::vector<double>& size, double tolerance) {
    std::vector<double> scaled_got, scaled_want;
    for (size_t i = 0; i < want.size(); ++i) {
        if (std::isnan(want[i])) continue;  // a row that the call does not have
        const double unit = size[i] > 0 ? size[i] : 1e-30;
        scaled_got.push_back(i < got.size() ? wide(got[i]) / unit : NAN);
        scaled_want.push_back(want[i] / unit);
    }
    return close(scaled_got, scaled_want, tolerance);
}

// Bounds of rounding errors, relative to sums of magnitudes. `terms(n)` is that of a sum of n
// products in f32: one rounding a term in a chain of fused multiply-adds. An mma adds 16 products
// and the sum so far, each cut (not rounded) at the largest's last bit: 17 errors of 2 units for 16
// terms; the zeros that pad n cost nothing.
template <class T>
struct Tolerance {
    static constexpr bool kMma = std::is_same_v<T, bf16>;
    static double terms(double n) { return gamma<float>(kMma ? 34 * std::ceil(n / 16) : n); }
    // What a weight loses by becoming an operand of the next product.
    static constexpr double kOperand = kMma ? unit_roundoff<bf16>() : 0;
    static constexpr double u = unit_roundoff<float>();

    double C, keys, rows;  // the most keys that a row sees, rows (and heads) that see a key
    double size = 0;       // the largest |scale * q.k|, by Cauchy
    double score;          // error of a score: the sum, the scale, log2 e

    explicit Tolerance(const Problem<T>& p) : C(p.shape.C) {
        const auto norm = [&](const std::vector<T>& v) {
            double most = 0;
            for (size_t i = 0; i < v.size(); i += size_t(C)) {
                double sum = 0;
                for (size_t c = 0; c < size_t(C); ++c) sum += wide(v[i + c]) * wide(v[i + c]);
                most = std::max(most, sum);
            }
            return std::sqrt(most);
        };
        const Shape& s = p.shape;
        keys = *std::max_element(s.lengths.begin(), s.lengths.end());
        if (s.window > 0) keys = std::min(keys, double(s.window));
        rows = keys * s.H / s.G;
        size = s.scale() * norm(p.q) * norm(p.k);
        score = (terms(C) + 3 * u) * size;
    }
    // A weight exp(score - m): the errors of both, the difference's rounding, exp's 2 ulp. Each of
    // the splits combines with two more such factors and three roundings; then the sum over keys.
    double l() const {
        const double once = 2 * score + 2 * u * size + 4 * u, splits = keys / kKeyBlock + 2;
        return std::expm1(once * splits + terms(keys + kKeyBlock) + gamma<float>(3 * splits) +
                          kOperand);
    }
    // In o = sum w v / sum w both sums err so; a division, and one rounding to T at the store.
    double o() const { return std::expm1(2 * l() + 3 * u); }
    // m + log l, in powers of 2 on the way.
    double lse() const { return score + std::log1p(l()) + 4 * u * (size + std::log(keys)); }

    // exp(score - lse): lse is given.
    double weight() const {
        return std::expm1(score + 3 * u * (2 * size + std::log(keys)) + 4 * u);
    }
    // p or ds is rounded to an operand; ds has two sums over the columns, two more roundings.
    double dv() const { return combined(weight(), terms(rows + kKeyBlock)); }
    double ds() const { return combined(weight(), terms(C) + 3 * u); }
    double dk() const { return combined(ds(), terms(rows + kKeyBlock) + 2 * u); }
    double dq() const { return combined(ds(), terms(keys + kKeyBlock) + 2 * u); }
    static double combined(double factor, double sum) {
        return (1 + factor) * (1 + sum) * (1 + kOperand) - 1;
    }
};

// o and lse of `layout` against the plain loops.
template <class T>
void check_forward(const Problem<T>& p, const Layout& layout) {
    SCOPED_TRACE(testing::Message() << p.shape << (sizeof(T) == 2 ? " bf16" : " f32"));
    const Tolerance<T> tolerance(p);
    const auto got = forward(p, layout);
    const auto want = expected(p, layout, false), size = expected(p, layout, true);
    EXPECT_TRUE(within(got.o, want.o, size.o, tolerance.o() + unit_roundoff<T>()));
    std::vector<double> one(want.lse.size(), 1);
    EXPECT_TRUE(within(got.lse, want.lse, one, tolerance.lse()));
}

// Gradients from the same o and lse, which are the exact ones rounded.
template <class T>
void check_backward(const Problem<T>& p, const Layout& layout) {
    SCOPED_TRACE(testing::Message() << p.shape << (sizeof(T) == 2 ? " bf16" : " f32"));
    const Tolerance<T> tolerance(p);
    const auto exact = expected(p, layout, false);
    const Output<T, float> out{cast<T>(exact.o), cast<float>(exact.lse)};
    const auto got = backward(p, layout, out);
    const auto want = expected_gradients(p, layout, out);
    EXPECT_TRUE(within(got.dq, want.value.dq, want.size.dq, tolerance.dq() + unit_roundoff<T>()));
    // Rows of the store that no span occupies keep their 7.
    EXPECT_TRUE(within(got.dk, want.value.dk, want.size.dk, tolerance.dk()));
    EXPECT_TRUE(within(got.dv, want.value.dv, want.size.dv, tolerance.dv()));
}

struct Case {
    Shape shape;
    std::vector<Cut> cuts;  // whole sequences when empty
    Store store;

    Case(const Shape& shape, const std::vector<Cut>& cuts, Store store)
        : shape(shape), cuts(cuts), store(store) {}
    Layout layout() const { return Layout(shape, cuts.empty() ? shape.whole() : cuts, store); }
};

// Under every schedule. No sequence has two spans, as the backward demands.
const Case kSmall[] = {
    {{1, 1, 2, 0, {1}}, {}, Store::contiguous},
    {{4, 2, 6, 5, {37, 1, 70}}, {{0, 30, 7}, {2, 0, 66}}, Store::paged},
    {{6, 1, 64, 1, {20}}, {}, Store::contiguous},
    {{2, 2, 34, 0, {66, 3}}, {{0, 14, 52}, {1, 2, 1}}, Store::paged},
    {{2, 1, 96, 64, {130}}, {{0, 100, 30}}, Store::paged},
};
// Under one.
const Case kLarge[] = {
    {{4, 2, 64, 0, {193, 260}}, {}, Store::paged},
    {{4, 2, 128, 100, {260}}, {}, Store::contiguous},
    {{1, 1, 80, 64, {193, 1, 65}}, {{2, 0, 65}, {0, 60, 133}, {1, 0, 1}}, Store::paged},
    {{6, 1, 96, 5, {70}}, {}, Store::contiguous},
    {{2, 2, 256, 0, {67}}, {}, Store::paged},
    {{2, 1, 130, 1, {65}}, {}, Store::contiguous},
    {{3, 3, 128, 0, {260, 140}}, {{1, 10, 130}, {0, 240, 20}}, Store::paged},
    {{64, 1, 2, 1, {260}}, {}, Store::contiguous},  // more heads than delta's grid has warps
    // Few rows, many keys.
    {{4, 2, 64, 0, {321, 40}}, {{0, 320, 1}, {1, 39, 1}}, Store::paged},
    {{6, 1, 128, 100, {260, 40}}, {{1, 37, 3}, {0, 258, 2}}, Store::contiguous},
    {{2, 2, 96, 0, {260}}, {{0, 220, 40}}, Store::paged},
    {{4, 1, 256, 0, {300}}, {{0, 297, 3}}, Store::paged},
};

class Attention : public ScheduleTest {};

TEST_P(Attention, ForwardMatchesPlainLoops) {
    for (const Case& c : kSmall) {
        check_forward(Problem<float>(c.shape), c.layout());
        check_forward(Problem<bf16>(c.shape), c.layout());
    }
}

TEST_P(Attention, BackwardMatchesPlainLoops) {
    for (const Case& c : kSmall) {
        check_backward(Problem<float>(c.shape), c.layout());
        check_backward(Problem<bf16>(c.shape), c.layout());
    }
}

// The row rule.
template <class T>
class Rows {
  public:
    explicit Rows(const Shape& shape) : Rows(shape, shape.whole()) {}
    Rows(const Shape& shape, const std::vector<Cut>& cuts)
        : p_(shape), want_(forward(p_, Layout(shape, cuts, Store::contiguous))) {}

    testing::AssertionResult same(const std::vector<Cut>& cuts, Store store,
                                  size_t shift = 0) const {
        return same(Layout(p_.shape, cuts, store), shift);
    }
    testing::AssertionResult same(const Layout& layout, size_t shift = 0,
                                  bool with_scratch = true) const {
        const Shape& s = p_.shape;
        const auto got = forward(p_, layout, shift, with_scratch);
        for (const int64_t row : layout.query_rows) {
            const auto part = [row](const auto& v, int width) {
                return std::span(v).subspan(size_t(row * width), size_t(width));
            };
            const auto o = same_bits(part(got.o, s.H * s.C), part(want_.o, s.H * s.C));
            const auto lse = same_bits(part(got.lse, s.H), part(want_.lse, s.H));
            if (!o || !lse)
                return testing::AssertionFailure()
                       << s << " row " << row << ": " << o.message() << lse.message();
        }
        return testing::AssertionSuccess();
    }

  private:
    Problem<T> p_;
    Output<T, float> want_;
};

constexpr int kLong = 3 * kKeyBlock + 2;

template <class T>
void check_rows(const Shape& shape) {
    const Rows<T> rows(shape);
    for (const Store store : {Store::contiguous, Store::paged}) {
        EXPECT_TRUE(
            rows.same({{0, 0, 1}, {0, 1, 62}, {0, 63, 2}, {1, 5, 10}, {0, 65, 100}}, store));
        EXPECT_TRUE(rows.same({{0, kLong - 1, 1}, {1, 14, 1}, {0, 128, 1}}, store));
    }
    EXPECT_TRUE(rows.same({{1, 3, 12}, {0, 7, 150}}, Store::paged));
    EXPECT_TRUE(rows.same({{0, 191, 3}}, Store::contiguous, 1));  // unaligned
    EXPECT_TRUE(rows.same({{0, 70, 124}}, Store::contiguous, 1));
}

TEST_P(Attention, RowsHaveTheSameBitsInEveryCall) {
    check_rows<float>({4, 2, 20, 70, {kLong, 15}});
    check_rows<bf16>({4, 2, 64, 70, {kLong, 15}});
}

INSTANTIATE_TEST_SUITE_P(Device, Attention, testing::ValuesIn(kSchedules), schedule_name);

// ScheduleTest skips without a device.
class LargeAttention : public ScheduleTest {};
INSTANTIATE_TEST_SUITE_P(Device, LargeAttention, testing::Values(kSchedules[0]), schedule_name);

TEST_P(LargeAttention, ForwardMatchesPlainLoops) {
    for (const Case& c : kLarge) {
        check_forward(Problem<float>(c.shape), c.layout());
        check_forward(Problem<bf16>(c.shape), c.layout());
    }
}

TEST_P(LargeAttention, BackwardMatchesPlainLoops) {
    for (const Case& c : kLarge) {
        check_backward(Problem<float>(c.shape), c.layout());
        check_backward(Problem<bf16>(c.shape), c.layout());
    }
}

// Scores far from 0, all of one sign: exp of any of them is 0 or infinite in float.
template <class T>
void check_far_scores(float sign) {
    Problem<T> p({2, 1, 64, 70, {200}});
    for (T& x : p.k) x = T(1 + 0.01f * float(x));
    for (T& x : p.q) x = T(sign * (20 + float(x)));
    check_forward(p, Layout(p.shape, p.shape.whole(), Store::paged));
    check_forward(p, Layout(p.shape, {{0, 199, 1}}, Store::paged));
    check_backward(p, Layout(p.shape, p.shape.whole(), Store::paged));
}
TEST_P(LargeAttention, ScoresFarFromZero) {
    for (const float sign : {-1.f, 1.f}) {
        check_far_scores<float>(sign);
        check_far_scores<bf16>(sign);
    }
}

// Windows that are none, shorter than a split, a split, and that start inside one.
TEST_P(LargeAttention, RowsHaveTheSameBitsInEveryCall) {
    check_rows<float>({6, 1, 6, 0, {kLong, 15}});
    for (const int window : {0, 1, 5, 64, 100}) check_rows<bf16>({2, 1, 34, window, {kLong, 15}});
    check_rows<bf16>({6, 1, 96, 0, {kLong, 15}});
    check_rows<bf16>({2, 2, 128, 0, {kLong, 15}});
    check_rows<bf16>({1, 1, 256, 100, {kLong, 15}});
}

// Each position on its own, with nothing but NaN behind it.
template <class T>
void check_decoding(const Shape& shape) {
    const Rows<T> rows(shape);
    for (int t = 0; t < shape.lengths[0]; ++t) EXPECT_TRUE(rows.same({{0, t, 1}}, Store::paged));
}
TEST_P(LargeAttention, DecodingGivesTheBitsOfPrefill) {
    check_decoding<float>({2, 2, 6, 70, {kLong}});
    check_decoding<bf16>({4, 2, 64, 0, {kLong}});
    check_decoding<bf16>({2, 1, 80, 70, {kLong}});
}

// ---- few rows, so many keys that a row's splits are computed by different blocks ----

constexpr int kFar = 10 * kKeyBlock;  // a table that reaches so far is enough

TEST_P(LargeAttention, SplitsOverBlocksMatchPlainLoops) {
    const Case cases[] = {
        {{4, 2, 64, 0, {600, 40}}, {{0, 599, 1}, {1, 39, 1}}, Store::paged},
        {{6, 1, 96, 520, {700, 3}}, {{1, 0, 3}, {0, 695, 4}}, Store::contiguous},
        {{1, 1, 34, 0, {33 * kKeyBlock}}, {{0, 33 * kKeyBlock - 20, 20}}, Store::paged},
        {{4, 1, 256, 0, {580}}, {{0, 577, 3}}, Store::paged},
        {{2, 1, 130, 0, {577}}, {{0, 576, 1}}, Store::paged},
    };
    for (const Case& c : cases) {
        EXPECT_GT(scratch_size<bf16>(c.shape, c.layout()), 0) << c.shape;
        check_forward(Problem<bf16>(c.shape), c.layout());
    }
}

// The last 70 rows of the first sequence by forward_tile; then some of them by many blocks a row,
// and by forward_few.
void check_splits(const Shape& shape) {
    const int end = shape.lengths[0], more = shape.lengths[1];
    const Rows<bf16> rows(shape, {{0, end - 70, 70}, {1, 0, more}});
    const int most = 64 / (shape.H / shape.G);  // rows at once
    const std::vector<Cut> calls[] = {
        {{0, end - 1, 1}},
        {{1, more - 1, 1}, {0, end - 3, 2}, {1, 3, 3}, {0, end - 30, 1}},
        {{0, end - 70, most}},
        {{0, end - most, most}, {1, 0, 1}},
    };
    for (const auto& cuts : calls)
        for (const Store store : {Store::contiguous, Store::paged}) {
            const Layout layout(shape, cuts, store);
            EXPECT_GT(scratch_size<bf16>(shape, layout), 0) << shape;
            EXPECT_TRUE(rows.same(layout));
            EXPECT_TRUE(rows.same(layout, 0, false));
        }
    EXPECT_TRUE(rows.same(calls[1], Store::contiguous, 1));  // unaligned
}
TEST_P(LargeAttention, SplitsOverBlocksGiveTheSameBits) {
    check_splits({2, 2, 34, 0, {35 * kKeyBlock + 7, 15}});
    check_splits({4, 2, 64, 0, {600, 15}});
    check_splits({6, 1, 96, 0, {577, 15}});
    // Windows that start inside a split, and that are whole splits.
    check_splits({1, 1, 64, 450, {620, 15}});
    check_splits({6, 1, 34, 512, {700, 70}});
    check_splits({4, 2, 96, 513, {640, 15}});
}

// Each position on its own, by a launch that reaches further.
TEST_P(LargeAttention, SplitsFollowTheTable) {
    for (const Shape& shape : {Shape{4, 2, 64, 0, {kLong}}, Shape{1, 1, 96, 0, {kLong}}}) {
        const Rows<bf16> rows(shape);
        for (int t = 0; t < kLong; ++t) {
            const Layout layout(shape, {{0, t, 1}}, Store::paged, kFar);
            EXPECT_GT(scratch_size<bf16>(shape, layout), 0);
            EXPECT_TRUE(rows.same(layout));
        }
    }
}

TEST(AttentionScratch, ServesFewRowsOverManyKeys) {
    const auto size = [](int count, int max_count, int max_end, int G, int window) {
        SpanTable table;
        table.count = count, table.max_count = max_count, table.max_end = max_end;
        EXPECT_EQ(cuda::attention_scratch_size<float>(table, 16, 8, 96, window), 0);
        EXPECT_EQ(ref::attention_scratch_size<float>(table, 16, 8, 96, window), 0);
        EXPECT_EQ(kernels::cpu::attention_scratch_size<float>(table, 16, 8, 96, window), 0);
        return cuda::attention_scratch_size<bf16>(table, 16, G, 96, window);
    };
    EXPECT_EQ(size(1, 1, 8192, 8, 0), 16 * 128 * 98);  // heads, splits, o_j with m_j and l_j
    EXPECT_EQ(size(1, 1, 8192, 8, 2048), 16 * 33 * 98);
    EXPECT_EQ(size(1, 1, 8 * kKeyBlock, 8, 0), 0);
    EXPECT_EQ(size(1, 1, 8192, 8, 64), 0);
    EXPECT_EQ(size(1, 33, 8192, 8, 0), 0);  // 66 packed rows
    EXPECT_EQ(size(64, 1, 8192, 8, 0), 0);  // enough blocks without
    EXPECT_LE(size(31, 1, 1 << 20, 8, 0), 1 << 24);
    EXPECT_EQ(size(0, 0, 0, 8, 0), 0);
    EXPECT_EQ(size(1, 1, 8192, 0, 0), 0);  // impossible
}

// The kernel for few rows takes four splits a round (two of wide heads): several rounds, and a last
// one that is not full.
TEST_P(LargeAttention, DecodingTakesSeveralRounds) {
    const auto check = [](const Shape& shape) {
        const Rows<bf16> rows(shape);
        for (int t = shape.lengths[0]; t-- > 4 * kKeyBlock;)
            if (t % kKeyBlock < 2 || t % 29 == 0) {
                EXPECT_TRUE(rows.same({{0, t, 1}}, Store::paged)) << t;
            }
    };
    check({2, 1, 64, 0, {10 * kKeyBlock + 2}});
    check({2, 2, 6, 5 * kKeyBlock + 9, {7 * kKeyBlock + 2}});
    check({1, 1, 200, 0, {5 * kKeyBlock + 2}});
}

// The order of dk's and dv's sums does not depend on the store, the company or alignment.
TEST_P(LargeAttention, GradientsDependOnTheirSequenceAlone) {
    const auto check = [](const auto& p) {
        const Shape& s = p.shape;
        const std::vector<Cut> both{{0, 30, 60}, {1, 0, 20}}, alone{{0, 30, 60}};
        const Layout a(s, both, Store::paged), b(s, alone, Store::contiguous);
        const auto out = forward(p, a);
        const auto two = backward(p, a, out), one = backward(p, b, out, 1);
        EXPECT_TRUE(same_bits(std::span(two.dq).first(one.dq.size()), std::span(one.dq)));
        const size_t width = size_t(s.G * s.C);
        for (size_t row = 0; row < 90; ++row) {
            const size_t other = size_t(a.blocks[row / kKeyBlock]) + row % kKeyBlock;
            for (const auto member : {&decltype(one)::dk, &decltype(one)::dv})
                EXPECT_TRUE(same_bits(std::span(one.*member).subspan(row * width, width),
                                      std::span(two.*member).subspan(other * width, width)))
                    << row;
        }
    };
    check(Problem<float>({4, 2, 20, 40, {90, 20}}));
    check(Problem<bf16>({4, 2, 64, 40, {90, 20}}));
}

// A captured launch serves later tables: fewer rows in a span, or none, and earlier ends.
TEST_P(LargeAttention, GridsCoverMoreThanTheTableHolds) {
    const auto check = [](const auto& p, int max_count) {
        const Shape& s = p.shape;
        Layout layout(s, {{0, 60, 10}, {1, 3, 2}}, Store::paged);
        const auto want = forward(p, layout);
        const auto gradients = backward(p, layout, want);
        layout.spans.push_back({0, 0, 0, 0});
        layout.table.count = 3;
        layout.table.max_count = max_count;
        layout.table.max_end = kFar;
        const auto far = forward(p, layout);
        EXPECT_TRUE(same_bits(far.o, want.o));
        EXPECT_TRUE(same_bits(far.lse, want.lse));
        const auto again = backward(p, layout, want);
        EXPECT_TRUE(same_bits(again.dq, gradients.dq));
        EXPECT_TRUE(same_bits(again.dk, gradients.dk));
    };
    check(Problem<float>({4, 2, 20, 40, {70, 5}}), 200);
    check(Problem<bf16>({4, 2, 64, 40, {70, 5}}), 200);
    check(Problem<bf16>({4, 2, 64, 0, {70, 5}}), 20);  // splits over blocks
}

TEST_P(LargeAttention, LogSumsAreOptional) {
    const Problem<bf16> p({1, 1, 8, 0, {3}});
    const Layout layout(p.shape, p.shape.whole(), Store::contiguous);
    DeviceArray<bf16> q(p.q), k(p.k), v(p.v), o(p.q.size());
    DeviceArray<Span> spans(layout.spans);
    DeviceArray<int64_t> blocks(layout.blocks);
    ASSERT_TRUE(ok(cuda::attention_forward<bf16, float>(
        o.data(), nullptr, q.data(), k.data(), v.data(), layout.at(spans.data(), blocks.data()), 1,
        1, 8, 0, float(p.shape.scale()), nullptr, {})));
    EXPECT_TRUE(same_bits(o.host(), forward(p, layout).o));
}

template <class T>
void check_arguments() {
    const auto code = [](SpanTable table, int H, int G, int C, int window, float scale = 1) {
        const kernels::Status forward =
            cuda::attention_forward<T, float>(nullptr, nullptr, nullptr, nullptr, nullptr, table, H,
                                              G, C, window, scale, nullptr, {});
        const kernels::Status backward = cuda::attention_backward<T, float>(
            nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
            nullptr, table, H, G, C, window, scale, {});
        EXPECT_EQ(forward.code, backward.code);
        return forward.code;
    };
    using kernels::Code;
    EXPECT_EQ(code({}, 4, 2, 16, 0), Code::ok);  // no rows, no work
    EXPECT_EQ(code({}, 3, 2, 16, 0), Code::bad_argument);
    EXPECT_EQ(code({}, 4, 2, 15, 0), Code::bad_argument);
    EXPECT_EQ(code({}, 4, 2, 258, 0), Code::bad_argument);
    EXPECT_EQ(code({}, 4, 2, 16, -1), Code::bad_argument);
    EXPECT_EQ(code({}, 4, 2, 16, 0, 0), Code::bad_argument);
    EXPECT_EQ(code({}, 4, 2, 16, 0, NAN), Code::bad_argument);
    SpanTable huge;
    huge.count = huge.max_count = huge.max_end = 1 << 30;
    EXPECT_EQ(code(huge, 4, 2, 16, 0), Code::bad_argument);
}
TEST_P(LargeAttention, RefusesImpossibleShapes) {
    check_arguments<float>();
    check_arguments<bf16>();
}

}  // namespace
}  // namespace fbt::tests
