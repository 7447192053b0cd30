// Every CPU kernel at the shapes of two models: checked against the reference, then timed.
//
//   kernels_bench [--json] [FILTER...] [Google Benchmark's flags]
//
// FILTER is a regular expression over names such as  rmsnorm_forward/2048x512/f32/cpu/threads:2.
#include <omp.h>

#include <array>
#include <stdexcept>

#include "bench/ceilings.h"
#include "bench/kernels/op.h"
#include "bench/report.h"
#include "bench/shape.h"
#include "kernels/philox.h"

namespace fbt::bench {
namespace {

// Only checked: two splits of keys, two chunks of rows, no multiple of a vector's width.
constexpr Sizes kSmall{140, 37, 4, 2, 6, 45, 41, 70};

Sizes sizes_of(const std::string& shape) {
    const nlohmann::json json = shape_named(shape);
    const auto& m = json.at("model");
    return {json.at("train").at("tokens_per_step"),
            m.at("dim"),
            m.at("heads"),
            m.at("kv_heads"),
            m.at("head_dim"),
            m.at("ffn_dim"),
            m.at("vocab_size"),
            m.at("context")};
}

std::vector<Op> ops_of(const Sizes& sizes) {
    Ops ops(sizes);
    for (const auto& add : {add_matmul, add_attention, add_rmsnorm, add_qk_norm_rope, add_swiglu,
                            add_gate, add_embedding, add_cross_entropy, add_carry, add_kv_store,
                            add_elementwise, add_square_sum, add_adamw, add_normuon, add_sampling})
        add(ops);
    return std::move(ops.all);
}

int64_t element_size(const Op& op, const Array& array) {
    return array.element == Array::Element::t ? op.element_size : int64_t(sizeof(float));
}

double element(const Op& op, const Array& array, const void* at, int64_t i) {
    if (element_size(op, array) == sizeof(bf16))
        return double(float(static_cast<const bf16*>(at)[i]));
    return static_cast<const float*>(at)[i];
}

// Array number `which` of every op starts with the same numbers.
void fill(const Op& op, const Array& array, uint32_t which, void* out) {
    const bool narrow = op.element_size == sizeof(bf16);
    for (int64_t i = 0; i < array.count; ++i) {
        uint32_t h = (uint32_t(i) + which * 0x01000193u) * 0x9E3779B9u;  // murmur3's finalizer
        h = (h ^ (h >> 16)) * 0x85EBCA6Bu;
        h = (h ^ (h >> 13)) * 0xC2B2AE35u;
        const float x = array.low + (array.high - array.low) * uniform_float(h ^ (h >> 16));
        if (element_size(op, array) == sizeof(bf16))
            static_cast<bf16*>(out)[i] = bf16(x);
        else
            static_cast<float*>(out)[i] = narrow ? float(bf16(x)) : x;
    }
}

// ---- the check

template <class T>
std::string prepare_and_run(const Call& prepare, const Call& call,
                            std::vector<std::vector<T>>& arrays, Stream s) {
    std::vector<void*> at;
    for (auto& array : arrays) at.push_back(array.data());
    if (prepare)
        if (const Status status = prepare(at.data(), s); !status.ok()) return status.message;
    const Status status = call(at.data(), s);
    return status.ok() ? "" : status.message;
}

// Empty, or what is wrong.
std::string check(const Op& op) {
    std::vector<std::vector<std::byte>> got;
    std::vector<std::vector<double>> want;
    for (const Array& array : op.arrays) {
        std::vector<std::byte> values(array.count * element_size(op, array));
        fill(op, array, uint32_t(got.size()), values.data());
        std::vector<double>& same = want.emplace_back(array.count);
        for (int64_t i = 0; i < array.count; ++i) same[i] = element(op, array, values.data(), i);
        got.push_back(std::move(values));
    }
    std::string error = prepare_and_run(op.prepare, op.call, got, {nullptr, 2});
    if (error.empty()) error = prepare_and_run(op.ref_prepare, op.ref, want, {nullptr, 1});
    for (size_t k = 0; k < op.outputs.size() && error.empty(); ++k)
        for (int64_t i = 0; i < op.arrays[k].count && error.empty(); ++i) {
            const double size = std::abs(want[k][i]);
            double bound = op.outputs[k].absolute + op.outputs[k].relative * size;
            if (op.arrays[k].element == Array::Element::t) bound += op.rounding * (size + bound);
            const double value = element(op, op.arrays[k], got[k].data(), i);
            if (std::abs(value - want[k][i]) <= bound) continue;  // NaN fails
            std::array<char, 128> text;
            std::snprintf(text.data(), text.size(),
                          "output %zu[%lld] is %.9g, expected %.9g +- %.1e", k,
                          static_cast<long long>(i), value, want[k][i], bound);
            error = text.data();
        }
    return error;
}

// ---- timing

constexpr int64_t kLine = 64;
int64_t space(const Op& op, const Array& array) {
    return ceil_div(array.count * element_size(op, array), kLine) * kLine;
}

// An op's arrays, as many sets of them as the footprint holds, each filled and prepared: no call
// finds its arrays in a core's own caches.
class Rotation {
  public:
    explicit Rotation(const Op& op) {
        int64_t size = 0;
        for (const Array& array : op.arrays) size += space(op, array);
        int64_t sets = footprint() / size;
        if (sets < 1) throw std::length_error(op.name + " does not fit into the footprint");
        auto* next = reinterpret_cast<std::byte*>(memory());
        for (; sets > 0; --sets) {
            std::vector<void*>& at = sets_.emplace_back();
            for (const Array& array : op.arrays) {
                fill(op, array, uint32_t(at.size()), next);
                at.push_back(next);
                next += space(op, array);
            }
            if (!op.prepare) continue;
            if (const Status status = op.prepare(at.data(), {nullptr, 1}); !status.ok())
                throw std::runtime_error(status.message);
        }
    }
    void* const* next() { return sets_[turn_++ % sets_.size()].data(); }

