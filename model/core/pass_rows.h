// Which rows a pass computes, and where the state that each of them carries lies.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace fbt::model::core {

// Positions [first, length) of every sequence, packed one sequence after another.
struct PassRows {
    std::vector<int32_t> length, first;  // [sequences]
    std::vector<int64_t> offset;         // [sequences], the row of position `first`
    int64_t count = 0;                   // rows in all

    PassRows(const std::vector<int32_t>& lengths, const std::vector<int32_t>& firsts);
    int64_t row(std::size_t sequence, int position) const {
        return offset[sequence] + position - first[sequence];
    }
};

// For every row (s, t) of a feedback pass, t >= 1: where h_{t-1} of the pass before lies.
struct CarrySource {
    std::vector<int64_t> source;     // kernels/carry.h: a row of the last pass, or of pass 1
    std::vector<int64_t> disturbed;  // the row of (s, t-1) among all N
    std::vector<int64_t> sequence;   // global sequence index
    std::vector<int32_t> position;   // t-1
};
// `whole`: pass 1. `previous`: the pass before; from_first says that it is pass 1 itself. A
// position that the pass before kept plain has pass 1's state.
CarrySource carry_source(const PassRows& whole, const PassRows& previous, bool from_first,
                         const PassRows& rows, const std::vector<int64_t>& indices);

}  // namespace fbt::model::core
