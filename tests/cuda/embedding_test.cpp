// kernels/embedding.cu and kernels/sort.cu against the plain loops in double.
#include "kernels/embedding.h"

#include <algorithm>
#include <numeric>

#include "kernels/sort.h"
#include "tests/cuda/rows.h"

namespace fbt::tests {
namespace {

namespace cuda = kernels::cuda;
namespace ref = kernels::ref;
using kernels::bf16;

class Embedding : public ScheduleTest {};

TEST_P(Embedding, SortKeepsTheOrderOfEqualKeys) {
    for (const int64_t n : {1, 2, 37, 5000}) {
        std::mt19937 generator(7);
        std::vector<int32_t> keys(n), values(n);
        for (int32_t& key : keys) key = int32_t(generator() % 11 * 100003);
        std::iota(values.begin(), values.end(), 0);
        DeviceArray<int32_t> dev_keys(keys), dev_values(values);
        ASSERT_TRUE(ok(cuda::sort_by_key(dev_keys.data(), dev_values.data(), n, {})));
        std::stable_sort(values.begin(), values.end(),
                         [&](int32_t a, int32_t b) { return keys[a] < keys[b]; });
        std::stable_sort(keys.begin(), keys.end());
        EXPECT_EQ(dev_keys.host(), keys);
        EXPECT_EQ(dev_values.host(), values);
    }
    EXPECT_TRUE(ok(cuda::sort_by_key(nullptr, nullptr, 0, {})));
    EXPECT_EQ(cuda::sort_by_key(nullptr, nullptr, -1, {}).code, kernels::Code::bad_argument);
}

// A copy, rounded to T.
template <class T>
void expect_forward() {
    struct Sizes {
        int64_t N;
        int D, V;
    };
    for (const auto [N, D, V] :
         {Sizes{1, 1, 1}, {37, 17, 5}, {9, 96, 3}, {5, 1536, 7}, {3, 1601, 2}})
        for (const size_t skip : {0, 1}) {
            const auto w = normal<float>(int64_t(V) * D, 1);
            std::vector<int32_t> tokens;
            std::vector<T> want;
            for (int64_t n = 0; n < N; ++n) {
                tokens.push_back(int32_t((n * n + 1) % V));
                for (int d = 0; d < D; ++d) want.push_back(T(w[int64_t(tokens[n]) * D + d]));
            }
            DeviceRows<float> dev_w(w, skip);
            DeviceArray<int32_t> dev_tokens(tokens);
            DeviceRows<T> y(N * D, skip);
            ASSERT_TRUE(
                ok(cuda::embedding_forward(y.data(), dev_tokens.data(), dev_w.data(), N, D, {})));
            EXPECT_TRUE(same_bits(y.host(), want)) << N << " x " << D << " skip " << skip;

            DeviceRows<T> rounded(cast<T>(w), skip), z(N * D, skip);
            ASSERT_TRUE(
                ok(cuda::embedding_forward(z.data(), dev_tokens.data(), rounded.data(), N, D, {})));
            EXPECT_TRUE(same_bits(z.host(), want)) << N << " x " << D << " skip " << skip;
        }
}
TEST_P(Embedding, ForwardGathers) {
    expect_forward<float>();
    expect_forward<bf16>();
}

template <class T>
std::vector<float> backward(const std::vector<float>& before, const std::vector<T>& dy,
                            const std::vector<int32_t>& tokens, int D, int V, size_t skip = 0) {
    const int64_t N = int64_t(tokens.size());
    DeviceRows<float> dw(before, skip);
    DeviceRows<T> dev_dy(dy, skip);
    DeviceArray<int32_t> dev_tokens(tokens), scratch(2 * N);
    EXPECT_TRUE(ok(cuda::embedding_backward_accum(dw.data(), dev_dy.data(), dev_tokens.data(), N, D,
                                                  V, scratch.data(), {})));
    return dw.host();
}

// How often tokens occur decides who sums them: runs of up to 64 rows a warp, longer ones a block,
// from 65 rows to more than its 16 warps have chunks for. Runs begin anywhere in the sorted list.
std::vector<int32_t> tokens_of_runs(const std::vector<int>& runs) {
    std::vector<int32_t> tokens;
    for (size_t v = 0; v < runs.size(); ++v) tokens.insert(tokens.end(), runs[v], int32_t(v));
    std::shuffle(tokens.begin(), tokens.end(), std::mt19937(5));
    return tokens;
}
const std::vector<int> kRuns[] = {{1},
                                  {0, 1, 0, 1, 2, 3},
                                  {64},
                                  {65},
                                  {1, 64, 0, 65, 1, 63, 66, 128, 1},
                                  {63, 129, 127, 64, 64, 3, 0},
                                  {5, 1, 1100, 2, 64, 70}};

// A token's n rows and dw, added in any order: n additions of values whose sizes add up to at most
// the sum of each row's largest.
template <class T>
void expect_backward(const std::vector<int>& runs, int D) {
    const auto tokens = tokens_of_runs(runs);
    const int64_t N = int64_t(tokens.size());
    const int V = int(runs.size());
    const auto dy = normal<T>(N * D, 2);
    const auto before = normal<float>(int64_t(V) * D, 3);
    auto want = cast<double>(before);
    ASSERT_TRUE(ok(ref::embedding_backward_accum(want.data(), cast<double>(dy).data(),
                                                 tokens.data(), N, D, V, nullptr, {})));
    const auto got = backward(before, dy, tokens, D, V);
    for (int v = 0; v < V; ++v) {
        double size = largest(cast<double>(row_of(before, v, D)));
        for (int64_t n = 0; n < N; ++n)
            if (tokens[n] == v) size += largest(cast<double>(row_of(dy, n, D)));
        EXPECT_TRUE(close(row_of(got, v, D), row_of(want, v, D), gamma<float>(runs[v]) * size))
            << "token " << v << " of " << V << ", " << N << " x " << D;
    }
    EXPECT_TRUE(same_bits(backward(before, dy, tokens, D, V, 1), got)) << N << " x " << D;
}
TEST_P(Embedding, BackwardMatchesPlainLoops) {
    for (const auto& runs : kRuns)
        for (const int D : {1, 37, 96}) {
            expect_backward<float>(runs, D);
            expect_backward<bf16>(runs, D);
        }
    expect_backward<float>({1, 70, 3}, 1601);
    expect_backward<bf16>({1, 70, 3}, 1536);
}

// A token's gradient has the same bits whatever other tokens surround it.
template <class T>
void expect_tokens_apart() {
    const int D = 24;
    const std::vector<int> runs{40, 1200, 3, 64, 65, 1};
    const auto tokens = tokens_of_runs(runs);
    const auto dy = normal<T>(tokens.size() * D, 2);
    const auto before = normal<float>(runs.size() * D, 3);
    const auto together = backward(before, dy, tokens, D, int(runs.size()));
    for (size_t v = 0; v < runs.size(); ++v) {
        std::vector<T> rows;
        for (size_t n = 0; n < tokens.size(); ++n)
            if (tokens[n] == int32_t(v)) rows.insert(rows.end(), &dy[n * D], &dy[n * D] + D);
        const auto alone =
            backward(row_of(before, int64_t(v), D), rows, std::vector<int32_t>(runs[v]), D, 1);
        EXPECT_TRUE(same_bits(alone, row_of(together, int64_t(v), D))) << "token " << v;
    }
}
TEST_P(Embedding, TokensDoNotDependOnOthers) {
    expect_tokens_apart<float>();
    expect_tokens_apart<bf16>();
}

TEST_P(Embedding, NoRowsIsNoWork) {
    DeviceRows<float> one(std::vector<float>{7});
    float* const v = one.data();
    EXPECT_TRUE(ok(cuda::embedding_forward(v, nullptr, v, 0, 1, {})));
    EXPECT_TRUE(ok(cuda::embedding_backward_accum(v, v, nullptr, 0, 1, 1, nullptr, {})));
    EXPECT_EQ(one.host(), std::vector<float>{7});
    const auto bad = kernels::Code::bad_argument;
    EXPECT_EQ(cuda::embedding_forward(v, nullptr, v, 1, 0, {}).code, bad);
    EXPECT_EQ(cuda::embedding_backward_accum(v, v, nullptr, -1, 1, 1, nullptr, {}).code, bad);
    EXPECT_EQ(cuda::embedding_backward_accum(v, v, nullptr, 1, 1, 0, nullptr, {}).code, bad);
    EXPECT_EQ(
        cuda::embedding_backward_accum(v, v, nullptr, int64_t(1) << 31, 1, 1, nullptr, {}).code,
        bad);
}

INSTANTIATE_TEST_SUITE_P(Device, Embedding, testing::ValuesIn(kSchedules), schedule_name);

}  // namespace
}  // namespace fbt::tests
