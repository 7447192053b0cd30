// The rooms: which folder may include which, and what only some of them may do. See
// docs/architecture.md.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <regex>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace fbt::tests {
namespace {

namespace fs = std::filesystem;
using Lines = std::vector<std::string>;

// In order: a room may include itself and what stands before it. `dist` has its own rule.
constexpr std::array<std::string_view, 8> kRooms = {
    "kernels", "tensor", "autograd", "nn", "model/data", "model/core", "model/engine", "apps"};
// What may stand at the top beside files and folders whose names begin with a dot, and build*.
const std::set<std::string> kTop = {"CMakeLists.txt",
                                    "CMakePresets.json",
                                    "tensor",
                                    "autograd",
                                    "nn",
                                    "kernels",
                                    "model",
                                    "dist",
                                    "apps",
                                    "tests",
                                    "bench",
                                    "docs",
                                    "README.md",
                                    "LICENSE",
                                    "dev"};

// Libraries that belong to one room: how the header's name begins, and the room.
struct Library {
    std::string_view header, room;
};
constexpr std::array<Library, 6> kLibraries = {{{"mpi.h", "dist"},
                                                {"nccl.h", "dist"},
                                                {"dnnl", "kernels"},
                                                {"sentencepiece", "model/data"},
                                                {"linear.h", "model/core"},
                                                {"CLI/", "apps"}}};

// Names by which a program prints, exits or reads its environment: for apps/ only.
const std::set<std::string> kAppsOnly = {
    "cout",    "cerr",       "clog",   "printf",        "vprintf", "puts",
    "putchar", "stdout",     "stderr", "exit",          "_exit",   "_Exit",
    "abort",   "quick_exit", "getenv", "secure_getenv", "setenv",  "putenv"};

bool is_under(std::string_view path, std::string_view folder) {
    return path.starts_with(folder) && path.size() > folder.size() && path[folder.size()] == '/';
}

// "kernels", "model/core", "tests", ...; nothing for a path in none of them.
std::optional<std::string> room_of(std::string_view path) {
    for (std::string_view room : kRooms)
        if (is_under(path, room)) return std::string(room);
    for (std::string_view room : {"dist", "tests", "bench"})
        if (is_under(path, room)) return std::string(room);
    return std::nullopt;
}

bool may_include(const std::string& from, const std::string& to) {
    if (from == to || from == "tests" || from == "bench") return true;
    if (to == "tests" || to == "bench") return false;
    if (from == "dist") return to == "kernels" || to == "tensor";
    if (to == "dist") return from == "apps";
    return std::ranges::find(kRooms, to) < std::ranges::find(kRooms, from);
}

// Comments removed and the contents of literals emptied, line by line; the names of includes stay.
Lines code_lines(std::string_view text) {
    static const std::regex directive(R"(\s*#\s*include\s*)");
    Lines lines(1);
    const auto skip_to = [&](size_t end) {  // keeps line numbers right
        const size_t newlines = size_t(std::ranges::count(text.substr(0, end), '\n'));
        text.remove_prefix(end);
        lines.resize(lines.size() + newlines);
    };
    while (!text.empty()) {
        const char c = text[0];
        std::string& line = lines.back();
        const char last = line.empty() ? ' ' : line.back();
        if (c == '\n') {
            skip_to(1);
        } else if (text.starts_with("//")) {
            skip_to(std::min(text.find('\n'), text.size()));
        } else if (text.starts_with("/*")) {
            const size_t end = text.find("*/", 2);
            skip_to(end == text.npos ? text.size() : end + 2);
        } else if (c == '"' && last == 'R') {  // R"mark( ... )mark"
            const size_t open = text.find('(');
            std::string close = ")";
            close.append(text.substr(1, open - 1)).append("\"");
            const size_t end = text.find(close, open);
            line += "\"\"";
            skip_to(end == text.npos ? text.size() : end + close.size());
        } else if ((c == '"' && !std::regex_match(line, directive)) ||
                   (c == '\'' && !std::isalnum(static_cast<unsigned char>(last)))) {
            size_t end = 1;  // a quote after a digit or letter separates digits instead
            while (end < text.size() && text[end] != c && text[end] != '\n')
                end += text[end] == '\\' ? 2 : 1;
            line += {c, c};
            skip_to(std::min(end + 1, text.size()));
        } else if (c == '"') {  // an include: to the end of the line
            const size_t end = std::min(text.find('\n'), text.size());
            line += text.substr(0, end);
            text.remove_prefix(end);
        } else {
            line += c;
            text.remove_prefix(1);
        }
    }
    return lines;
}

// Every breach in one source file, as "path:line: what".
Lines violations(const std::string& path, std::string_view text) {
    static const std::regex include(R"re(\s*#\s*include\s*(["<])([^">]+)[">].*)re");
    static const std::regex opens_namespace(R"(\s*(?:inline )?namespace (fbt[\w:]*) \{.*)");
    static const std::regex identifier(R"([A-Za-z_]\w*)");
    static const std::regex assembly(R"(\b(asm|__asm__)\b)");
    static const std::regex pragma_once(R"(\s*#\s*pragma once\s*)");

