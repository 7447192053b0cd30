#include "model/data/loader.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <string>
#include <utility>

#include "kernels/philox.h"
#include "tensor/error.h"

namespace fbt::model::data {
namespace {

using tensor::Error;
using tensor::ErrorKind;

void check_fits(const Piece& piece, int64_t token_budget) {
    if (piece.count > token_budget)
        throw Error(ErrorKind::usage,
                    "a sequence of " + std::to_string(piece.count) + " tokens does not fit into " +
                        std::to_string(token_budget) +
                        " tokens per step; raise the tokens per step or lower the context length");
}

void append(Sequences& out, const Split& split, const Piece& piece, int64_t index) {
    const size_t row = out.tokens.size(), count = size_t(piece.count);
    out.tokens.resize(row + count);
    split.copy(piece.begin, piece.count, out.tokens.data() + row);
    out.targets.insert(out.targets.end(), out.tokens.begin() + ptrdiff_t(row) + 1,
                       out.tokens.end());
    out.targets.push_back(-1);
    out.lengths.push_back(piece.count);
    out.indices.push_back(index);
}

}  // namespace

Sequences Sequences::select(const std::vector<size_t>& which) const {
    std::vector<ptrdiff_t> first;
    ptrdiff_t row = 0;
    for (int32_t length : lengths) {
        first.push_back(row);
        row += length;
    }
    Sequences out;
    for (size_t s : which) {
        const ptrdiff_t begin = first.at(s), end = begin + lengths[s];
        out.tokens.insert(out.tokens.end(), tokens.begin() + begin, tokens.begin() + end);
        out.targets.insert(out.targets.end(), targets.begin() + begin, targets.begin() + end);
        out.lengths.push_back(lengths[s]);
        out.indices.push_back(indices[s]);
    }
    return out;
}

int64_t Sequences::targets_counted() const {
    return std::count_if(targets.begin(), targets.end(), [](int32_t t) { return t >= 0; });
}

std::vector<Piece> cut(const Split& split, int context) {
    if (context < 2)
        throw Error(ErrorKind::usage, "the context length is " + std::to_string(context) +
                                          "; expected at least 2 (a token and its target)");
    std::vector<Piece> pieces;
    const auto& begins = split.documents();
    for (size_t d = 0; d < begins.size(); ++d) {
        const int64_t end = d + 1 < begins.size() ? begins[d + 1] : split.size();
        for (int64_t at = begins[d]; at + 1 < end; at += context - 1)
            pieces.push_back({at, int32_t(std::min<int64_t>(context, end - at))});
    }
    return pieces;
}

std::vector<uint32_t> shuffled(uint64_t seed, int64_t epoch, int64_t n) {
    if (n < 0 || n > std::numeric_limits<int32_t>::max())
        throw Error(ErrorKind::usage, std::to_string(n) +
                                          " sequences are too many to shuffle; expected less than "
                                          "2^31, raise the context length");
    const auto key = kernels::philox_key(seed, kernels::Draw::shuffle, uint64_t(epoch));
    std::vector<uint32_t> order(static_cast<size_t>(n));
    std::iota(order.begin(), order.end(), 0u);
    for (int64_t i = n - 1; i > 0; --i) {
        const uint32_t j =
            kernels::uniform_below(kernels::philox_bits(key, uint64_t(i)), uint32_t(i + 1));
        std::swap(order[size_t(i)], order[j]);
    }
    return order;
}

Loader::Loader(const Split& split, int vocab_size, int context, uint64_t seed)
    : split_(split), pieces_(cut(split, context)), vocab_size_(vocab_size), seed_(seed) {
    if (pieces_.empty())
        throw Error(ErrorKind::bad_file,
                    "the training data has no document of two tokens or more; expected some text");
    order_ = shuffled(seed_, position_.epoch, sequences_per_epoch());
}

void Loader::seek(Position position) {
    const int64_t n = sequences_per_epoch();
    if (position.epoch < 0 || position.epoch > (int64_t(1) << 62) / n || position.index < 0 ||
        position.index >= n)
        throw Error(ErrorKind::bad_file,
                    "data position (epoch " + std::to_string(position.epoch) + ", index " +
                        std::to_string(position.index) + ") is outside the data, which has " +
                        std::to_string(n) +
                        " sequences an epoch; resume with the data and context length of the run");
    if (position.epoch != position_.epoch) order_ = shuffled(seed_, position.epoch, n);
    position_ = position;
}

Sequences Loader::next(int64_t token_budget) {
    Sequences out;
    for (;;) {
        const Piece& piece = pieces_[order_[size_t(position_.index)]];
        if (out.lengths.empty()) check_fits(piece, token_budget);
        if (int64_t(out.tokens.size()) + piece.count > token_budget) return out;
        append(out, split_, piece, position_.epoch * sequences_per_epoch() + position_.index);
        if (position_.index + 1 < sequences_per_epoch())
            ++position_.index;
        else
            seek({position_.epoch + 1, 0});
    }
}

std::optional<Sequences> InOrder::next(int64_t token_budget) {
    if (next_ == pieces_.size()) return {};
    Sequences out;
    check_fits(pieces_[next_], token_budget);
    while (next_ < pieces_.size() &&
           int64_t(out.tokens.size()) + pieces_[next_].count <= token_budget) {
        append(out, split_, pieces_[next_], int64_t(next_));
        ++next_;
    }
    return out;
}

}  // namespace fbt::model::data
