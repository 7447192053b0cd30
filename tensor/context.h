// A device as the rest of fbt sees it: its memory, its stream, its name. A context owns the stream
// and the arena; every tensor lives in the arena of one context, and every op runs on the stream of
// its tensors' context.
#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "kernels/matmul.h"
#include "tensor/error.h"
#include "tensor/shape.h"

namespace fbt::tensor {

// Which kernels run. `cuda` is a real GPU, or the emulated one in a build for it.
enum class Backend { cpu, ref, cuda };

// Work that a device has recorded (a CUDA graph), to be queued again as a whole.
class Recording {
  public:
    virtual ~Recording() = default;
};

// The memory of one device, and its queue of work. One implementation for the host, where all is
// done at once, one for CUDA. Copies within the device and kernels are queued; copy_in has taken
// the host's data when it returns, copy_out has delivered it.
class Memory {
  public:
    virtual ~Memory() = default;
    virtual void* allocate(size_t bytes) = 0;  // null when the device has no more
    virtual void release(void* p) = 0;
    virtual void trim() {}  // gives what was released back to the system
    // That nobody may touch this memory, or that it may be used again: for checkers of memory.
    virtual void forbid(void*, size_t /*bytes*/) {}
    virtual void allow(void*, size_t /*bytes*/) {}
    virtual void copy_in(void* device, const void* host, size_t bytes) = 0;
    virtual void copy_out(void* host, const void* device, size_t bytes) = 0;
    virtual void copy(void* to, const void* from, size_t bytes) = 0;
    virtual void zero(void* p, size_t bytes) = 0;
    virtual void synchronize() = 0;
    virtual void* stream() = 0;
    // An op over a tensor of this shape was queued. What goes wrong while it runs is noticed by a
    // later call, which can then say what it was about.
    virtual void queued(const char* /*op*/, const Shape& /*shape*/) {}

    // An inbox is memory that the host fills first of all, so that this copy need not wait for what
    // is queued, but only for what used the memory before it was released the last time.
    virtual void inbox_taken(void*) {}
    virtual void inbox_released(void*) {}
    virtual void inbox_forgotten(void*) {}

    // Records what is queued in between instead of running it, where the device can.
    virtual void begin_recording() {}
    virtual std::unique_ptr<Recording> end_recording() { return nullptr; }
    virtual void replay(Recording&) {}
};
std::unique_ptr<Memory> make_host_memory();
#ifdef FBT_CUDA
std::unique_ptr<Memory> make_cuda_memory(int index);  // throws usage where there is no such GPU
#endif

// The GPU that a context of this index would use, or why there is none. A process that sees one GPU
// alone, as srun --gpus-per-task=1 arranges it, uses that one whatever the index.
struct CudaDevice {
    bool usable;
    std::string description;
    int number = 0;  // CUDA's, among those that the process sees
};
CudaDevice cuda_device(int index = 0);
std::vector<CudaDevice> cuda_devices();  // all that the process sees

// What a block of memory is for; blocks of one use are not reused for the other.
enum class Use { work, inbox };

// A caching allocator: what is released stays here, its pages mapped, for the next who asks.
//   small blocks and inboxes  in free lists, one for each (rounded) size
//   larger blocks             cut from chunks of the device's memory, the smallest free piece that
//                             fits; neighbours that are free become one piece again. So steps whose
//                             numbers of rows differ (prefixes are drawn) share the same memory.
class Arena {
  public:
    explicit Arena(std::shared_ptr<Memory> memory) : memory_(std::move(memory)) {}
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    // Aligned to 64 bytes, larger blocks to 256. Throws environment when memory is out, with `plan`
    // in the message.
    void* allocate(size_t bytes, Use use = Use::work);
    void release(void* p, size_t bytes, Use use = Use::work);
    Memory& memory() { return *memory_; }
    const std::shared_ptr<Memory>& shared_memory() const { return memory_; }
    size_t in_use() const { return in_use_; }
    size_t peak() const { return peak_; }
    size_t held() const { return held_; }  // taken from the device
    void set_plan(std::string plan) { plan_ = std::move(plan); }

  private:
    using Address = std::byte*;
    static size_t rounded(size_t bytes, Use use);
    static bool listed(size_t size, Use use);
    void* take_piece(size_t size);  // null where none fits
    void add_piece(Address p, size_t size);
    void* from_device(size_t size);  // null when the device has no more
    void release_cached();  // gives every cached block and every unused chunk back to the device

    std::shared_ptr<Memory> memory_;
    std::mutex mutex_;
    std::map<std::pair<Use, size_t>, std::vector<void*>> lists_;
    std::map<Address, size_t> chunks_, pieces_;     // of the device; free parts of chunks
    std::set<std::pair<size_t, Address>> by_size_;  // the same pieces
    size_t in_use_ = 0, peak_ = 0, held_ = 0;
    std::string plan_;  // what the program meant to use
};

class Context {
  public:
    // name: cpu, ref, cuda or simt (the last two where this build has them).
    // threads: OpenMP threads of host kernels; 0 means as many as the machine has.
    // device: which GPU, for cuda: the rank of this process among those on its machine. It is then
    // the calling thread's, in CUDA's sense; other threads begin with the first one.
    // Errors  usage for a name that this build does not have, or without such a GPU.
    explicit Context(const std::string& name, int threads = 0, int device = 0);

    const std::string& name() const { return name_; }
    Backend backend() const { return backend_; }
    kernels::Stream stream() const;
    int threads() const { return threads_; }
    int device() const { return device_; }  // CUDA's number of the GPU
    const std::shared_ptr<Arena>& arena() const { return arena_; }
    // New tensors lie in `arena` from now on; returns the one before.
    std::shared_ptr<Arena> use(std::shared_ptr<Arena> arena);
    void synchronize() { arena_->memory().synchronize(); }

    // Whether products go through the vendor's library, which is faster and does not keep the row
    // rule. For training on a GPU; off at first.
    // Errors  usage where the device has no such library, environment when it fails to start.
    void set_fast_matmul(bool on);
    kernels::cuda::MatmulFast* fast_matmul() const { return fast_on_ ? fast_.get() : nullptr; }

  private:
    std::string name_;
    Backend backend_;
    int threads_, device_ = 0;
    std::shared_ptr<kernels::cuda::MatmulFast> fast_;  // made when first wanted
    bool fast_on_ = false;
    std::shared_ptr<Arena> arena_;
};

// The names that this build accepts, for messages and `fbt info`.
std::vector<std::string> device_names();

}  // namespace fbt::tensor
