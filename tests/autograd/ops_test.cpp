// Every rule against central finite differences, in double on the ref backend.
#include "autograd/ops.h"

#include <functional>

#include "tests/compare.h"

namespace fbt::tests {
namespace {

using autograd::Tape;
using autograd::Var;
using autograd::Weight;
using tensor::Context;
using tensor::DType;
using tensor::Shape;
using tensor::Tensor;

Context& ref() {
    static Context context("ref", 2);
    return context;
}

Tensor random(Shape shape, unsigned seed, double scale = 1) {
    const int64_t n = tensor::numel_of(shape);
    return Tensor::from_double(ref(), normal<double>(n, seed, scale), shape, DType::f64);
}

Weight weight(Shape shape, unsigned seed) {
    Weight w;
    w.value = random(shape, seed);
    w.grad = Tensor::zeros(ref(), shape, DType::f64);
    if (shape.size() == 2) {
        tensor::matmul_pack(w.packed, w.value, false, w.value.dtype());
        tensor::matmul_pack(w.packed_back, w.value, true, w.value.dtype());
    }
    return w;
}

// f: an op of variables and weights. Checks d sum(c * f) / d every element of every input, with
// fixed random c. With h = 1e-5 the truncation error h^2 f'''/6 is below 1e-9 for these O(1)
// functions and the rounding error 1e-16/h below 1e-10; 1e-7 leaves two digits for large f'''.
void check(const std::function<Var(Tape&, const std::vector<Var>&)>& f, std::vector<Tensor> inputs,
           const std::vector<Weight*>& weights = {}) {
    Tape tape(true);
    std::vector<Var> vars;
    for (const Tensor& t : inputs) vars.push_back(tape.variable(t));
    const Var y = f(tape, vars);
    const Tensor c = random(y.value().shape(), 99);
    tape.backward({{y, c}});
    const auto value = [&] {
        Tape plain(false);
        std::vector<Var> constants;
        for (const Tensor& t : inputs) constants.push_back(plain.constant(t));
        const std::vector<double> out = f(plain, constants).value().to_double();
        const std::vector<double> k = c.to_double();
        double sum = 0;
        for (size_t i = 0; i < out.size(); ++i) sum += k[i] * out[i];
        return sum;
    };
    const auto differences = [&](const Tensor& t, const std::function<void()>& refresh) {
        std::vector<double> out;
        const double h = 1e-5;
        for (int64_t i = 0; i < t.numel(); ++i) {
            double* x = t.data<double>() + i;
            const double keep = *x;
            *x = keep + h;
            refresh();
            const double up = value();
            *x = keep - h;
            refresh();
            const double down = value();
            *x = keep;
            refresh();
            out.push_back((up - down) / (2 * h));
        }
        return out;
    };
    for (size_t i = 0; i < inputs.size(); ++i) {
        SCOPED_TRACE("input " + std::to_string(i));
        ASSERT_TRUE(vars[i].grad().defined());
        EXPECT_TRUE(close(vars[i].grad().to_double(), differences(inputs[i], [] {}), 1e-7, 1e-7));
    }
    for (size_t i = 0; i < weights.size(); ++i) {
        SCOPED_TRACE("weight " + std::to_string(i));
        Weight& w = *weights[i];
        EXPECT_TRUE(w.reached);
        const std::vector<double> got = w.grad.to_double();
        EXPECT_TRUE(close(got,
                          differences(w.value,
                                      [&] {
                                          if (!w.packed.data.defined()) return;
                                          tensor::matmul_pack(w.packed, w.value, false,
                                                              w.value.dtype());
                                      }),
                          1e-7, 1e-7));
    }
}

TEST(Autograd, Linear) {
    Weight w = weight({5, 3}, 1);
    check([&](Tape& t, auto& v) { return autograd::linear(t, v[0], w); }, {random({4, 3}, 2)},
          {&w});
}

TEST(Autograd, Embedding) {
    Weight w = weight({4, 3}, 1);
    const Tensor tokens = Tensor::from(ref(), std::vector<int32_t>{2, 0, 2, 3, 2}, {5});
    check([&](Tape& t, auto&) { return autograd::embedding(t, tokens, w); }, {}, {&w});
}

TEST(Autograd, RmsNorm) {
    Weight g = weight({7}, 1);
    check([&](Tape& t, auto& v) { return autograd::rmsnorm(t, v[0], g, 1e-6); },
          {random({3, 7}, 2)}, {&g});
}

TEST(Autograd, ResidualRmsNorm) {
    Weight g = weight({7}, 1);
    check([&](Tape& t, auto& v) { return autograd::residual_rmsnorm(t, v[0], v[1], g, 0.4, 1e-6); },
          {random({3, 7}, 2), random({3, 7}, 3)}, {&g});
}

TEST(Autograd, QkNormRope) {
    Weight g = weight({6}, 1);
    const Tensor cos = random({9, 3}, 5), sin = random({9, 3}, 6);
    const Tensor positions = Tensor::from(ref(), std::vector<int32_t>{0, 8, 3}, {3});
    check([&](Tape& t,
              auto& v) { return autograd::qk_norm_rope(t, v[0], g, cos, sin, positions, 1e-6); },
          {random({3, 2, 6}, 2)}, {&g});
}

TEST(Autograd, AttentionOverSpans) {
    // Two sequences in one store: a suffix [3,6) of one and the whole of another.
    auto spans = std::make_shared<tensor::SpanBatch>();
    spans->add_contiguous(3, 3, 0);
    spans->add_contiguous(0, 4, 6);
    spans->upload(ref());
    for (int window : {0, 3})
        check([&](Tape& t,
                  auto& v) { return autograd::attention(t, v[0], v[1], v[2], spans, window); },
              {random({7, 4, 2}, 1), random({10, 2, 2}, 2), random({10, 2, 2}, 3)});
}

TEST(Autograd, GateSwigluAddConcat) {
    check([&](Tape& t, auto& v) { return autograd::gate(t, v[0], v[1]); },
          {random({3, 2, 4}, 1), random({3, 2}, 2)});
    check([&](Tape& t, auto& v) { return autograd::gate(t, v[0], v[1]); },
          {random({3, 5}, 1), random({3, 5}, 2)});
    check([&](Tape& t, auto& v) { return autograd::swiglu(t, v[0], v[1]); },
          {random({3, 5}, 1), random({3, 5}, 2)});
    check([&](Tape& t, auto& v) { return autograd::add(t, v[0], v[1]); },
          {random({3, 5}, 1), random({3, 5}, 2)});
    check([&](Tape& t, auto& v) { return autograd::concat_columns(t, v[0], v[1]); },
          {random({3, 5}, 1), random({3, 2}, 2)});
}

TEST(Autograd, CarryFromBothSources) {
    const Tensor source = Tensor::from(ref(), std::vector<int64_t>{-1 - 2, 0, 3}, {3});
    check([&](Tape& t, auto& v) { return autograd::carry(t, v[0], v[1], source, {}); },
          {random({3, 4}, 1), random({4, 4}, 2)});
}

TEST(Autograd, JoinRows) {
    const auto index = [](std::vector<int64_t> v) {
        return Tensor::from(ref(), v, {int64_t(v.size())});
    };
    check(
        [&](Tape& t, auto& v) {
            return autograd::join_rows(t, 5, v[0], index({3, 1}), index({0, 2}), v[1],
                                       index({1, 4, 3}));
        },
        {random({4, 2, 3}, 1), random({3, 2, 3}, 2)});
}

TEST(Autograd, GradientsOfOneValueUsedTwiceAdd) {
    Weight w = weight({3, 3}, 1);
    check(
        [&](Tape& t, auto& v) {
            const Var y = autograd::linear(t, v[0], w);
            const Var twice = autograd::add(t, v[0], v[0]);
            return autograd::add(t, autograd::add(t, y, v[0]), autograd::swiglu(t, y, twice));
        },
        {random({4, 3}, 2)}, {&w});
}

// The classifier is a root: its own gradient is 1.
TEST(Autograd, Classifier) {
    Weight e = weight({6, 3}, 1);
    const int64_t N = autograd::kLogitRows + 3;  // two chunks
    Tensor x = random({N, 3}, 2);
    std::vector<int32_t> targets(N);
    std::vector<double> weights(N);
    for (int64_t n = 0; n < N; ++n) {
        targets[n] = n % 5 == 0 ? -1 : int32_t(n % 6);
        weights[n] = 0.1 + double(n % 3);
    }
    const Tensor t = Tensor::from(ref(), targets, {N});
    const Tensor w = Tensor::from_double(ref(), weights, {N}, DType::f64);
    const double z = 0.01;
    Tape tape(true);
    const Var h = tape.variable(x);
    (void)autograd::classifier(tape, h, e, t, w, z);
    tape.backward();
    const auto loss = [&] {
        Tape plain(false);
        const auto c = autograd::classifier(plain, plain.constant(x), e, t, w, z);
        const std::vector<double> ce = c.ce.to_double(), lse = c.lse.to_double();
        double sum = 0;
        for (int64_t n = 0; n < N; ++n)
            if (targets[n] >= 0) sum += weights[n] * (ce[n] + z * lse[n] * lse[n]);
        return sum;
    };
    const auto difference = [&](double* p, bool repack) {
        const double keep = *p, step = 1e-5;
        const auto at = [&](double v) {
            *p = v;
            if (repack) tensor::matmul_pack(e.packed, e.value, false, e.value.dtype());
            return loss();
        };
        const double d = (at(keep + step) - at(keep - step)) / (2 * step);
        at(keep);
        return d;
    };
    std::vector<double> want, got = h.grad().to_double();
    for (int64_t i = 0; i < 9; ++i) want.push_back(difference(x.data<double>() + i, false));
    got.resize(9);
    EXPECT_TRUE(close(got, want, 1e-7, 1e-7));
    want.clear();
    // A sum of N terms is up to N times as large: so are its rounding and truncation errors.
    for (int64_t i = 0; i < 18; ++i) want.push_back(difference(e.value.data<double>() + i, true));
    EXPECT_TRUE(close(e.grad.to_double(), want, 1e-7 * double(N), 1e-7));
}

TEST(Autograd, RecomputedSegmentHasTheSameGradients) {
    Weight w = weight({3, 3}, 1), w2 = weight({3, 3}, 1);
    const Tensor x = random({4, 3}, 2), c = random({4, 3}, 3);
    const auto segment = [](Weight& weight) {
        return [&weight](Tape& t, const std::vector<Var>& in) -> std::vector<Var> {
            const Var y = autograd::linear(t, in[0], weight);
            return {autograd::swiglu(t, y, in[0]), y};
        };
    };
    const auto run = [&](bool recompute, Weight& weight) {
        Tape tape(true);
        const Var v = tape.variable(x);
        const std::vector<Var> out = recompute ? autograd::recompute(tape, {v}, segment(weight))
                                               : segment(weight)(tape, {v});
        const Var sum = autograd::add(tape, out[0], out[1]);
        tape.backward({{sum, c}});
        return v.grad().to_double();
    };
    EXPECT_TRUE(same_bits(run(true, w), run(false, w2)));
    EXPECT_TRUE(same_bits(w.grad.to_double(), w2.grad.to_double()));
}

// A weight is said to be ready once, when its gradient is what it will be in the end, and before
// the walk is over; uses inside a recomputed segment count.
TEST(Autograd, TellsWhenAWeightsGradientIsComplete) {
    Weight early = weight({3, 3}, 1), late = weight({3, 3}, 2), unused = weight({3, 3}, 3);
    Tape tape(true);
    const Var v = tape.variable(random({4, 3}, 4));
    const auto segment = [&](Tape& t, const std::vector<Var>& in) -> std::vector<Var> {
        return {autograd::linear(t, in[0], late)};
    };
    const Var a = autograd::recompute(tape, {v}, segment)[0];
    const Var b = autograd::linear(tape, autograd::linear(tape, a, early), early);
    const Var c = autograd::add(tape, b, autograd::linear(tape, b, late));
    // A branch in which no gradient flows still holds its weight back until it is passed.
    (void)autograd::linear(tape, autograd::linear(tape, v, early), late);
    EXPECT_EQ(tape.uses(early), 3);
    EXPECT_EQ(tape.uses(late), 3);
    EXPECT_EQ(tape.uses(unused), 0);

    std::vector<const Weight*> order;
    std::vector<std::vector<double>> gradients;
    tape.backward({{c, random({4, 3}, 5)}}, [&](Weight& w) {
        order.push_back(&w);
        gradients.push_back(w.grad.to_double());
    });
    ASSERT_EQ(order, (std::vector<const Weight*>{&early, &late}));
    EXPECT_TRUE(same_bits(gradients[0], early.grad.to_double()));
    EXPECT_TRUE(same_bits(gradients[1], late.grad.to_double()));
    EXPECT_EQ(tape.uses(early), 0);
}

TEST(Autograd, ValuesUnderWayArriveBeforeTheyAreRead) {
    Weight w = weight({3, 3}, 1), other = weight({3, 3}, 2);
    const Tensor x = random({2, 3}, 3);
    Tape tape(false);
    const Var want = autograd::linear(tape, tape.constant(x), other);
    int arrivals = 0;
    w.arrive = [&] {
        ++arrivals;
        tensor::matmul_pack(w.packed, other.value, false, DType::f64);
    };
    for (int i = 0; i < 2; ++i) {
        const Var y = autograd::linear(tape, tape.constant(x), w);
        EXPECT_TRUE(same_bits(y.value().to_double(), want.value().to_double()));
    }
    EXPECT_EQ(arrivals, 1);
}

TEST(Autograd, NothingIsRecordedWithoutNeed) {
    Weight w = weight({3, 3}, 1);
    w.grad = {};
    Tape tape(true);
    const Var y = autograd::linear(tape, tape.constant(random({2, 3}, 1)), w);
    EXPECT_FALSE(y.needs_grad());
    Tape off(false);
    EXPECT_FALSE(off.variable(random({2, 3}, 1)).needs_grad());
}

}  // namespace
}  // namespace fbt::tests
