// kernels/matmul.cu and matmul_mma.cu against the plain loops in double, on the same rounded
// inputs.
#include "kernels/matmul.h"

#include <algorithm>

#include "tests/compare.h"
#include "tests/cuda/device.h"

namespace fbt::tests {
namespace {

namespace cuda = kernels::cuda;
namespace ref = kernels::ref;
using kernels::bf16;

struct Shape {
    int64_t M, N, K;
};
std::string name_of(Shape s) {
    return std::to_string(s.M) + " x " + std::to_string(s.N) + " x " + std::to_string(s.K);
}
// On both sides of tiles' 16, 32, 64 and 128, and longer than every ring of stages at its size.
const Shape kShapes[] = {{1, 1, 1},     {3, 37, 5},    {16, 64, 32},    {17, 65, 33},
                         {65, 3, 129},  {1, 17, 2300}, {70, 130, 64},   {40, 17, 700},
                         {129, 66, 15}, {5, 8, 8},     {130, 129, 250}, {130, 136, 256}};

// A bound on |computed - exact| / sum_i |a_i b_i| for a sum of n products in f32: Higham's gamma.
// From bf16 the products are exact, and a tensor core may truncate where an addition would round
// (2 u instead of u), in one more addition for every group of 16.
template <class T>
double sum_error(double n) {
    return std::is_same_v<T, bf16> ? gamma<float>(2 * (n + n / 16 + 1)) : gamma<float>(n);
}
// Of the result's one rounding, if the sum's type is not its own.
template <class T>
double store_error() {
    return std::is_same_v<T, bf16> ? unit_roundoff<bf16>() : 0;
}

template <class T>
std::vector<double> magnitudes(const std::vector<T>& v) {
    std::vector<double> out;
    for (const T x : v) out.push_back(std::abs(wide(x)));
    return out;
}
double largest(const std::vector<double>& v) { return *std::max_element(v.begin(), v.end()); }

// y = x w^T in double, w as matmul_pack takes it.
std::vector<double> product(const std::vector<double>& x, const std::vector<double>& w, Shape s,
                            bool transposed) {
    std::vector<double> packed(ref::matmul_packed_size<double>(s.N, s.K)), y(s.M * s.N);
    EXPECT_TRUE(ok(ref::matmul_pack<double>(packed.data(), w.data(), s.N, s.K, transposed, {})));
    EXPECT_TRUE(
        ok(ref::matmul_forward<double>(y.data(), x.data(), packed.data(), s.M, s.N, s.K, {})));
    return y;
}

// An array whose first element lies `offset` elements into an allocation, so is less aligned.
template <class T>
class Shifted {
  public:
    Shifted(std::vector<T> values, size_t offset)
        : offset_(offset), array_([&] {
              values.insert(values.begin(), offset, T(0.f));
              return values;
          }()) {}
    T* data() { return array_.data() + offset_; }
    std::vector<T> host() const {
        auto values = array_.host();
        values.erase(values.begin(), values.begin() + int64_t(offset_));
        return values;
    }

  private:
    size_t offset_;
    DeviceArray<T> array_;
};

template <class T>
class Weights {
  public:
    Weights(const std::vector<float>& w, int64_t N, int64_t K, bool transposed, size_t offset = 0)
        : packed_(cuda::matmul_packed_size<T>(N, K)) {
        Shifted<float> dev_w(w, offset);
        EXPECT_TRUE(ok(cuda::matmul_pack<T>(packed_.data(), dev_w.data(), N, K, transposed, {})));
    }
    const T* data() { return packed_.data(); }

