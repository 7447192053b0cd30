// Dealing work that cannot be cut: parameters to the ranks that own them, sequences to ranks.
#pragma once
#include <vector>

namespace fbt::model::engine {

// The part, of `parts`, of every item: the largest cost first, each to the part with the least so
// far; of equal costs the lower index first, of equal parts the lower. The heaviest part has at
// most 4/3 of what the best deal gives it. The same on every rank.
// Needs  costs >= 0, parts >= 1.
std::vector<int> deal(const std::vector<double>& costs, int parts);

}  // namespace fbt::model::engine
