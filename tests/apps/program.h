// Runs the real program on tiny models, as its users do.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "tests/data/files.h"

namespace fbt::tests {

using Arguments = std::vector<std::string>;
Arguments operator+(Arguments a, const Arguments& b);

// `fbt ARGUMENT...`, running.
class Program {
  public:
    explicit Program(const Arguments& arguments);
    Program(const Program&) = delete;
    ~Program();  // kills it if it still runs

    void signal(int number);
    bool running();
    // The exit code; 128 + its number after a fatal signal.
    int wait();

    // What it printed; complete after wait().
    std::string out() const { return get(folder_ / "out"); }
    std::string err() const { return get(folder_ / "err"); }

  private:
    TemporaryFolder folder_;
    int process_ = -1, code_ = -1;
};

struct Result {
    int code;
    std::string out, err;
};
Result fbt(const Arguments& arguments);

// Passes when the program failed with this code and one line on stderr that has all the words.
testing::AssertionResult failed(const Result& result, int code,
                                std::initializer_list<const char*> words);

// A folder with tiny data `data` in it, and what trains a tiny model on them into `run`.
class Workplace {
  public:
    Workplace();
    std::string operator/(const std::string& name) const { return folder_ / name; }
    std::string path() const { return folder_.path(); }
    Arguments train(const std::string& run, const Arguments& more = {}) const;
    // Trains 20 steps; the test fails when that fails.
    void train_20(const std::string& run) const;

  private:
    TemporaryFolder folder_;
};

// A folder in memory with little room, where the system lets us mount one.
class SmallDisk {
  public:
    explicit SmallDisk(const std::string& path);
    SmallDisk(const SmallDisk&) = delete;
    ~SmallDisk();
    bool mounted() const { return mounted_; }
    const std::string& reason() const { return reason_; }
    bool enlarge();

  private:
    std::string path_, reason_;
    bool mounted_;
};

// The rows of RUN/metrics.jsonl without "ms", which no two runs share.
std::vector<std::string> metrics_of(const std::string& run);

// Passes when both runs ended at this step with the same parameters, moments, position and metrics.
testing::AssertionResult same_run(const std::string& a, const std::string& b, int step);

}  // namespace fbt::tests
