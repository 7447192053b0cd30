// oneDNN's product as fast as it goes, the ceiling of ours: weights packed as it likes, any order
// of sums, its own threads.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <oneapi/dnnl/dnnl.hpp>
#include <vector>

#include "model/core/flops.h"

namespace fbt::bench {

// y[m,n] = sum_k x[m,k] * w[n,k].  x [M,K], y [M,N], row-major, both of `dtype`; w [N,K] float.
// Throws dnnl::error where oneDNN has no product of that dtype.
class OneDnnMatmul {
  public:
    using DType = dnnl::memory::data_type;
    OneDnnMatmul(int64_t M, int64_t N, int64_t K, DType dtype);

    int64_t packed_bytes() const { return int64_t(packed_.get_size()); }
    void pack(void* packed, const float* w);
    void forward(void* y, const void* x, const void* packed, int threads);

  private:
    // oneDNN shares work out when a primitive is made, for as many threads as OpenMP then has.
    dnnl::matmul::primitive_desc description(int threads, const dnnl::memory::desc& weights) const;

    dnnl::engine engine_;
    dnnl::stream stream_;
    int64_t M_, N_, K_;
    DType dtype_;
    dnnl::memory::desc packed_;
    std::map<int, dnnl::matmul> by_threads_;
};

using model::core::Matrix;

// Products of M rows with all of a model's matrices: what a step could reach if it were nothing but
// them. Each call of `time` runs each once; `rate` takes each one's median.
class OneDnnModel {
  public:
    OneDnnModel(const std::vector<Matrix>& matrices, int64_t M, OneDnnMatmul::DType dtype);
    void time(int threads);
    double rate() const;  // FLOP/s

  private:
    struct Product {
        Matrix matrix;
        OneDnnMatmul matmul;
        std::vector<std::byte> packed;
        std::vector<double> seconds;
    };
    int64_t M_;
    std::vector<Product> products_;
    std::vector<uint16_t> x_, y_;  // as long as the largest, in the wider dtype
};

}  // namespace fbt::bench
