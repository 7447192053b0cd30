#include "model/data/tasks.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "kernels/philox.h"
#include "tensor/error.h"

namespace fbt::model::data {
namespace {

using tensor::Error;
using tensor::ErrorKind;

// label[t] = 2 + (input[0] + ... + input[t]) mod 2
class Parity : public Task {
  public:
    int vocab_size() const override { return 4; }
    void step(int32_t position, uint32_t bits, int32_t& input, int32_t& label) override {
        if (position == 0) parity_ = 0;
        input = int32_t(bits & 1);
        parity_ ^= input;
        label = 2 + parity_;
    }

  private:
    int32_t parity_ = 0;
};

struct Known {
    const char* name;
    std::unique_ptr<Task> (*make)();
};
constexpr Known kTasks[] = {
    {"parity", []() -> std::unique_ptr<Task> { return std::make_unique<Parity>(); }}};

// Evaluation sequences have this bit set in their Philox counter, training sequences never.
constexpr uint64_t kEvaluation = uint64_t(1) << 63;

class TaskSource : public Source {
  public:
    TaskSource(std::unique_ptr<Task> task, int length, uint64_t seed, TaskStream stream)
        : task_(std::move(task)),
          key_(kernels::philox_key(seed, kernels::Draw::task)),
          flag_(stream == TaskStream::evaluation ? kEvaluation : 0),
          length_(length) {}

    Sequences next(int64_t token_budget) override {
        if (token_budget < length_)
            throw Error(ErrorKind::usage, "a sequence of " + std::to_string(length_) +
                                              " tokens does not fit into " +
                                              std::to_string(token_budget) +
                                              " tokens per step; raise the tokens per step or "
                                              "shorten the task's length");
        Sequences out;
        for (int64_t left = token_budget; left >= length_; left -= length_) {
            const int64_t index = position_.index++;
            for (int32_t t = 0; t < length_; ++t) {
                const uint32_t bits =
                    kernels::philox_bits(key_, uint64_t(index) | flag_, uint32_t(t));
                int32_t input = 0, label = 0;
                task_->step(t, bits, input, label);
                out.tokens.push_back(input);
                out.targets.push_back(label);
            }
            out.lengths.push_back(length_);
            out.indices.push_back(index);
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
    int vocab_size() const override { return task_->vocab_size(); }

  private:
    std::unique_ptr<Task> task_;
    kernels::PhiloxKey key_;
    uint64_t flag_;
    int length_;
    Position position_;
};

}  // namespace

std::vector<std::string> task_names() {
    std::vector<std::string> names;
    for (const Known& known : kTasks) names.push_back(known.name);
    return names;
}

std::unique_ptr<Source> make_task(const std::string& name, int length, uint64_t seed,
                                  TaskStream stream) {
    if (length < 1)
        throw Error(ErrorKind::usage,
                    "the task's length is " + std::to_string(length) + "; expected at least 1");
    for (const Known& known : kTasks)
        if (name == known.name)
            return std::make_unique<TaskSource>(known.make(), length, seed, stream);
    std::string list;
    for (const std::string& known : task_names()) list += (list.empty() ? "" : ", ") + known;
    throw Error(ErrorKind::usage, "task \"" + name + "\" is unknown; known tasks: " + list);
}

}  // namespace fbt::model::data
