// matmul: the loops against the formula, the cpu kernel against the loops, and the row rule.
#include "kernels/matmul.h"

#include <cstring>
#include <memory>

#include "kernels/matmul_chain.h"
#include "kernels/matmul_onednn.h"
#include "tests/kernels/kernel_test.h"

namespace fbt::tests {
namespace {

using namespace kernels;

struct Shape {
    int64_t M, N, K;
};
const Shape kShapes[] = {{0, 3, 5},      {1, 1, 1},      {1, 37, 3},    {2, 3, 37},
                         {3, 1, 1601},   {37, 1601, 3},  {65, 64, 64},  {7, 130, 31},
                         {17, 352, 257}, {300, 37, 128}, {1601, 15, 9}, {513, 129, 300}};

template <class T>
std::vector<T> absolute(std::vector<T> v) {
    for (T& x : v) x = std::abs(x);
    return v;
}

// got and want over `size`, element by element: what is left is the relative error.
template <class T, class U>
testing::AssertionResult close_over(const std::vector<T>& got, const std::vector<U>& want,
                                    const std::vector<double>& size, double tolerance) {
    std::vector<double> a(got.begin(), got.end()), b(want.begin(), want.end());
    for (size_t i = 0; i < size.size(); ++i) {
        a[i] /= size[i];
        b[i] /= size[i];
    }
    return close(a, b, tolerance);
}

// y = x w^T with w [N,K]
template <class T>
std::vector<T> product(const std::vector<T>& x, const std::vector<T>& w, Shape shape) {
    const auto [M, N, K] = shape;
    std::vector<T> packed(size_t(ref::matmul_packed_size<T>(N, K))), y(size_t(M * N), T(7));
    EXPECT_TRUE(ok(ref::matmul_pack(packed.data(), w.data(), N, K, false, kOneThread)));
    EXPECT_TRUE(ok(ref::matmul_forward(y.data(), x.data(), packed.data(), M, N, K, kOneThread)));
    return y;
}

// What matmul.h offers, and the chain behind it, which oneDNN would otherwise hide.
struct Implementation {
    const char* name;
    int64_t (*packed_size)(int64_t, int64_t);
    Status (*pack)(float*, const float*, int64_t, int64_t, bool, Stream);
    Status (*forward)(float*, const float*, const float*, int64_t, int64_t, int64_t, Stream);
};

void PrintTo(const Implementation& i, std::ostream* out) { *out << i.name; }

class MatmulForward : public testing::TestWithParam<Implementation> {
  protected:
    std::vector<float> pack(const std::vector<float>& w, int64_t N, int64_t K, bool transposed) {
        std::vector<float> packed(size_t(GetParam().packed_size(N, K)), NAN);
        EXPECT_TRUE(ok(GetParam().pack(packed.data(), w.data(), N, K, transposed, kTwoThreads)));
        return packed;
    }
};

INSTANTIATE_TEST_SUITE_P(Cpu, MatmulForward,
                         testing::Values(Implementation{"matmul", cpu::matmul_packed_size<float>,
                                                        cpu::matmul_pack<float>,
                                                        cpu::matmul_forward<float>},
                                         Implementation{"chain", cpu::chain_packed_size,
                                                        cpu::chain_pack, cpu::chain_forward}),
                         [](const auto& info) { return info.param.name; });

TEST(Matmul, RefIsTheFormula) {
    // x = [1 2; 3 4; 5 6], w = [1 0; 2 -1]:  x w^T and x w by hand
    const std::vector<double> x{1, 2, 3, 4, 5, 6}, w{1, 0, 2, -1};
    EXPECT_TRUE(same_bits(product(x, w, {3, 2, 2}), {1, 0, 3, 2, 5, 4}));
    std::vector<double> packed(4), y(6);
    EXPECT_TRUE(ok(ref::matmul_pack(packed.data(), w.data(), 2, 2, true, kOneThread)));
    EXPECT_TRUE(ok(ref::matmul_forward(y.data(), x.data(), packed.data(), 3, 2, 2, kOneThread)));
    EXPECT_TRUE(same_bits(y, {5, -2, 11, -4, 17, -6}));
}

TEST(Matmul, RefGradientIsTheSlope) {
    // F = sum y*dy is linear in w, so its difference quotient is exact but for rounding.
    const int64_t M = 5, N = 3, K = 4;
    const auto x = normal<double>(M * K, 1), dy = normal<double>(M * N, 2);
    auto w = normal<double>(N * K, 3);
    std::vector<double> dw(N * K, 0.5);  // and it accumulates
    EXPECT_TRUE(ok(ref::matmul_dw_accum(dw.data(), dy.data(), x.data(), M, N, K, kOneThread)));
    const std::function<double()> F = [&] { return sum_products(product(x, w, {M, N, K}), dy); };
    const double size = sum_products(product(absolute(x), absolute(w), {M, N, K}), absolute(dy));
    for (size_t i = 0; i < w.size(); ++i)
        EXPECT_NEAR(dw[i] - 0.5, slope(F, w[i]), slope_tolerance(size, double(M * N + K)));
}

TEST_P(MatmulForward, MatchesRef) {
    for (const auto [M, N, K] : kShapes)
        for (const bool transposed : {false, true}) {
            SCOPED_TRACE(testing::Message() << M << " " << N << " " << K << " " << transposed);
            const auto x = normal<double>(size_t(M * K), 4), w = normal<double>(size_t(N * K), 5);
            std::vector<double> stored = w;  // as [K,N] if transposed
            if (transposed)
                for (int64_t n = 0; n < N; ++n)
                    for (int64_t k = 0; k < K; ++k)
                        stored[size_t(k * N + n)] = w[size_t(n * K + k)];
            const auto packed = pack(cast<float>(stored), N, K, transposed);
            const auto xf = cast<float>(x);
            std::vector<float> y(size_t(M * N) + 1, 7.f);
            EXPECT_TRUE(
                ok(GetParam().forward(y.data(), xf.data(), packed.data(), M, N, K, kTwoThreads)));
            EXPECT_EQ(y.back(), 7.f);
            y.pop_back();
            EXPECT_TRUE(close_over(y, product(x, w, {M, N, K}),
                                   product(absolute(x), absolute(w), {M, N, K}),
                                   gamma<float>(double(K))));
        }
}

TEST(Matmul, CpuGradientMatchesRefAndThreadsDoNotMatter) {
    for (const auto [M, N, K] : kShapes) {
        SCOPED_TRACE(testing::Message() << M << " " << N << " " << K);
        const auto x = normal<double>(size_t(M * K), 6), dy = normal<double>(size_t(M * N), 7);
        const auto start = normal<double>(size_t(N * K), 8);
        std::vector<double> want = start, size = absolute(start);
        EXPECT_TRUE(
            ok(ref::matmul_dw_accum(want.data(), dy.data(), x.data(), M, N, K, kOneThread)));
        EXPECT_TRUE(ok(ref::matmul_dw_accum(size.data(), absolute(dy).data(), absolute(x).data(), M,
                                            N, K, kOneThread)));
        const auto xf = cast<float>(x), dyf = cast<float>(dy);
        std::vector<float> one = cast<float>(start), two = one;
        one.push_back(7.f);
        EXPECT_TRUE(
            ok(cpu::matmul_dw_accum(one.data(), dyf.data(), xf.data(), M, N, K, kOneThread)));
        EXPECT_TRUE(ok(
            cpu::matmul_dw_accum(two.data(), dyf.data(), xf.data(), M, N, K, Stream{nullptr, 3})));
        EXPECT_EQ(one.back(), 7.f);
        one.pop_back();
        EXPECT_TRUE(same_bits(one, two));
        EXPECT_TRUE(close_over(one, want, size, gamma<float>(double(M + 1))));
    }
}

// The row rule: a row of y has the same bits in every call, whatever rows stand beside it.
TEST_P(MatmulForward, RowsHaveTheSameBitsInEveryCall) {
    const int64_t rows = 1601;
    const Shape shapes[] = {{0, 1, 1},    {0, 37, 3},    {0, 64, 64},  {0, 130, 31},
                            {0, 3, 1601}, {0, 352, 128}, {0, 17, 600}, {0, 256, 257}};
    for (const Shape& shape : shapes) {
        const int64_t N = shape.N, K = shape.K;
        SCOPED_TRACE(testing::Message() << N << " " << K);
        const auto x = normal<float>(size_t(rows * K), 9);
        const auto packed = pack(normal<float>(size_t(N * K), 10), N, K, false);
        std::vector<float> whole(size_t(rows * N));
        EXPECT_TRUE(
            ok(GetParam().forward(whole.data(), x.data(), packed.data(), rows, N, K, kOneThread)));
        for (const int64_t M : {1, 2, 3, 4, 16, 17, 64, 65, 1601})
            for (const int64_t at : {int64_t(0), int64_t(1), int64_t(100), int64_t(1001), rows - M})
                for (const Stream& stream : {kOneThread, kTwoThreads}) {
                    if (at + M > rows) continue;
                    std::vector<float> part(size_t(M * N));
                    EXPECT_TRUE(ok(GetParam().forward(part.data(), x.data() + at * K, packed.data(),
                                                      M, N, K, stream)));
                    const auto same = whole.begin() + at * N;
                    EXPECT_TRUE(same_bits(part, {same, same + M * N}))
                        << M << " rows from row " << at << ", " << stream.threads << " threads";
                }
    }
}

template <class T>
class MatmulStored : public testing::Test {};
TYPED_TEST_SUITE(MatmulStored, Storage);

// Products with several weights at once: whole tiles, parts of one, and one narrower than a vector.
TYPED_TEST(MatmulStored, EachOfSeveralProductsIsAsItIsAlone) {
    using T = TypeParam;
    const int64_t widths[] = {130, 1, 64, 200, 37};
    for (const int64_t K : {int64_t(31), int64_t(128), int64_t(1601)}) {
        std::vector<std::vector<T>> packed;
        for (const int64_t N : widths) {
            packed.emplace_back(size_t(cpu::matmul_packed_size<T>(N, K)) + 32);
            void* p = packed.back().data();
            size_t space = packed.back().size() * sizeof(T);
            std::align(64, 1, p, space);
            EXPECT_TRUE(ok(cpu::matmul_pack(static_cast<T*>(p),
                                            normal<float>(size_t(N * K), unsigned(N)).data(), N, K,
                                            false, kTwoThreads)));
        }
        for (const int64_t M : {0, 1, 3, 16, 65, 300})
            for (const int threads : {1, 2, 5}) {
                std::vector<T> x;
                for (float v : normal<float>(size_t(M * K), 11)) x.push_back(T(v));
                std::vector<std::vector<T>> ys;
                std::vector<MatmulOutput<T>> outputs;
                for (size_t i = 0; i < packed.size(); ++i) {
                    ys.emplace_back(size_t(M * widths[i]));
                    void* p = packed[i].data();
                    size_t space = packed[i].size() * sizeof(T);
                    std::align(64, 1, p, space);
                    outputs.push_back({ys[i].data(), static_cast<const T*>(p), widths[i]});
                }
                EXPECT_TRUE(ok(cpu::matmul_forward_each<T>(outputs, x.data(), M, K,
                                                           Stream{nullptr, threads})));
                for (size_t i = 0; i < ys.size(); ++i) {
                    std::vector<T> alone(ys[i].size());
                    EXPECT_TRUE(ok(cpu::matmul_forward(alone.data(), x.data(), outputs[i].packed, M,
                                                       widths[i], K, kOneThread)));
                    EXPECT_TRUE(alone.empty() || std::memcmp(alone.data(), ys[i].data(),
                                                             alone.size() * sizeof(T)) == 0)
                        << widths[i] << " columns, K " << K << ", " << M << " rows, " << threads
                        << " threads";
                }
            }
    }
}

TEST(Matmul, RejectsImpossibleSizes) {
    float x = 0;
    EXPECT_EQ(cpu::matmul_pack(&x, &x, 0, 1, false, kOneThread).code, Code::bad_argument);
    EXPECT_EQ(cpu::matmul_forward(&x, &x, &x, -1, 1, 1, kOneThread).code, Code::bad_argument);
    EXPECT_EQ(cpu::matmul_dw_accum(&x, &x, &x, 1, 1, 0, kOneThread).code, Code::bad_argument);
    EXPECT_EQ(ref::matmul_forward(&x, &x, &x, 1, 0, 1, kOneThread).code, Code::bad_argument);
}

}  // namespace
}  // namespace fbt::tests
