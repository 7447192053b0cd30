#include "apps/command.h"

#include <algorithm>
#include <filesystem>

#include "tensor/file.h"

namespace fbt::apps {

using tensor::DType;
using tensor::Error;
using tensor::ErrorKind;

int exit_code(ErrorKind kind) {
    switch (kind) {
        case ErrorKind::usage:
            return kUsage;
        case ErrorKind::diverged:
            return kDiverged;
        case ErrorKind::bad_file:
            return kBadFile;
        case ErrorKind::environment:
        case ErrorKind::internal:
            break;
    }
    return kEnvironment;
}

void Machine::declare(Settings& settings) {
    std::string names;
    for (const std::string& name : tensor::device_names())
        names += (names.empty() ? "" : " or ") + name;
    settings.add("device", &device, "where to compute: " + names).changeable();
    settings.add("dtype", &dtype,
                 "arithmetic: f32; bf16, but not on the device ref; f64, on it alone");
    settings.add("threads", &threads, "threads of the CPU's kernels; 0: all")
        .at_least(0)
        .at_most(4096)
        .changeable();
    settings.section("");
    settings.add("json", &json, "print one JSON document on stdout and all text on stderr");
}

DType Machine::checked_dtype() const {
    const std::vector<std::string> devices = tensor::device_names();
    if (std::find(devices.begin(), devices.end(), device) == devices.end())
        tensor::Context unknown(device);  // says which ones there are
    if (dtype == "f32") return DType::f32;
    if (dtype == "f64" && device == "ref") return DType::f64;
    if (dtype == "f64")
        throw Error(ErrorKind::usage, "--dtype f64 is for --device ref only, not for " + device);
    if (dtype == "bf16" && device != "ref") return DType::bf16;
    if (dtype == "bf16")
        throw Error(ErrorKind::usage,
                    "--dtype bf16 is for --device cpu or a CUDA device, not for ref; use f32");
    throw Error(ErrorKind::usage, "--dtype is " + tensor::in_quotes(dtype) +
                                      ", needed f32, bf16, or f64 on the device ref");
}

void check_output(const std::string& flag, const std::string& path) {
    namespace fs = std::filesystem;
    std::error_code none;
    const fs::file_status status = fs::status(path, none);
    if (fs::exists(status) && !fs::is_regular_file(status))
        throw Error(ErrorKind::usage, flag + " is " + tensor::in_quotes(path) +
                                          ", which is there and is no regular file; needed the "
                                          "name of a file to write");
    tensor::OutputFile probe(tensor::temporary_beside(path));  // goes away again
}

}  // namespace fbt::apps
