#include "tests/apps/program.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>
#include <thread>

namespace fbt::tests {

Arguments operator+(Arguments a, const Arguments& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}

Program::Program(const Arguments& arguments) {
    std::vector<char*> argv;
    static std::string binary = FBT_BINARY;
    argv.push_back(binary.data());
    for (const std::string& argument : arguments)
        argv.push_back(const_cast<char*>(argument.data()));
    argv.push_back(nullptr);
    const std::string out = folder_ / "out", err = folder_ / "err";
    process_ = fork();
    if (process_ != 0) return;
    dup2(open("/dev/null", O_RDONLY), 0);
    dup2(open(out.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), 1);
    dup2(open(err.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), 2);
    execv(argv[0], argv.data());
    _exit(127);
}

Program::~Program() {
    if (code_ < 0) {
        signal(SIGKILL);
        wait();
    }
}

void Program::signal(int number) {
    if (code_ < 0) kill(process_, number);
}

bool Program::running() {
    int status = 0;
    if (code_ < 0 && waitpid(process_, &status, WNOHANG) == process_)
        code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    return code_ < 0;
}

int Program::wait() {
    while (running()) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    return code_;
}

Result fbt(const Arguments& arguments) {
    Program program(arguments);
    const int code = program.wait();
    return {code, program.out(), program.err()};
}

testing::AssertionResult failed(const Result& result, int code,
                                std::initializer_list<const char*> words) {
    const std::string& err = result.err;
    if (result.code != code)
        return testing::AssertionFailure() << "exit code " << result.code << ": " << err;
    if (!err.starts_with("fbt: ") || err.find('\n') != err.size() - 1)
        return testing::AssertionFailure() << "not one line `fbt: ...`: " << err;
    for (const char* word : words)
        if (err.find(word) == std::string::npos)
            return testing::AssertionFailure() << "no \"" << word << "\" in: " << err;
    return testing::AssertionSuccess() << err;
}

Workplace::Workplace() {
    std::string text;
    for (int i = 0; i < 900; ++i)
        text += std::to_string(i * 7919 % 1000) + (i % 7 == 0 ? " n\xc3\xa4her.\n" : " and ");
    put(folder_ / "text.txt", text);
    const Result made = fbt({"data", "--input", folder_ / "text.txt", "--tokenizer", "bytes",
                             "--out", folder_ / "data"});
    if (made.code != 0) throw std::runtime_error(made.err);
}

// One thread: tests may share the processor, and the bits do not depend on it.
Arguments Workplace::train(const std::string& run, const Arguments& more) const {
    const Arguments tiny = {"train",
                            "--data",
                            folder_ / "data",
                            "--out",
                            folder_ / run,
                            "--dim",
                            "16",
                            "--layers",
                            "2",
                            "--heads",
                            "2",
                            "--kv-heads",
                            "1",
                            "--head-dim",
                            "6",
                            "--ffn-dim",
                            "20",
                            "--context",
                            "23",
                            "--window",
                            "9",
                            "--seed",
                            "5",
                            "--threads",
                            "1",
                            "--schedule",
                            "1:1@1+2@1+3@1",
                            "--tokens-per-step",
                            "97",
                            "--eval-sequences",
                            "5",
                            "--warmup",
                            "3",
                            "--learning-rate",
                            "0.01"};
    return tiny + more;
}

void Workplace::train_20(const std::string& run) const {
    const Result result = fbt(train(run, {"--steps", "20"}));
    ASSERT_EQ(result.code, 0) << result.err;
}

SmallDisk::SmallDisk(const std::string& path) : path_(path) {
    std::filesystem::create_directories(path);
    mounted_ = mount("tmpfs", path.c_str(), "tmpfs", 0, "size=600k") == 0;
    reason_ = std::strerror(errno);
}

SmallDisk::~SmallDisk() {
    if (mounted_) umount(path_.c_str());
}

bool SmallDisk::enlarge() {
    return mount("tmpfs", path_.c_str(), "tmpfs", MS_REMOUNT, "size=9m") == 0;
}

std::vector<std::string> metrics_of(const std::string& run) {
    std::vector<std::string> rows;
    std::istringstream in(get(run + "/metrics.jsonl"));
    for (std::string line; std::getline(in, line);) {
        nlohmann::json row = nlohmann::json::parse(line);
        row.erase("ms");
        rows.push_back(row.dump());
    }
    return rows;
}

testing::AssertionResult same_run(const std::string& a, const std::string& b, int step) {
    std::string digits = std::to_string(step);
    digits.insert(0, 8 - digits.size(), '0');
    for (const char* file : {"model.safetensors", "optimizer.safetensors", "state.json"}) {
        const std::string name = "/step_" + digits + "/" + file;
        if (get(a + name).empty()) return testing::AssertionFailure() << a << name << " is missing";
        if (get(a + name) != get(b + name))
            return testing::AssertionFailure() << name << " differs";
    }
    const auto x = metrics_of(a), y = metrics_of(b);
    if (x.size() != y.size())
        return testing::AssertionFailure() << x.size() << " rows against " << y.size();
    for (size_t i = 0; i < x.size(); ++i)
        if (x[i] != y[i]) return testing::AssertionFailure() << x[i] << "\nagainst\n" << y[i];
    return testing::AssertionSuccess();
}

}  // namespace fbt::tests
