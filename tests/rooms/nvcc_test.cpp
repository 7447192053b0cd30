// What nvcc said of the kernels when they were compiled: no kernel spills registers to memory, on
// any of the architectures. One exception: attention in heads wider than 192, which no preset has.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <regex>
#include <set>
#include <string>

namespace fbt::tests {
namespace {

namespace fs = std::filesystem;

struct Compiled {
    std::string kernel, architecture;
    int spill_stores = -1, spill_loads = -1;  // bytes
};

// ptxas prints, for every kernel and architecture:
//   ptxas info    : Compiling entry function 'NAME' for 'sm_80'
//   ...
//       0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
std::vector<Compiled> read_log(std::istream& in) {
    static const std::regex entry("Compiling entry function '([^']+)' for '(sm_\\w+)'"),
        spills("(\\d+) bytes spill stores, (\\d+) bytes spill loads");
    std::vector<Compiled> out;
    std::smatch match;
    for (std::string line; std::getline(in, line);) {
        if (std::regex_search(line, match, entry)) out.push_back({match[1], match[2]});
        if (std::regex_search(line, match, spills) && !out.empty()) {
            out.back().spill_stores = std::stoi(match[1]);
            out.back().spill_loads = std::stoi(match[2]);
        }
    }
    return out;
}

// Instantiated for a padded head width of 256.
bool is_widest_attention(const std::string& kernel) {
    static const std::regex name("(forward_tile|dq_tile)ILi256E");
    return std::regex_search(kernel, name);
}

TEST(Nvcc, NoKernelSpills) {
    const fs::path folder = FBT_BINARY_DIR "/kernels";
    std::set<std::string> architectures;
    int kernels = 0, files = 0;
    if (fs::exists(folder))
        for (const auto& file : fs::directory_iterator(folder)) {
            if (file.path().extension() != ".ptxas") continue;
            ++files;
            std::ifstream in(file.path());
            for (const Compiled& c : read_log(in)) {
                ++kernels;
                architectures.insert(c.architecture);
                EXPECT_TRUE((c.spill_stores == 0 && c.spill_loads == 0) ||
                            is_widest_attention(c.kernel))
                    << c.kernel << " for " << c.architecture << ": " << c.spill_stores
                    << " bytes of spill stores, " << c.spill_loads << " of loads";
            }
        }
    if (files == 0) GTEST_SKIP() << "nvcc did not compile the kernels in this build";
    EXPECT_GE(kernels, files);
    EXPECT_EQ(architectures, (std::set<std::string>{"sm_80", "sm_90"}));
}

TEST(Nvcc, ASpillIsSeen) {
    std::istringstream log(
        "ptxas info    : Compiling entry function '_Z1av' for 'sm_80'\n"
        "ptxas info    : Function properties for _Z1av\n"
        "    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads\n"
        "ptxas info    : Compiling entry function '_Z1bv' for 'sm_90a'\n"
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n");
    const std::vector<Compiled> c = read_log(log);
    ASSERT_EQ(c.size(), 2u);
    EXPECT_EQ(c[0].spill_stores, 4);
    EXPECT_EQ(c[0].spill_loads, 12);
    EXPECT_EQ(c[1].architecture, "sm_90a");
    EXPECT_EQ(c[1].spill_stores, 0);
}

}  // namespace
}  // namespace fbt::tests
