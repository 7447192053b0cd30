// fbt info: what this program is, and what it can use here.
#include <memory>

#include "apps/command.h"
#include "apps/embedded.h"
#include "dist/dist.h"
#include "kernels/bf16_dot.h"

namespace fbt::apps {
namespace {

using nlohmann::json;

// The vector extensions that the CPU's kernels were compiled for.
std::vector<std::string> cpu_features() {
    std::vector<std::string> names;
#ifdef __AVX2__
    names.push_back("avx2");
#endif
#ifdef __FMA__
    names.push_back("fma");
#endif
#ifdef __AVX512F__
    names.push_back("avx512f");
#endif
#ifdef __AVX512BF16__
    names.push_back("avx512_bf16");
#endif
#ifdef __AMX_BF16__
    names.push_back("amx_bf16");
#endif
#ifdef __ARM_NEON
    names.push_back("neon");
#endif
    return names;
}

std::string joined(const std::vector<std::string>& names) {
    std::string text;
    for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
    return text.empty() ? "none" : text;
}

// A line for each GPU that is seen, numbered where there are several, or why there is none.
std::vector<std::string> gpus() {
    const std::vector<tensor::CudaDevice> devices = tensor::cuda_devices();
    if (devices.size() < 2) return {tensor::cuda_device().description};
    std::vector<std::string> lines;
    for (const tensor::CudaDevice& device : devices)
        lines.push_back(std::to_string(device.number) + ": " + device.description);
    return lines;
}

struct Info {
    explicit Info(CLI::App& app) {
        machine.declare(settings);
        settings.bind(app);
    }

    int run() {
        settings.take_flags();
        machine.checked_dtype();
        Console console(machine.json);
        const tensor::Context context = machine.context();
        const BuildFacts facts = build_facts();
        std::vector<std::string> presets;
        for (const auto& [name, text] : embedded_presets()) presets.push_back(name);
        const std::string bf16 = kernels::cpu::dot_kernels().front().name;
        console.line("fbt " + facts.version);
        console.line("devices    " + joined(tensor::device_names()));
        if (tensor::device_names().back() != "ref")
            for (const std::string& gpu : gpus())
                console.line(tensor::device_names().back() + std::string(7, ' ') + gpu);
        const std::string mpi = dist::mpi_version(), nccl = dist::nccl_version();
        console.line("ranks over " + joined([&] {
                         std::vector<std::string> names;
                         if (!mpi.empty()) names.push_back(mpi);
                         if (!nccl.empty()) names.push_back("NCCL " + nccl);
                         return names;
                     }()));
        console.line("threads    " + std::to_string(context.threads()));
        console.line("cpu uses   " + joined(cpu_features()));
        console.line("bf16 uses  " + bf16);
        console.line("built by   " + facts.compiler + ", " + facts.type + ", -march=" + facts.arch);
        if (!facts.sanitizers.empty()) console.line("sanitizers " + facts.sanitizers);
        console.line("presets    " + joined(presets));
        console.result({{"version", facts.version},
                        {"devices", tensor::device_names()},
                        {"cuda", tensor::cuda_device().description},
                        {"gpus", gpus()},
                        {"mpi", mpi},
                        {"nccl", nccl},
                        {"threads", context.threads()},
                        {"cpu_features", cpu_features()},
                        {"cpu_bf16", bf16},
                        {"compiler", facts.compiler},
                        {"build_type", facts.type},
                        {"march", facts.arch},
                        {"sanitizers", facts.sanitizers},
                        {"presets", presets}});
        return kDone;
    }

    Settings settings;
    Machine machine;
};

}  // namespace

Run add_info(CLI::App& app) {
    CLI::App* command = app.add_subcommand("info", "Version, devices, build and presets");
    auto info = std::make_shared<Info>(*command);
    return [info] { return info->run(); };
}

}  // namespace fbt::apps
