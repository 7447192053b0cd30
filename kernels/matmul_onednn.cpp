#include "kernels/matmul_onednn.h"

#include <omp.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <oneapi/dnnl/dnnl.hpp>
#include <string>
#include <vector>

#include "kernels/philox.h"

namespace fbt::kernels::cpu {
namespace {

using dnnl::memory;

// Row counts that primitives exist for.
constexpr std::array<int64_t, 5> kRows = {256, 64, 16, 4, 1};

const dnnl::engine& engine() {
    static const dnnl::engine cpu(dnnl::engine::kind::cpu, 0);
    return cpu;
}
dnnl::stream& stream() {
    thread_local dnnl::stream mine(engine());
    return mine;
}

// Below this many multiply-adds, waking a second thread costs more than it saves.
constexpr int64_t kSerialWork = 1 << 18;

// oneDNN plans for as many threads as OpenMP would give; here that is one, always.
class OneThread {
  public:
    OneThread() : before_(omp_get_max_threads()) { omp_set_num_threads(1); }
    ~OneThread() { omp_set_num_threads(before_); }

  private:
    int before_;
};

memory::desc row_major(int64_t rows, int64_t columns) {
    return {{rows, columns}, memory::data_type::f32, memory::format_tag::ab};
}

}  // namespace

struct OneDnnMatmul::Plan {
    int64_t N, K;
    memory::desc plain, plain_transposed;  // w [N,K], w [K,N], seen as the product's [K,N]
    memory::desc packed;
    dnnl::reorder pack, pack_transposed;
    std::array<dnnl::matmul, kRows.size()> products;
    std::array<memory::desc, kRows.size()> scratch;

