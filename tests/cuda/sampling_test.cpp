// kernels/sampling.cu against the contract, spelled out in double on the same rounded logits.
#include "kernels/sampling.h"

#include <algorithm>
#include <numeric>

#include "tensor/ops.h"
#include "tests/compare.h"
#include "tests/cuda/device.h"

namespace fbt::tests {
namespace {

namespace cuda = kernels::cuda;
namespace ref = kernels::ref;
using kernels::bf16;
using kernels::Sampling;

// Rows of V logits, each with its settings and uniform.
template <class T>
std::vector<int32_t> draw(const std::vector<T>& logits, int V,
                          const std::vector<Sampling>& settings,
                          const std::vector<float>& uniform) {
    const size_t N = uniform.size();
    DeviceArray<T> dev_logits(logits);
    DeviceArray<Sampling> dev_settings(settings);
    DeviceArray<float> dev_uniform(uniform);
    DeviceArray<int32_t> tokens(N), scratch(N * size_t(V));
    EXPECT_TRUE(ok(cuda::sample<T>(tokens.data(), dev_logits.data(), dev_settings.data(),
                                   dev_uniform.data(), int64_t(N), V, scratch.data(), {})));
    return tokens.host();
}
// One row, drawn once for each uniform.
template <class T>
std::vector<int32_t> draw(const std::vector<T>& row, const Sampling& how,
                          const std::vector<float>& uniform) {
    std::vector<T> logits;
    for (size_t n = 0; n < uniform.size(); ++n) logits.insert(logits.end(), row.begin(), row.end());
    return draw<T>(logits, int(row.size()), std::vector<Sampling>(uniform.size(), how), uniform);
}

std::vector<float> evenly(int n) {
    std::vector<float> u;
    for (int i = 0; i < n; ++i) u.push_back((float(i) + 0.5f) / float(n));
    return u;
}
// The ends of [0, 1) and some between.
const std::vector<float> kUniforms = {0, 0x1p-20f, 0.3f, 0.77f, 0.999f, 1 - 0x1p-24f};

// Each token drawn is one whose interval holds the uniform, to the rounding of the weights
//   exp((x - largest)/temperature) = exp(-t):
// the exponent has three roundings, 3tu; the exponential is off by 2 ulp = 4u, and truncation takes
// less than V*2^-61. What has t > 44 weighs less than that, whatever its t. So the sums of weights
// are off by `tolerance`, relative to their total. The cut by top_p may fall on any token whose
// prefix is that close to top_p.
template <class T>
void check(const std::vector<T>& row, const Sampling& how,
           const std::vector<float>& uniforms = kUniforms) {
    const size_t V = row.size();
    const auto x = cast<double>(row);
    std::vector<int32_t> ids(V);
    std::iota(ids.begin(), ids.end(), 0);
    std::stable_sort(ids.begin(), ids.end(),
                     [&](int32_t a, int32_t b) { return x[size_t(a)] > x[size_t(b)]; });
    if (how.top_k > 0 && size_t(how.top_k) < V) ids.resize(size_t(how.top_k));
    std::vector<double> ends;
    std::vector<size_t> place(V, V);  // of a token in the order; V for one that top-k cut
    double total = 0, most = 0;
    for (size_t i = 0; i < ids.size(); ++i) {
        place[size_t(ids[i])] = i;
        const double t = x[size_t(ids[i])] == x[size_t(ids[0])]
                             ? 0
                             : (x[size_t(ids[0])] - x[size_t(ids[i])]) / double(how.temperature);
        total += std::exp(-t);
        most = std::max(most, std::min(t, 44.));
        ends.push_back(total);
    }
    for (double& end : ends) end /= total;
    const double tolerance =
        2 * (gamma<float>(3 * most + 4) + double(V) * double(V) * 0x1p-61 + gamma<double>(V));
    const auto tokens = draw<T>(row, how, uniforms);
    for (size_t n = 0; n < uniforms.size(); ++n) {
        ASSERT_GE(tokens[n], 0);
        ASSERT_LT(size_t(tokens[n]), V);
        const size_t i = place[size_t(tokens[n])];
        ASSERT_LT(i, V) << "token " << tokens[n] << " was cut";
        const double begin = i ? ends[i - 1] : 0;
        size_t cut =
            size_t(std::lower_bound(ends.begin(), ends.end() - 1, double(how.top_p) - tolerance) -
                   ends.begin());
        bool held = false;
        for (; cut < ends.size() && (cut == 0 || ends[cut - 1] <= how.top_p + tolerance); ++cut) {
            const double u = double(uniforms[n]) * ends[cut];
            held = held || (i <= cut && u >= begin - tolerance && u <= ends[i] + tolerance);
        }
        EXPECT_TRUE(held) << "V " << V << ", temperature " << how.temperature << ", top_k "
                          << how.top_k << ", top_p " << how.top_p << ", uniform " << uniforms[n]
                          << ": token " << tokens[n] << " of [" << begin << ", " << ends[i] << ")";
    }
}

const Sampling kSettings[] = {{1, 0, 1},     {0.5f, 0, 1},    {1, 5, 1},         {1, 0, 0.7f},
                              {2, 11, 0.9f}, {1, 1000000, 1}, {0.7f, 700, 0.95f}};

class SamplingKernel : public ScheduleTest {};

TEST_P(SamplingKernel, ZeroTemperatureTakesTheLowestIdAmongTheLargest) {
    EXPECT_EQ(draw<float>({1, 5, 2, 5, 5}, {0, 0, 1}, {0.99f})[0], 1);
    EXPECT_EQ(draw<float>({-1}, {0, 0, 1}, {0.f})[0], 0);
    EXPECT_EQ(draw<float>({-1, -0.f, 0}, {0, 0, 1}, {0.f})[0], 1);  // -0 equals 0
    std::vector<bf16> row(1601, bf16(-3.f));
    row[1600] = row[37] = bf16(2.f);
    EXPECT_EQ(draw<bf16>(row, {0, 5, 0.5f}, {0.5f})[0], 37);
}

TEST_P(SamplingKernel, DrawsTheIntervalThatHoldsTheUniform) {
    for (const Sampling& how : kSettings) {
        for (const size_t V : {1, 37}) check(normal<float>(V, 1, 2), how, evenly(2));
        check(normal<float>(1601, 2, 2), how, evenly(2));
        check(normal<bf16>(1601, 3, 2), how, evenly(2));  // many ties
    }
}

// The rows, their settings and uniforms: each drawn alone as among the others.
TEST_P(SamplingKernel, RowsDoNotDependOnOtherRows) {
    const size_t N = 9;
    const int V = 2051;
    const auto logits = normal<float>(N * size_t(V), 1, 2);
    const auto u = evenly(int(N));
    std::vector<Sampling> settings;
    for (size_t n = 0; n < N; ++n)
        settings.push_back({n % 5 ? 1.f : 0.f, n % 3 ? 0 : 40, n % 2 ? 1.f : 0.9f});
    const auto all = draw<float>(logits, V, settings, u);
    for (size_t n = 0; n < N; ++n) {
        const std::vector<float> row(logits.begin() + n * size_t(V),
                                     logits.begin() + (n + 1) * size_t(V));
        EXPECT_EQ(draw<float>(row, settings[n], {u[n]})[0], all[n]) << n;
    }
}
INSTANTIATE_TEST_SUITE_P(Device, SamplingKernel, testing::ValuesIn(kSchedules), schedule_name);

class SamplingOnce : public ScheduleTest {};

// More rows than a grid has blocks: some blocks take a second one, in the same shared memory.
TEST_P(SamplingOnce, BlocksStrideOverRows) {
    const size_t N = 1024 + 3;
    const int V = 5;
    const auto logits = normal<float>(N * size_t(V), 1, 2);
    const auto u = evenly(int(N));
    const std::vector<Sampling> settings(N, {1, 4, 0.9f});
    const auto all = draw<float>(logits, V, settings, u);
    for (const size_t n : {size_t(0), size_t(2), N - 4, N - 3, N - 2, N - 1}) {
        const std::vector<float> row(logits.begin() + int64_t(n) * V,
                                     logits.begin() + int64_t(n + 1) * V);
        EXPECT_EQ(draw<float>(row, settings[n], {u[n]})[0], all[n]) << n;
    }
}

TEST_P(SamplingOnce, WideVocabularies) {
    for (const Sampling& how : kSettings) {
        check(normal<float>(100352, 1, 2), how);
        check(normal<bf16>(50257, 2, 2), how);
    }
    check(normal<float>(262144, 3, 0.01), {1, 0, 1});  // all of them count
    check(normal<float>(100352, 4, 2), {1, 50000, 0.999f});
}

// Where equal parts of the range of logits are of little use.
TEST_P(SamplingOnce, LopsidedRows) {
    const size_t V = 20011;
    auto masked = normal<float>(V, 1, 2), floor = masked, tiny = masked, twin = masked;
    for (size_t v = 0; v < V; ++v) {
        if (v % 4) masked[v] = -INFINITY;
        if (v % 4) floor[v] = -1e30f;
        tiny[v] *= 1e-40f;                       // subnormal
        if (v % 2) twin[v] = float(v % 7) - 20;  // half of them tied in seven groups
    }
    tiny[5] = 1;
    for (const Sampling& how : {Sampling{1, 0, 1}, Sampling{1, 3000, 0.9f}, Sampling{100, 0, 1},
                                Sampling{1e4f, 15000, 0.5f}, Sampling{0.01f, 0, 1}}) {
        check(masked, how);
        check(floor, how);
        check(tiny, how);
        check(twin, how);
    }
}

// Among equals the order is that of the ids, and sums are exact.
TEST_P(SamplingOnce, EqualLogitsAreDrawnByPlace) {
    const auto u = evenly(3);
    for (const int V : {600, 20011})
        for (const float logit : {0.f, 3.5f, -INFINITY, INFINITY}) {
            const std::vector<float> row(size_t(V), logit);
            const auto all = draw<float>(row, {1, 0, 1}, u);
            const auto few = draw<float>(row, {1, V / 2 + 1, 1}, u);
            const auto half = draw<float>(row, {1, 0, 0.5f}, u);
            for (size_t n = 0; n < u.size(); ++n) {
                EXPECT_EQ(all[n], int32_t(double(u[n]) * V));
                EXPECT_EQ(few[n], int32_t(double(u[n]) * (V / 2 + 1)));
                EXPECT_EQ(half[n], int32_t(double(u[n]) * ((V + 1) / 2)));
            }
        }
}

// Cuts are exact: weights 8 4 4 2 1 1 of 20, shuffled: ids in order 3 | 1 4 | 0 | 2 5.
TEST_P(SamplingOnce, SupportsAreExact) {
    const float ln2 = 0.693147181f;
    const std::vector<float> row = {1 * ln2, 2 * ln2, 0, 3 * ln2, 2 * ln2, 0};
    const auto support = [&](const Sampling& how) {
        auto drawn = draw<float>(row, how, evenly(21));
        std::sort(drawn.begin(), drawn.end());
        drawn.erase(std::unique(drawn.begin(), drawn.end()), drawn.end());
        return drawn;
    };
    using Set = std::vector<int32_t>;
    EXPECT_EQ(support({1, 0, 1}), (Set{0, 1, 2, 3, 4, 5}));
    EXPECT_EQ(support({1, 1, 1}), (Set{3}));
    EXPECT_EQ(support({1, 2, 1}), (Set{1, 3}));  // 1 and 4 tie: the lower id stays
    EXPECT_EQ(support({1, 3, 1}), (Set{1, 3, 4}));
    EXPECT_EQ(support({1, 5, 1}), (Set{0, 1, 2, 3, 4}));
    EXPECT_EQ(support({1, 0, 0.39f}), (Set{3}));           // 8/20 reach it
    EXPECT_EQ(support({1, 0, 0.41f}), (Set{1, 3}));        // 12/20
    EXPECT_EQ(support({1, 0, 0.61f}), (Set{1, 3, 4}));     // 16/20
    EXPECT_EQ(support({1, 0, 0.89f}), (Set{0, 1, 3, 4}));  // 18/20
    EXPECT_EQ(support({1, 2, 0.65f}), (Set{3}));           // of the two: 8/12
    EXPECT_EQ(support({1, 2, 0.68f}), (Set{1, 3}));
    EXPECT_EQ(support({1, 0, 1e-6f}), (Set{3}));
}

// NaN counts as -infinity; infinities take all; a row of nothing but -infinity is uniform.
TEST_P(SamplingOnce, OddLogitsNeitherCrashNorWin) {
    const float inf = INFINITY;
    for (const Sampling& how : {Sampling{0, 0, 1}, Sampling{1, 0, 1}, Sampling{1, 2, 1},
                                Sampling{1, 0, 0.9f}, Sampling{1e-30f, 0, 1}}) {
        for (const int32_t token : draw<float>({NAN, -inf, 0, NAN}, how, evenly(5)))
            EXPECT_EQ(token, 2);
        for (const int32_t token : draw<float>({0, inf, 3e38f, NAN}, how, evenly(5)))
            EXPECT_EQ(token, 1);
        for (const int32_t token : draw<float>({NAN, NAN, -inf}, how, evenly(5))) {
            EXPECT_GE(token, 0);
            EXPECT_LT(token, 3);
        }
        for (const int32_t token : draw<float>({-3e38f, 3e38f}, how, evenly(5)))
            EXPECT_EQ(token, 1);
    }
}

TEST_P(SamplingOnce, NoRowsAndBadArguments) {
    DeviceArray<float> one(std::vector<float>{0});
    DeviceArray<int32_t> token(std::vector<int32_t>{7}), scratch(1);
    DeviceArray<Sampling> how(std::vector<Sampling>(1));
    const auto run = [&](int64_t N, int V) {
        return cuda::sample<float>(token.data(), one.data(), how.data(), one.data(), N, V,
                                   scratch.data(), {});
    };
    EXPECT_TRUE(ok(run(0, 1)));
    EXPECT_EQ(token.host()[0], 7);
    EXPECT_EQ(run(1, 0).code, kernels::Code::bad_argument);
    EXPECT_EQ(run(-1, 1).code, kernels::Code::bad_argument);
    EXPECT_TRUE(ok(run(1, 1)));
    EXPECT_EQ(token.host()[0], 0);
}

// The kernel cannot report settings that it finds on the device: who sends them there checks.
TEST_P(SamplingOnce, BadSettingsAreRefusedOnTheHost) {
    tensor::Context device(kDevice);
    const auto logits = tensor::Tensor::from(device, std::vector<float>{0, 1, 5, 1}, {1, 4});
    EXPECT_EQ(tensor::sample(logits, {{0, 0, 1}}, {0.5f}), std::vector<int32_t>{2});
    for (const Sampling& how : {Sampling{-1, 0, 1}, Sampling{NAN, 0, 1}, Sampling{1, -1, 1},
                                Sampling{1, 0, 0}, Sampling{1, 0, 1.5f}})
        EXPECT_THROW((void)tensor::sample(logits, {how}, {0.5f}), tensor::Error);
}
INSTANTIATE_TEST_SUITE_P(Device, SamplingOnce, testing::Values(kSchedules[0]), schedule_name);

}  // namespace
}  // namespace fbt::tests