    Lines out;
    const auto report = [&](size_t line, const std::string& what) {
        out.push_back(path + ":" + std::to_string(line) + ": " + what);
    };
    const std::optional<std::string> room = room_of(path);
    if (!room) {
        report(1, "is in no room");
        return out;
    }
    const bool is_checked_room = *room != "tests" && *room != "bench";
    const bool is_header = path.ends_with(".h") || path.ends_with(".cuh");
    const std::string own = "fbt::" + std::regex_replace(*room, std::regex("/"), "::");

    bool once = false, opened = false;
    const Lines lines = code_lines(text);
    for (size_t i = 0; i < lines.size(); ++i) {
        const std::string& line = lines[i];
        const size_t number = i + 1;
        std::smatch match;
        if (std::regex_match(line, match, include)) {
            const std::string to = match[2];
            if (match[1] == "\"") {
                const std::optional<std::string> other = room_of(to);
                const bool emulator =
                    path == "kernels/gpu.h" && to == "tests/simt/emu.h";  // under FBT_SIMT only
                if (!other)
                    report(number, "includes \"" + to + "\", which names no room from the top");
                else if (!may_include(*room, *other) && !emulator)
                    report(number, *room + " may not include " + *other);
            }
            for (const Library& library : kLibraries)
                if (is_checked_room && to.starts_with(library.header) && *room != library.room)
                    report(number, "only " + std::string(library.room) + " may include " + to);
            continue;
        }
        once = once || std::regex_match(line, pragma_once);
        if (!is_checked_room) continue;
        if (std::regex_match(line, match, opens_namespace)) {
            const std::string name = match[1];
            if (name == own || name.starts_with(own + "::"))
                opened = true;
            else
                report(number, "opens namespace " + name + "; the folder's is " + own);
        }
        if (line.find("<<<") != line.npos) report(number, "kernels are launched by launch()");
        if (path != "kernels/ptx.cuh" && std::regex_search(line, assembly))
            report(number, "only kernels/ptx.cuh holds assembly");
        if (*room == "apps") continue;
        for (std::sregex_iterator word(line.begin(), line.end(), identifier), end; word != end;
             ++word)
            if (kAppsOnly.contains(word->str()))
                report(number, "only apps prints, exits or reads flags: " + word->str());
    }
    if (is_header && !once) report(1, "has no #pragma once");
    if (is_header && is_checked_room && !opened && path != "kernels/gpu.h")  // macros only
        report(1, "does not open namespace " + own);
    return out;
}

// Entries of the top level that should not be there.
Lines strangers(const Lines& top) {
    Lines out;
    for (const std::string& name : top)
        if (!name.starts_with('.') && !name.starts_with("build") && !kTop.contains(name))
            out.push_back(name);
    return out;
}

std::string read(const fs::path& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
}

std::string joined(const Lines& lines) {
    std::string out;
    for (const std::string& line : lines) out += line + "\n";
    return out;
}

const fs::path kSource = FBT_SOURCE_DIR;

