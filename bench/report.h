// What the benches share: flags, five repetitions of which the median is shown, one row of a table
// a benchmark.
#pragma once
#include <benchmark/benchmark.h>

#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace fbt::bench {

// [--json] [FILTER...] [Google Benchmark's flags]: the filters are regular expressions, of which a
// name has to match one.
struct Arguments {
    bool json = false;
    std::string filter;
    std::vector<std::string> rest;

    Arguments(int argc, char** argv) {
        for (int i = 1; i < argc; ++i) {
            const std::string argument = argv[i];
            if (argument == "--json")
                json = true;
            else if (argument.starts_with("--"))
                rest.push_back(argument);
            else
                filter += (filter.empty() ? "" : "|") + argument;
        }
    }
};

// Benchmarks are named op/shape/dtype/kernel and count FLOP/s or B/s, and "% of peak". The spread
// is the repetitions' standard deviation / mean; without repetitions every run is a row.
class TableReporter : public benchmark::BenchmarkReporter {
  public:
    explicit TableReporter(bool json) : json_(json) {}

    bool ReportContext(const Context&) override {
        if (json_) return true;
        std::printf(
            "| %-24s | %-20s | %-5s | %-6s | threads |         us | +- %% |              rate"
            " | %% of peak |\n|---|---|---|---|---|---|---|---|---|\n",
            "op", "shape", "dtype", "kernel");
        return true;
    }

    void ReportRuns(const std::vector<Run>& runs) override {
        double spread = NAN;
        for (const Run& run : runs)
            if (run.aggregate_name == "cv") spread = run.real_accumulated_time;
        for (const Run& run : runs)
            if (run.run_type == Run::RT_Iteration || run.aggregate_name == "median")
                add(run, 100 * spread);
    }

    const nlohmann::json& rows() const { return rows_; }
    bool failed() const { return failed_; }

  private:
    // Takes what follows the last slash off the name.
    static std::string take_last(std::string& name) {
        const size_t slash = name.rfind('/');
        const std::string last = name.substr(slash + 1);
        name.resize(slash);
        return last;
    }

    void add(const Run& run, double spread) {
        std::string op = run.run_name.function_name;
        if (run.error_occurred) {
            failed_ = true;
            std::fprintf(stderr, "FAILED: %s: %s\n", op.c_str(), run.error_message.c_str());
            return;
        }
        const std::string kernel = take_last(op), dtype = take_last(op);
        const std::string shape = op.substr(op.find('/') + 1);
        op.resize(op.find('/'));
        const std::string& threads = run.run_name.args;  // "threads:2", or nothing
        const double us =
            1e6 * run.GetAdjustedRealTime() / benchmark::GetTimeUnitMultiplier(run.time_unit);
        const bool is_flops = run.counters.contains("FLOP/s");
        const double rate = run.counters.at(is_flops ? "FLOP/s" : "B/s");
        const auto share = run.counters.find("% of peak");

        nlohmann::json row = {
            {"op", op},       {"shape", shape},
            {"dtype", dtype}, {"kernel", kernel},
            {"us", us},       {is_flops ? "flops_per_second" : "bytes_per_second", rate}};
        if (!threads.empty()) row["threads"] = std::stoi(threads.substr(threads.find(':') + 1));
        if (std::isfinite(spread)) row["spread_percent"] = spread;
        if (share != run.counters.end()) row["percent_of_peak"] = double(share->second);
        if (!json_) {
            std::printf("| %-24s | %-20s | %-5s | %-6s | %7s | %10.1f | %4.1f | %9.4g %-7s | ",
                        op.c_str(), shape.c_str(), dtype.c_str(), kernel.c_str(),
                        threads.empty() ? "" : threads.substr(threads.find(':') + 1).c_str(), us,
                        spread, rate / (is_flops ? 1e12 : 1e9), is_flops ? "TFLOP/s" : "GB/s");
            if (share != run.counters.end())
                std::printf("%9.1f |\n", double(share->second));
            else
                std::printf("%9s |\n", "");
            std::fflush(stdout);
        }
        rows_.push_back(std::move(row));
    }

    bool json_, failed_ = false;
    nlohmann::json rows_ = nlohmann::json::array();
};

// Runs what is registered and prints its table, or `document` with the rows under "rows". Returns
// the exit code.
inline int run(const char* program, const Arguments& arguments, nlohmann::json document) {
    std::vector<std::string> flags = {program, "--benchmark_repetitions=5",
                                      "--benchmark_report_aggregates_only=true",
                                      "--benchmark_min_time=0.02"};  // seconds, of each repetition
    if (!arguments.filter.empty()) flags.push_back("--benchmark_filter=" + arguments.filter);
    flags.insert(flags.end(), arguments.rest.begin(), arguments.rest.end());
    std::vector<char*> argv;
    for (std::string& flag : flags) argv.push_back(flag.data());
    int argc = int(argv.size());
    argv.push_back(nullptr);
    benchmark::Initialize(&argc, argv.data());
    if (benchmark::ReportUnrecognizedArguments(argc, argv.data())) return 2;
    TableReporter reporter(arguments.json);
    benchmark::RunSpecifiedBenchmarks(&reporter);
    benchmark::Shutdown();
    if (arguments.json) {
        document["rows"] = reporter.rows();
        std::printf("%s\n", document.dump(1).c_str());
    }
    return reporter.failed() ? 1 : 0;
}

}  // namespace fbt::bench
