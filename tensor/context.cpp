#include "tensor/context.h"

#include <omp.h>

#include <algorithm>
#include <bit>
#include <utility>

namespace fbt::tensor {

// Without trimming the device's memory: that waits for the device, and throws where it has failed.
Arena::~Arena() { release_cached(); }

constexpr size_t kListed = 64 << 10;  // bytes of the largest block that a free list keeps
constexpr size_t kPieces = 256;       // sizes of larger ones are multiples of it
constexpr size_t kChunks = 2 << 20;   // and chunks' of this, a huge page

bool Arena::listed(size_t size, Use use) { return use == Use::inbox || size <= kListed; }

// In a list with up to an eighth of waste, so that nearly equal sizes share it.
size_t Arena::rounded(size_t bytes, Use use) {
    if (bytes <= 64) return 64;
    const size_t step =
        listed(bytes, use) ? std::max<size_t>(64, std::bit_floor(bytes) / 8) : kPieces;
    return (bytes + step - 1) / step * step;
}

void* Arena::from_device(size_t size) {
    void* p = memory_->allocate(size);
    if (p) held_ += size;
    return p;
}

void* Arena::take_piece(size_t size) {
    const auto best = by_size_.lower_bound({size, nullptr});
    if (best == by_size_.end()) return nullptr;
    const auto [whole, p] = *best;
    by_size_.erase(best);
    pieces_.erase(p);
    if (whole > size) add_piece(p + size, whole - size);
    return p;
}

// Joins the piece with free neighbours of the same chunk.
void Arena::add_piece(Address p, size_t size) {
    auto next = pieces_.lower_bound(p);
    if (next != pieces_.end() && next->first == p + size && !chunks_.contains(next->first)) {
        size += next->second;
        by_size_.erase({next->second, next->first});
        next = pieces_.erase(next);
    }
    if (next != pieces_.begin() && !chunks_.contains(p)) {
        const auto before = std::prev(next);
        if (before->first + before->second == p) {
            p = before->first;
            size += before->second;
            by_size_.erase({before->second, before->first});
            pieces_.erase(before);
        }
    }
    pieces_.emplace(p, size);
    by_size_.emplace(size, p);
}

void* Arena::allocate(size_t bytes, Use use) {
    const size_t size = rounded(bytes, use);
    const bool from_list = listed(size, use);
    std::lock_guard lock(mutex_);
    const auto cached = [&]() -> void* {
        if (!from_list) return take_piece(size);
        const auto it = lists_.find({use, size});
        if (it == lists_.end() || it->second.empty()) return nullptr;
        void* p = it->second.back();
        it->second.pop_back();
        return p;
    };
    const auto fresh = [&]() -> void* {
        if (from_list) return from_device(size);
        // Chunks grow with the arena, so that there are few; without room for that, just enough.
        for (const size_t wanted : {std::max(size, held_ / 8), size}) {
            const size_t chunk = (wanted + kChunks - 1) / kChunks * kChunks;
            if (void* p = from_device(chunk)) {
                chunks_.emplace(static_cast<Address>(p), chunk);
                memory_->forbid(p, chunk);
                add_piece(static_cast<Address>(p), chunk);
                return take_piece(size);
            }
        }
        return nullptr;
    };
    void* p = cached();
    if (!p) p = fresh();
    if (!p) {
        release_cached();
        memory_->trim();
        p = fresh();
    }
    if (!p)
        throw Error(ErrorKind::environment,
                    "out of memory: " + std::to_string(size >> 20) + " MiB more wanted, " +
                        std::to_string(in_use_ >> 20) + " MiB in use" +
                        (plan_.empty() ? "; take fewer or shorter sequences at a time"
                                       : ", planned: " + plan_ +
                                             "; lower --tokens-per-step or set --memory-budget"));
    memory_->allow(p, bytes);
    if (use == Use::inbox) memory_->inbox_taken(p);
    in_use_ += size;
    peak_ = std::max(peak_, in_use_);
    return p;
}

void Arena::release(void* p, size_t bytes, Use use) {
    const size_t size = rounded(bytes, use);
    std::lock_guard lock(mutex_);
    if (use == Use::inbox) memory_->inbox_released(p);
    memory_->forbid(p, size);
    if (listed(size, use))
        lists_[{use, size}].push_back(p);
    else
        add_piece(static_cast<Address>(p), size);
    in_use_ -= size;
}

void Arena::release_cached() {
    const auto give_back = [&](void* p, size_t size) {
        memory_->allow(p, size);
        memory_->release(p);
        held_ -= size;
    };
    for (auto& [kind, blocks] : lists_)
        for (void* p : blocks) {
            if (kind.first == Use::inbox) memory_->inbox_forgotten(p);
            give_back(p, kind.second);
        }
    lists_.clear();
    std::erase_if(chunks_, [&](const auto& chunk) {
        const auto it = pieces_.find(chunk.first);
        if (it == pieces_.end() || it->second != chunk.second) return false;  // partly in use
        by_size_.erase({it->second, it->first});
        pieces_.erase(it);
        give_back(chunk.first, chunk.second);
        return true;
    });
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

Context::Context(const std::string& name, int threads, [[maybe_unused]] int device) : name_(name) {
    threads_ = threads > 0 ? threads : omp_get_num_procs();
    if (name == "cpu" || name == "ref") {
        backend_ = name == "cpu" ? Backend::cpu : Backend::ref;
        arena_ = std::make_shared<Arena>(make_host_memory());
        return;
    }
#ifdef FBT_CUDA
    if (name == device_names().back()) {
        backend_ = Backend::cuda;
        arena_ = std::make_shared<Arena>(make_cuda_memory(device));
        device_ = cuda_device(device).number;
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
CudaDevice cuda_device(int) { return {false, "this build has no CUDA"}; }
std::vector<CudaDevice> cuda_devices() { return {}; }
#endif

kernels::Stream Context::stream() const { return {arena_->memory().stream(), threads_}; }

}  // namespace fbt::tensor