TEST(Rooms, SourcesKeepTheOrder) {
    Lines all;
    size_t files = 0;
    for (const std::string& top : kTop) {
        if (!fs::is_directory(kSource / top)) continue;
        for (const auto& entry : fs::recursive_directory_iterator(kSource / top)) {
            const std::string extension = entry.path().extension();
            if (extension != ".h" && extension != ".cpp" && extension != ".cu" &&
                extension != ".cuh")
                continue;
            ++files;
            const std::string path = entry.path().lexically_relative(kSource).generic_string();
            std::ranges::copy(violations(path, read(entry.path())), std::back_inserter(all));
        }
    }
    EXPECT_EQ(joined(all), "");
    EXPECT_GT(files, 20u) << "the sources were not found";
}

// Of what git tracks, or, outside a checkout, of what is there.
TEST(Rooms, TopLevelHoldsNothingElse) {
    std::set<std::string> names;
    const std::string command = "git -C '" + kSource.string() + "' ls-files 2>/dev/null";
    if (FILE* list = popen(command.c_str(), "r")) {
        char line[4096];
        while (std::fgets(line, sizeof line, list)) {
            const std::string path = line;
            names.insert(path.substr(0, path.find_first_of("/\n")));
        }
        pclose(list);
    }
    if (names.empty())
        for (const auto& entry : fs::directory_iterator(kSource))
            names.insert(entry.path().filename());
    const Lines top(names.begin(), names.end());
    EXPECT_EQ(joined(strangers(top)), "");
    EXPECT_EQ(strangers({"build", "build-asan", ".ci", "dev", "kernels", "util", "Makefile"}),
              (Lines{"util", "Makefile"}));
}

// What the checker says of one line in an otherwise good file of that name.
std::string verdict(const std::string& path, const std::string& line) {
    const std::string room = room_of(path).value_or("none");
    const std::string name = std::regex_replace(room, std::regex("/"), "::");
    return joined(
        violations(path, "#pragma once\n" + line + "\nnamespace fbt::" + name + " {\n}\n"));
}

TEST(RoomsChecker, AcceptsWhatIsAllowed) {
    const struct {
        std::string path, line;
    } cases[] = {
        {"kernels/a.h", "#include \"kernels/types.h\""},
        {"tensor/a.cpp", "#include \"kernels/types.h\""},
        {"model/core/a.h", "#include \"model/data/loader.h\""},
        {"model/engine/a.h", "#include \"nn/linear.h\"  // a comment"},
        {"apps/a.cpp", "#include \"model/engine/trainer.h\""},
        {"apps/a.cpp", "#include \"dist/communicator.h\""},
        {"apps/a.cpp", "std::cout << std::getenv(\"HOME\"); std::exit(1);"},
        {"apps/a.cpp", "#include <CLI/CLI.hpp>"},
        {"dist/a.cpp", "#include <mpi.h>"},
        {"dist/a.cpp", "#include \"tensor/tensor.h\""},
        {"kernels/a.cpp", "#include <dnnl.hpp>"},
        {"model/core/a.cpp", "#include <linear.h>"},
        {"kernels/gpu.h", "#include \"tests/simt/emu.h\""},
        {"kernels/ptx.cuh", "asm volatile(\"bar.sync 0;\");"},
        {"tests/nn/a.cpp", "#include \"apps/commands.h\""},
        {"tests/nn/a.cpp", "std::printf(\"hello\");"},
        {"bench/a.cpp", "#include \"tests/compare.h\""},
        {"nn/a.cpp", "// std::cout << 1; #include \"apps/a.h\""},
        {"nn/a.cpp", "/* exit(1)\n#include \"apps/a.h\"\n*/ int million = 1'000'000;"},
        {"nn/a.cpp", "const char* s = \"a \\\" printf( \"; char q = '\"';"},
        {"nn/a.cpp", "const char* s = R\"x(\n#include \"apps/a.h\"\n)x\";"},
        {"nn/a.cpp", "std::snprintf(text, sizeof text, \"%d\", 1); int exit_code = 0;"},
    };
    for (const auto& c : cases) EXPECT_EQ(verdict(c.path, c.line), "") << c.path << ": " << c.line;
}

