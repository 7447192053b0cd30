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

// Row counts that primitives exist for, and the first of those that exist for parts of the columns
// as well; a part is a whole number of oneDNN's blocks of columns.
constexpr std::array<int64_t, 5> kRows = {256, 64, 16, 4, 1};
constexpr size_t kFewRows = 2;
constexpr int64_t kColumnBlock = 64, kMostParts = 8;

const dnnl::engine& engine() {
    static const dnnl::engine cpu(dnnl::engine::kind::cpu, 0);
    return cpu;
}
dnnl::stream& stream() {
    thread_local dnnl::stream mine(engine());
    return mine;
}

// Below this many multiply-adds, waking a second thread costs more than it saves.
constexpr int64_t kSerialWork = 1 << 16;

// oneDNN plans and runs with as many threads as OpenMP would give: for products that is one,
// always.
class Threads {
  public:
    explicit Threads(int count) : before_(omp_get_max_threads()) { omp_set_num_threads(count); }
    ~Threads() { omp_set_num_threads(before_); }

  private:
    int before_;
};

memory::desc row_major(int64_t rows, int64_t columns) {
    return {{rows, columns}, memory::data_type::f32, memory::format_tag::ab};
}

}  // namespace

struct OneDnnMatmul::Plan {
    struct Product {
        dnnl::matmul primitive;
        memory::desc source, weights, result, scratch;
    };
    int64_t N, K;
    memory::desc plain, plain_transposed;  // w [N,K], w [K,N], seen as the product's [K,N]
    memory::desc packed;
    dnnl::reorder pack, pack_transposed;
    std::array<Product, kRows.size()> products;
    // From kFewRows on: of `part` columns, and of those that remain. None where part is 0.
    int64_t part = 0;
    std::array<Product, kRows.size()> parts, last_part;

    int64_t packed_size() const { return (int64_t(packed.get_size()) + 3) / 4; }
    bool make();
    bool make_product(Product& product, int64_t rows, const memory::desc& weights);
    bool same_bits();
    int64_t part_count() const { return ceil_div(N, part); }
    void run(const Product& product, float* y, const float* x, const float* w) const {
        // oneDNN's own scratch would be the creating thread's, shared by all who run the product.
        thread_local std::vector<std::byte> buffer;
        buffer.resize(std::max(buffer.size(), product.scratch.get_size()));
        const memory source(product.source, engine(), const_cast<float*>(x));
        const memory weights(product.weights, engine(), const_cast<float*>(w));
        const memory result(product.result, engine(), y);
        product.primitive.execute(
            stream(), {{DNNL_ARG_SRC, source},
                       {DNNL_ARG_WEIGHTS, weights},
                       {DNNL_ARG_DST, result},
                       {DNNL_ARG_SCRATCHPAD, memory(product.scratch, engine(), buffer.data())}});
    }
    void run(size_t size, float* y, const float* x, const float* w) const {
        run(products[size], y, x, w);
    }
    // Part i of the columns of kRows[size] rows. oneDNN wants dense results, so they are copied.
    void run_part(size_t size, int64_t i, float* y, const float* x, const float* w) const {
        const int64_t first = i * part, columns = std::min(part, N - first);
        thread_local std::vector<float> dense;
        dense.resize(std::max(dense.size(), size_t(kRows[size] * columns)));
        run((columns == part ? parts : last_part)[size], dense.data(), x,
            w + packed_size() / ceil_div(N, kColumnBlock) * (first / kColumnBlock));
        for (int64_t r = 0; r < kRows[size]; ++r)
            std::copy_n(dense.data() + r * columns, columns, y + r * N + first);
    }
};

// False where the implementation is not brg.
bool OneDnnMatmul::Plan::make_product(Product& product, int64_t rows, const memory::desc& weights) {
    dnnl::primitive_attr attributes;
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    const dnnl::matmul::desc wanted(row_major(rows, K), weights,
                                    row_major(rows, weights.dims()[1]));
    const dnnl::matmul::primitive_desc chosen(wanted, attributes, engine());
    if (!std::string(chosen.impl_info_str()).starts_with("brg")) return false;
    product = {dnnl::matmul(chosen), chosen.src_desc(), chosen.weights_desc(), chosen.dst_desc(),
               chosen.scratchpad_desc()};
    return true;
}

