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

void SpanBatch::upload(Context& context, int reach) {
    if (reach != 0 && reach < max_end_)
        throw Error(ErrorKind::internal, "spans end at " + std::to_string(max_end_) +
                                             ", beyond their reach of " + std::to_string(reach));
    reach_ = std::max(reach, max_end_);
    const size_t room = (size_t(reach) + kKeyBlock - 1) / kKeyBlock * spans_.size();
    device_spans_ = Tensor::empty(context, {int64_t(spans_.size() * sizeof(kernels::Span))},
                                  DType::u8, Use::inbox);
    device_blocks_ =
        Tensor::empty(context, {int64_t(std::max(room, blocks_.size()))}, DType::i64, Use::inbox);
    device_positions_ = Tensor::empty(context, {rows()}, DType::i32, Use::inbox);
    copy_in();
}

void SpanBatch::overwrite(const SpanBatch& next) {
    if (next.spans_.size() != spans_.size() || next.rows() != rows() ||
        next.max_count_ > max_count_ || next.max_end_ > reach_)
        throw Error(ErrorKind::internal, "a batch of other spans cannot be written over this one");
    spans_ = next.spans_;
    blocks_ = next.blocks_;
    positions_ = next.positions_;
    copy_in();
}

void SpanBatch::copy_in() {
    device_spans_.copy_in(spans_.data(), spans_.size() * sizeof(kernels::Span));
    device_blocks_.rows(0, int64_t(blocks_.size()))
        .copy_in(blocks_.data(), blocks_.size() * sizeof(int64_t));
    device_positions_.copy_in(positions_.data(), positions_.size() * sizeof(int32_t));
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
            reach_,
            rows()};
}

}  // namespace fbt::tensor
