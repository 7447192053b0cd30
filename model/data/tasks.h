// Generated tasks: labelled sequences that are a pure function of (seed, global sequence index).
//
// Inputs and labels share one vocabulary of V ids, so that the output head stays tied to the
// embedding: input ids come first, in the order below, label ids follow. T positions, t = 0..T-1;
// a position without a label has -1. In `prefix` tasks the sequence of an index at a shorter length
// is the beginning of the one at a longer length; in `scratch` tasks the two differ in the length
// of the scratch stretch only, whose tokens change no answer; in `own` tasks they are unrelated.
//
//   task           V  T >=
//   parity         4     1  prefix   0, 1. label[t] = 2 + (input[0] + ... + input[t]) mod 2
//   mod-sum       10     1  prefix   0..4. label[t] = 5 + (input[0] + ... + input[t]) mod 5
//   swap-s5       15     1  prefix   Items 0..4 lie in places 0..4. 0..9: exchange what lies in the
//                                    places 01 02 03 04 12 13 14 23 24 34. label[t] = 10 + the
//                                    place where item 0 now lies
//   registers     26     9  own      2r + v: write the bit v to register r of 0..7; 16 + r: query.
//                                    T-1 writes in a random order, to each register equally often,
//                                    except that the first (T-1) mod 8 get one more; then a query,
//                                    the only label: 24 + the value last written to r
//   completion    17    13  scratch  3c + g-1: the goal of counter c of 0..2 is g of 1..3; 9 + c:
//                                    count c up; 12, 13: count up, down what has no goal; 14:
//                                    query. The goals of counters 0, 1, 2; nine updates in a random
//                                    order; T-13 scratch updates, fair; the query. Labels at the
//                                    nine updates and the query: 16 when all goals are met by now,
//                                    else 15. In the end either is as likely; when they are not
//                                    met, one counter is one update short and the others are not
//   memory         7     2  scratch  0, 1: the bit; 2, 3: scratch, fair; 4: query. The bit, T-2
//                                    scratch updates, the query, the only label: 5 + the bit
//   pointer-chase 81     9  prefix   8a + b: f(a) = b, for a random permutation f of 0..7; 64 + a:
//                                    start at a; 72: hop. The eight edges in a random order, the
//                                    start, T-9 hops. Labels from the start on: 73 + f(a),
//                                    73 + f(f(a)), ...
//
// What is not said to be otherwise is drawn uniformly.
#pragma once
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/philox.h"
#include "model/data/loader.h"

namespace fbt::model::data {

// The random numbers of one sequence, by position and column.
class SequenceBits {
  public:
    SequenceBits(kernels::PhiloxKey key, uint64_t sequence) : key_(key), sequence_(sequence) {}
    uint32_t operator()(size_t position, uint32_t column = 0) const {
        return kernels::philox_bits(key_, sequence_, uint32_t(position), column);
    }
    // Uniform on 0..n-1.
    int32_t below(uint32_t n, size_t position, uint32_t column = 0) const {
        return int32_t(kernels::uniform_below((*this)(position, column), n));
    }

  private:
    kernels::PhiloxKey key_;
    uint64_t sequence_;
};

// One task: how a sequence is drawn and labelled.
class Task {
  public:
    virtual ~Task() = default;
    virtual int vocab_size() const = 0;
    virtual int shortest() const = 0;  // length
    // Fills tokens [T], T >= shortest(), and those of the labels [T] that there are: all are -1.
    virtual void draw(const SequenceBits& bits, std::span<int32_t> tokens,
                      std::span<int32_t> labels) const = 0;
};

std::vector<std::string> task_names();
// Errors  usage for an unknown name: the known ones are listed.
const Task& find_task(const std::string& name);
// Errors  usage unless there are lengths, all of which the task has.
void check_lengths(const std::string& name, const std::vector<int>& lengths);

// Evaluation draws from other counters than training, so that the two never share a random number,
// with the same seed either.
enum class TaskStream { training, evaluation };

// An endless source of sequences, each of a length that is drawn uniformly from `lengths`; the draw
// shares no number with what the sequence holds. Sequence i has the global index i, and
// Position{0, i}. Errors  as find_task and check_lengths.
std::unique_ptr<Source> make_task(const std::string& name, const std::vector<int>& lengths,
                                  uint64_t seed, TaskStream stream = TaskStream::training);

}  // namespace fbt::model::data
