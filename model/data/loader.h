// From documents to the packed sequences of a training step.
//
// A document of m tokens is one sequence when m <= T, the context length, else it is cut into
// pieces of T tokens that overlap by one: [0, T), [T-1, 2T-1), ... Inside a piece target[i] =
// token[i+1]; the last position has no target (-1): its target is the second token of the next
// piece, so every token but a document's first is a target exactly once. Documents of one token
// have no target and are left out.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "model/data/shards.h"

namespace fbt::model::data {

// Packed sequences: N = sum of lengths positions, sequence after sequence.
struct Sequences {
    std::vector<int32_t> tokens, targets;  // [N]; target -1 is ignored
    std::vector<int32_t> lengths;          // [sequences], each >= 1
    std::vector<int64_t> indices;          // [sequences], the global sequence index: unique over a
                                           // run, and the counter of every random draw for it

    Sequences select(const std::vector<size_t>& which) const;  // these, in this order
    int64_t targets_counted() const;                           // those that are not ignored
};

// The next sequence to be given out. Plain numbers, kept in checkpoints.
struct Position {
    int64_t epoch = 0;
    int64_t index = 0;  // inside the epoch
    bool operator==(const Position&) const = default;
};

// An endless stream of sequences, a function of its position alone. Sequences are numbered
// globally, never per rank.
class Source {
  public:
    virtual ~Source() = default;

    // As many whole sequences as fit into token_budget, at least one.
    // Errors  usage when the first one alone is longer.
    virtual Sequences next(int64_t token_budget) = 0;
    virtual Position position() const = 0;
    virtual void seek(Position position) = 0;  // errors  bad_file when outside the data
    virtual int vocab_size() const = 0;
};

// [begin, begin + count) of a split's stream.
struct Piece {
    int64_t begin;
    int32_t count;
};
// Errors  usage when context < 2.
std::vector<Piece> cut(const Split& split, int context);

// A permutation of 0..n-1, drawn for one epoch: Fisher-Yates with Philox(seed, shuffle, epoch).
std::vector<uint32_t> shuffled(uint64_t seed, int64_t epoch, int64_t n);

// Training: all pieces in an order shuffled anew each epoch. Sequence i of an epoch has the global
// index epoch * pieces + i. `split` must outlive it.
class Loader : public Source {
  public:
    // Errors  bad_file when the split holds no sequence.
    Loader(const Split& split, int vocab_size, int context, uint64_t seed);

    Sequences next(int64_t token_budget) override;
    Position position() const override { return position_; }
    void seek(Position position) override;
    int vocab_size() const override { return vocab_size_; }
    int64_t sequences_per_epoch() const { return int64_t(pieces_.size()); }

  private:
    const Split& split_;
    std::vector<Piece> pieces_;
    std::vector<uint32_t> order_;  // of position_.epoch
    Position position_;
    int vocab_size_;
    uint64_t seed_;
};

// Validation: all pieces once, in order. Index i is the i-th piece.
class InOrder {
  public:
    InOrder(const Split& split, int context) : split_(split), pieces_(cut(split, context)) {}
    // As Source::next; nothing at the end.
    std::optional<Sequences> next(int64_t token_budget);

  private:
    const Split& split_;
    std::vector<Piece> pieces_;
    size_t next_ = 0;
};

}  // namespace fbt::model::data
