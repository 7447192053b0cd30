// What the links between ranks carry: `mpirun -n N build/ranks_bench`, started as training is.
// Sums are checked before they are timed. The median of a collective's repetitions; GB/s are of
// bytes * (ranks-1)/ranks, what a rank sends and receives: the --link of `fbt train --plan`.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

#include "apps/command.h"
#include "apps/job.h"

namespace fbt::bench {
namespace {

using tensor::Communicator;
using tensor::DType;
using tensor::Tensor;

constexpr int kRepetitions = 21;

int measure(apps::Job& job, const std::string& device, bool reproducible) {
    job.join();
    job.check_device(device);
    tensor::Context context(device, 1, job.launch().local_rank);
    const auto ranks = job.connect(context, reproducible);
    const int n = ranks->size();
    const auto seconds = [&](const std::function<Communicator::Ticket()>& collective) {
        std::vector<double> all;
        for (int i = 0; i < kRepetitions; ++i) {
            ranks->barrier();
            const auto start = std::chrono::steady_clock::now();
            ranks->wait(collective());
            context.synchronize();
            all.push_back(
                std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
        }
        std::ranges::nth_element(all, all.begin() + kRepetitions / 2);
        return job.sum({all[kRepetitions / 2]})[0] / n;
    };
    if (job.leads())
        std::printf("%d ranks over %s on %s\n\n| %-14s | %10s | %10s | %8s |\n|---|---|---|---|\n",
                    n, ranks->name(), device.c_str(), "collective", "KiB", "us", "GB/s");
    for (const int64_t kib : {4, 256, 1024, 4096, 16384, 65536}) {
        const int64_t numbers = kib * 256 / n * n;
        std::vector<int64_t> pieces(size_t(n), numbers / n);
        Tensor x = Tensor::from(
            context, std::vector<float>(size_t(numbers), float(ranks->rank() + 1)), {numbers});
        ranks->wait(ranks->all_reduce(x));
        if (x.rows(0, 1).to_vector<float>()[0] != float(n * (n + 1) / 2)) {
            std::fprintf(stderr, "ranks_bench: rank %d got a wrong sum\n", ranks->rank());
            return apps::kCheckFailed;
        }
        x.zero();  // sums of sums would overflow
        const auto row = [&](const char* what, double s, double times) {
            if (job.leads())
                std::printf("| %-14s | %10lld | %10.1f | %8.2f |\n", what,
                            static_cast<long long>(kib), 1e6 * s,
                            times * double(x.bytes()) * (n - 1) / n / s / 1e9);
        };
        row("reduce_scatter", seconds([&] { return ranks->reduce_scatter(x, pieces); }), 1);
        row("all_gather", seconds([&] { return ranks->all_gather(x, pieces); }), 1);
        row("all_reduce", seconds([&] { return ranks->all_reduce(x); }), 2);
    }
    return apps::kDone;
}

}  // namespace
}  // namespace fbt::bench

int main(int argc, char** argv) {
    using namespace fbt;
    CLI::App app("Collectives between ranks, timed (bench/README.md); to be started by mpirun.");
    std::string device = "cpu";
    bool reproducible = false;
    app.add_option("--device", device, "cpu or cuda")->capture_default_str();
    app.add_flag("--reproducible", reproducible, "GPUs: sum in the order of the ranks");
    try {
        app.parse(argc, argv);
        apps::Job job(apps::Launch::from_environment(), 300);
        return job.run([&] { return bench::measure(job, device, reproducible); });
    } catch (const CLI::ParseError& e) {
        return app.exit(e) == 0 ? 0 : 2;
    } catch (const tensor::Error& e) {
        std::fprintf(stderr, "ranks_bench: %s\n", e.what());
        return apps::exit_code(e.kind());
    }
}
