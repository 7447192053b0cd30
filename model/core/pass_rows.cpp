#include "model/core/pass_rows.h"

namespace fbt::model::core {

PassRows::PassRows(const std::vector<int32_t>& lengths, const std::vector<int32_t>& firsts)
    : length(lengths), first(firsts) {
    for (std::size_t s = 0; s < length.size(); ++s) {
        offset.push_back(count);
        count += length[s] - first[s];
    }
}

CarrySource carry_source(const PassRows& whole, const PassRows& previous, bool from_first,
                         const PassRows& rows, const std::vector<int64_t>& indices) {
    CarrySource out;
    for (std::size_t s = 0; s < rows.length.size(); ++s)
        for (int t = rows.first[s]; t < rows.length[s]; ++t) {
            const int64_t row = whole.row(s, t - 1);
            const bool plain = from_first || t - 1 < previous.first[s];
            out.source.push_back(plain ? -1 - row : previous.row(s, t - 1));
            out.disturbed.push_back(row);
            out.sequence.push_back(indices[s]);
            out.position.push_back(t - 1);
        }
    return out;
}

}  // namespace fbt::model::core
