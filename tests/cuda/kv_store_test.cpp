// kernels/kv_store.cu against plain loops: copies, and additions rounded once, so the same bits.
#include "kernels/kv_store.h"

#include "tests/cuda/rows.h"

namespace fbt::tests {
namespace {

namespace cuda = kernels::cuda;
using kernels::bf16;

constexpr int64_t kStoreRows = 29;
const int64_t kWidths[] = {1, 3, 8, 37, 96, 768, 1601};
// Rows of either store, out of order; no dst row twice, a src row may be.
const std::vector<int64_t> kTo{28, 0, 3, 17, 5, 11}, kFrom{2, 2, 28, 0, 9, 1};
const int64_t kRows = int64_t(kTo.size());

class KvStore : public ScheduleTest {};

template <class T>
void expect_copies() {
    DeviceArray<int64_t> dev_to(kTo), dev_from(kFrom);
    for (const int64_t W : kWidths)
        for (const size_t skip : {0, 1})
            for (const bool to_given : {false, true})
                for (const bool from_given : {false, true}) {
                    const auto src = normal<T>(kStoreRows * W, 1),
                               before = normal<T>(kStoreRows * W, 2);
                    auto copied = before, added = before;
                    for (int64_t n = 0; n < kRows; ++n)
                        for (int64_t w = 0; w < W; ++w) {
                            const int64_t to = (to_given ? kTo[n] : n) * W + w,
                                          from = (from_given ? kFrom[n] : n) * W + w;
                            copied[to] = src[from];
                            added[to] = T(float(before[to]) + float(src[from]));
                        }
                    DeviceRows<T> dev_src(src, skip), dst(before, skip), sums(before, skip);
                    const int64_t* to = to_given ? dev_to.data() : nullptr;
                    const int64_t* from = from_given ? dev_from.data() : nullptr;
                    ASSERT_TRUE(
                        ok(cuda::copy_rows(dst.data(), to, dev_src.data(), from, kRows, W, {})));
                    EXPECT_TRUE(same_bits(dst.host(), copied)) << W << " skip " << skip;
                    ASSERT_TRUE(ok(cuda::copy_rows_accum(sums.data(), to, dev_src.data(), from,
                                                         kRows, W, {})));
                    EXPECT_TRUE(same_bits(sums.host(), added)) << W << " skip " << skip;
                }
}
TEST_P(KvStore, RowsMove) {
    expect_copies<float>();
    expect_copies<bf16>();
}

// Source and destination may be one store: a forked page.
template <class T>
void expect_fork() {
    const int64_t W = 24, N = 300;
    const auto rows = normal<T>(2 * N * W, 1);
    std::vector<int64_t> to, from;
    std::vector<T> copied = rows, added = rows;
    for (int64_t n = 0; n < N; ++n) {
        from.push_back(2 * n);
        to.push_back(2 * (N - 1 - n) + 1);
        for (int64_t w = 0; w < W; ++w) {
            const T v = rows[from[n] * W + w];
            copied[to[n] * W + w] = v;
            added[to[n] * W + w] = T(float(added[to[n] * W + w]) + float(v));
        }
    }
    DeviceArray<int64_t> dev_to(to), dev_from(from);
    DeviceRows<T> store(rows), sums(rows);
    ASSERT_TRUE(
        ok(cuda::copy_rows(store.data(), dev_to.data(), store.data(), dev_from.data(), N, W, {})));
    EXPECT_TRUE(same_bits(store.host(), copied));
    ASSERT_TRUE(ok(
        cuda::copy_rows_accum(sums.data(), dev_to.data(), sums.data(), dev_from.data(), N, W, {})));
    EXPECT_TRUE(same_bits(sums.host(), added));
}
TEST_P(KvStore, OneStoreForks) {
    expect_fork<float>();
    expect_fork<bf16>();
}

TEST_P(KvStore, NoRowsIsNoWork) {
    DeviceRows<float> one(std::vector<float>{7});
    float* const v = one.data();
    EXPECT_TRUE(ok(cuda::copy_rows(v, nullptr, v, nullptr, 0, 1, {})));
    EXPECT_TRUE(ok(cuda::copy_rows_accum(v, nullptr, v, nullptr, 0, 1, {})));
    EXPECT_EQ(one.host(), std::vector<float>{7});
    const auto bad = kernels::Code::bad_argument;
    EXPECT_EQ(cuda::copy_rows(v, nullptr, v, nullptr, 1, 0, {}).code, bad);
    EXPECT_EQ(cuda::copy_rows_accum(v, nullptr, v, nullptr, -1, 1, {}).code, bad);
}

INSTANTIATE_TEST_SUITE_P(Device, KvStore, testing::ValuesIn(kSchedules), schedule_name);

}  // namespace
}  // namespace fbt::tests
