// The program `fbt`: chooses the subcommand and turns every failure into one line and an exit code.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <sstream>
#include <utility>
#include <vector>

#include "apps/command.h"
#include "apps/embedded.h"
#include "apps/job.h"
#include "tensor/file.h"

namespace fbt::apps {
namespace {

int fail(int code, const std::string& what) {
    std::fprintf(stderr, "fbt: %s\n", what.c_str());
    return code;
}

// The other ranks of a job were given the same arguments; one answers.
bool answers() {
    try {
        return Launch::from_environment().rank == 0;
    } catch (const tensor::Error&) {
        return true;
    }
}

int run(int argc, char** argv) {
    CLI::App app("The full-bandwidth transformer: train, decode in three modes, replay.", "fbt");
    app.set_version_flag("--version", "fbt " + build_facts().version);
    app.require_subcommand(1);
    std::vector<std::pair<CLI::App*, Run>> commands;
    for (auto add : {add_train, add_generate, add_replay, add_eval, add_data, add_audit,
                     add_experiment, add_info}) {
        Run todo = add(app);
        commands.emplace_back(app.get_subcommands({}).back(), std::move(todo));
    }
    if (argc > 1 && argv[1][0] != '-' &&
        std::none_of(commands.begin(), commands.end(),
                     [&](const auto& c) { return c.first->get_name() == argv[1]; })) {
        std::string names;
        for (const auto& [command, todo] : commands)
            names += (names.empty() ? "" : ", ") + command->get_name();
        return fail(kUsage,
                    "unknown subcommand " + tensor::in_quotes(argv[1]) + "; there are " + names);
    }
    try {
        app.parse(argc, argv);
    } catch (const CLI::Success& request) {  // --help, --version
        std::ostringstream text;
        const int code = app.exit(request, text, text);
        Console(false, !answers()).print(text.str());
        return code;
    } catch (const CLI::ParseError& error) {
        std::string what = error.what();
        while (!what.empty() && what.back() == '\n') what.pop_back();
        if (!answers()) return kUsage;
        return fail(kUsage, what + " (fbt --help, or fbt SUBCOMMAND --help)");
    }
    for (auto& [command, todo] : commands)
        if (command->parsed()) return todo();
    return kUsage;
}

// By default OpenMP's threads spin for milliseconds at the end of every parallel loop. Where
// another process wants one of the cores, a training step then takes twenty times as long. Spinning
// for a few microseconds keeps the speed of an idle machine and costs little on a busy one. The
// runtimes (gcc's, clang's) read this before main, so set it and start again.
void spin_briefly(char** argv) {
    for (const char* chosen : {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"})
        if (std::getenv(chosen)) return;
    setenv("GOMP_SPINCOUNT", "2000", 1);
    setenv("KMP_BLOCKTIME", "0", 1);
    execv("/proc/self/exe", argv);  // comes back only where that cannot be done
}

}  // namespace
}  // namespace fbt::apps

int main(int argc, char** argv) {
    using namespace fbt::apps;
    spin_briefly(argv);
    // Writing to a reader that left must be an error that the writer sees, not the end.
    signal(SIGPIPE, SIG_IGN);
    try {
        return run(argc, argv);
    } catch (const fbt::tensor::Error& error) {
        return fail(exit_code(error.kind()), error.what());
    } catch (const std::bad_alloc&) {
        return fail(kEnvironment, "out of memory");
    } catch (const std::exception& error) {
        return fail(kEnvironment, error.what());
    }
}
