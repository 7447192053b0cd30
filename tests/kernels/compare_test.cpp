// The comparer is tested before anything is compared with it.
#include "tests/compare.h"

namespace fbt::tests {
namespace {

const double nan = std::numeric_limits<double>::quiet_NaN();
const double inf = std::numeric_limits<double>::infinity();

TEST(Compare, AcceptsWhatIsClose) {
    EXPECT_TRUE(close(std::vector<double>{1, 2}, std::vector<double>{1, 2.001}, 0.002));
    EXPECT_TRUE(close(std::vector<float>{100}, std::vector<double>{100.05}, 0, 1e-3));
    EXPECT_TRUE(close(std::vector<double>{inf}, std::vector<double>{inf}, 0));
    EXPECT_TRUE(close(std::vector<double>{}, std::vector<double>{}, 0));
}

TEST(Compare, RejectsNanOnEitherSide) {
    EXPECT_FALSE(close(std::vector<double>{nan}, std::vector<double>{1}, 1e9));
    EXPECT_FALSE(close(std::vector<double>{1}, std::vector<double>{nan}, 1e9));
    EXPECT_FALSE(close(std::vector<double>{nan}, std::vector<double>{nan}, 1e9));
    EXPECT_FALSE(close(std::vector<double>{nan, 5}, std::vector<double>{1, 1}, 0.1));
    EXPECT_FALSE(close(std::vector<double>{5, nan}, std::vector<double>{1, 1}, 0.1));
}

TEST(Compare, RejectsInfinityAndShape) {
    EXPECT_FALSE(close(std::vector<double>{inf}, std::vector<double>{1}, 1e9));
    EXPECT_FALSE(close(std::vector<double>{1}, std::vector<double>{inf}, 1e9));
    EXPECT_FALSE(close(std::vector<double>{-inf}, std::vector<double>{inf}, 1e9));
    EXPECT_FALSE(close(std::vector<double>{1}, std::vector<double>{1, 2}, 1e9));
}

TEST(Compare, FindsOneBadElementInAMillion) {
    std::vector<float> a(1000000, 1.f), b = a;
    EXPECT_TRUE(close(a, b, 0));
    EXPECT_TRUE(same_bits(a, b));
    b[777777] = std::nextafter(1.f, 2.f);
    EXPECT_FALSE(close(a, b, 1e-8));
    EXPECT_FALSE(same_bits(a, b));
}

TEST(Compare, BitsTellZerosApart) {
    EXPECT_FALSE(same_bits(std::vector<float>{0.f}, std::vector<float>{-0.f}));
    EXPECT_FALSE(same_bits(std::vector<float>{0.f}, std::vector<float>{}));
}

}  // namespace
}  // namespace fbt::tests
