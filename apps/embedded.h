// What the build puts into the program beside its code (apps/presets.cmake).
#pragma once
#include <map>
#include <string>

namespace fbt::apps {

// apps/presets/NAME.json by name.
std::map<std::string, std::string> embedded_presets();

struct BuildFacts {
    std::string version, type, compiler, arch, sanitizers;
};
BuildFacts build_facts();

}  // namespace fbt::apps
