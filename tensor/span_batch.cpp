#include "tensor/span_batch.h"

#include <algorithm>

namespace fbt::tensor {

using kernels::kKeyBlock;

void SpanBatch::add(int first, int count, const std::vector<int64_t>& blocks) {
    if (count == 0) return;
    const int end = first + count;
    const size_t needed = size_t(end + kKeyBlock - 1) / kKeyBlock;
    if (first < 0 || count < 0 || blocks.size() < needed)
        throw Error(ErrorKind::internal, "span [" + std::to_string(first) + "," +
                                             std::to_string(end) + ") has " +
                                             std::to_string(blocks.size()) + " key blocks");
    spans_.push_back({rows(), int64_t(blocks_.size()), first, count});
    blocks_.insert(blocks_.end(), blocks.begin(), blocks.begin() + needed);
    for (int t = first; t < end; ++t) positions_.push_back(t);
    max_count_ = std::max(max_count_, count);
    max_end_ = std::max(max_end_, end);
}

void SpanBatch::add_contiguous(int first, int count, int64_t start) {
    std::vector<int64_t> blocks;
    for (int t = 0; t < first + count; t += kKeyBlock) blocks.push_back(start + t);
    add(first, count, blocks);
}

void SpanBatch::upload(Context& context) {
    device_spans_ =
        Tensor::empty(context, {int64_t(spans_.size() * sizeof(kernels::Span))}, DType::u8);
    device_spans_.copy_in(spans_.data(), spans_.size() * sizeof(kernels::Span));
    device_blocks_ = Tensor::from(context, blocks_, {int64_t(blocks_.size())});
    device_positions_ = Tensor::from(context, positions_, {rows()});
}

std::vector<int64_t> SpanBatch::own_slots() const {
    std::vector<int64_t> slots;
    slots.reserve(positions_.size());
    for (const kernels::Span& span : spans_)
        for (int t = span.first; t < span.first + span.count; ++t)
            slots.push_back(blocks_[span.block + t / kKeyBlock] + t % kKeyBlock);
    return slots;
}

kernels::SpanTable SpanBatch::table() const {
    return {device_spans_.data<kernels::Span>(),
            device_blocks_.data<int64_t>(),
            int32_t(spans_.size()),
            max_count_,
            max_end_,
            rows()};
}

}  // namespace fbt::tensor
