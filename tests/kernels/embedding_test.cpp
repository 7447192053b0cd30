#include "kernels/embedding.h"

#include <algorithm>

#include "tests/kernels/kernel_test.h"

namespace fbt::tests {
namespace {

namespace ref = kernels::ref;
namespace cpu = kernels::cpu;

template <class T>
class EmbeddingStored : public testing::Test {};
TYPED_TEST_SUITE(EmbeddingStored, Storage);

// Few tokens, each many times; the last one never.
std::vector<int32_t> some_tokens(int64_t N, int V) {
    std::vector<int32_t> tokens;
    for (int64_t n = 0; n < N; ++n) tokens.push_back(int32_t(n * n % std::max(V - 1, 1)));
    return tokens;
}

TYPED_TEST(EmbeddingStored, ForwardGathers) {
    using T = TypeParam;
    for (const auto& [N, D, V] :
         {std::tuple<int64_t, int, int>{1, 1, 1}, {37, 17, 5}, {37, 1601, 7}}) {
        const auto w = normal<float>(size_t(V * D), 1);
        const auto tokens = some_tokens(N, V);
        std::vector<T> want;
        for (const int32_t v : tokens)
            for (int d = 0; d < D; ++d) want.push_back(T(w[size_t(v * D + d)]));
        const auto check = [&, N = N, D = D](auto forward, const auto& table) {
            std::vector<T> y(want.size());
            ASSERT_TRUE(ok(forward(y.data(), tokens.data(), table.data(), N, D, kTwoThreads)));
            EXPECT_TRUE(same_bits(y, want));
        };
        check(cpu::embedding_forward<T>, w);
        check(cpu::embedding_forward<T, T>, cast<T>(w));
        if constexpr (std::is_same_v<T, float>) check(ref::embedding_forward<T>, w);
    }
}

// y is linear in w: sum dy*y = sum dw*w, and every backend adds in the same order.
TYPED_TEST(EmbeddingStored, BackwardSumsInOrder) {
    using T = TypeParam;
    for (const auto& [N, D, V] :
         {std::tuple<int64_t, int, int>{1, 1, 1}, {37, 17, 5}, {301, 131, 7}, {37, 1601, 7}}) {
        const size_t size = size_t(V * D);
        const auto w = normal<float>(size, 1), before = normal<float>(size, 3);
        const auto dy = normal<T>(size_t(N * D), 2);
        const auto tokens = some_tokens(N, V);
        std::vector<float> dw[3] = {before, before, before};
        ASSERT_TRUE(ok(ref::embedding_backward_accum(dw[0].data(), cast<float>(dy).data(),
                                                     tokens.data(), N, D, V, nullptr, kOneThread)));
        ASSERT_TRUE(ok(cpu::embedding_backward_accum(dw[1].data(), dy.data(), tokens.data(), N, D,
                                                     V, nullptr, kOneThread)));
        ASSERT_TRUE(ok(cpu::embedding_backward_accum(dw[2].data(), dy.data(), tokens.data(), N, D,
                                                     V, nullptr, kTwoThreads)));
        EXPECT_TRUE(same_bits(dw[1], dw[0]));
        EXPECT_TRUE(same_bits(dw[2], dw[0]));

        const auto w64 = cast<double>(w), dy64 = cast<double>(dy);
        std::vector<double> y(dy.size()), sums(size);
        ASSERT_TRUE(
            ok(ref::embedding_forward(y.data(), tokens.data(), w64.data(), N, D, kOneThread)));
        ASSERT_TRUE(ok(ref::embedding_backward_accum(sums.data(), dy64.data(), tokens.data(), N, D,
                                                     V, nullptr, kOneThread)));
        EXPECT_NEAR(sum_products(dy64, y), sum_products(sums, w64),
                    2 * sum_abs_products(dy64, y) * gamma<double>(double(N * D + N)));
        std::vector<double> want(size);
        for (size_t i = 0; i < size; ++i) want[i] = double(before[i]) + sums[i];
        // At most N additions an element, of values whose sum of sizes is at most N*max|dy|.
        EXPECT_TRUE(close(dw[2], want,
                          gamma<float>(double(N)) * (double(N) * max_abs(dy) + max_abs(before))));
    }
}

TEST(Embedding, RefusesBadSizes) {
    float v = 1;
    const int32_t t = 0;
    EXPECT_FALSE(ok(cpu::embedding_forward(&v, &t, &v, 1, 0, kOneThread)));
    EXPECT_FALSE(ok(ref::embedding_forward(&v, &t, &v, -1, 1, kOneThread)));
    EXPECT_FALSE(ok(cpu::embedding_backward_accum(&v, &v, &t, 1, 1, 0, nullptr, kOneThread)));
    EXPECT_TRUE(ok(cpu::embedding_backward_accum(&v, &v, &t, 0, 1, 1, nullptr, kOneThread)));
}

}  // namespace
}  // namespace fbt::tests
