#include "bench/ceilings.h"

#include <benchmark/benchmark.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#if defined(__AMX_BF16__)
#include <immintrin.h>
#include <sys/syscall.h>
#endif

#include "kernels/amx_dot.h"
#include "kernels/cpu_tile.h"

namespace fbt::bench {
namespace {

using namespace kernels;

constexpr int kTries = 7;

// The best rate of `run`, which does `work`.
template <class F>
double best_rate(double work, F run) {
    double best = 0;
    for (int i = 0; i < kTries; ++i) {
        const auto start = std::chrono::steady_clock::now();
        run();
        const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
        best = std::max(best, work / elapsed.count());
    }
    return best;
}

constexpr int64_t kSteps = 200000;

// `chain` multiply-adds kChains times a step. The chains are named by a pack, not an array, so that
// each has a register for the whole loop; there are enough of them to hide the latency (at most 6
// cycles, two a cycle).
template <class Register, size_t... I, class F>
void run_chains(Register start, std::index_sequence<I...>, F chain) {
    Register sum[] = {(static_cast<void>(I), start)...};
    for (int64_t i = 0; i < kSteps; ++i) ((sum[I] = chain(sum[I])), ...);
    for (Register& r : sum) benchmark::DoNotOptimize(r);
}

#if defined(__AVX512F__)
constexpr int kChains = 16;
#else
constexpr int kChains = 5;  // of two registers each
#endif

int64_t cache_size(int name, int64_t otherwise) {
    const long size = sysconf(name);
    return size > 0 ? size : otherwise;
}
int64_t l2_size() { return cache_size(_SC_LEVEL2_CACHE_SIZE, int64_t(1) << 20); }
int64_t l3_size() { return cache_size(_SC_LEVEL3_CACHE_SIZE, int64_t(32) << 20); }

}  // namespace

double fma_rate(int threads) {
    return best_rate(2.0 * threads * kSteps * kChains * cpu::kLanes, [=] {
#pragma omp parallel num_threads(threads)
        {
            float x = 0.5f;
            benchmark::DoNotOptimize(x);
            const cpu::Vec factor = cpu::splat(x);
            run_chains(factor, std::make_index_sequence<kChains>(),
                       [=](cpu::Vec v) { return cpu::fma(v, factor, factor); });
        }
    });
}

double bf16_dot_rate([[maybe_unused]] int threads) {
#if defined(__AVX512BF16__)
    return best_rate(4.0 * threads * kSteps * kChains * cpu::kLanes, [=] {
#pragma omp parallel num_threads(threads)
        {
            int ones = 0x3f803f80;
            benchmark::DoNotOptimize(ones);
            const auto factor = __m512bh(_mm512_set1_epi32(ones));
            run_chains(cpu::splat(1.f), std::make_index_sequence<kChains>(),
                       [=](cpu::Vec v) { return cpu::Vec{_mm512_dpbf16_ps(v.v, factor, factor)}; });
        }
    });
#else
    return 0;
#endif
}

double bf16_tile_rate([[maybe_unused]] int threads) {
#if defined(__AMX_BF16__)
    constexpr int kRequestState = 0x1023, kTileData = 18;  // arch_prctl(2)
    if (syscall(SYS_arch_prctl, kRequestState, kTileData) != 0) return 0;
    constexpr double kFlops = 2.0 * 16 * 16 * 32;  // of one tile product
    return best_rate(4 * kFlops * threads * kSteps, [=] {
#pragma omp parallel num_threads(threads)
        {
            const cpu::AmxConfig shape;
            _tile_loadconfig(&shape);
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            _tile_zero(4);
            _tile_zero(5);
            for (int64_t i = 0; i < kSteps; ++i) {
                _tile_dpbf16ps(0, 4, 5);
                _tile_dpbf16ps(1, 4, 5);
                _tile_dpbf16ps(2, 4, 5);
                _tile_dpbf16ps(3, 4, 5);
            }
            _tile_release();
        }
    });
#else
    return 0;
#endif
}

double read_rate(int64_t bytes, int threads) {
    constexpr int64_t kStep = 8 * cpu::kLanes;
    const int64_t steps = std::max<int64_t>(1, bytes / int64_t(sizeof(float)) / kStep / threads);
    const double swept = double(steps * threads * kStep) * sizeof(float);
    const int64_t sweeps = std::max<int64_t>(1, int64_t(double(footprint()) / swept));
    std::vector<float> own;  // where the footprint is too small
    if (swept > double(footprint())) own.assign(size_t(steps * threads * kStep), 1.f);
    const float* const from = own.empty() ? memory() : own.data();
    return best_rate(swept * double(sweeps), [=] {
#pragma omp parallel for schedule(static) num_threads(threads)
        for (int part = 0; part < threads; ++part) {
            const float* const mine = from + part * steps * kStep;
            cpu::Vec sum[8];
            for (cpu::Vec& v : sum) v = cpu::splat(0.f);
            for (int64_t sweep = 0; sweep < sweeps; ++sweep)
                for (int64_t i = 0; i < steps; ++i)
                    for (int v = 0; v < 8; ++v)
                        sum[v] = sum[v] + cpu::load(mine + i * kStep + v * cpu::kLanes);
            for (cpu::Vec& v : sum) benchmark::DoNotOptimize(v);
        }
    });
}

double update_rate(int threads) {
    const int64_t steps = footprint() / int64_t(sizeof(float)) / cpu::kLanes;
    float* const x = memory();
    return best_rate(2.0 * double(footprint()), [=] {
#pragma omp parallel for schedule(static) num_threads(threads)
        for (int64_t i = 0; i < steps; ++i) {
            float* const at = x + i * cpu::kLanes;
            cpu::store(at, cpu::fma(cpu::load(at), cpu::splat(0.5f), cpu::splat(0.5f)));
        }
    });
}

int64_t footprint() {
    static const int64_t bytes = std::max(int64_t(256) << 20, 4 * l3_size()) / 4096 * 4096;
    return bytes;
}

float* memory() {
    constexpr size_t kLine = 64 / sizeof(float);
    static std::vector<float> floats(footprint() / sizeof(float) + kLine, 1.f);
    const size_t past_line = reinterpret_cast<uintptr_t>(floats.data()) % 64 / sizeof(float);
    return floats.data() + (past_line > 0 ? kLine - past_line : 0);
}

std::vector<Ceiling> measure_ceilings(int threads) {
    std::vector<Ceiling> all;
    for (int n : {1, threads}) {
        if (n == threads && !all.empty() && threads == 1) break;
        const auto add = [&](const std::string& what, bool is_flops, double rate) {
            if (rate > 0) all.push_back({what, n, is_flops, rate});
        };
        add("f32 fma", true, fma_rate(n));
        add("bf16 vdpbf16ps", true, bf16_dot_rate(n));
        add("bf16 AMX", true, bf16_tile_rate(n));
        // Half of a cache, so that little else of it is needed; L2 is each core's own.
        add("read L2", false, read_rate(n * l2_size() / 2, n));
        add("read L3", false, read_rate(l3_size() / 2, n));
        add("read memory", false, read_rate(footprint(), n));
        add("update memory", false, update_rate(n));
    }
    return all;
}

std::string processor_name() {
    std::ifstream file("/proc/cpuinfo");
    for (std::string line; std::getline(file, line);)
        if (line.starts_with("model name")) return line.substr(line.find(": ") + 2);
    return "unknown";
}

}  // namespace fbt::bench
