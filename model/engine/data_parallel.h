// One model trained by the processes of a job: which sequences and which parameters are whose,
// gradients summed while the way back goes on, new values handed round while the next step begins.
//
// Every rank keeps all gradients. With ZeRO-1 (Rajbhandari et al., 2019, section 5.1) the master
// copy and the moments of a matrix or of the embedding are at one rank, its owner: gradients are
// summed there, updated there, and the values go to the others in the compute dtype. Gains are
// small, and every rank updates them all.
#pragma once
#include <memory>
#include <unordered_map>
#include <vector>

#include "autograd/tape.h"
#include "model/core/config.h"
#include "model/core/objective.h"
#include "nn/parameter.h"
#include "tensor/communicator.h"

namespace fbt::model::engine {

using tensor::Communicator;
using tensor::Tensor;

// The owners of a model's parameters, in their order; -1: every rank. Whole parameters are dealt by
// the cost of their update.
inline constexpr int kEveryRank = -1;
std::vector<int> owners(const nn::ParameterSet& parameters, int ranks, bool sharded);
// Numbers of the rank that updates most of them.
int64_t most_owned(const nn::ParameterSet& parameters, int ranks, bool sharded);

// Which sequences of a step's batch are this rank's. They are dealt by the work of all passes
// (core::pass_flops), a rule of the batch alone: any number of ranks sees the same batches.
struct Share {
    std::vector<size_t> sequences;  // in the batch's order
    double spread = 0;              // the most work of a rank over the mean, less 1
};
Share share_of(const core::Config& config, const core::Batch& batch, const core::PassPlan& plan,
               int rank, int ranks);

class DataParallel {
  public:
    // The parameters have their values. Those that other ranks own are disowned, and all gradients
    // move into buckets. In a job of one process nothing happens, here and below.
    // bucket_bytes  a bucket has the gradients of a block, or of as many blocks as have these bytes
    DataParallel(nn::ParameterSet& parameters, std::shared_ptr<Communicator> communicator,
                 bool sharded, int64_t bucket_bytes = int64_t(4) << 20);
    DataParallel(const DataParallel&) = delete;

    Communicator& communicator() const { return *communicator_; }

    // A way back is about to begin on this tape, of which ready() will hear.
    void begin(const autograd::Tape& tape);
    void ready(const autograd::Weight& weight);
    // Sends what is left. Afterwards an owned parameter's gradient is the sum over ranks, and
    // `reached` says whether one of them reached it.
    void finish();

    // The whole gradient's norm from each rank's AdamW::gradient_squares(), and sums of `numbers`
    // over ranks, in place.
    double norm_and_sums(std::vector<double> squares, std::vector<double>& numbers);

    // After the update: starts to hand the owners' new values round. Each arrives when an op first
    // reads it.
    void hand_round();

    // A parameter's tensor from its owner, on every rank: for checkpoints. `own` is only looked at
    // where this rank owns it.
    Tensor whole(size_t parameter, const Tensor& own) const;
    // Sums over ranks.
    std::vector<double> sum(const std::vector<double>& numbers) const;

  private:
    struct Member {
        nn::Parameter* parameter;
        int64_t at;  // its first element in the bucket
        Tensor slice(const Tensor& flat) const {
            return flat.rows(at, tensor::numel_of(parameter->shape())).view(parameter->shape());
        }
    };
    struct Bucket {
        bool sharded;
        std::vector<Member> members;
        std::vector<int64_t> counts;  // elements of each rank, one after the other
        Tensor gradients;
        size_t waiting = 0;  // members whose gradients are not complete
    };
    void fill(const std::vector<size_t>& parameters, bool sharded);
    void send_complete();

    nn::ParameterSet& parameters_;
    std::shared_ptr<Communicator> communicator_;
    std::vector<int> owner_;
    std::vector<Bucket> buckets_;  // in the order in which the way back completes them
    std::unordered_map<const autograd::Weight*, size_t> bucket_of_;
    size_t sent_ = 0;  // buckets of this step that are on their way
    Communicator::Ticket last_ = 0;
};

}  // namespace fbt::model::engine
