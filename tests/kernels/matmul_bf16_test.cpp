// matmul in bf16 on the CPU, with every tile kernel that this processor has, and with the AMX
// kernel on a model of its registers: against the loops in double, and the row rule.
#include "kernels/matmul_bf16.h"

#include <cstring>

#include "kernels/amx_dot.h"
#include "kernels/matmul.h"
#include "tests/kernels/kernel_test.h"

namespace fbt::kernels::cpu {
static void PrintTo(const DotKernel& kernel, std::ostream* out) { *out << kernel.name; }
}  // namespace fbt::kernels::cpu

namespace fbt::tests {
namespace {

using namespace kernels;

// AMX's eight registers of 16 rows of 64 bytes, as Intel's manual describes its instructions: a dot
// keeps the sums of first and of second elements apart until its end.
struct ModelTiles {
    alignas(64) std::byte memory[8][16][64];

    template <int T>
    void load(const void* p, int64_t bytes) {
        for (int r = 0; r < 16; ++r)
            std::memcpy(memory[T][r], static_cast<const std::byte*>(p) + r * bytes, 64);
    }
    template <int T>
    void store(void* p, int64_t bytes) {
        for (int r = 0; r < 16; ++r)
            std::memcpy(static_cast<std::byte*>(p) + r * bytes, memory[T][r], 64);
    }
    template <int T>
    void zero() {
        std::memset(memory[T], 0, sizeof memory[T]);
    }
    template <class E, int T>
    E& at(int row, int column) {
        return reinterpret_cast<E*>(memory[T][row])[column];
    }
    template <int Sum, int A, int B>
    void dot() {
        for (int m = 0; m < 16; ++m)
            for (int n = 0; n < 16; ++n) {
                float first = 0, second = 0;
                for (int k = 0; k < 16; ++k) {
                    first =
                        std::fma(float(at<bf16, A>(m, 2 * k)), float(at<bf16, B>(k, 2 * n)), first);
                    second = std::fma(float(at<bf16, A>(m, 2 * k + 1)),
                                      float(at<bf16, B>(k, 2 * n + 1)), second);
                }
                at<float, Sum>(m, n) += first + second;
            }
    }
};

void model_multiply(float* out, int64_t stride, const bf16* a, const bf16* b, int64_t panel,
                    int64_t depth, int rows, int panels, bool add, const bf16*, int) {
    ModelTiles tiles;
    std::memset(tiles.memory, 0xff, sizeof tiles.memory);  // NaN: what is not set must not count
    cpu::amx_multiply(tiles, out, stride, a, b, panel, depth, rows, panels, add);
}

std::vector<cpu::DotKernel> all_kernels() {
    const auto usable = cpu::dot_kernels();
    std::vector<cpu::DotKernel> kernels(usable.begin(), usable.end());
    kernels.push_back({"amx_model", cpu::kAmxRows, cpu::kAmxPanels, model_multiply});
    return kernels;
}

class MatmulBf16 : public testing::TestWithParam<cpu::DotKernel> {};
INSTANTIATE_TEST_SUITE_P(Cpu, MatmulBf16, testing::ValuesIn(all_kernels()),
                         [](const auto& info) { return std::string(info.param.name); });

struct Shape {
    int64_t M, N, K;
};
// Beyond one block of rows, one group of columns, two blocks of depth and two chunks of dw's rows.
const Shape kShapes[] = {{0, 3, 5},      {1, 1, 1},     {1, 37, 3},     {2, 3, 37},
                         {37, 160, 3},   {65, 64, 64},  {7, 130, 31},   {17, 352, 257},
                         {300, 37, 128}, {601, 15, 9},  {1100, 33, 40}, {35, 530, 66},
                         {3, 70, 3201},  {131, 17, 99}, {40, 90, 1601}};

std::vector<bf16> rounded(const std::vector<float>& v) {
    std::vector<bf16> out;
    for (float x : v) out.emplace_back(x);
    return out;
}
std::vector<double> widened(const std::vector<bf16>& v) {
    std::vector<double> out;
    for (bf16 x : v) out.push_back(double(float(x)));
    return out;
}
std::vector<double> absolute(std::vector<double> v) {
    for (double& x : v) x = std::abs(x);
    return v;
}

// Packed operands are read in whole aligned vectors; an element stands behind the last.
struct Packed {
    explicit Packed(int64_t size) : memory(size_t(size + 64)), size(size) {
        while (reinterpret_cast<uintptr_t>(data()) % 64 != 0) ++shift;
        data()[size].bits = 0x1234;
    }
    bf16* data() { return memory.data() + shift; }
    bool overrun() { return data()[size].bits != 0x1234; }
    std::vector<bf16> memory;
    int64_t size, shift = 0;
};

Status forward(const cpu::DotKernel& kernel, bf16* y, const bf16* x, const bf16* packed, int64_t M,
               int64_t N, int64_t K, Stream s) {
    const MatmulOutput<bf16> output{y, packed, N};
    return cpu::bf16_forward(kernel, {&output, 1}, x, M, K, s);
}

std::vector<double> product(const std::vector<double>& x, const std::vector<double>& w,
                            Shape shape) {
    std::vector<double> packed(size_t(shape.N * shape.K)), y(size_t(shape.M * shape.N));
    EXPECT_TRUE(ok(ref::matmul_pack(packed.data(), w.data(), shape.N, shape.K, false, kOneThread)));
    EXPECT_TRUE(ok(ref::matmul_forward(y.data(), x.data(), packed.data(), shape.M, shape.N, shape.K,
                                       kOneThread)));
    return y;
}

// got and want differ by at most tolerance * size, element by element.
testing::AssertionResult close_over(std::vector<double> got, std::vector<double> want,
                                    const std::vector<double>& size, double tolerance) {
    for (size_t i = 0; i < size.size(); ++i) {
        got[i] /= size[i];
        want[i] /= size[i];
    }
    return close(got, want, tolerance);
}

TEST_P(MatmulBf16, ForwardMatchesRef) {
    for (const auto [M, N, K] : kShapes)
        for (const bool transposed : {false, true}) {
            SCOPED_TRACE(testing::Message() << M << " " << N << " " << K << " " << transposed);
            const auto x = rounded(normal<float>(size_t(M * K), 1));
            const auto w = rounded(normal<float>(size_t(N * K), 2));
            std::vector<float> master(w.size());
            for (int64_t n = 0; n < N; ++n)
                for (int64_t k = 0; k < K; ++k)
                    master[size_t(transposed ? k * N + n : n * K + k)] =
                        float(w[size_t(n * K + k)]);
            Packed packed(cpu::bf16_packed_size(N, K));
            EXPECT_TRUE(
                ok(cpu::bf16_pack(packed.data(), master.data(), N, K, transposed, kTwoThreads)));
            EXPECT_FALSE(packed.overrun());
            std::vector<bf16> y(size_t(M * N) + 1, bf16(7.f));
            EXPECT_TRUE(
                ok(forward(GetParam(), y.data(), x.data(), packed.data(), M, N, K, kTwoThreads)));
            EXPECT_EQ(float(y.back()), 7.f);
            y.pop_back();
            const auto xd = widened(x), wd = widened(w);
            EXPECT_TRUE(close_over(widened(y), product(xd, wd, {M, N, K}),
                                   product(absolute(xd), absolute(wd), {M, N, K}),
                                   gamma<float>(double(K)) + unit_roundoff<bf16>()));
        }
}

TEST_P(MatmulBf16, GradientMatchesRefAndThreadsDoNotMatter) {
    for (const auto [M, N, K] : kShapes) {
        SCOPED_TRACE(testing::Message() << M << " " << N << " " << K);
        const auto x = rounded(normal<float>(size_t(M * K), 3));
        const auto dy = rounded(normal<float>(size_t(M * N), 4));
        const auto start = normal<float>(size_t(N * K), 5);
        const auto xd = widened(x), dyd = widened(dy);
        std::vector<double> want(start.begin(), start.end()), size = absolute(want);
        EXPECT_TRUE(
            ok(ref::matmul_dw_accum(want.data(), dyd.data(), xd.data(), M, N, K, kOneThread)));
        EXPECT_TRUE(ok(ref::matmul_dw_accum(size.data(), absolute(dyd).data(), absolute(xd).data(),
                                            M, N, K, kOneThread)));
        std::vector<float> one = start;
        one.push_back(7.f);
        EXPECT_TRUE(ok(
            cpu::bf16_dw_accum(GetParam(), one.data(), dy.data(), x.data(), M, N, K, kOneThread)));
        EXPECT_EQ(one.back(), 7.f);
        one.pop_back();
        for (const int threads : {2, 3, 7}) {
            std::vector<float> other = start;
            EXPECT_TRUE(ok(cpu::bf16_dw_accum(GetParam(), other.data(), dy.data(), x.data(), M, N,
                                              K, Stream{nullptr, threads})));
            EXPECT_TRUE(same_bits(one, other)) << threads << " threads";
        }
        EXPECT_TRUE(close_over({one.begin(), one.end()}, want, size, gamma<float>(double(M + 1))));
    }
}

// The row rule: a row of y has the same bits in every call, whatever rows stand beside it.
TEST_P(MatmulBf16, RowsHaveTheSameBitsInEveryCall) {
    const int64_t rows = 401;
    const Shape shapes[] = {{0, 1, 1},     {0, 37, 3},   {0, 130, 31},  {0, 3, 1601},
                            {0, 352, 128}, {0, 17, 600}, {0, 530, 1601}};
    for (const Shape& shape : shapes) {
        const int64_t N = shape.N, K = shape.K;
        SCOPED_TRACE(testing::Message() << N << " " << K);
        const auto x = rounded(normal<float>(size_t(rows * K), 6));
        Packed packed(cpu::bf16_packed_size(N, K));
        EXPECT_TRUE(ok(cpu::bf16_pack(packed.data(), normal<float>(size_t(N * K), 7).data(), N, K,
                                      false, kOneThread)));
        std::vector<bf16> whole(size_t(rows * N));
        EXPECT_TRUE(
            ok(forward(GetParam(), whole.data(), x.data(), packed.data(), rows, N, K, kOneThread)));
        for (const int64_t M : {1, 2, 5, 16, 17, 65, 131})
            for (const int64_t at : {int64_t(0), int64_t(101), rows - M})
                for (const int threads : {1, 2, 5}) {
                    std::vector<bf16> part(size_t(M * N));
                    EXPECT_TRUE(ok(forward(GetParam(), part.data(), x.data() + at * K,
                                           packed.data(), M, N, K, Stream{nullptr, threads})));
                    EXPECT_EQ(
                        std::memcmp(part.data(), whole.data() + at * N, part.size() * sizeof(bf16)),
                        0)
                        << M << " rows from row " << at << ", " << threads << " threads";
                }
    }
}

// Few rows have tiles of their own: every number of them, with several weights at once, and K in
// one block and in two.
TEST_P(MatmulBf16, EveryNumberOfRowsHasTheBitsOfEachAlone) {
    const int64_t rows = 40, Ns[] = {77, 5, 130};
    for (const int64_t K : {101, 1601}) {
        const auto x = rounded(normal<float>(size_t(rows * K), 10));
        std::vector<Packed> packed;
        for (const int64_t N : Ns) {
            packed.emplace_back(cpu::bf16_packed_size(N, K));
            EXPECT_TRUE(ok(cpu::bf16_pack(packed.back().data(),
                                          normal<float>(size_t(N * K), unsigned(N)).data(), N, K,
                                          false, kOneThread)));
        }
        // y of each weight, for M rows from row m on
        const auto product = [&](int64_t m, int64_t M, int threads) {
            std::vector<std::vector<bf16>> y;
            std::vector<MatmulOutput<bf16>> outputs;
            for (const int64_t N : Ns) y.emplace_back(size_t(M * N), bf16(7.f));
            for (size_t i = 0; i < y.size(); ++i)
                outputs.push_back({y[i].data(), packed[i].data(), Ns[i]});
            EXPECT_TRUE(ok(cpu::bf16_forward(GetParam(), outputs, x.data() + m * K, M, K,
                                             Stream{nullptr, threads})));
            return y;
        };
        std::vector<std::vector<std::vector<bf16>>> alone;
        for (int64_t m = 0; m < rows; ++m) alone.push_back(product(m, 1, 1));
        for (int64_t M = 1; M <= rows; ++M)
            for (const int threads : {1, 2, 3}) {
                const auto y = product(rows - M, M, threads);
                for (size_t i = 0; i < y.size(); ++i)
                    for (int64_t m = 0; m < M; ++m)
                        EXPECT_EQ(std::memcmp(y[i].data() + m * Ns[i],
                                              alone[size_t(rows - M + m)][i].data(),
                                              size_t(Ns[i]) * sizeof(bf16)),
                                  0)
                            << "row " << m << " of " << M << ", N = " << Ns[i] << ", K = " << K
                            << ", " << threads << " threads";
            }
    }
}

// What a tile is filled up with must not meet a NaN beside it.
TEST_P(MatmulBf16, NanStaysInItsRow) {
    const int64_t M = 9, N = 21, K = 35;
    auto x = rounded(normal<float>(size_t(M * K), 8));
    for (int64_t k = 0; k < K; ++k) x[size_t(4 * K + k)] = bf16(NAN);
    Packed packed(cpu::bf16_packed_size(N, K));
    EXPECT_TRUE(ok(cpu::bf16_pack(packed.data(), normal<float>(size_t(N * K), 9).data(), N, K,
                                  false, kOneThread)));
    std::vector<bf16> y(size_t(M * N));
    EXPECT_TRUE(ok(forward(GetParam(), y.data(), x.data(), packed.data(), M, N, K, kOneThread)));
    for (int64_t i = 0; i < M * N; ++i) EXPECT_EQ(std::isnan(float(y[size_t(i)])), i / N == 4);
}

TEST(MatmulBf16, RejectsImpossibleSizes) {
    bf16 x{0.f};
    float w = 0;
    EXPECT_EQ(cpu::matmul_pack(&x, &w, 0, 1, false, kOneThread).code, Code::bad_argument);
    EXPECT_EQ(cpu::matmul_forward(&x, &x, &x, -1, 1, 1, kOneThread).code, Code::bad_argument);
    EXPECT_EQ(cpu::matmul_dw_accum(&w, &x, &x, 1, 1, 0, kOneThread).code, Code::bad_argument);
}

}  // namespace
}  // namespace fbt::tests
