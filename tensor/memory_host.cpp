// Host memory: the device of the cpu and ref backends.
#include <sanitizer/asan_interface.h>  // its macros do nothing elsewhere
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>

#include "tensor/context.h"

namespace fbt::tensor {
namespace {

class HostMemory : public Memory {
  public:
    void* allocate(size_t bytes) override {
        // Huge pages where a block spans several: matrices are walked with long strides.
        const size_t align = bytes >= (2u << 20) ? (2u << 20) : 64;
        void* p = nullptr;
        if (posix_memalign(&p, align, (bytes + align - 1) / align * align) != 0) return nullptr;
        if (align > 64) madvise(p, bytes, MADV_HUGEPAGE);
        return p;
    }
    void release(void* p) override { std::free(p); }
    void forbid(void* p, size_t n) override { ASAN_POISON_MEMORY_REGION(p, n); }
    void allow(void* p, size_t n) override { ASAN_UNPOISON_MEMORY_REGION(p, n); }
    void copy_in(void* device, const void* host, size_t n) override { copy(device, host, n); }
    void copy_out(void* host, const void* device, size_t n) override { copy(host, device, n); }
    void copy(void* to, const void* from, size_t n) override {
        if (n) std::memcpy(to, from, n);
    }
    void zero(void* p, size_t n) override {
        if (n) std::memset(p, 0, n);
    }
    void synchronize() override {}
    void* stream() override { return nullptr; }
};

}  // namespace

std::unique_ptr<Memory> make_host_memory() { return std::make_unique<HostMemory>(); }

}  // namespace fbt::tensor
