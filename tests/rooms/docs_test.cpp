// docs/algorithm.md points at real code: every row's file exists and holds the name beside it.
#include <gtest/gtest.h>

#include <fstream>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

namespace fbt::tests {
namespace {

std::string read(const std::string& path) {
    std::ifstream in(path);
    std::ostringstream text;
    text << in.rdbuf();
    return text.str();
}

// Every `file` `name` pair whose name the file does not hold as a word, or whose file is not there.
std::vector<std::string> broken(const std::string& document, int& pairs) {
    static const std::regex pair("`([a-z_/]+\\.[a-z]+)` `([A-Za-z_]+)`");
    std::vector<std::string> out;
    for (std::sregex_iterator it(document.begin(), document.end(), pair), end; it != end; ++it) {
        ++pairs;
        static const std::regex comment("//[^\n]*");
        const std::string text =
            std::regex_replace(read(std::string(FBT_SOURCE_DIR "/") + (*it)[1].str()), comment, "");
        if (!std::regex_search(text, std::regex("\\b" + (*it)[2].str() + "\\b")))
            out.push_back(it->str());
    }
    return out;
}

TEST(Docs, AlgorithmNamesCodeThatExists) {
    int pairs = 0;
    const std::string document = read(FBT_SOURCE_DIR "/docs/algorithm.md");
    for (const std::string& pair : broken(document, pairs)) ADD_FAILURE() << pair;
    // Every row of every table names its code: header and rule lines aside.
    int rows = 0;
    std::istringstream lines(document);
    for (std::string line; std::getline(lines, line);)
        rows += line.starts_with("| ") && !line.starts_with("| what ");
    EXPECT_EQ(pairs, rows);
    EXPECT_GT(pairs, 30);
}

TEST(Docs, TheCheckFindsWhatIsMissing) {
    int pairs = 0;
    EXPECT_EQ(broken("`nn/block.cpp` `no_such_name` `nn/none.cpp` `run`", pairs).size(), 2u);
    EXPECT_EQ(broken("`nn/block.cpp` `run`", pairs).size(), 0u);
    EXPECT_EQ(pairs, 3);
}

}  // namespace
}  // namespace fbt::tests
