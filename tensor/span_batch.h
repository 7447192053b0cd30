// Spans of many sequences packed into one call: the host's description and its device tables.
#pragma once
#include <vector>

#include "tensor/tensor.h"

namespace fbt::tensor {

class SpanBatch {
  public:
    // Adds a span of `count` rows that starts at position `first` of a sequence whose keys lie in
    // the store rows `blocks` (the first row of each run of kKeyBlock positions from position 0).
    void add(int first, int count, const std::vector<int64_t>& blocks);
    // The same for a sequence whose store rows are contiguous from row `start`.
    void add_contiguous(int first, int count, int64_t start);

    // Copies the tables to the device; call once, after the last add. With `reach` positions, which
    // no span may exceed, the device's tables have room for as many key blocks a span, and kernels
    // are launched for as many: batches that grow may then be written over this one.
    void upload(Context& context, int reach = 0);
    // The device's tables of this batch become those of `next`, in the same memory. next has as
    // many spans and rows, within the reach. Errors  internal when it has not.
    void overwrite(const SpanBatch& next);

    int64_t rows() const { return int64_t(positions_.size()); }           // N
    const std::vector<int32_t>& positions() const { return positions_; }  // [N]
    int max_end() const { return max_end_; }  // the largest first + count
    // The store row of each packed row's own position, [N].
    std::vector<int64_t> own_slots() const;

    kernels::SpanTable table() const;
    const Tensor& device_positions() const { return device_positions_; }

  private:
    void copy_in();
    std::vector<kernels::Span> spans_;
    std::vector<int64_t> blocks_;
    std::vector<int32_t> positions_;
    int max_count_ = 0, max_end_ = 0;
    int reach_ = 0;
    Tensor device_spans_, device_blocks_, device_positions_;
};

}  // namespace fbt::tensor