TEST(RoomsChecker, RejectsSeededViolations) {
    const struct {
        std::string path, line, what;
    } cases[] = {
        {"kernels/a.cpp", "#include \"tensor/tensor.h\"", "kernels may not include tensor"},
        {"tensor/a.h", "#include \"autograd/tape.h\"", "tensor may not include autograd"},
        {"autograd/a.h", "  # include \"nn/linear.h\"", "autograd may not include nn"},
        {"nn/a.h", "#include \"model/data/a.h\"", "nn may not include model/data"},
        {"model/data/a.h", "#include \"model/core/a.h\"", "model/data may not include model/core"},
        {"model/core/a.h", "#include \"model/engine/a.h\"",
         "model/core may not include model/engine"},
        {"model/engine/a.h", "#include \"apps/a.h\"", "model/engine may not include apps"},
        {"model/engine/a.h", "#include \"dist/a.h\"", "model/engine may not include dist"},
        {"dist/a.h", "#include \"nn/a.h\"", "dist may not include nn"},
        {"apps/a.cpp", "#include \"tests/compare.h\"", "apps may not include tests"},
        {"kernels/rmsnorm.cu", "#include \"tests/simt/emu.h\"", "kernels may not include tests"},
        {"kernels/gpu.h", "#include \"tests/compare.h\"", "kernels may not include tests"},
        {"nn/a.cpp", "#include \"bench/a.h\"", "nn may not include bench"},
        {"kernels/a.cu", "kernel<<<1, 32>>>(x);", "launched by launch()"},
        {"kernels/a.cu", "asm(\"bar.sync 0;\");", "only kernels/ptx.cuh holds assembly"},
        {"nn/a.cpp", "#include \"util/a.h\"", "which names no room from the top"},
        {"nn/a.cpp", "#include \"linear.h\"", "which names no room from the top"},
        {"tests/nn/a.cpp", "#include \"compare.h\"", "which names no room from the top"},
        {"model/a.cpp", "", "is in no room"},
        {"nn/a.cpp", "#include <mpi.h>", "only dist may include mpi.h"},
        {"apps/a.cpp", "#include <nccl.h>", "only dist may include nccl.h"},
        {"nn/a.cpp", "#include <dnnl.hpp>", "only kernels may include dnnl.hpp"},
        {"apps/a.cpp", "#include <linear.h>", "only model/core may include linear.h"},
        {"nn/a.cpp", "std::cout << 1;", "reads flags: cout"},
        {"nn/a.cpp", "/* why */ printf(\"\\\\\");", "reads flags: printf"},
        {"nn/a.cpp", "fprintf(stderr, \"x\");", "reads flags: stderr"},
        {"model/core/a.h", "inline void f() { std::exit(1); }", "reads flags: exit"},
        {"tensor/a.cpp", "auto* e = std::getenv(\"X\");", "reads flags: getenv"},
        {"nn/a.h", "namespace fbt::tensor {\n}", "opens namespace fbt::tensor; the folder's is"},
        {"model/core/a.h", "namespace fbt::model::data {\n}", "the folder's is fbt::model::core"},
    };
    for (const auto& c : cases)
        EXPECT_NE(verdict(c.path, c.line).find(c.what), std::string::npos)
            << c.path << ": " << c.line << "\nwas judged: " << verdict(c.path, c.line);
}

TEST(RoomsChecker, RejectsHeadersWithoutTheirFrame) {
    EXPECT_EQ(violations("nn/a.h", "namespace fbt::nn {\n}\n"),
              (Lines{"nn/a.h:1: has no #pragma once"}));
    EXPECT_EQ(violations("nn/a.h", "#pragma once\nint x;\n"),
              (Lines{"nn/a.h:1: does not open namespace fbt::nn"}));
    EXPECT_EQ(violations("tests/a.h", "int x;\n"), (Lines{"tests/a.h:1: has no #pragma once"}));
}

TEST(RoomsChecker, NamesTheLine) {
    EXPECT_EQ(violations("nn/a.cpp", "/* two\nlines */\n\n#include \"apps/a.h\"\n"),
              (Lines{"nn/a.cpp:4: nn may not include apps"}));
}

}  // namespace
}  // namespace fbt::tests
