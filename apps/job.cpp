#include "apps/job.h"

#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <optional>
#include <system_error>

#include "apps/command.h"
#include "tensor/file.h"

namespace fbt::apps {

using tensor::Communicator;
using tensor::Error;
using tensor::ErrorKind;
using tensor::Tensor;

namespace {

// What every rank knows of already.
class Agreed : public Error {
  public:
    using Error::Error;
};

// "node[03-07,9],other" -> node03
std::string first_host(const std::string& list) {
    const size_t open = list.find_first_of("[,");
    if (open == std::string::npos || list[open] == ',') return list.substr(0, open);
    const size_t end = list.find_first_of("-,]", open), close = list.find(']', open);
    if (close == std::string::npos) return list;
    const size_t comma = list.find(',', close);
    return list.substr(0, open) + list.substr(open + 1, end - open - 1) +
           list.substr(close + 1, comma == std::string::npos ? comma : comma - close - 1);
}

}  // namespace

Launch Launch::from(const std::function<const char*(const char*)>& get) {
    const auto number = [&](const char* name, int least, std::optional<int> otherwise = {}) {
        const char* text = get(name);
        if (!text && otherwise) return *otherwise;
        int value = 0;
        const char* end = text ? text + std::strlen(text) : nullptr;
        const auto [stop, error] =
            text ? std::from_chars(text, end, value)
                 : std::from_chars_result{nullptr, std::errc::invalid_argument};
        if (error != std::errc() || stop != end || value < least)
            throw Error(ErrorKind::usage, "the environment variable " + std::string(name) + " is " +
                                              (text ? tensor::in_quotes(text) : "missing") +
                                              ", needed a whole number from " +
                                              std::to_string(least) + " on");
        return value;
    };
    Launch out;
    if (get("OMPI_COMM_WORLD_SIZE")) {
        out.by = By::mpi;
        out.rank = number("OMPI_COMM_WORLD_RANK", 0);
        out.size = number("OMPI_COMM_WORLD_SIZE", 1);
        out.local_rank = number("OMPI_COMM_WORLD_LOCAL_RANK", 0, 0);
        out.local_size = number("OMPI_COMM_WORLD_LOCAL_SIZE", 1, 1);
    } else if (get("PMI_SIZE")) {
        out.by = By::mpi;
        out.rank = number("PMI_RANK", 0);
        out.size = number("PMI_SIZE", 1);
        out.local_rank = number("SLURM_LOCALID", 0, number("MPI_LOCALRANKID", 0, 0));
        out.local_size = number("MPI_LOCALNRANKS", 1, 1);
    } else if (get("WORLD_SIZE")) {
        out.by = By::variables;
        out.rank = number("RANK", 0);
        out.size = number("WORLD_SIZE", 1);
        out.local_rank = number("LOCAL_RANK", 0, 0);
        out.local_size = number("LOCAL_WORLD_SIZE", 1, 1);
    } else if (get("SLURM_STEP_NUM_TASKS")) {
        out.by = get("PMIX_RANK") ? By::mpi : By::slurm;
        out.rank = number("SLURM_PROCID", 0);
        out.size = number("SLURM_STEP_NUM_TASKS", 1);
        out.local_rank = number("SLURM_LOCALID", 0, 0);
    }
    if (out.rank >= out.size)
        throw Error(ErrorKind::usage, "the environment says rank " + std::to_string(out.rank) +
                                          " of " + std::to_string(out.size) +
                                          " ranks; they count from 0");
    if (out.size == 1) out.by = By::nobody;
    if (const char* address = get("MASTER_ADDR"))
        out.address = address;
    else if (const char* nodes = get("SLURM_STEP_NODELIST"))
        out.address = first_host(nodes);
    out.port = number("MASTER_PORT", 1, out.port);
    return out;
}

Launch Launch::from_environment() {
    return from([](const char* name) { return std::getenv(name); });
}

int Launch::threads(int wanted) const {
    if (wanted > 0 || local_size == 1) return wanted;
    const int cores = int(sysconf(_SC_NPROCESSORS_ONLN));
    return std::clamp(cores / local_size, 1, std::max(1, omp_get_num_procs()));
}

Job::Job(const Launch& launch, double seconds) : launch_(launch), seconds_(seconds) {
    if (launch_.by != Launch::By::mpi) return;
    if (dist::mpi_version().empty())
        throw Error(
            ErrorKind::usage,
            "MPI started " + std::to_string(size()) +
                " ranks, but this build has no MPI; install libopenmpi-dev and build again");
    const std::string who = name();
    mpi_ = dist::connect_mpi({.seconds = seconds_, .fail = [who](const std::string& message) {
                                  Console(false).warn(message);
                                  std::_Exit(kEnvironment);
                              }});
    if (mpi_->size() != size() || mpi_->rank() != rank())
        throw Error(ErrorKind::environment, "the launcher says " + who + ", but MPI says rank " +
                                                std::to_string(mpi_->rank()) + " of " +
                                                std::to_string(mpi_->size()) +
                                                "; start it with the mpirun of " +
                                                dist::mpi_version() + ", or with srun --mpi=pmix");
    talk_ = mpi_.get();
    memory_ = &host_;
}

std::string Job::name() const {
    return "rank " + std::to_string(rank()) + " of " + std::to_string(size());
}

std::shared_ptr<Communicator> Job::connect(tensor::Context& context, bool reproducible) {
    if (size() == 1) return std::make_shared<Communicator>();
    if (context.backend() != tensor::Backend::cuda) {
        if (mpi_) return mpi_;
        throw Error(ErrorKind::usage,
                    "the environment has " + std::to_string(size()) +
                        " ranks without MPI, which join on GPUs only (--device cuda); on CPUs "
                        "start them with mpirun -n " +
                        std::to_string(size()) + ", or with srun --mpi=pmix");
    }
    if (dist::nccl_version().empty())
        throw Error(ErrorKind::usage,
                    "this build has no NCCL, which several GPUs need; install it beside the CUDA "
                    "toolkit and build again");
    const auto exchange = [&](std::span<std::byte> bytes) {
        if (!mpi_) {
            if (launch_.address.empty())
                throw Error(ErrorKind::usage, "the environment has " + std::to_string(size()) +
                                                  " ranks, but no MASTER_ADDR: the host of rank 0");
            dist::exchange_over_tcp(bytes, rank(), size(), launch_.address, launch_.port, seconds_);
            return;
        }
        const Tensor t = Tensor::empty(host_, {int64_t(bytes.size())}, tensor::DType::u8);
        std::memcpy(t.raw(), bytes.data(), bytes.size());
        mpi_->wait(mpi_->broadcast(t, 0));
        std::memcpy(bytes.data(), t.raw(), bytes.size());
    };
    devices_ = dist::connect_nccl(context, rank(), size(), exchange, reproducible,
                                  {.seconds = seconds_, .fail = [](const std::string& message) {
                                       Console(false).warn(message);
                                       std::_Exit(kEnvironment);
                                   }});
    if (!talk_) {
        talk_ = devices_.get();
        memory_ = &context;
    }
    return devices_;
}

std::vector<double> Job::sum(const std::vector<double>& numbers) const {
    if (!talk_) return numbers;
    const Tensor t = Tensor::from(*memory_, numbers, {int64_t(numbers.size())});
    talk_->wait(talk_->all_reduce(t));
    return t.to_vector<double>();
}

bool Job::any(bool yes) const { return sum({yes ? 1.0 : 0.0})[0] > 0; }

void Job::together(const std::function<void()>& f) {
    if (!talk_) return f();
    std::optional<Error> own;
    try {
        f();
    } catch (const Error& e) {
        own = e;
    } catch (const std::bad_alloc&) {
        own = Error(ErrorKind::environment, "out of memory");
    } catch (const std::exception& e) {
        own = Error(ErrorKind::environment, e.what());
    }
    std::vector<double> failed(size_t(size()), 0);
    if (own) failed[size_t(rank())] = 1 + double(own->kind());
    failed = sum(failed);
    const auto first = std::ranges::find_if(failed, [](double x) { return x > 0; });
    if (first == failed.end()) return;
    // The first failing rank's words.
    const int speaker = int(first - failed.begin());
    constexpr size_t kLongest = 4096;
    std::vector<uint8_t> text(kLongest, 0);
    if (rank() == speaker) {
        const std::string what = own->what();
        std::copy_n(what.begin(), std::min(what.size(), kLongest - 1), text.begin());
    }
    const Tensor t = Tensor::from(*memory_, text, {int64_t(kLongest)});
    talk_->wait(talk_->broadcast(t, speaker));
    text = t.to_vector<uint8_t>();
    std::string what = reinterpret_cast<const char*>(text.data());
    if (speaker > 0) what = "rank " + std::to_string(speaker) + ": " + what;
    throw Agreed(ErrorKind(int(*first) - 1), what);
}

void Job::finish() {
    if (devices_) devices_->finish();
    if (mpi_) mpi_->finish();
}

int Job::run(const std::function<int()>& body) {
    if (size() == 1) return body();
    Console console(false);
    const auto agreed = [&](const Error& e) {
        if (leads()) console.warn(e.what());
        finish();
        return exit_code(e.kind());
    };
    const auto alone = [&](int code, const std::string& what) {
        console.warn(name() + ": " + what);
        if (talk_) talk_->end_all(code);
        return code;
    };
    try {
        const int code = body();
        finish();
        return code;
    } catch (const Agreed& e) {
        return agreed(e);
    } catch (const Error& e) {
        // Whether a training diverged follows from what all ranks know.
        if (e.kind() == ErrorKind::diverged) return agreed(e);
        return alone(exit_code(e.kind()), e.what());
    } catch (const std::bad_alloc&) {
        return alone(kEnvironment, "out of memory");
    } catch (const std::exception& e) {
        return alone(kEnvironment, e.what());
    }
}

}  // namespace fbt::apps