  private:
    std::vector<std::vector<void*>> sets_;
    size_t turn_ = 0;
};

// The repetitions of one op follow each other and share its rotation.
Rotation& rotation_of(const Op& op) {
    static const Op* owner = nullptr;
    static std::unique_ptr<Rotation> rotation;
    if (owner != &op) rotation = std::make_unique<Rotation>(op);
    owner = &op;
    return *rotation;
}

// The highest ceiling of an op: of its dtype's multiply-adds (bf16 can be computed in float, too),
// or of memory.
double peak_of(const Op& op, int threads, const std::vector<Ceiling>& ceilings) {
    const bool is_flops = op.work.unit == Work::Unit::flop;
    double peak = 0;
    for (const Ceiling& c : ceilings) {
        if (c.threads != threads) continue;
        const bool is_its = is_flops ? c.what.starts_with("f32") || c.what.starts_with(op.dtype)
                                     : c.what.ends_with("memory");
        if (is_its) peak = std::max(peak, c.rate);
    }
    return peak;
}

void time_op(benchmark::State& state, const Op& op, const std::vector<Ceiling>& ceilings) {
    using benchmark::Counter;
    Rotation& rotation = rotation_of(op);
    const Stream s{nullptr, int(state.range(0))};
    if (const Status status = op.call(rotation.next(), s); !status.ok())
        return state.SkipWithError(status.message);
    for (auto _ : state)
        if (const Status status = op.call(rotation.next(), s); !status.ok()) {
            state.SkipWithError(status.message);
            break;
        }
    const bool is_flops = op.work.unit == Work::Unit::flop;
    state.counters[is_flops ? "FLOP/s" : "B/s"] =
        Counter(op.work.amount, Counter::kIsIterationInvariantRate);
    state.counters["% of peak"] = Counter(100 * op.work.amount / peak_of(op, s.threads, ceilings),
                                          Counter::kIsIterationInvariantRate);
}

nlohmann::json json_of(const std::vector<Ceiling>& ceilings) {
    nlohmann::json all = nlohmann::json::array();
    for (const Ceiling& c : ceilings)
        all.push_back({{"what", c.what},
                       {"threads", c.threads},
                       {c.is_flops ? "flops_per_second" : "bytes_per_second", c.rate}});
    return all;
}

void print(const std::vector<Ceiling>& ceilings) {
    std::printf("| ceiling        | threads |              rate |\n|---|---|---|\n");
    for (const Ceiling& c : ceilings)
        std::printf("| %-14s | %7d | %9.4g %-7s |\n", c.what.c_str(), c.threads,
                    c.rate / (c.is_flops ? 1e12 : 1e9), c.is_flops ? "TFLOP/s" : "GB/s");
    std::printf("\n");
}

int run_all(int argc, char** argv) {
    const Arguments arguments(argc, argv);
    for (const Op& op : ops_of(kSmall))
        if (const std::string error = check(op); !error.empty()) {
            std::fprintf(stderr, "kernels_bench: %s at %s in %s is wrong, nothing was timed: %s\n",
                         op.name.c_str(), op.shape.c_str(), op.dtype.c_str(), error.c_str());
            return 1;
        }

    const int threads = omp_get_num_procs();
    const std::vector<Ceiling> ceilings = measure_ceilings(threads);
    if (!arguments.json) {
        std::printf("%s, %d processors\n\n", processor_name().c_str(), threads);
        print(ceilings);
    }
    std::vector<std::vector<Op>> models;
    for (const char* shape : {"A", "B"}) {
        models.push_back(ops_of(sizes_of(shape)));  // moving a vector leaves its ops where they are
        for (const Op& op : models.back()) {
            auto* b = benchmark::RegisterBenchmark(
                (op.name + "/" + op.shape + "/" + op.dtype + "/" + op.kernel).c_str(),
                [&](benchmark::State& state) { time_op(state, op, ceilings); });
            b->ArgName("threads")->UseRealTime()->Arg(1);
            if (threads > 1) b->Arg(threads);
        }
    }
    return run(argv[0], arguments,
               {{"processor", processor_name()},
                {"processors", threads},
                {"ceilings", json_of(ceilings)}});
}

}  // namespace
}  // namespace fbt::bench

int main(int argc, char** argv) { return fbt::bench::run_all(argc, argv); }
