// A device as the rest of fbt sees it: its memory, its stream, its name. A context owns the stream
// and the arena; every tensor lives in the arena of one context, and every op runs on the stream of
// its tensors' context.
#pragma once
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernels/types.h"
#include "tensor/error.h"

namespace fbt::tensor {

// Which kernels run. `cuda` is a real GPU, or the emulated one in a build for it.
enum class Backend { cpu, ref, cuda };

// The memory of one device, and its stream. One implementation for the host, one for CUDA.
class Memory {
  public:
    virtual ~Memory() = default;
    virtual void* allocate(size_t bytes) = 0;  // null when the device has no more
    virtual void release(void* p) = 0;
    virtual void copy_in(void* device, const void* host, size_t bytes) = 0;
    virtual void copy_out(void* host, const void* device, size_t bytes) = 0;
    virtual void copy(void* to, const void* from, size_t bytes) = 0;
    virtual void zero(void* p, size_t bytes) = 0;
    virtual void synchronize() = 0;
    virtual void* stream() = 0;
};
std::unique_ptr<Memory> make_host_memory();
#ifdef FBT_CUDA
std::unique_ptr<Memory> make_cuda_memory();
#endif

// A caching allocator. Training asks for the same sizes every step, so a released block goes to a
// free list of its (rounded) size and the next step finds it there, its pages already mapped.
class Arena {
  public:
    explicit Arena(std::unique_ptr<Memory> memory) : memory_(std::move(memory)) {}
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    void* allocate(size_t bytes);  // aligned to 64 bytes; throws environment when memory is out
    void release(void* p, size_t bytes);
    Memory& memory() { return *memory_; }
    size_t in_use() const { return in_use_; }
    size_t peak() const { return peak_; }

  private:
    static size_t rounded(size_t bytes);
    void trim();  // gives every cached block back to the device
    std::unique_ptr<Memory> memory_;
    std::mutex mutex_;
    std::map<size_t, std::vector<void*>> free_;
    size_t in_use_ = 0, peak_ = 0;
};

class Context {
  public:
    // name: cpu, ref, cuda or simt (the last two where this build has them).
    // threads: OpenMP threads of host kernels; 0 means as many as the machine has.
    // Errors  usage for a name that this build does not have, or without a GPU.
    explicit Context(const std::string& name, int threads = 0);

    const std::string& name() const { return name_; }
    Backend backend() const { return backend_; }
    kernels::Stream stream() const;
    int threads() const { return threads_; }
    const std::shared_ptr<Arena>& arena() const { return arena_; }
    void synchronize() { arena_->memory().synchronize(); }

  private:
    std::string name_;
    Backend backend_;
    int threads_;
    std::shared_ptr<Arena> arena_;
};

// The names that this build accepts, for messages and `fbt info`.
std::vector<std::string> device_names();

}  // namespace fbt::tensor
