// What every subcommand shares: its entry point, exit codes, and the flags that all of them take.
#pragma once
#include <CLI/CLI.hpp>
#include <functional>
#include <string>

#include "apps/console.h"
#include "apps/settings.h"
#include "tensor/context.h"
#include "tensor/dtype.h"

namespace fbt::apps {

enum ExitCode {
    kDone = 0,
    kCheckFailed = 1,
    kUsage = 2,
    kDiverged = 3,
    kBadFile = 4,
    kEnvironment = 5,  // disk, memory or device; a bug of fbt's own too
    kStopped = 75,     // by a signal, with everything saved
};

int exit_code(tensor::ErrorKind kind);

// Adds the subcommand with its flags to the parser, and returns what it does once they are parsed.
using Run = std::function<int()>;
Run add_train(CLI::App& app);
Run add_generate(CLI::App& app);
Run add_replay(CLI::App& app);
Run add_eval(CLI::App& app);
Run add_data(CLI::App& app);
Run add_audit(CLI::App& app);
Run add_info(CLI::App& app);
Run add_experiment(CLI::App& app);

// Where and in which arithmetic a subcommand computes, and whom it talks to.
struct Machine {
    std::string device = "cpu", dtype = "f32";
    int threads = 0;  // 0: as many as the machine has
    bool json = false;

    // The kept ones belong to the settings' current section; --json never is.
    void declare(Settings& settings);
    // Errors  usage when the device has no such arithmetic.
    tensor::DType checked_dtype() const;
    tensor::Context context() const { return tensor::Context(device, threads); }
};

// Says before the work what would otherwise be found out after it: that no file can be written
// there. Errors  usage, naming the flag, when `path` is something other than a regular file;
// environment when its folder takes none.
void check_output(const std::string& flag, const std::string& path);

}  // namespace fbt::apps