bool OneDnnMatmul::Plan::make() {
    const auto any = [this](int64_t columns) {
        return memory::desc({K, columns}, memory::data_type::f32, memory::format_tag::any);
    };
    packed = any(N);
    for (size_t i = 0; i < kRows.size(); ++i) {
        if (!make_product(products[i], kRows[i], packed)) return false;
        packed = products[i].weights;  // the largest row count chooses the layout for all
    }
    plain = {{K, N}, memory::data_type::f32, memory::format_tag::ba};
    plain_transposed = {{K, N}, memory::data_type::f32, memory::format_tag::ab};
    pack = dnnl::reorder({engine(), plain, engine(), packed});
    pack_transposed = dnnl::reorder({engine(), plain_transposed, engine(), packed});
    if (N < 2 * kColumnBlock) return true;
    const int64_t width = ceil_div(ceil_div(N, kMostParts), kColumnBlock) * kColumnBlock;
    const int64_t last = N - (ceil_div(N, width) - 1) * width;
    for (size_t i = kFewRows; i < kRows.size(); ++i)
        if (!make_product(parts[i], kRows[i], any(width)) ||
            !make_product(last_part[i], kRows[i], any(last)))
            return true;
    // Parts can lie in the whole's weights only where these are the parts', one after the other.
    const size_t of_parts = size_t(ceil_div(N, width) - 1) * parts[kFewRows].weights.get_size() +
                            last_part[kFewRows].weights.get_size();
    if (of_parts == packed.get_size()) part = width;
    return true;
}

// Every row count must give a row the same bits, wherever in the chunk it stands. If parts of the
// columns do not, there are none.
bool OneDnnMatmul::Plan::same_bits() {
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
    for (size_t size = kFewRows; part > 0 && size < kRows.size(); ++size) {
        for (int64_t m = 0; m < rows; m += kRows[size])
            for (int64_t i = 0; i < part_count(); ++i)
                run_part(size, i, got.data() + m * N, x.data() + m * K, layout.data());
        if (std::memcmp(got.data(), want.data(), want.size() * sizeof(float)) != 0) part = 0;
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
    const Threads one(1);
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

Status OneDnnMatmul::pack(float* packed, const float* w, bool transposed, Stream s) const {
    const Threads all(s.threads);
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

Status OneDnnMatmul::forward(std::span<const Output> outputs, const float* x, int64_t M, Stream s) {
    int64_t work = 0;
    for (const Output& o : outputs) work += M * o.plan->plan_->N * o.plan->plan_->K;
    const int threads = work < kSerialWork ? 1 : s.threads;
    // Chunks no larger than leaves every thread two of them, then what remains in smaller ones.
    std::vector<std::pair<int64_t, size_t>> chunks;  // first row, which count
    int64_t m = 0;
    for (size_t size = 0; size < kRows.size(); ++size) {
        if (kRows[size] > 16 && kRows[size] * 2 * threads > M) continue;
        for (; m + kRows[size] <= M; m += kRows[size]) chunks.emplace_back(m, size);
    }
    const bool few = threads > 1 && !chunks.empty() && chunks[0].second >= kFewRows &&
                     int64_t(chunks.size()) < 4 * threads;
    struct Item {
        const Output* output;
        int64_t row, part;  // part -1: all columns
        size_t size;
    };
    std::vector<Item> items;
    for (const Output& o : outputs)
        for (const auto& [row, size] : chunks)
            if (few && o.plan->plan_->part > 0)
                for (int64_t part = 0; part < o.plan->plan_->part_count(); ++part)
                    items.push_back({&o, row, part, size});
            else
                items.push_back({&o, row, -1, size});
    std::atomic<bool> failed = false;
    const auto run = [&](const Item& item) {
        const Plan& p = *item.output->plan->plan_;
        float* y = item.output->y + item.row * p.N;
        try {
            if (item.part < 0)
                p.run(item.size, y, x + item.row * p.K, item.output->packed);
            else
                p.run_part(item.size, item.part, y, x + item.row * p.K, item.output->packed);
        } catch (const std::exception&) {  // of oneDNN, or no memory
            failed = true;
        }
    };
    if (threads == 1) {
        const Threads one(1);
        for (const Item& item : items) run(item);
    } else {
#pragma omp parallel for num_threads(threads) schedule(dynamic)
        for (size_t i = 0; i < items.size(); ++i) run(items[i]);
    }
    if (failed) return {Code::device_error, "oneDNN could not run the product"};
    return {};
}

}  // namespace fbt::kernels::cpu
