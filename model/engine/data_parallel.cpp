#include "model/engine/data_parallel.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string_view>

#include "model/core/flops.h"
#include "model/engine/share.h"
#include "nn/optimizer.h"

namespace fbt::model::engine {
namespace {

// "layers.3." of "layers.3.attn.q.weight", "embed." of "embed.weight"
std::string_view block_of(std::string_view name) {
    const size_t first = name.find('.') + 1;
    return name.substr(0, name.starts_with("layers.") ? name.find('.', first) + 1 : first);
}

}  // namespace

std::vector<int> owners(const nn::ParameterSet& parameters, int ranks, bool sharded) {
    std::vector<int> owner(parameters.all().size(), kEveryRank);
    if (!sharded || ranks == 1) return owner;
    std::vector<size_t> dealt;
    std::vector<double> costs;
    for (size_t i = 0; i < owner.size(); ++i) {
        const nn::Parameter& p = parameters.all()[i];
        if (p.role() == nn::Role::gain) continue;
        dealt.push_back(i);
        costs.push_back(nn::AdamW::cost(p));
    }
    const std::vector<int> part = deal(costs, ranks);
    for (size_t i = 0; i < dealt.size(); ++i) owner[dealt[i]] = part[i];
    return owner;
}

int64_t most_owned(const nn::ParameterSet& parameters, int ranks, bool sharded) {
    const std::vector<int> owner = owners(parameters, ranks, sharded);
    std::vector<int64_t> owned(size_t(ranks), 0);
    int64_t everywhere = 0;
    for (size_t i = 0; i < owner.size(); ++i)
        (owner[i] == kEveryRank ? everywhere : owned[size_t(owner[i])]) +=
            tensor::numel_of(parameters.all()[i].shape());
    return everywhere + *std::max_element(owned.begin(), owned.end());
}

Share share_of(const core::Config& config, const core::Batch& batch, const core::PassPlan& plan,
               int rank, int ranks) {
    std::vector<double> work;
    for (size_t s = 0; s < batch.lengths.size(); ++s) {
        double flops = core::pass_flops(config, 0, batch.lengths[s]);
        for (const std::vector<int32_t>& plain : plan.plain)
            flops += core::pass_flops(config, plain[s], batch.lengths[s]);
        work.push_back(flops);
    }
    const std::vector<int> part = deal(work, ranks);
    Share share;
    std::vector<double> load(size_t(ranks), 0);
    for (size_t s = 0; s < work.size(); ++s) {
        load[size_t(part[s])] += work[s];
        if (part[s] == rank) share.sequences.push_back(s);
    }
    const double total = std::accumulate(load.begin(), load.end(), 0.0);
    if (total > 0) share.spread = *std::max_element(load.begin(), load.end()) * ranks / total - 1;
    return share;
}

// The way back completes parameters from the last block to the first, so the set's order is walked
// backwards: it ends with the fusion, whose last use is before pass 1's way back. The embedding,
// first of all, is completed last. Gains, of all blocks, share a bucket, which goes at the end.
DataParallel::DataParallel(nn::ParameterSet& parameters, std::shared_ptr<Communicator> communicator,
                           bool sharded, int64_t bucket_bytes)
    : parameters_(parameters),
      communicator_(std::move(communicator)),
      owner_(owners(parameters, communicator_->size(), sharded)) {
    if (communicator_->size() == 1) return;
    std::vector<size_t> bucket, gains;
    int64_t bytes = 0;
    std::string_view last;
    const auto close = [&] {
        if (!bucket.empty()) fill(bucket, sharded);
        bucket.clear();
        bytes = 0;
    };
    for (size_t i = owner_.size(); i-- > 0;) {
        const nn::Parameter& p = parameters_.all()[i];
        if (p.role() == nn::Role::gain) {
            gains.push_back(i);
            continue;
        }
        const std::string_view block = block_of(p.name());
        if (block != last && (bytes >= bucket_bytes || p.role() == nn::Role::embedding)) close();
        last = block;
        bucket.push_back(i);
        bytes += int64_t(p.weight().grad.bytes());
    }
    close();
    if (!gains.empty()) fill(gains, false);
    for (size_t i = 0; i < owner_.size(); ++i)
        if (owner_[i] != kEveryRank && owner_[i] != communicator_->rank())
            parameters_.all()[i].disown();
}

// Members lie in the order of their owners, each from a multiple of 16 elements on: kernels like
// aligned rows.
void DataParallel::fill(const std::vector<size_t>& parameters, bool sharded) {
    Bucket bucket;
    bucket.sharded = sharded;
    bucket.counts.assign(size_t(communicator_->size()), 0);
    int64_t end = 0;
    for (int rank = sharded ? 0 : kEveryRank; rank < communicator_->size(); ++rank) {
        for (size_t i : parameters) {
            if (owner_[i] != rank) continue;
            nn::Parameter& p = parameters_.all()[i];
            bucket.members.push_back({&p, end});
            const int64_t size = (tensor::numel_of(p.shape()) + 15) / 16 * 16;
            end += size;
            if (sharded) bucket.counts[size_t(rank)] += size;
        }
        if (!sharded) break;
    }
    const Tensor& any = bucket.members[0].parameter->weight().grad;
    bucket.gradients = Tensor::zeros(any.context(), {end}, any.dtype());
    for (const Member& m : bucket.members) {
        m.parameter->weight().grad = m.slice(bucket.gradients);
        bucket_of_[&m.parameter->weight()] = buckets_.size();
    }
    buckets_.push_back(std::move(bucket));
}

void DataParallel::begin(const autograd::Tape& tape) {
    sent_ = 0;
    for (Bucket& bucket : buckets_)
        bucket.waiting = size_t(
            std::count_if(bucket.members.begin(), bucket.members.end(),
                          [&](const Member& m) { return tape.uses(m.parameter->weight()) > 0; }));
    send_complete();
}

void DataParallel::ready(const autograd::Weight& weight) {
    if (buckets_.empty()) return;
    --buckets_[bucket_of_.at(&weight)].waiting;
    send_complete();
}

// In one order on all ranks, although a rank's own passes may complete buckets in another.
void DataParallel::send_complete() {
    for (; sent_ < buckets_.size() && buckets_[sent_].waiting == 0; ++sent_) {
        const Bucket& bucket = buckets_[sent_];
        last_ = bucket.sharded ? communicator_->reduce_scatter(bucket.gradients, bucket.counts)
                               : communicator_->all_reduce(bucket.gradients);
    }
}

void DataParallel::finish() {
    if (buckets_.empty()) return;
    if (sent_ < buckets_.size())
        throw tensor::Error(tensor::ErrorKind::internal,
                            "a gradient of " + buckets_[sent_].members[0].parameter->name() +
                                "'s bucket was never completed");
    communicator_->wait(last_);
    std::vector<double> reached;
    for (const nn::Parameter& p : parameters_.all()) reached.push_back(p.weight().reached);
    reached = sum(reached);
    for (size_t i = 0; i < reached.size(); ++i)
        parameters_.all()[i].weight().reached = reached[i] > 0;
}

// Each square comes from one rank, the other terms being 0, so its sum is exact; and they are added
// in the parameters' order. So the norm's bits do not depend on who owns what.
double DataParallel::norm_and_sums(std::vector<double> squares, std::vector<double>& numbers) {
    const size_t n = squares.size();
    if (communicator_->size() > 1) {
        for (size_t i = 0; i < n; ++i)
            if (owner_[i] == kEveryRank && communicator_->rank() > 0) squares[i] = 0;
        squares.insert(squares.end(), numbers.begin(), numbers.end());
        squares = sum(squares);
        numbers.assign(squares.begin() + ptrdiff_t(n), squares.end());
    }
    return std::sqrt(std::accumulate(squares.begin(), squares.begin() + ptrdiff_t(n), 0.0));
}

// The next forward walks the buckets from the last to the first.
void DataParallel::hand_round() {
    for (size_t b = buckets_.size(); b-- > 0;) {
        const Bucket& bucket = buckets_[b];
        if (!bucket.sharded ||
            std::none_of(bucket.members.begin(), bucket.members.end(),
                         [](const Member& m) { return m.parameter->weight().reached; }))
            continue;
        const autograd::Weight& any = bucket.members[0].parameter->weight();
        const tensor::DType dtype = any.packed.data.dtype();
        const Tensor values =
            Tensor::zeros(bucket.gradients.context(), bucket.gradients.shape(), dtype);
        for (const Member& m : bucket.members)
            if (m.parameter->owned())
                m.slice(values).copy_from(tensor::cast(m.parameter->weight().value, dtype));
        const Communicator::Ticket ticket = communicator_->all_gather(values, bucket.counts);
        for (const Member& m : bucket.members)
            if (!m.parameter->owned())
                m.parameter->weight().arrive = [=, communicator = communicator_] {
                    communicator->wait(ticket);
                    m.parameter->arrived(m.slice(values));
                };
    }
}

Tensor DataParallel::whole(size_t parameter, const Tensor& own) const {
    const int owner = owner_[parameter];
    if (owner == kEveryRank) return own;
    const nn::Parameter& p = parameters_.all()[parameter];
    const Tensor t =
        owner == communicator_->rank()
            ? own
            : Tensor::empty(p.weight().grad.context(), p.shape(), p.weight().grad.dtype());
    communicator_->wait(communicator_->broadcast(t, owner));
    return t;
}

std::vector<double> DataParallel::sum(const std::vector<double>& numbers) const {
    if (communicator_->size() == 1) return numbers;
    tensor::Context& context = buckets_[0].gradients.context();
    const Tensor t = Tensor::from(context, numbers, {int64_t(numbers.size())});
    communicator_->wait(communicator_->all_reduce(t));
    return t.to_vector<double>();
}

}  // namespace fbt::model::engine
