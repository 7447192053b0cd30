#include "bench/onednn_matmul.h"

#include <omp.h>

#include <algorithm>
#include <chrono>

namespace fbt::bench {
namespace {

using dnnl::memory;

class Threads {
  public:
    explicit Threads(int count) : before_(omp_get_max_threads()) { omp_set_num_threads(count); }
    ~Threads() { omp_set_num_threads(before_); }
    Threads(const Threads&) = delete;

  private:
    int before_;
};

}  // namespace

OneDnnMatmul::OneDnnMatmul(int64_t M, int64_t N, int64_t K, DType dtype)
    : engine_(dnnl::engine::kind::cpu, 0), stream_(engine_), M_(M), N_(N), K_(K), dtype_(dtype) {
    dnnl::set_primitive_cache_capacity(0);  // it does not tell numbers of threads apart
    packed_ =
        description(omp_get_num_procs(), {{K, N}, dtype, memory::format_tag::any}).weights_desc();
}

dnnl::matmul::primitive_desc OneDnnMatmul::description(int threads,
                                                       const memory::desc& weights) const {
    const Threads only(threads);
    const memory::desc x({M_, K_}, dtype_, memory::format_tag::ab),
        y({M_, N_}, dtype_, memory::format_tag::ab);
    return {{x, weights, y}, engine_};
}

void OneDnnMatmul::pack(void* packed, const float* w) {
    const memory::desc plain({K_, N_}, DType::f32, memory::format_tag::ba);
    memory from(plain, engine_, const_cast<float*>(w)), to(packed_, engine_, packed);
    dnnl::reorder(from, to).execute(stream_, from, to);
    stream_.wait();
}

void OneDnnMatmul::forward(void* y, const void* x, const void* packed, int threads) {
    auto made = by_threads_.find(threads);
    if (made == by_threads_.end())
        made = by_threads_.emplace(threads, dnnl::matmul(description(threads, packed_))).first;
    const Threads only(threads);
    const memory::desc rows({M_, K_}, dtype_, memory::format_tag::ab),
        result({M_, N_}, dtype_, memory::format_tag::ab);
    made->second.execute(stream_,
                         {{DNNL_ARG_SRC, memory(rows, engine_, const_cast<void*>(x))},
                          {DNNL_ARG_WEIGHTS, memory(packed_, engine_, const_cast<void*>(packed))},
                          {DNNL_ARG_DST, memory(result, engine_, y)}});
    stream_.wait();
}

OneDnnModel::OneDnnModel(const std::vector<Matrix>& matrices, int64_t M, OneDnnMatmul::DType dtype)
    : M_(M) {
    int64_t widest = 0;
    for (const Matrix& m : matrices) {
        widest = std::max({widest, m.in, m.out});
        Product& p =
            products_.emplace_back(Product{m, OneDnnMatmul(M, m.out, m.in, dtype), {}, {}});
        const std::vector<float> w(size_t(m.out * m.in), 0.01f);
        p.packed.resize(size_t(p.matmul.packed_bytes()));
        p.matmul.pack(p.packed.data(), w.data());
    }
    x_.assign(size_t(2 * M * widest), 0x3f80);  // about 1 in either dtype
    y_.resize(x_.size());
}

void OneDnnModel::time(int threads) {
    for (Product& p : products_) {
        const auto start = std::chrono::steady_clock::now();
        p.matmul.forward(y_.data(), x_.data(), p.packed.data(), threads);
        p.seconds.push_back(
            std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
}

double OneDnnModel::rate() const {
    double flops = 0, seconds = 0;
    for (const Product& p : products_) {
        std::vector<double> times = p.seconds;
        std::ranges::nth_element(times, times.begin() + std::ptrdiff_t(times.size() / 2));
        flops += p.matrix.count * 2.0 * double(M_ * p.matrix.out * p.matrix.in);
        seconds += p.matrix.count * times[times.size() / 2];
    }
    return flops / seconds;
}

}  // namespace fbt::bench
