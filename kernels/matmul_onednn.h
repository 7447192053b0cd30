// y = x w^T through oneDNN, where it keeps the row rule.
#pragma once
#include <cstdint>
#include <memory>
#include <span>

#include "kernels/types.h"

namespace fbt::kernels::cpu {

// oneDNN chooses an algorithm by shape, and with run-time or rare row counts one whose sums change
// with M. So it is only called on a few fixed row counts, on one thread each, and only for shapes
// where its implementation is "brg" for every one of them and a self-test finds the same bits in
// all (once a shape and process). The threads are ours: an item of work is a chunk of rows, of
// whichever of those counts suits M, since all give the same bits.
class OneDnnMatmul {
  public:
    // The plan for w [N,K]; null where oneDNN does not qualify. Never depends on M or threads.
    // Creating a shape's primitives takes milliseconds, so plans are kept for the process.
    static const OneDnnMatmul* find(int64_t N, int64_t K);

    int64_t packed_size() const;  // elements
    Status pack(float* packed, const float* w, bool transposed, Stream s) const;
    // Products of one x with weights of the same K, each packed by its plan.
    struct Output {
        const OneDnnMatmul* plan;
        float* y;
        const float* packed;
    };
    static Status forward(std::span<const Output> outputs, const float* x, int64_t M, Stream s);

    ~OneDnnMatmul();

  private:
    struct Plan;
    explicit OneDnnMatmul(std::unique_ptr<Plan> plan);
    std::unique_ptr<Plan> plan_;
};

}  // namespace fbt::kernels::cpu
