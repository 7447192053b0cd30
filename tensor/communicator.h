// The processes of one job, and what they do with each other's tensors. This class is a job of one
// process; dist/ has those of many, over MPI and NCCL.
#pragma once
#include <cstdint>
#include <vector>

#include "tensor/tensor.h"

namespace fbt::tensor {

// Collectives are called by every rank, in the same order, with equal numbers of elements and
// dtypes, from one thread. All work in place, and only start: what was queued on the tensor's
// context before is done first, later work on it sees the result after wait(). Until then the
// elements must not be touched; the communicator keeps their memory alive.
//
// Nothing that other ranks do hangs this one, and nothing of it is thrown: when they do not take
// part within the time limit, or when the library reports an error, the process ends with a message
// that names rank and op. Errors  internal for arguments that are not as said here.
class Communicator {
  public:
    // Collectives end in the order in which they were started; this one is the n-th.
    using Ticket = int64_t;

    virtual ~Communicator() = default;
    int rank() const { return rank_; }
    int size() const { return size_; }
    virtual const char* name() const { return "alone"; }

    // x = the sum over ranks. x f32 or f64.
    virtual Ticket all_reduce(const Tensor& /*x*/) { return 0; }
    // x is cut into consecutive pieces of counts[r] elements, r = 0..size-1, with no rest. Piece
    // rank() becomes the sum over ranks of theirs; what the others then hold is unspecified. x f32
    // or f64.
    virtual Ticket reduce_scatter(const Tensor& /*x*/, const std::vector<int64_t>& /*counts*/) {
        return 0;
    }
    // Cut likewise. Every piece r becomes rank r's. Any dtype.
    virtual Ticket all_gather(const Tensor& /*x*/, const std::vector<int64_t>& /*counts*/) {
        return 0;
    }
    // x = the root's. Any dtype.
    virtual Ticket broadcast(const Tensor& /*x*/, int /*root*/) { return 0; }
    // Until the collective of this ticket and all before it are done, as said above.
    virtual void wait(Ticket) {}
    // Returns when every rank has called it.
    virtual void barrier() {}
    // The orderly end: every rank calls it, nothing may follow.
    virtual void finish() {}
    // Tells the launcher, where there is one, to end every rank; this one is about to exit with
    // `code`. It may return or not.
    virtual void end_all(int /*code*/) {}

  protected:
    int rank_ = 0, size_ = 1;
};

}  // namespace fbt::tensor
