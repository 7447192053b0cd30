// What the benches share: five repetitions of which the median is shown, one line a benchmark.
#pragma once
#include <benchmark/benchmark.h>

#include <array>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

namespace fbt::bench {

// 12345 -> "12.3 k"
inline std::string with_prefix(double x) {
    static constexpr std::array<const char*, 5> kPrefixes = {"", "k", "M", "G", "T"};
    size_t i = 0;
    for (; std::abs(x) >= 999.5 && i + 1 < kPrefixes.size(); x /= 1000) ++i;
    std::array<char, 32> text;
    std::snprintf(text.data(), text.size(), "%.3g %s", x, kPrefixes[i]);
    return text.data();
}

// A line is: benchmark, wall time, spread (standard deviation / mean of the repetitions), counters.
// Without repetitions every run is a line.
class MedianReporter : public benchmark::BenchmarkReporter {
  public:
    bool ReportContext(const Context& context) override {
        PrintBasicContext(&GetErrorStream(), context);
        width_ = int(context.name_field_width);
        return true;
    }

    void ReportRuns(const std::vector<Run>& runs) override {
        double spread = NAN;
        for (const Run& run : runs)
            if (run.aggregate_name == "cv") spread = run.real_accumulated_time;
        for (const Run& run : runs)
            if (run.run_type == Run::RT_Iteration || run.aggregate_name == "median")
                print(run, spread);
    }

    bool failed() const { return failed_; }

  private:
    void print(const Run& run, double spread) {
        benchmark::BenchmarkName name = run.run_name;
        name.time_type.clear();  // always wall time
        std::printf("%-*s ", width_, name.str().c_str());
        if (run.error_occurred) {
            failed_ = true;
            std::printf("FAILED: %s\n", run.error_message.c_str());
            return;
        }
        std::printf("%11.1f us", 1e6 * run.GetAdjustedRealTime() /
                                     benchmark::GetTimeUnitMultiplier(run.time_unit));
        if (std::isfinite(spread)) std::printf("  +-%5.1f %%", 100 * spread);
        // Backwards, since the map's order puts the share of the peak before the rate.
        for (auto it = run.counters.rbegin(); it != run.counters.rend(); ++it)
            std::printf("  %9s%s", with_prefix(it->second.value).c_str(), it->first.c_str());
        std::printf("\n");
        std::fflush(stdout);
    }

    int width_ = 0;
    bool failed_ = false;
};

// Runs what is registered; arguments on the command line override these. Returns the exit code.
inline int run(int argc, char** argv) {
    static std::string flags[] = {"--benchmark_repetitions=5",
                                  "--benchmark_report_aggregates_only=true",
                                  "--benchmark_min_time=0.02"};  // seconds, of each repetition
    std::vector<char*> arguments = {argv[0]};
    for (std::string& flag : flags) arguments.push_back(flag.data());
    arguments.insert(arguments.end(), argv + 1, argv + argc);
    int count = int(arguments.size());
    arguments.push_back(nullptr);
    benchmark::Initialize(&count, arguments.data());
    if (benchmark::ReportUnrecognizedArguments(count, arguments.data())) return 2;
    MedianReporter reporter;
    benchmark::RunSpecifiedBenchmarks(&reporter);
    benchmark::Shutdown();
    return reporter.failed() ? 1 : 0;
}

}  // namespace fbt::bench
