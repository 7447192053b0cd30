// Generated tasks: labelled sequences that are a pure function of (seed, global sequence index).
//
// Inputs and labels share one vocabulary, so that the output head stays tied to the embedding:
// input ids come first, label ids follow. Every position has a label.
//
//   parity   inputs 0, 1; label[t] = 2 + (input[0] + ... + input[t]) mod 2; vocabulary 4
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "model/data/loader.h"

namespace fbt::model::data {

// One task: how a sequence is drawn and labelled.
class Task {
  public:
    virtual ~Task() = default;
    virtual int vocab_size() const = 0;
    // The next input from 32 random bits, and its label. A task that keeps a state along the
    // sequence starts it anew at position 0.
    virtual void step(int32_t position, uint32_t bits, int32_t& input, int32_t& label) = 0;
};

std::vector<std::string> task_names();

// Evaluation draws from other counters than training, so that the two never share a random number,
// with the same seed either.
enum class TaskStream { training, evaluation };

// An endless source of sequences of `length` positions. Sequence i has the global index i, and
// Position{0, i}. Errors  usage for an unknown name (the known ones are listed) or length < 1.
std::unique_ptr<Source> make_task(const std::string& name, int length, uint64_t seed,
                                  TaskStream stream = TaskStream::training);

}  // namespace fbt::model::data
