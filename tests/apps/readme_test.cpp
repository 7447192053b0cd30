// README's commands, run in README's order. Trainings are cut to 6 steps; ./dev quickstart and
// ./dev test are run by continuous integration.
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "tests/data/files.h"

namespace fbt::tests {
namespace {

TEST(Readme, EveryCommandWorks) {
    const TemporaryFolder folder;
    const std::string place = folder.path();
    std::filesystem::create_directory(place + "/build");
    std::filesystem::create_symlink(FBT_BINARY, place + "/build/fbt");
    std::filesystem::create_symlink(FBT_SOURCE_DIR "/tests", place + "/tests");
    for (const char* name : {"/notes.txt", "/more.txt"}) {
        std::ofstream text(place + name);
        for (int i = 0; i < 3000; ++i) text << "Dear reader, this is line " << i << ".\n";
    }
    std::ifstream readme(FBT_SOURCE_DIR "/README.md");
    int commands = 0;
    for (std::string line; std::getline(readme, line);) {
        if (!line.starts_with("    build/fbt ") && !line.starts_with("    printf ")) continue;
        ++commands;
        if (line.starts_with("    build/fbt train ")) line += " --steps 6";
        const std::string command = "cd '" + place + "' && (" + line + ") >out.txt 2>&1";
        EXPECT_EQ(std::system(command.c_str()), 0) << line << "\n" << get(place + "/out.txt");
    }
    EXPECT_GE(commands, 8);
}

}  // namespace
}  // namespace fbt::tests
