#include "model/data/tasks.h"

#include <numeric>
#include <utility>

#include "tensor/error.h"
#include "tensor/file.h"

namespace fbt::model::data {
namespace {

using tensor::Error;
using tensor::ErrorKind;
using Ids = std::span<int32_t>;

// Fisher and Yates; the bits are those of positions [first, first + items).
void shuffle(Ids items, const SequenceBits& bits, size_t first = 0, uint32_t column = 0) {
    for (size_t i = items.size(); i-- > 1;)
        std::swap(items[i], items[size_t(bits.below(uint32_t(i + 1), first + i, column))]);
}

class Parity : public Task {
  public:
    int vocab_size() const override { return 4; }
    int shortest() const override { return 1; }
    void draw(const SequenceBits& bits, Ids tokens, Ids labels) const override {
        int32_t parity = 0;
        for (size_t t = 0; t < tokens.size(); ++t) {
            tokens[t] = int32_t(bits(t) & 1);
            parity ^= tokens[t];
            labels[t] = 2 + parity;
        }
    }
};

class ModSum : public Task {
  public:
    int vocab_size() const override { return 10; }
    int shortest() const override { return 1; }
    void draw(const SequenceBits& bits, Ids tokens, Ids labels) const override {
        int32_t sum = 0;
        for (size_t t = 0; t < tokens.size(); ++t) {
            tokens[t] = bits.below(5, t);
            sum = (sum + tokens[t]) % 5;
            labels[t] = 5 + sum;
        }
    }
};

class SwapS5 : public Task {
  public:
    int vocab_size() const override { return 15; }
    int shortest() const override { return 1; }
    void draw(const SequenceBits& bits, Ids tokens, Ids labels) const override {
        constexpr int32_t kPairs[10][2] = {{0, 1}, {0, 2}, {0, 3}, {0, 4}, {1, 2},
                                           {1, 3}, {1, 4}, {2, 3}, {2, 4}, {3, 4}};
        int32_t place = 0;  // of item 0: where the others lie never matters to it
        for (size_t t = 0; t < tokens.size(); ++t) {
            tokens[t] = bits.below(10, t);
            const auto [a, b] = kPairs[tokens[t]];
            place = place == a ? b : place == b ? a : place;
            labels[t] = 10 + place;
        }
    }
};

class Registers : public Task {
  public:
    int vocab_size() const override { return 26; }
    int shortest() const override { return 9; }  // every register is written
    void draw(const SequenceBits& bits, Ids tokens, Ids labels) const override {
        const size_t writes = tokens.size() - 1;
        int32_t value[8] = {};
        for (size_t t = 0; t < writes; ++t) tokens[t] = int32_t(t % 8);  // registers at first
        shuffle(tokens.first(writes), bits);
        for (size_t t = 0; t < writes; ++t) {
            const int32_t r = tokens[t];
            value[r] = int32_t(bits(t, 1) & 1);
            tokens[t] = 2 * r + value[r];
        }
        const int32_t r = bits.below(8, writes);
        tokens[writes] = 16 + r;
        labels[writes] = 24 + value[r];
    }
};

class Completion : public Task {
  public:
    int vocab_size() const override { return 17; }
    int shortest() const override { return kScratch + 1; }
    void draw(const SequenceBits& bits, Ids tokens, Ids labels) const override {
        // Which answer, and where it is no, which counter is one short.
        const bool complete = (bits(0, 1) & 1) != 0;
        const int32_t lacking = complete ? -1 : bits.below(3, 0, 2);
        int32_t missing[3];  // updates to each goal
        size_t end = kGoals;
        for (int32_t c = 0; c < 3; ++c) {
            missing[c] = 1 + bits.below(3, size_t(c));
            tokens[size_t(c)] = 3 * c + missing[c] - 1;
            for (int32_t i = c == lacking; i < missing[c]; ++i) tokens[end++] = c;
        }
        for (; end < kScratch; ++end)  // the updates beyond the goals
            tokens[end] =
                complete ? bits.below(3, end, 1) : (lacking + 1 + int32_t(bits(end, 1) & 1)) % 3;
        shuffle(tokens.subspan(kGoals, kScratch - kGoals), bits, kGoals);
        int32_t answer = 15;
        for (size_t t = kGoals; t < kScratch; ++t) {
            --missing[tokens[t]];
            if (missing[0] <= 0 && missing[1] <= 0 && missing[2] <= 0) answer = 16;
            tokens[t] += 9;
            labels[t] = answer;
        }
        for (size_t t = kScratch; t + 1 < tokens.size(); ++t) tokens[t] = 12 + int32_t(bits(t) & 1);
        tokens.back() = 14;
        labels.back() = answer;
    }

