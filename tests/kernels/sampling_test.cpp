#include "kernels/sampling.h"

#include <algorithm>
#include <numeric>

#include "kernels/philox.h"
#include "tests/kernels/kernel_test.h"

namespace fbt::tests {
namespace {

namespace ref = kernels::ref;
namespace cpu = kernels::cpu;
using kernels::Sampling;
using Sampler = kernels::Status (*)(int32_t*, const float*, const Sampling*, const float*, int64_t,
                                    int, int32_t*, kernels::Stream);
const Sampler kSamplers[] = {ref::sample<float>, cpu::sample<float>};

std::vector<float> uniforms(size_t n) {
    std::vector<float> u;
    for (size_t i = 0; i < n; ++i)
        u.push_back(kernels::uniform_float(
            kernels::philox_bits(kernels::philox_key(5, kernels::Draw::sampling), i)));
    return u;
}

// One row, drawn once for each uniform.
std::vector<int32_t> draw(Sampler sampler, const std::vector<float>& row, const Sampling& how,
                          const std::vector<float>& u) {
    const size_t N = u.size(), V = row.size();
    std::vector<float> logits;
    for (size_t n = 0; n < N; ++n) logits.insert(logits.end(), row.begin(), row.end());
    const std::vector<Sampling> settings(N, how);
    std::vector<int32_t> tokens(N, -7), scratch(N * V);
    EXPECT_TRUE(ok(sampler(tokens.data(), logits.data(), settings.data(), u.data(), int64_t(N),
                           int(V), scratch.data(), kTwoThreads)));
    return tokens;
}

// The kept tokens in order and where their intervals end, straight from the contract.
struct Kept {
    std::vector<int32_t> ids;
    std::vector<double> ends;  // the last is 1
};
Kept kept_of(const std::vector<float>& row, const Sampling& how) {
    Kept kept;
    kept.ids.resize(row.size());
    std::iota(kept.ids.begin(), kept.ids.end(), 0);
    std::stable_sort(kept.ids.begin(), kept.ids.end(),
                     [&](int32_t a, int32_t b) { return row[size_t(a)] > row[size_t(b)]; });
    if (how.top_k > 0 && size_t(how.top_k) < row.size()) kept.ids.resize(size_t(how.top_k));
    double total = 0;
    for (const int32_t id : kept.ids) {
        total += std::exp((double(row[size_t(id)]) - row[size_t(kept.ids[0])]) / how.temperature);
        kept.ends.push_back(total);
    }
    const auto cut = std::find_if(kept.ends.begin(), kept.ends.end(),
                                  [&](double end) { return end >= how.top_p * total; });
    if (cut != kept.ends.end()) kept.ends.erase(cut + 1, kept.ends.end());
    kept.ids.resize(kept.ends.size());
    const double last = kept.ends.back();
    for (double& end : kept.ends) end /= last;
    return kept;
}

TEST(Sampling, ZeroTemperatureTakesTheLowestIdAmongTheLargest) {
    for (const Sampler sampler : kSamplers) {
        EXPECT_EQ(draw(sampler, {1, 5, 2, 5, 5}, {0, 0, 1}, {0.99f})[0], 1);
        EXPECT_EQ(draw(sampler, {-1}, {0, 0, 1}, {0.f})[0], 0);
        std::vector<float> row(1601, -3.f);
        row[1600] = row[37] = 2;
        EXPECT_EQ(draw(sampler, row, {0, 5, 0.5f}, {0.5f})[0], 37);
    }
}

// Each token drawn is the one whose interval holds the uniform, to the rounding of the weights:
// float exponents of at most `range` are off by range*u and the exponential by 2.2 u.
TEST(Sampling, DrawsTheIntervalThatHoldsTheUniform) {
    const auto u = uniforms(301);
    for (const size_t V : {size_t(1), size_t(3), size_t(37), size_t(1601)})
        for (const Sampling& how :
             {Sampling{1, 0, 1}, Sampling{0.5f, 0, 1}, Sampling{1, 5, 1}, Sampling{1, 0, 0.7f},
              Sampling{2, 11, 0.9f}, Sampling{1, 100000, 1}, Sampling{1, 0, 1e-6f}}) {
            const auto row = normal<float>(V, 1, 2);
            const Kept kept = kept_of(row, how);
            const double range = 2 * max_abs(row) / how.temperature;
            const double tolerance = 4 * gamma<float>(range + 4);
            for (const Sampler sampler : kSamplers) {
                const auto tokens = draw(sampler, row, how, u);
                for (size_t n = 0; n < u.size(); ++n) {
                    const auto at = std::find(kept.ids.begin(), kept.ids.end(), tokens[n]);
                    ASSERT_NE(at, kept.ids.end()) << "token " << tokens[n] << " was cut";
                    const size_t i = size_t(at - kept.ids.begin());
                    EXPECT_LE(u[n], kept.ends[i] + tolerance);
                    EXPECT_GE(u[n], (i ? kept.ends[i - 1] : 0) - tolerance);
                }
            }
        }
}

// Cuts are exact: the supports are those sets and all of them.
TEST(Sampling, SupportsAreExact) {
    // Weights 8 4 4 2 1 1 of 20, shuffled: ids in order 3 | 1 4 | 0 | 2 5.
    const float ln2 = 0.693147181f;
    const std::vector<float> row = {1 * ln2, 2 * ln2, 0, 3 * ln2, 2 * ln2, 0};
    const auto u = uniforms(2000);
    const auto support = [&](Sampler sampler, const Sampling& how) {
        auto drawn = draw(sampler, row, how, u);
        std::sort(drawn.begin(), drawn.end());
        drawn.erase(std::unique(drawn.begin(), drawn.end()), drawn.end());
        return drawn;
    };
    using Set = std::vector<int32_t>;
    for (const Sampler sampler : kSamplers) {
        EXPECT_EQ(support(sampler, {1, 0, 1}), (Set{0, 1, 2, 3, 4, 5}));
        EXPECT_EQ(support(sampler, {1, 1, 1}), (Set{3}));
        EXPECT_EQ(support(sampler, {1, 2, 1}), (Set{1, 3}));  // 1 and 4 tie: the lower id stays
        EXPECT_EQ(support(sampler, {1, 3, 1}), (Set{1, 3, 4}));
        EXPECT_EQ(support(sampler, {1, 6, 1}), (Set{0, 1, 2, 3, 4, 5}));
        EXPECT_EQ(support(sampler, {1, 5, 1}), (Set{0, 1, 2, 3, 4}));
        EXPECT_EQ(support(sampler, {1, 0, 0.39f}), (Set{3}));           // 8/20 reach it
        EXPECT_EQ(support(sampler, {1, 0, 0.41f}), (Set{1, 3}));        // 12/20
        EXPECT_EQ(support(sampler, {1, 0, 0.61f}), (Set{1, 3, 4}));     // 16/20
        EXPECT_EQ(support(sampler, {1, 0, 0.89f}), (Set{0, 1, 3, 4}));  // 18/20
        EXPECT_EQ(support(sampler, {1, 2, 0.65f}), (Set{3}));           // of the two: 8/12
        EXPECT_EQ(support(sampler, {1, 2, 0.68f}), (Set{1, 3}));
    }
}

// Chi-square of n draws over V tokens: mean V-1, variance about 2(V-1); five deviations.
TEST(Sampling, FrequenciesFollowTheSoftmax) {
    const size_t V = 17, n = 20000;
    const auto row = normal<float>(V, 3);
    const auto u = uniforms(n);
    for (const float temperature : {1.f, 0.7f}) {
        const Kept kept = kept_of(row, {temperature, 0, 1});
        for (const Sampler sampler : kSamplers) {
            std::vector<double> count(V);
            for (const int32_t token : draw(sampler, row, {temperature, 0, 1}, u))
                count[size_t(token)] += 1;
            double chi_square = 0;
            for (size_t i = 0; i < V; ++i) {
                const double expected = double(n) * (kept.ends[i] - (i ? kept.ends[i - 1] : 0));
                const double excess = count[size_t(kept.ids[i])] - expected;
                chi_square += excess * excess / expected;
            }
            EXPECT_LT(chi_square, V - 1 + 5 * std::sqrt(2.0 * (V - 1)));
        }
    }
}

// NaN counts as -infinity; infinities take all; a row of nothing but -infinity is uniform.
TEST(Sampling, OddLogitsNeitherCrashNorWin) {
    const float inf = INFINITY;
    const auto u = uniforms(200);
    for (const Sampler sampler : kSamplers)
        for (const Sampling& how : {Sampling{0, 0, 1}, Sampling{1, 0, 1}, Sampling{1, 2, 1},
                                    Sampling{1, 0, 0.9f}, Sampling{1e-30f, 0, 1}}) {
            for (const int32_t token : draw(sampler, {NAN, -inf, 0, NAN}, how, u))
                EXPECT_EQ(token, 2);
            for (const int32_t token : draw(sampler, {0, inf, 3e38f, NAN}, how, u))
                EXPECT_EQ(token, 1);
            for (const int32_t token : draw(sampler, {NAN, NAN, -inf}, how, u)) {
                EXPECT_GE(token, 0);
                EXPECT_LT(token, 3);
            }
            for (const int32_t token : draw(sampler, {-3e38f, 3e38f}, how, u)) EXPECT_EQ(token, 1);
        }
}

// Rows have their own settings, and do not see each other; the backends agree on threads.
TEST(Sampling, RowsDoNotDependOnOtherRowsNorOnThreads) {
    const size_t N = 37, V = 1601;
    const auto logits = normal<float>(N * V, 1, 2), u = uniforms(N);
    std::vector<Sampling> settings;
    for (size_t n = 0; n < N; ++n)
        settings.push_back({n % 5 ? 1.f : 0.f, n % 3 ? 0 : 40, n % 2 ? 1.f : 0.9f});
    std::vector<int32_t> one(N), two(N), scratch(N * V);
    ASSERT_TRUE(ok(cpu::sample(one.data(), logits.data(), settings.data(), u.data(), int64_t(N),
                               int(V), scratch.data(), kOneThread)));
    ASSERT_TRUE(ok(cpu::sample(two.data(), logits.data(), settings.data(), u.data(), int64_t(N),
                               int(V), scratch.data(), kTwoThreads)));
    EXPECT_EQ(one, two);
    for (size_t n = 0; n < N; ++n) {
        int32_t alone = -1;
        ASSERT_TRUE(ok(cpu::sample(&alone, &logits[n * V], &settings[n], &u[n], 1, int(V),
                                   scratch.data(), kOneThread)));
        EXPECT_EQ(alone, one[n]) << n;
    }
}

// A bf16 logit is a float: the same tokens, among ties and NaN as well.
TEST(Sampling, Bf16LogitsAreDrawnAsFloats) {
    for (const size_t V : {size_t(1), size_t(3), size_t(37), size_t(1601)}) {
        const size_t N = 37;
        auto logits = normal<kernels::bf16>(N * V, 1, 2);
        logits[V / 2] = kernels::bf16(NAN);
        const auto wide = cast<float>(logits), u = uniforms(N);
        std::vector<Sampling> settings;
        for (size_t n = 0; n < N; ++n)
            settings.push_back({n % 5 ? 1.f : 0.f, n % 3 ? 0 : 40, n % 2 ? 1.f : 0.9f});
        std::vector<int32_t> got(N), want(N), scratch(N * V);
        ASSERT_TRUE(ok(cpu::sample(got.data(), logits.data(), settings.data(), u.data(), int64_t(N),
                                   int(V), scratch.data(), kTwoThreads)));
        ASSERT_TRUE(ok(cpu::sample(want.data(), wide.data(), settings.data(), u.data(), int64_t(N),
                                   int(V), scratch.data(), kOneThread)));
        EXPECT_EQ(got, want) << V;
    }
}

TEST(Sampling, RefusesBadSettings) {
    int32_t token = 0, scratch = 0;
    const float logit = 0, u = 0;
    for (const Sampler sampler : kSamplers) {
        for (const Sampling& how :
             {Sampling{-1, 0, 1}, Sampling{NAN, 0, 1}, Sampling{INFINITY, 0, 1}, Sampling{1, -1, 1},
              Sampling{1, 0, 0}, Sampling{1, 0, 1.5f}, Sampling{1, 0, NAN}})
            EXPECT_FALSE(ok(sampler(&token, &logit, &how, &u, 1, 1, &scratch, kOneThread)));
        const Sampling how;
        EXPECT_FALSE(ok(sampler(&token, &logit, &how, &u, 1, 0, &scratch, kOneThread)));
        EXPECT_FALSE(ok(sampler(&token, &logit, &how, &u, -1, 1, &scratch, kOneThread)));
        EXPECT_TRUE(ok(sampler(&token, &logit, &how, &u, 1, 1, &scratch, kOneThread)));
    }
}

}  // namespace
}  // namespace fbt::tests
