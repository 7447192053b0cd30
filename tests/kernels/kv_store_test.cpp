#include "kernels/kv_store.h"

#include "tests/kernels/kernel_test.h"

namespace fbt::tests {
namespace {

namespace ref = kernels::ref;
namespace cpu = kernels::cpu;

template <class T>
class KvStoreStored : public testing::Test {};
TYPED_TEST_SUITE(KvStoreStored, Storage);

TYPED_TEST(KvStoreStored, RowsGoWhereTheyShould) {
    using T = TypeParam;
    for (const auto& [N, W] : {std::pair<int64_t, int64_t>{1, 1}, {3, 17}, {37, 1601}}) {
        std::vector<int64_t> to, from;
        for (int64_t n = 0; n < N; ++n) {
            to.push_back(2 * (N - 1 - n));  // the odd rows of dst stay
            from.push_back(n / 2 + N);      // a source may serve twice
        }
        const auto src = normal<T>(size_t(2 * N * W), 1), before = normal<T>(size_t(2 * N * W), 2);
        for (int indices = 0; indices < 4; ++indices) {
            const int64_t *dst_rows = indices & 1 ? to.data() : nullptr,
                          *src_rows = indices & 2 ? from.data() : nullptr;
            auto copied = before, added = before;
            for (int64_t n = 0; n < N; ++n)
                for (int64_t w = 0; w < W; ++w) {
                    const size_t d = size_t((dst_rows ? dst_rows[n] : n) * W + w),
                                 s = size_t((src_rows ? src_rows[n] : n) * W + w);
                    copied[d] = src[s];
                    added[d] = T(float(added[d]) + float(src[s]));
                }
            const auto check = [&, N = N, W = W](auto copy, auto accum) {
                auto dst = before;
                ASSERT_TRUE(
                    ok(copy(dst.data(), dst_rows, src.data(), src_rows, N, W, kTwoThreads)));
                EXPECT_TRUE(same_bits(dst, copied)) << N << " x " << W;
                dst = before;
                ASSERT_TRUE(
                    ok(accum(dst.data(), dst_rows, src.data(), src_rows, N, W, kTwoThreads)));
                EXPECT_TRUE(same_bits(dst, added)) << N << " x " << W;
            };
            check(cpu::copy_rows<T>, cpu::copy_rows_accum<T>);
            if constexpr (std::is_same_v<T, float>)
                check(ref::copy_rows<T>, ref::copy_rows_accum<T>);
        }
    }
}

// Forking a page: both ends in one store.
TEST(KvStore, CopiesInsideOneStore) {
    const int64_t W = 37;
    for (const auto copy : {ref::copy_rows<float>, cpu::copy_rows<float>}) {
        auto store = normal<float>(4 * W, 1);
        const int64_t to[2] = {3, 0}, from[2] = {1, 2};
        ASSERT_TRUE(ok(copy(store.data(), to, store.data(), from, 2, W, kOneThread)));
        const auto row = [&](size_t r) { return std::span<const float>(&store[r * W], W); };
        EXPECT_TRUE(same_bits<float>(row(3), row(1)));
        EXPECT_TRUE(same_bits<float>(row(0), row(2)));
        EXPECT_FALSE(same_bits<float>(row(0), row(1)));
    }
}

TEST(KvStore, RefusesBadSizes) {
    float v = 0;
    EXPECT_FALSE(ok(cpu::copy_rows(&v, nullptr, &v, nullptr, 1, 0, kOneThread)));
    EXPECT_FALSE(ok(ref::copy_rows_accum(&v, nullptr, &v, nullptr, -1, 1, kOneThread)));
    EXPECT_TRUE(ok(cpu::copy_rows(&v, nullptr, &v, nullptr, 0, 1, kOneThread)));
}

}  // namespace
}  // namespace fbt::tests