  private:
    static constexpr size_t kGoals = 3, kScratch = kGoals + 9;  // where each stretch ends
};

class Memory : public Task {
  public:
    int vocab_size() const override { return 7; }
    int shortest() const override { return 2; }
    void draw(const SequenceBits& bits, Ids tokens, Ids labels) const override {
        tokens[0] = int32_t(bits(0) & 1);
        for (size_t t = 1; t + 1 < tokens.size(); ++t) tokens[t] = 2 + int32_t(bits(t) & 1);
        tokens.back() = 4;
        labels.back() = 5 + tokens[0];
    }
};

class PointerChase : public Task {
  public:
    int vocab_size() const override { return 81; }
    int shortest() const override { return 9; }
    void draw(const SequenceBits& bits, Ids tokens, Ids labels) const override {
        int32_t f[8];
        std::iota(f, f + 8, 0);
        shuffle(f, bits);
        for (int32_t a = 0; a < 8; ++a) tokens[size_t(a)] = 8 * a + f[a];
        shuffle(tokens.first(8), bits, 0, 1);
        int32_t node = bits.below(8, 8);
        for (size_t t = 8; t < tokens.size(); ++t) {
            tokens[t] = t == 8 ? 64 + node : 72;
            node = f[node];
            labels[t] = 73 + node;
        }
    }
};

const Parity kParity;
const ModSum kModSum;
const SwapS5 kSwapS5;
const Registers kRegisters;
const Completion kCompletion;
const Memory kMemory;
const PointerChase kPointerChase;

struct Known {
    const char* name;
    const Task* task;
};
constexpr Known kTasks[] = {{"parity", &kParity},
                            {"mod-sum", &kModSum},
                            {"swap-s5", &kSwapS5},
                            {"registers", &kRegisters},
                            {"completion", &kCompletion},
                            {"memory", &kMemory},
                            {"pointer-chase", &kPointerChase}};

// Evaluation sequences have this bit set in their Philox counter, training sequences never.
constexpr uint64_t kEvaluation = uint64_t(1) << 63;

class TaskSource : public Source {
  public:
    TaskSource(const Task& task, std::vector<int> lengths, uint64_t seed, TaskStream stream)
        : task_(task),
          lengths_(std::move(lengths)),
          key_(kernels::philox_key(seed, kernels::Draw::task)),
          length_key_(kernels::philox_key(seed, kernels::Draw::task_length)),
          flag_(stream == TaskStream::evaluation ? kEvaluation : 0) {}

    Sequences next(int64_t token_budget) override {
        if (const int length = next_length(); token_budget < length)
            throw Error(ErrorKind::usage, "a sequence of " + std::to_string(length) +
                                              " tokens does not fit into " +
                                              std::to_string(token_budget) +
                                              " tokens per step; raise the tokens per step or "
                                              "shorten the task's length");
        Sequences out;
        size_t rows = 0;
        for (int64_t left = token_budget; left >= next_length(); left -= out.lengths.back()) {
            const size_t length = size_t(next_length());
            const int64_t index = position_.index++;
            out.tokens.resize(rows + length);
            out.targets.resize(rows + length, -1);
            task_.draw(SequenceBits(key_, uint64_t(index) | flag_),
                       Ids(out.tokens).subspan(rows, length),
                       Ids(out.targets).subspan(rows, length));
            out.lengths.push_back(int32_t(length));
            out.indices.push_back(index);
            rows += length;
        }
        return out;
    }
    Position position() const override { return position_; }
    void seek(Position position) override {
        if (position.epoch != 0 || position.index < 0)
            throw Error(ErrorKind::bad_file,
                        "data position (epoch " + std::to_string(position.epoch) + ", index " +
                            std::to_string(position.index) +
                            ") does not belong to a generated task; expected epoch 0, index >= 0");
        position_ = position;
    }
    int vocab_size() const override { return task_.vocab_size(); }

  private:
    int next_length() const {
        if (lengths_.size() == 1) return lengths_[0];
        const SequenceBits bits(length_key_, uint64_t(position_.index) | flag_);
        return lengths_[size_t(bits.below(uint32_t(lengths_.size()), 0))];
    }

    const Task& task_;
    std::vector<int> lengths_;
    kernels::PhiloxKey key_, length_key_;
    uint64_t flag_;
    Position position_;
};

}  // namespace

std::vector<std::string> task_names() {
    std::vector<std::string> names;
    for (const Known& known : kTasks) names.push_back(known.name);
    return names;
}

const Task& find_task(const std::string& name) {
    for (const Known& known : kTasks)
        if (name == known.name) return *known.task;
    std::string list;
    for (const std::string& known : task_names()) list += (list.empty() ? "" : ", ") + known;
    throw Error(ErrorKind::usage,
                "task " + tensor::in_quotes(name) + " is unknown; known tasks: " + list);
}

void check_lengths(const std::string& name, const std::vector<int>& lengths) {
    const int shortest = find_task(name).shortest();
    if (lengths.empty()) throw Error(ErrorKind::usage, "the task " + name + " is given no length");
    for (int length : lengths)
        if (length < shortest)
            throw Error(ErrorKind::usage, "sequences of the task " + name + " have at least " +
                                              std::to_string(shortest) +
                                              " tokens, but a length is " + std::to_string(length));
}

std::unique_ptr<Source> make_task(const std::string& name, const std::vector<int>& lengths,
                                  uint64_t seed, TaskStream stream) {
    check_lengths(name, lengths);
    return std::make_unique<TaskSource>(find_task(name), lengths, seed, stream);
}

}  // namespace fbt::model::data
