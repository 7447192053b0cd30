// Starts jobs of many ranks, on this machine or across two that are network namespaces.
#pragma once
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "dist/dist.h"
#include "tests/data/files.h"

namespace fbt::tests {

using Arguments = std::vector<std::string>;

// A command, running. What it and its children print goes to one file.
class Launch {
  public:
    // leaks: whether AddressSanitizer looks for them, where it is built in.
    explicit Launch(const Arguments& command, bool leaks = true) {
        std::vector<char*> argv;
        for (const std::string& argument : command)
            argv.push_back(const_cast<char*>(argument.data()));
        argv.push_back(nullptr);
        const std::string out = folder_ / "out";
        process_ = fork();
        if (process_ != 0) return;
        setpgid(0, 0);
        // Open MPI's libraries keep no frame pointers, without which AddressSanitizer's quick walk
        // of the stack does not get to the names in tests/lsan.supp; its thorough one takes long.
        const char* options = std::getenv("ASAN_OPTIONS");
        setenv("ASAN_OPTIONS",
               ((options ? options : "") +
                std::string(leaks ? ":fast_unwind_on_malloc=0" : ":detect_leaks=0"))
                   .c_str(),
               1);
        dup2(open("/dev/null", O_RDONLY), 0);
        dup2(open(out.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND, 0600), 1);
        dup2(1, 2);
        execvp(argv[0], argv.data());
        _exit(127);
    }
    Launch(const Launch&) = delete;
    ~Launch() {  // mpirun is asked first: its ranks are no children of ours
        signal(SIGTERM);
        const double end = seconds() + 5;
        while (running() && seconds() < end)
            std::this_thread::sleep_for(std::chrono::milliseconds(2));
        if (running()) kill(-process_, SIGKILL);
        wait();
    }

    bool running() {
        int status = 0;
        if (code_ < 0 && waitpid(process_, &status, WNOHANG) == process_)
            code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
        return code_ < 0;
    }
    int wait() {
        while (running()) std::this_thread::sleep_for(std::chrono::milliseconds(2));
        return code_;
    }
    void signal(int number) {
        if (running()) kill(process_, number);
    }
    std::string out() const { return get(folder_ / "out"); }
    double seconds() const {  // since its start
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    }

  private:
    TemporaryFolder folder_;
    const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
    int process_ = -1, code_ = -1;
};

struct Launched {
    int code;
    std::string out;
    double seconds;  // from its start to its end
};

// Waits until `seconds` from now at most; then the code is -1, and the launch goes on.
inline Launched finished(Launch& launch, double seconds) {
    const double end = launch.seconds() + seconds;
    while (launch.running() && launch.seconds() < end)
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
    const int code = launch.running() ? -1 : launch.wait();
    return {code, launch.out(), launch.seconds()};
}

// Empty where jobs can be started; else why not.
inline std::string no_mpirun() {
    if (dist::mpi_version().empty()) return "this build has no MPI";
    if (std::system("command -v mpirun >/dev/null 2>&1") == 0) return {};
    return "mpirun is not installed";
}
#define NEEDS_MPIRUN() \
    if (const std::string why = no_mpirun(); !why.empty()) GTEST_SKIP() << why

// mpirun's command line: also as root, also with more ranks than cores, and free to use all cores.
inline Arguments mpirun(int ranks, const Arguments& options, const Arguments& command) {
    Arguments out = {"mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none",
                     "-n",     std::to_string(ranks)};
    out.insert(out.end(), options.begin(), options.end());
    out.insert(out.end(), command.begin(), command.end());
    return out;
}

// Two machines and a cable: namespaces a and b, each with its own network and host name, 10.77.0.1
// and 10.77.0.2, joined by a pair of virtual interfaces.
class TwoMachines {
  public:
    TwoMachines()
        : a_("fbt-a-" + std::to_string(getpid())), b_("fbt-b-" + std::to_string(getpid())) {
        if (geteuid() != 0) {
            trouble_ = "network namespaces need root";
            return;
        }
        put(script(),
            "#!/bin/sh\n# Starts Open MPI's daemon on the other machine.\n"
            "shift\nexec ip netns exec " +
                b_ + " unshare --uts sh -c \"hostname fbt-b; $*\"\n");
        std::filesystem::permissions(script(), std::filesystem::perms::owner_all);
        const std::string on_a = "ip -n " + a_, on_b = "ip -n " + b_;
        for (const std::string& line :
             {"ip netns add " + a_, "ip netns add " + b_, on_a + " link set lo up",
              on_b + " link set lo up",
              on_a + " link add cable type veth peer name cable netns " + b_,
              on_a + " address add 10.77.0.1/24 dev cable",
              on_b + " address add 10.77.0.2/24 dev cable", on_a + " link set cable up",
              on_b + " link set cable up"})
            if (std::system((line + " 2>" + folder_ / "err").c_str()) != 0) {
                trouble_ = "cannot make network namespaces: " + line + ": " + get(folder_ / "err");
                return;
            }
    }
    TwoMachines(const TwoMachines&) = delete;
    ~TwoMachines() {
        for (const std::string& name : {a_, b_}) {
            run("ip netns pids " + name + " 2>/dev/null | xargs -r kill -9");
            run("ip netns del " + name + " 2>/dev/null");
        }
    }

    const std::string& trouble() const { return trouble_; }  // why there are none
    void cut() { run("ip -n " + a_ + " link set cable down"); }
    // The command, on the first machine; mpirun there finds the other one.
    Arguments on_a(const Arguments& command) const {
        Arguments out = {"ip", "netns",   "exec",
                         a_,   "unshare", "--uts",
                         "sh", "-c",      "hostname fbt-a; exec \"$@\"",
                         "sh"};
        out.insert(out.end(), command.begin(), command.end());
        return out;
    }
    // How many processes live on both.
    int processes() const {
        run("(ip netns pids " + a_ + "; ip netns pids " + b_ + ") | wc -l >" + folder_ / "pids");
        return std::stoi(get(folder_ / "pids"));
    }
    // mpirun's options for half the ranks on each, over the cable alone.
    Arguments options(int ranks) const {
        const std::string half = ":" + std::to_string(ranks / 2);
        return {"--host",
                "10.77.0.1" + half + ",10.77.0.2" + half,
                "--mca",
                "plm_rsh_agent",
                script(),
                "--mca",
                "btl",
                "tcp,self",
                "--mca",
                "btl_tcp_if_include",
                "10.77.0.0/24",
                "--mca",
                "oob_tcp_if_include",
                "10.77.0.0/24"};
    }

  private:
    std::string script() const { return folder_ / "start"; }
    static void run(const std::string& line) {
        [[maybe_unused]] const int code = std::system(line.c_str());
    }

    TemporaryFolder folder_;
    std::string a_, b_, trouble_;
};

}  // namespace fbt::tests