    int64_t packed_size() const { return (int64_t(packed.get_size()) + 3) / 4; }
    bool make();
    bool same_bits() const;
    void run(size_t size, float* y, const float* x, const float* w) const {
        // oneDNN's own scratch would be the creating thread's, shared by all who run the product.
        thread_local std::vector<std::byte> buffer;
        buffer.resize(std::max(buffer.size(), scratch[size].get_size()));
        const memory source(row_major(kRows[size], K), engine(), const_cast<float*>(x));
        const memory weights(packed, engine(), const_cast<float*>(w));
        const memory result(row_major(kRows[size], N), engine(), y);
        products[size].execute(
            stream(), {{DNNL_ARG_SRC, source},
                       {DNNL_ARG_WEIGHTS, weights},
                       {DNNL_ARG_DST, result},
                       {DNNL_ARG_SCRATCHPAD, memory(scratch[size], engine(), buffer.data())}});
    }
};

// False where an implementation is not brg.
bool OneDnnMatmul::Plan::make() {
    packed = {{K, N}, memory::data_type::f32, memory::format_tag::any};
    dnnl::primitive_attr attributes;
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    for (size_t i = 0; i < kRows.size(); ++i) {
        const dnnl::matmul::desc wanted(row_major(kRows[i], K), packed, row_major(kRows[i], N));
        const dnnl::matmul::primitive_desc chosen(wanted, attributes, engine());
        if (!std::string(chosen.impl_info_str()).starts_with("brg")) return false;
        packed = chosen.weights_desc();  // the largest row count chooses the layout for all
        scratch[i] = chosen.scratchpad_desc();
        products[i] = dnnl::matmul(chosen);
    }
    plain = {{K, N}, memory::data_type::f32, memory::format_tag::ba};
    plain_transposed = {{K, N}, memory::data_type::f32, memory::format_tag::ab};
    pack = dnnl::reorder({engine(), plain, engine(), packed});
    pack_transposed = dnnl::reorder({engine(), plain_transposed, engine(), packed});
    return true;
}

// Every row count must give a row the same bits, wherever in the chunk it stands.
bool OneDnnMatmul::Plan::same_bits() const {
    const auto draw = [](int64_t n, uint32_t what) {
        std::vector<float> v(n);
        for (int64_t i = 0; i < n; ++i)
            v[i] = uniform_float(philox({{what, 0}}, uint32_t(i), 0, 0, 0).v[0]) - 0.5f;
        return v;
    };
    const int64_t rows = kRows[0];
    const std::vector<float> x = draw(rows * K, 1), w = draw(N * K, 2);
    std::vector<float> layout(packed_size()), want(rows * N), got(rows * N);
    const memory from(plain, engine(), const_cast<float*>(w.data()));
    memory to(packed, engine(), layout.data());
    dnnl::reorder(pack).execute(stream(), const_cast<memory&>(from), to);
    run(0, want.data(), x.data(), layout.data());
    for (size_t size = 1; size < kRows.size(); ++size) {
        for (int64_t m = 0; m < rows; m += kRows[size])
            run(size, got.data() + m * N, x.data() + m * K, layout.data());
        if (std::memcmp(got.data(), want.data(), want.size() * sizeof(float)) != 0) return false;
    }
    return true;
}

OneDnnMatmul::OneDnnMatmul(std::unique_ptr<Plan> plan) : plan_(std::move(plan)) {}
OneDnnMatmul::~OneDnnMatmul() = default;

// The plans are the one state of this file. They are a cache: a pure function of the shape, the
// processor and the library, so which call makes one cannot be seen in any result.
const OneDnnMatmul* OneDnnMatmul::find(int64_t N, int64_t K) {
    static std::mutex mutex;
    static std::map<std::pair<int64_t, int64_t>, std::unique_ptr<OneDnnMatmul>> plans;
    const std::lock_guard lock(mutex);
    const auto [it, added] = plans.try_emplace({N, K});
    if (!added) return it->second.get();
    const OneThread one;
    try {
        auto plan = std::make_unique<Plan>();
        plan->N = N;
        plan->K = K;
        if (plan->make() && plan->same_bits()) it->second.reset(new OneDnnMatmul(std::move(plan)));
    } catch (const dnnl::error&) {  // this processor or shape is not for oneDNN
    }
    return it->second.get();
}

int64_t OneDnnMatmul::packed_size() const { return plan_->packed_size(); }

Status OneDnnMatmul::pack(float* packed, const float* w, bool transposed) const {
    const OneThread one;
    try {
        memory source(transposed ? plan_->plain_transposed : plan_->plain, engine(),
                      const_cast<float*>(w));
        memory target(plan_->packed, engine(), packed);
        dnnl::reorder(transposed ? plan_->pack_transposed : plan_->pack)
            .execute(stream(), source, target);
    } catch (const dnnl::error&) {
        return {Code::device_error, "oneDNN could not reorder the weights"};
    }
    return {};
}

Status OneDnnMatmul::forward(float* y, const float* x, const float* packed, int64_t M,
                             Stream s) const {
    const Plan& p = *plan_;
    const int threads = M * p.N * p.K < kSerialWork ? 1 : s.threads;
    // Chunks no larger than leaves every thread two of them, then what remains in smaller ones.
    std::vector<std::pair<int64_t, size_t>> chunks;  // first row, which count
    int64_t m = 0;
    for (size_t size = 0; size < kRows.size(); ++size) {
        if (kRows[size] > 16 && kRows[size] * 2 * threads > M) continue;
        for (; m + kRows[size] <= M; m += kRows[size]) chunks.emplace_back(m, size);
    }
    std::atomic<bool> failed = false;
    const auto run = [&](size_t i) {
        const auto [row, size] = chunks[i];
        try {
            p.run(size, y + row * p.N, x + row * p.K, packed);
        } catch (const dnnl::error&) {
            failed = true;
        }
    };
    if (threads == 1) {
        const OneThread one;
        for (size_t i = 0; i < chunks.size(); ++i) run(i);
    } else {
#pragma omp parallel for num_threads(threads) schedule(dynamic)
        for (size_t i = 0; i < chunks.size(); ++i) run(i);
    }
    if (failed) return {Code::device_error, "oneDNN could not run the product"};
    return {};
}

}  // namespace fbt::kernels::cpu
