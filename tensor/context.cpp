#include "tensor/context.h"

#include <omp.h>

#include <algorithm>
#include <bit>
#include <utility>

namespace fbt::tensor {

// Without trimming the device's memory: that waits for the device, and throws where it has failed.
Arena::~Arena() { release_cached(); }

// Up to an eighth of waste, so that nearly equal sizes share a free list.
size_t Arena::rounded(size_t bytes) {
    if (bytes <= 64) return 64;
    const size_t step = std::max<size_t>(64, std::bit_floor(bytes) / 8);
    return (bytes + step - 1) / step * step;
}

void* Arena::allocate(size_t bytes, Use use) {
    const size_t size = rounded(bytes);
    std::lock_guard lock(mutex_);
    void* p = nullptr;
    if (auto it = free_.find({use, size}); it != free_.end() && !it->second.empty()) {
        p = it->second.back();
        it->second.pop_back();
    } else {
        p = memory_->allocate(size);
        if (!p) {
            release_cached();
            memory_->trim();
            p = memory_->allocate(size);
        }
        if (!p)
            throw Error(ErrorKind::environment,
                        "out of memory: " + std::to_string(size >> 20) + " MiB more wanted, " +
                            std::to_string(in_use_ >> 20) + " MiB in use" +
                            (plan_.empty() ? "; take fewer or shorter sequences at a time"
                                           : ", planned: " + plan_ +
                                                 "; lower --tokens-per-step or set "
                                                 "--memory-budget"));
    }
    if (use == Use::inbox) memory_->inbox_taken(p);
    in_use_ += size;
    peak_ = std::max(peak_, in_use_);
    return p;
}

void Arena::release(void* p, size_t bytes, Use use) {
    const size_t size = rounded(bytes);
    std::lock_guard lock(mutex_);
    if (use == Use::inbox) memory_->inbox_released(p);
    free_[{use, size}].push_back(p);
    in_use_ -= size;
}

void Arena::release_cached() {
    for (auto& [kind, blocks] : free_)
        for (void* p : blocks) {
            if (kind.first == Use::inbox) memory_->inbox_forgotten(p);
            memory_->release(p);
        }
    free_.clear();
}

std::vector<std::string> device_names() {
    std::vector<std::string> names = {"cpu", "ref"};
#if defined(FBT_CUDA) && defined(FBT_SIMT)
    names.push_back("simt");
#elif defined(FBT_CUDA)
    names.push_back("cuda");
#endif
    return names;
}

Context::Context(const std::string& name, int threads) : name_(name) {
    threads_ = threads > 0 ? threads : omp_get_num_procs();
    if (name == "cpu" || name == "ref") {
        backend_ = name == "cpu" ? Backend::cpu : Backend::ref;
        arena_ = std::make_shared<Arena>(make_host_memory());
        return;
    }
#ifdef FBT_CUDA
    if (name == device_names().back()) {
        backend_ = Backend::cuda;
        arena_ = std::make_shared<Arena>(make_cuda_memory());
        return;
    }
#endif
    std::string known;
    for (const std::string& n : device_names()) known += (known.empty() ? "" : ", ") + n;
    throw Error(ErrorKind::usage, "device '" + name + "' is not in this build; it has " + known);
}

std::shared_ptr<Arena> Context::use(std::shared_ptr<Arena> arena) {
    return std::exchange(arena_, std::move(arena));
}

void Context::set_fast_matmul(bool on) {
    fast_on_ = on && fast_;
    if (!on || fast_) return;
#ifdef FBT_CUDA
    if (backend_ == Backend::cuda) {
        kernels::cuda::MatmulFast* made = nullptr;
        const kernels::Status status = kernels::cuda::matmul_fast_create(&made);
        if (!status.ok())
            throw Error(status.code == kernels::Code::unsupported ? ErrorKind::usage
                                                                  : ErrorKind::environment,
                        std::string("--fast-matmul on ") + name_ + ": " + status.message);
        // It may be destroyed when the work that was queued with it is done.
        fast_ = {made, [memory = arena_->shared_memory()](kernels::cuda::MatmulFast* fast) {
                     try {
                         memory->synchronize();
                     } catch (const Error&) {  // a failed device has no work left
                     }
                     kernels::cuda::matmul_fast_destroy(fast);
                 }};
        fast_on_ = true;
        return;
    }
#endif
    throw Error(ErrorKind::usage, "--fast-matmul is for --device cuda, not for " + name_);
}

#ifndef FBT_CUDA
CudaDevice cuda_device() { return {false, "this build has no CUDA"}; }
#endif

kernels::Stream Context::stream() const { return {arena_->memory().stream(), threads_}; }

}  // namespace fbt::tensor
