// What the tests of files and programs share: a folder that goes away, patience, and the error a
// call throws.
#pragma once
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <sstream>
#include <string>
#include <thread>

#include "tensor/error.h"

namespace fbt::tests {

class TemporaryFolder {
  public:
    TemporaryFolder() {
        std::string name = (std::filesystem::temp_directory_path() / "fbt-test-XXXXXX").string();
        if (!::mkdtemp(name.data())) throw std::runtime_error("no temporary folder");
        path_ = name;
    }
    TemporaryFolder(const TemporaryFolder&) = delete;
    TemporaryFolder& operator=(const TemporaryFolder&) = delete;
    ~TemporaryFolder() { std::filesystem::remove_all(path_); }
    std::string path() const { return path_; }
    std::string operator/(const std::string& name) const { return path_ + "/" + name; }

  private:
    std::string path_;
};

inline void put(const std::string& path, const std::string& bytes) {
    std::ofstream(path, std::ios::binary) << bytes;
}
inline std::string get(const std::string& path) {
    std::ostringstream out;
    out << std::ifstream(path, std::ios::binary).rdbuf();
    return out.str();
}

// Waits until the condition holds, for a minute at most.
inline bool eventually(const std::function<bool()>& condition) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    while (!condition()) {
        if (std::chrono::steady_clock::now() > end) return false;
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    return true;
}

// Passes when call() throws an Error of this kind whose single printable line has all the words.
template <class Call>
testing::AssertionResult throws(tensor::ErrorKind kind, std::initializer_list<const char*> words,
                                Call call) {
    try {
        call();
    } catch (const tensor::Error& e) {
        const std::string what = e.what();
        if (e.kind() != kind)
            return testing::AssertionFailure() << "kind " << int(e.kind()) << ": " << what;
        for (const char* word : words)
            if (what.find(word) == std::string::npos)
                return testing::AssertionFailure() << "no \"" << word << "\" in: " << what;
        for (const char c : what)
            if (static_cast<unsigned char>(c) < 0x20)
                return testing::AssertionFailure() << "more than a line: " << what;
        return testing::AssertionSuccess() << what;
    }
    return testing::AssertionFailure() << "nothing was thrown";
}

}  // namespace fbt::tests
