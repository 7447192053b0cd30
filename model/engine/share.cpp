#include "model/engine/share.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <queue>
#include <utility>

namespace fbt::model::engine {

std::vector<int> deal(const std::vector<double>& costs, int parts) {
    std::vector<int> order(costs.size());
    std::iota(order.begin(), order.end(), 0);
    std::ranges::stable_sort(order, [&](int a, int b) { return costs[a] > costs[b]; });

    using Load = std::pair<double, int>;  // so far, part
    std::vector<Load> empty(parts);
    for (int part = 0; part < parts; ++part) empty[part] = {0, part};
    std::priority_queue<Load, std::vector<Load>, std::greater<>> loads({}, std::move(empty));
    std::vector<int> dealt(costs.size());
    for (int item : order) {
        const auto [so_far, part] = loads.top();
        loads.pop();
        dealt[item] = part;
        loads.emplace(so_far + costs[item], part);
    }
    return dealt;
}

}  // namespace fbt::model::engine
