// Dealing by cost: the order it promises, its bound against the best deal of all.
#include "model/engine/share.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

namespace fbt::tests {
namespace {

using model::engine::deal;

double heaviest(const std::vector<double>& costs, const std::vector<int>& dealt, int parts) {
    std::vector<double> loads(parts, 0.0);
    for (size_t i = 0; i < costs.size(); ++i) loads.at(dealt[i]) += costs[i];
    return *std::ranges::max_element(loads);
}

TEST(Deal, LargestFirstToTheLeastLoaded) {
    // 7 -> 0, 6 -> 1, 5 -> 2, 4 -> 2 (9), 3 -> 1 (9), 2 -> 0 (9)
    EXPECT_EQ(deal({2, 5, 7, 3, 6, 4}, 3), (std::vector<int>{0, 2, 0, 1, 1, 2}));
    EXPECT_EQ(deal({}, 4), std::vector<int>{});
    EXPECT_EQ(deal({3, 1, 2}, 1), (std::vector<int>{0, 0, 0}));
    EXPECT_EQ(deal({3, 1, 2}, 5), (std::vector<int>{0, 2, 1}));
}

TEST(Deal, TiesGoToLowerIndicesAndLowerParts) {
    EXPECT_EQ(deal({1, 1, 1, 1, 1}, 3), (std::vector<int>{0, 1, 2, 0, 1}));
    EXPECT_EQ(deal({0, 0, 0}, 2), (std::vector<int>{0, 0, 0}));  // nothing was added to part 0
    EXPECT_EQ(deal({1, 2, 2, 1}, 2), (std::vector<int>{0, 0, 1, 1}));
}

// Graham's bound for this order is 4/3 - 1/(3 parts) of the best deal, which trying all finds.
TEST(Deal, IsNearTheBestDeal) {
    std::mt19937 random(1);
    for (int trial = 0; trial < 200; ++trial) {
        const int parts = 2 + trial % 2;
        std::vector<double> costs(1 + random() % 7);
        for (double& x : costs) x = double(1 + random() % 20);
        const std::vector<int> dealt = deal(costs, parts);
        ASSERT_EQ(dealt.size(), costs.size());
        double best = 1e9;
        for (int code = 0; code < int(std::pow(parts, costs.size())); ++code) {
            std::vector<int> other;
            for (int rest = code; other.size() < costs.size(); rest /= parts)
                other.push_back(rest % parts);
            best = std::min(best, heaviest(costs, other, parts));
        }
        // Whole numbers: the bound is exact but for the rounding of the division.
        EXPECT_LE(heaviest(costs, dealt, parts),
                  best * (4.0 / 3 - 1.0 / (3 * parts)) * (1 + 1e-12));
    }
}

}  // namespace
}  // namespace fbt::tests
