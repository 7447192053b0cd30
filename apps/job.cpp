#include "apps/job.h"

#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <optional>
#include <sstream>
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

// What a communicator has to say in the end, from whichever thread.
[[noreturn]] void end_with(const std::string& message) {
    Console(false).warn(message);
    std::_Exit(kEnvironment);
}

std::vector<std::string> split(const std::string& text) {
    std::vector<std::string> parts;
    std::istringstream in(text);
    for (std::string part; std::getline(in, part, ',');) parts.push_back(part);
    return parts;
}

// "rack[1-2]node[03-07,9],other" -> rack1node03
std::string first_host(const std::string& list) {
    std::string host;
    for (size_t at = 0; at < list.size() && list[at] != ','; ++at) {
        if (list[at] != '[') {
            host += list[at];
            continue;
        }
        const size_t end = list.find_first_of("-,]", at), close = list.find(']', at);
        if (close == std::string::npos) return list;
        host += list.substr(at + 1, end - at - 1);
        at = close;
    }
    return host;
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
    // "2(x3),1": tasks of each node, the last number as often as it says
    const auto tasks_here = [&] {
        const char* text = get("SLURM_STEP_TASKS_PER_NODE");
        const int node = number("SLURM_NODEID", 0, 0);
        int at = 0, tasks = 1;
        for (const std::string& part : split(text ? text : "")) {
            int times = 1;
            tasks = 1;
            if (std::sscanf(part.c_str(), "%d(x%d)", &tasks, &times) < 1) return 1;
            at += times;
            if (node < at) break;
        }
        return std::max(1, tasks);
    };
    Launch out;
    const auto take = [&](By by, const char* rank, const char* size, const char* local_rank,
                          const char* local_size) {
        out.by = by;
        out.rank = number(rank, 0);
        out.size = number(size, 1);
        out.local_rank = number(local_rank, 0, 0);
        out.local_size = number(local_size, 1, 1);
    };
    const auto several = [&](const char* size) { return number(size, 1, 1) > 1; };
    if (several("OMPI_COMM_WORLD_SIZE"))
        take(By::mpi, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
             "OMPI_COMM_WORLD_LOCAL_SIZE");
    else if (several("PMI_SIZE"))
        take(By::pmi, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS");
    else if (several("WORLD_SIZE"))
        take(By::variables, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE");
    else if (several("SLURM_STEP_NUM_TASKS"))
        take(get("PMIX_RANK") ? By::mpi : By::slurm, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS",
             "SLURM_LOCALID", "");
    const bool by_mpirun = out.by == By::mpi && several("OMPI_COMM_WORLD_SIZE");
    if (out.size > 1 && get("SLURM_STEP_NUM_TASKS") && !by_mpirun && out.by != By::variables) {
        out.local_rank = number("SLURM_LOCALID", 0, out.local_rank);
        out.local_size = tasks_here();
        out.cores = number("SLURM_CPUS_PER_TASK", 1, 0);
    }
    if (out.rank >= out.size)
        throw Error(ErrorKind::usage, "the environment says rank " + std::to_string(out.rank) +
                                          " of " + std::to_string(out.size) +
                                          " ranks; they count from 0");
    if (const char* address = get("MASTER_ADDR"))
        out.address = address;
    else if (const char* nodes = get("SLURM_STEP_NODELIST"))
        out.address = first_host(nodes);
    if (out.size > 1) out.port = number("MASTER_PORT", 1, out.port);
    return out;
}

Launch Launch::from_environment() {
    return from([](const char* name) { return std::getenv(name); });
}

int Launch::threads(int wanted) const {
    if (wanted > 0 || size == 1) return wanted;
    const int machine = int(sysconf(_SC_NPROCESSORS_ONLN)), left = omp_get_num_procs();
    const int mine = cores > 0 ? cores : machine / local_size;
    return std::clamp(mine, 1, std::max(1, left));
}

void Job::join() {
    const std::string mpi = dist::mpi_version();
    if (launch_.by == Launch::By::pmi && mpi.starts_with("Open MPI"))
        throw Agreed(ErrorKind::usage, "the ranks were started by PMI, which " + mpi +
                                           " does not speak; use its mpirun, or srun --mpi=pmix");
    if ((launch_.by != Launch::By::mpi && launch_.by != Launch::By::pmi) || mpi.empty()) return;
    const std::string who = name();
    mpi_ = dist::connect_mpi({.seconds = seconds_, .fail = end_with, .rank = rank()});
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

void Job::check_device(const std::string& device) const {
    if (size() == 1) return;
    const bool on_host = device == "cpu" || device == "ref";
    if (on_host && dist::mpi_version().empty())
        throw Agreed(ErrorKind::usage,
                     "the environment has " + std::to_string(size()) +
                         " ranks, which join over MPI on CPUs, but this build has none; install "
                         "libopenmpi-dev and build again");
    if (on_host && !mpi_)
        throw Agreed(ErrorKind::usage,
                     "the environment has " + std::to_string(size()) +
                         " ranks without MPI, which join on GPUs only (--device cuda); on CPUs "
                         "start them with mpirun -n " +
                         std::to_string(size()) + ", or with srun --mpi=pmix");
    if (!on_host && dist::nccl_version().empty())
        throw Agreed(ErrorKind::usage,
                     "this build has no NCCL, which several GPUs need; install it beside the CUDA "
                     "toolkit and build again");
}

std::shared_ptr<Communicator> Job::connect(tensor::Context& context, bool reproducible) {
    if (size() == 1) return std::make_shared<Communicator>();
    if (context.backend() != tensor::Backend::cuda) return mpi_;
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
                                  {.seconds = seconds_, .fail = end_with});
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
        console.warn(what.starts_with("rank ") ? what : name() + ": " + what);
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
        // Whether a training diverged follows from what all ranks know, and so do faults of a
        // command before ranks talk to each other.
        if (e.kind() == ErrorKind::diverged || (!talk_ && e.kind() == ErrorKind::usage))
            return agreed(e);
        return alone(exit_code(e.kind()), e.what());
    } catch (const std::bad_alloc&) {
        return alone(kEnvironment, "out of memory");
    } catch (const std::exception& e) {
        return alone(kEnvironment, e.what());
    }
}

}  // namespace fbt::apps
