// Communicators of many processes. MPI: host memory, whatever started the processes. NCCL: a GPU a
// process. Both are there when the build found them.
#pragma once
#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "tensor/communicator.h"

namespace fbt::dist {

using tensor::Communicator;
using tensor::Context;

// What ends a process whose job cannot go on: it is given the message, from any thread, and does
// not return.
using Fail = std::function<void(const std::string& message)>;

// "Open MPI 4.1.4", "2.28.9"; empty where the build has none.
std::string mpi_version();
std::string nccl_version();

struct Options {
    double seconds = 300;  // that a collective may wait for the other ranks
    Fail fail;
    int rank = -1;  // as the launcher counts, for what is said before MPI says it; -1: unknown
};
// What one rank of these waits in seconds. Of several that wait for the same one the lowest gives
// up first and speaks for all, and the launcher needs a moment to end the others.
inline double patience(double seconds, int rank) { return seconds + 1.5 * std::min(rank, 2); }

// The ranks that mpirun or srun started; without either, a job of one. Sums are made in the order
// of the ranks, so that the same number of ranks gives the same bits, and an element the same ones
// in all_reduce and in reduce_scatter, whoever owns it. At most once in a process. Makes two
// threads, which sleep while they wait.
// Memory  size-1 times the largest piece that this rank has summed
// Errors  environment when MPI does not start; internal in a build without it. The collectives
//         throw internal for arguments that break their contract, for tensors outside host memory
//         and for more than 2^31-1 elements.
std::unique_ptr<Communicator> connect_mpi(Options options);

// Gives every rank rank 0's bytes.
using Exchange = std::function<void(std::span<std::byte> bytes)>;

// Rank `rank` of `size` on the context's GPU. `exchange` is called once.
// reproducible  sums are made in the order of the ranks
// Errors  environment when NCCL does not start; internal in a build without it.
std::unique_ptr<Communicator> connect_nccl(Context& context, int rank, int size,
                                           const Exchange& exchange, bool reproducible,
                                           Options options);

// Exchange over TCP: rank 0 listens on this port, the others connect to `address`, a host's name or
// number, trying again until it listens. Errors  environment, naming address and port, when that
// takes longer than `seconds`.
void exchange_over_tcp(std::span<std::byte> bytes, int rank, int size, const std::string& address,
                       int port, double seconds);

}  // namespace fbt::dist
