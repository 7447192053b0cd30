#include "dist/dist.h"

namespace fbt::dist {

std::string mpi_version() { return {}; }

std::unique_ptr<Communicator> connect_mpi(Options) {
    throw tensor::Error(tensor::ErrorKind::internal, "this build has no MPI");
}

}  // namespace fbt::dist