  private:
    DeviceArray<T> packed_;
};

// Values that a product must not depend on: NaN.
template <class T>
std::vector<T> unwritten(size_t n) {
    return std::vector<T>(n, T(std::numeric_limits<float>::quiet_NaN()));
}

// y for the first rows of x, with arrays `offset` elements off their alignment.
template <class T>
std::vector<T> forward(const std::vector<T>& x, Weights<T>& w, Shape s, size_t offset = 0) {
    Shifted<T> dev_x(std::vector<T>(x.begin(), x.begin() + s.M * s.K), offset),
        dev_y(unwritten<T>(s.M * s.N), offset);
    EXPECT_TRUE(
        ok(cuda::matmul_forward<T>(dev_y.data(), dev_x.data(), w.data(), s.M, s.N, s.K, {})));
    return dev_y.host();
}

template <class T>
void expect_forward(Shape s, bool transposed, size_t offset = 0) {
    const auto x = normal<T>(s.M * s.K, 1);
    const auto w = normal<float>(s.N * s.K, 2);
    const auto rounded = cast<T>(w);
    const auto want = product(cast<double>(x), cast<double>(rounded), s, transposed),
               size = product(magnitudes(x), magnitudes(rounded), s, transposed);
    Weights<T> packed(w, s.N, s.K, transposed, offset);
    EXPECT_TRUE(close(forward(x, packed, s, offset), want,
                      sum_error<T>(double(s.K)) * largest(size) * (1 + store_error<T>()),
                      store_error<T>()))
        << name_of(s) << (transposed ? " transposed" : "") << " offset " << offset;
}

template <class T>
void expect_dw(Shape s, size_t offset = 0) {
    const auto dy = normal<T>(s.M * s.N, 1), x = normal<T>(s.M * s.K, 2);
    const auto start = normal<float>(s.N * s.K, 3);
    auto want = cast<double>(start), size = magnitudes(start);
    ASSERT_TRUE(ok(ref::matmul_dw_accum<double>(want.data(), cast<double>(dy).data(),
                                                cast<double>(x).data(), s.M, s.N, s.K, {})));
    ASSERT_TRUE(ok(ref::matmul_dw_accum<double>(size.data(), magnitudes(dy).data(),
                                                magnitudes(x).data(), s.M, s.N, s.K, {})));
    Shifted<float> dw(start, offset);
    Shifted<T> dev_dy(dy, offset), dev_x(x, offset);
    ASSERT_TRUE(
        ok(cuda::matmul_dw_accum<T>(dw.data(), dev_dy.data(), dev_x.data(), s.M, s.N, s.K, {})));
    // one addition more: to what is there
    EXPECT_TRUE(close(dw.host(), want, sum_error<T>(double(s.M + 1)) * largest(size)))
        << name_of(s) << " offset " << offset;
}

class Matmul : public ScheduleTest {};

TEST_P(Matmul, ForwardMatchesPlainLoops) {
    for (const Shape s : kShapes)
        for (const bool transposed : {false, true}) {
            expect_forward<float>(s, transposed);
            expect_forward<bf16>(s, transposed);
        }
}

TEST_P(Matmul, WeightGradientMatchesPlainLoops) {
    for (const Shape s : kShapes) {
        expect_dw<float>(s);
        expect_dw<bf16>(s);
    }
}

// The row rule: alone, among a few and among many, a row has the same bits.
template <class T>
void expect_rows_alone() {
    const int64_t M = 70, N = 67, K = 264;
    const auto x = normal<T>(M * K, 1);
    Weights<T> packed(normal<float>(N * K, 2), N, K, false);
    const auto y = forward(x, packed, {M, N, K});
    for (const int64_t rows : {1, 3, 16, 17, 37})
        for (const int64_t first : {int64_t(0), int64_t(5), M - rows}) {
            const std::vector<T> some(x.begin() + first * K, x.begin() + (first + rows) * K);
            EXPECT_TRUE(
                same_bits(forward(some, packed, {rows, N, K}),
                          std::vector<T>(y.begin() + first * N, y.begin() + (first + rows) * N)))
                << rows << " rows from " << first;
        }
}
TEST_P(Matmul, RowsDoNotDependOnOtherRows) {
    expect_rows_alone<float>();
    expect_rows_alone<bf16>();
}

INSTANTIATE_TEST_SUITE_P(Device, Matmul, testing::ValuesIn(kSchedules), schedule_name);

// ---- under one schedule ----

class MatmulSizes : public ScheduleTest {};

TEST_P(MatmulSizes, EveryAwkwardSize) {
    for (const int64_t M : {1, 3, 17, 128, 130, 257})
        for (const int64_t N : {1, 17, 127, 129, 257})
            for (const int64_t K : {1, 8, 15, 16, 33, 250}) {
                expect_forward<float>({M, N, K}, (M + N + K) % 2 == 0);
                expect_forward<bf16>({M, N, K}, (M + N + K) % 2 == 0);
                expect_dw<float>({K, N, M});
                expect_dw<bf16>({K, N, M});
            }
}

TEST_P(MatmulSizes, ArraysNeedNoAlignment) {
    for (const Shape s : {Shape{3, 40, 48}, {20, 40, 48}, {70, 72, 136}})
        for (const size_t offset : {1, 2, 4}) {
            expect_forward<float>(s, false, offset);
            expect_forward<bf16>(s, true, offset);
            expect_forward<bf16>(s, false, offset);
            expect_dw<float>(s, offset);
            expect_dw<bf16>(s, offset);
        }
}

// Every count of rows, and alignment, gives a row the bits that it has among 300.
TEST_P(MatmulSizes, RowsDoNotDependOnTheirCount) {
    const int64_t most = 300, N = 40, K = 136;
    const auto x = normal<bf16>(most * K, 1);
    Weights<bf16> packed(normal<float>(N * K, 2), N, K, false);
    const auto y = forward(x, packed, {most, N, K});
    std::vector<int64_t> counts = {63, 64, 65, 129, 130};
    for (int64_t M = 1; M <= 40; ++M) counts.push_back(M);
    for (const int64_t M : counts)
        for (const size_t offset : {0, 1})
            EXPECT_TRUE(same_bits(forward(x, packed, {M, N, K}, offset),
                                  std::vector<bf16>(y.begin(), y.begin() + M * N)))
                << M << " rows, offset " << offset;
}

// Products so wide that larger tiles run (matmul_mma.cu, mma_forward): an output's bits depend
// neither on them nor on how many other columns there are.
TEST_P(MatmulSizes, TilesDoNotChangeBits) {
    const int64_t K = 200, few = 520;
    const auto x = normal<bf16>(300 * K, 1);
    const auto w = normal<float>(22408 * K, 2);
    const auto product_of = [&](Shape s) {
        Weights<bf16> packed(std::vector<float>(w.begin(), w.begin() + s.N * K), s.N, K, false);
        return forward(x, packed, s);
    };
    const auto expect_same = [](const std::vector<bf16>& got, Shape s,
                                const std::vector<bf16>& want, int64_t want_N) {
        const int64_t N = std::min(s.N, want_N);
        for (int64_t m = 0; m < s.M; ++m)
            ASSERT_EQ(std::memcmp(&got[m * s.N], &want[m * want_N], N * sizeof(bf16)), 0)
                << name_of(s) << " row " << m;
    };
    const Shape wide_strip{16, 8456, K};
    const auto strip = product_of(wide_strip);
    const auto squares = product_of({300, few, K});  // of 64
    expect_same(strip, wide_strip, squares, few);
    for (const Shape s :
         {Shape{1, few, K}, {40, few, K}, {40, 4232, K}, {130, 8459, K}, {300, 22408, K}}) {
        const auto y = product_of(s);
        expect_same(y, s, squares, few);
        expect_same(strip, {std::min(s.M, wide_strip.M), wide_strip.N, K}, y, s.N);
    }
}

// A few rows over a long sum: a ring of stages is walked round by wide strips too.
TEST_P(MatmulSizes, LongSumsOfWideProducts) { expect_forward<bf16>({2, 8456, 800}, false); }

// The same for gradients: the whole against its corners.
void expect_same_corners(int64_t M, int64_t N, int64_t K) {
    const int64_t n_side = 24, k_side = 40;
    const auto dy = normal<bf16>(M * N, 1), x = normal<bf16>(M * K, 2);
    const auto columns = [M](const std::vector<bf16>& v, int64_t width, int64_t first,
                             int64_t count) {
        std::vector<bf16> out;
        for (int64_t m = 0; m < M; ++m)
            out.insert(out.end(), v.begin() + m * width + first,
                       v.begin() + m * width + first + count);
        return out;
    };
    const auto dw = [M](const std::vector<bf16>& a, const std::vector<bf16>& b, int64_t rows,
                        int64_t width) {
        DeviceArray<float> out(std::vector<float>(rows * width, 0.5f));
        DeviceArray<bf16> dev_a(a), dev_b(b);
        EXPECT_TRUE(ok(cuda::matmul_dw_accum<bf16>(out.data(), dev_a.data(), dev_b.data(), M, rows,
                                                   width, {})));
        return out.host();
    };
    const auto all = dw(dy, x, N, K);
    for (const int64_t n : {int64_t(0), N / 2, N - n_side})
        for (const int64_t k : {int64_t(0), K / 2, K - k_side}) {
            const auto some =
                dw(columns(dy, N, n, n_side), columns(x, K, k, k_side), n_side, k_side);
            for (int64_t row = 0; row < n_side; ++row)
                ASSERT_TRUE(same_bits(std::span(&some[row * k_side], k_side),
                                      std::span(&all[(n + row) * K + k], k_side)))
                    << "row " << n + row << " from column " << k;
        }
}
TEST_P(MatmulSizes, GradientTilesDoNotChangeBits) {
    expect_same_corners(150, 1552, 1416);  // squares of 128
    expect_same_corners(130, 1552, 5320);  // 128 x 256
    expect_same_corners(70, 1552, 1411);   // unaligned rows
}

// A row with a NaN spoils no other.
TEST_P(MatmulSizes, NanStaysInItsRow) {
    for (const int64_t M : {4, 40, 100}) {
        const int64_t N = 9, K = 72;
        auto x = normal<bf16>(M * K, 1);
        Weights<bf16> packed(normal<float>(N * K, 2), N, K, false);
        auto want = forward(x, packed, {M, N, K});
        x[2 * K + 71] = bf16(std::numeric_limits<float>::quiet_NaN());
        const auto y = forward(x, packed, {M, N, K});
        for (int64_t n = 0; n < N; ++n) {
            EXPECT_TRUE(std::isnan(float(y[2 * N + n])));
            want[2 * N + n] = y[2 * N + n];
        }
        EXPECT_TRUE(same_bits(y, want));
    }
}

template <class T>
void expect_errors() {
    DeviceArray<T> one(std::vector<T>{T(7.f)});
    DeviceArray<float> sum(std::vector<float>{7});
    EXPECT_TRUE(ok(cuda::matmul_forward<T>(one.data(), one.data(), one.data(), 0, 1, 1, {})));
    EXPECT_TRUE(ok(cuda::matmul_dw_accum<T>(sum.data(), one.data(), one.data(), 0, 1, 1, {})));
    EXPECT_EQ(float(one.host()[0]), 7);
    EXPECT_EQ(sum.host()[0], 7);
    using kernels::Code;
    for (const Shape s : {Shape{-1, 1, 1}, {1, 0, 1}, {1, 1, 0}}) {
        EXPECT_EQ(
            cuda::matmul_forward<T>(one.data(), one.data(), one.data(), s.M, s.N, s.K, {}).code,
            Code::bad_argument);
        EXPECT_EQ(
            cuda::matmul_dw_accum<T>(sum.data(), one.data(), one.data(), s.M, s.N, s.K, {}).code,
            Code::bad_argument);
    }
    EXPECT_EQ(cuda::matmul_pack<T>(one.data(), sum.data(), 0, 1, false, {}).code,
              Code::bad_argument);
    EXPECT_EQ(cuda::matmul_pack<T>(one.data(), sum.data(), 1, 0, true, {}).code,
              Code::bad_argument);
    // more tiles than gridDim.x may count
    EXPECT_EQ(
        cuda::matmul_forward<T>(one.data(), one.data(), one.data(), 1, int64_t(1) << 38, 1, {})
            .code,
        Code::unsupported);
}
TEST_P(MatmulSizes, NoRowsIsNoWorkAndBadSizesAreErrors) {
    expect_errors<float>();
    expect_errors<bf16>();
}

INSTANTIATE_TEST_SUITE_P(Device, MatmulSizes, testing::Values(kSchedules[0]), schedule_name);

}  // namespace
}  // namespace fbt::tests
