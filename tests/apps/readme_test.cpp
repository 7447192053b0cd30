// README's commands, run in README's order. Trainings are cut to 6 steps; ./dev quickstart and
// ./dev test are run by continuous integration.
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "tests/data/files.h"
#include "tests/dist/launch.h"

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
        const bool mpi = line.starts_with("    mpirun ");
        if (!line.starts_with("    build/fbt ") && !line.starts_with("    printf ") && !mpi)
            continue;
        ++commands;
        if (line.find("build/fbt train ") != line.npos) line += " --steps 6";
        if (mpi) {
            if (!no_mpirun().empty()) continue;
            // As root, on any number of cores; leaks are seen elsewhere.
            line =
                "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 "
                "OMPI_MCA_rmaps_base_oversubscribe=1 "
                "ASAN_OPTIONS=\"$ASAN_OPTIONS:detect_leaks=0\"; " +
                line;
        }
        const std::string command = "cd '" + place + "' && (" + line + ") >out.txt 2>&1";
        EXPECT_EQ(std::system(command.c_str()), 0) << line << "\n" << get(place + "/out.txt");
    }
    EXPECT_GE(commands, 8);
}

}  // namespace
}  // namespace fbt::tests
