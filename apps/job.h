// The processes that a launcher started with this one, and how they agree: settings, failures and
// stops are everybody's, only the leading one prints and writes.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "apps/console.h"
#include "dist/dist.h"
#include "tensor/error.h"

namespace fbt::apps {

// What the environment says of the job: the first of these that has more than one rank.
//   mpi        mpirun: OMPI_COMM_WORLD_RANK, ..._SIZE, ..._LOCAL_RANK, ..._LOCAL_SIZE; or srun with
//              PMIx: PMIX_RANK beside Slurm's variables
//   pmi        mpirun of MPICH and its kin, or srun with PMI: PMI_RANK and PMI_SIZE
//   variables  RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT
//   slurm      srun without either: SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID; the address
//              is MASTER_ADDR, or the first host of SLURM_STEP_NODELIST
struct Launch {
    enum class By { nobody, mpi, pmi, variables, slurm };
    By by = By::nobody;
    int rank = 0, size = 1;
    int local_rank = 0, local_size = 1;  // on this machine
    int cores = 0;                       // that the launcher leaves a rank; 0: it does not say
    std::string address;                 // where rank 0 can be reached
    int port = 29500;

    // `get` as std::getenv. Errors  usage: a variable that is no number, a rank outside the size.
    static Launch from(const std::function<const char*(const char*)>& get);
    static Launch from_environment();

    // Threads of this process, where `wanted` is 0: its part of the machine's cores, at most those
    // that the launcher left it.
    int threads(int wanted) const;
};

class Job {
  public:
    // `seconds` is how long a rank may keep the others waiting.
    Job(const Launch& launch, double seconds) : launch_(launch), seconds_(seconds) {}
    Job(const Job&) = delete;

    const Launch& launch() const { return launch_; }
    int rank() const { return launch_.rank; }
    int size() const { return launch_.size; }
    bool leads() const { return launch_.rank == 0; }

    // Whether the ranks talk already: MPI's do from the start, NCCL's once they are connected.
    bool talks() const { return talk_ != nullptr || size() == 1; }
    // Errors  usage, known to all, where ranks cannot be joined on this device.
    void check_device(const std::string& device) const;
    // For tensors of this context: MPI's ranks on a CPU, NCCL's on a GPU. Called once; the context
    // must live as long as the job.
    std::shared_ptr<tensor::Communicator> connect(tensor::Context& context, bool reproducible);

    // Meets the other ranks where MPI started them. Called once, within run(). Errors  usage where
    // this build's MPI cannot; environment.
    void join();
    // Runs `body`, whose exit code it returns, to the orderly end of all ranks. Failures that every
    // rank knows of end likewise, and the leading rank has said why; any other is said by the rank
    // that met it, and ends them all.
    int run(const std::function<int()>& body);
    // Runs `f` on every rank. Where it fails on one, it fails on all, with that rank's error.
    void together(const std::function<void()>& f);
    // Over ranks: sums, and whether one says yes.
    std::vector<double> sum(const std::vector<double>& numbers) const;
    bool any(bool yes) const;

  private:
    void finish();
    std::string name() const;  // "rank 1 of 4"

    Launch launch_;
    double seconds_;
    tensor::Context host_{"cpu", 1};
    std::shared_ptr<tensor::Communicator> mpi_, devices_;  // over the host's memory, over GPUs
    tensor::Communicator* talk_ =
        nullptr;  // what agreements go through, and the memory they lie in
    tensor::Context* memory_ = nullptr;
};

}  // namespace fbt::apps
