#include "tests/simt/device_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <unordered_map>

#if FBT_SIMT_ASAN
#include <sanitizer/asan_interface.h>
#endif

namespace fbt::simt {
namespace {

constexpr size_t kAlignment = 256;  // as cudaMalloc promises
constexpr size_t kRedZone = 256;    // after each allocation, and before the first
constexpr size_t kGrowth = size_t(2) << 20;
constexpr size_t kRegionBytes = size_t(1) << 38;  // of addresses; pages come when they are touched
// Pages of freed memory beyond this go back to the host.
constexpr size_t kKeptBytes = size_t(512) << 20;

struct Allocation {
    size_t bytes;  // asked for
    size_t room;
    bool lives = false, released = false;
};

struct Region {
    char* base = nullptr;
    size_t bytes = 0;
    size_t used = 0;        // carved into allocations so far
    size_t open_bytes = 0;  // of the region, what open and close concern
    std::map<const char*, Allocation> allocations;
    // Freed, by room, oldest first: an address is used again as late as possible.
    std::unordered_map<size_t, std::deque<char*>> freed;
    size_t freed_bytes = 0;  // whose pages are kept
    size_t limit = 0, reserved = 0;
};

size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

// Rooms come in few sizes, so that what was freed fits again: steps of an eighth at most.
size_t room_for(size_t bytes) {
    size_t step = kAlignment;
    while (step * 16 <= bytes) step *= 2;
    return round_up(std::max(bytes, size_t(1)), step);
}

size_t host_memory() {
    unsigned long long kilobytes = 0;
    if (FILE* file = std::fopen("/proc/meminfo", "r")) {
        (void)std::fscanf(file, "MemTotal: %llu", &kilobytes);
        std::fclose(file);
    }
    return size_t(kilobytes) * 1024;
}

Region& region() {
    static Region& r = *[] {  // never destroyed: other static objects may still free memory
        Region* made = new Region;
        made->limit = host_memory();
        void* base = MAP_FAILED;
        for (made->bytes = kRegionBytes; base == MAP_FAILED && made->bytes > kGrowth;
             made->bytes /= 2) {
            base = mmap(nullptr, made->bytes, PROT_NONE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (base != MAP_FAILED) break;
        }
        if (base == MAP_FAILED) {
            std::perror("simt: mmap");
            std::abort();
        }
        // Fewer pages make open and close cheaper.
        (void)madvise(base, made->bytes, MADV_HUGEPAGE);
        made->base = static_cast<char*>(base);
        made->used = kRedZone;
        return made;
    }();
    return r;
}

void poison([[maybe_unused]] void* memory, [[maybe_unused]] size_t bytes) {
#if FBT_SIMT_ASAN
    __asan_poison_memory_region(memory, bytes);
#endif
}
void unpoison([[maybe_unused]] void* memory, [[maybe_unused]] size_t bytes) {
#if FBT_SIMT_ASAN
    __asan_unpoison_memory_region(memory, bytes);
#endif
}

void drop_freed_pages(Region& r) {
    for (auto& [room, blocks] : r.freed)
        if (room >= kGrowth)
            for (char* memory : blocks) (void)madvise(memory, room, MADV_DONTNEED);
    r.freed_bytes = 0;
}

// The allocation that holds `p`, or the end.
auto holder(const void* p) {
    Region& r = region();
    const char* address = static_cast<const char*>(p);
    auto found = r.allocations.upper_bound(address);
    if (found == r.allocations.begin()) return r.allocations.end();
    --found;
    return address < found->first + found->second.room ? found : r.allocations.end();
}

}  // namespace

bool is_device_memory(const void* p) {
    const Region& r = region();
    const char* address = static_cast<const char*>(p);
    return address >= r.base && address < r.base + r.bytes;
}

void* reserve_device_memory(size_t bytes) {
    Region& r = region();
    if (bytes > r.limit || r.reserved > r.limit - bytes) return nullptr;
    const size_t room = room_for(bytes);
    char* memory = nullptr;
    if (auto fit = r.freed.find(room); fit != r.freed.end() && !fit->second.empty()) {
        memory = fit->second.front();
        fit->second.pop_front();
        r.freed_bytes -= std::min(r.freed_bytes, room);
    } else {
        if (room + kRedZone > r.bytes - r.used) return nullptr;
        memory = r.base + r.used;
        r.used += room + kRedZone;
        if (r.used > r.open_bytes) {
            const size_t grown = std::min(round_up(r.used, kGrowth), r.bytes);
            poison(r.base + r.open_bytes, grown - r.open_bytes);
            r.open_bytes = grown;
        }
    }
    r.allocations[memory] = {bytes, room};
    r.reserved += bytes;
    return memory;
}

bool is_reserved(const void* p) {
    const Region& r = region();
    const auto found = r.allocations.find(static_cast<const char*>(p));
    return found != r.allocations.end() && !found->second.released;
}

void release(const void* p) {
    region().allocations.at(static_cast<const char*>(p)).released = true;
}

void begin_life(void* p) {
    Allocation& a = region().allocations.at(static_cast<char*>(p));
    unpoison(p, a.bytes);
    std::memset(p, 0xff, a.bytes);
    a.lives = true;
}

void end_life(void* p) {
    Region& r = region();
    char* memory = static_cast<char*>(p);
    const auto found = r.allocations.find(memory);
    const Allocation a = found->second;
    r.allocations.erase(found);
    if (a.lives) std::memset(memory, 0xff, a.bytes);  // a failure may have come before its life
    poison(memory, a.room);
    r.reserved -= a.bytes;
    r.freed[a.room].push_back(memory);
    r.freed_bytes += a.room;
    if (r.freed_bytes > kKeptBytes) drop_freed_pages(r);
}

bool lives(const void* p, size_t bytes) {
    const auto found = holder(p);
    if (found == region().allocations.end() || !found->second.lives) return false;
    const size_t offset = size_t(static_cast<const char*>(p) - found->first);
    return offset <= found->second.bytes && bytes <= found->second.bytes - offset;
}

void open_device_memory() {
    Region& r = region();
    if (r.open_bytes == 0) return;
    if (mprotect(r.base, r.open_bytes, PROT_READ | PROT_WRITE) != 0) {
        std::perror("simt: mprotect");
        std::abort();
    }
}

void close_device_memory() {
    Region& r = region();
    if (r.open_bytes > 0) mprotect(r.base, r.open_bytes, PROT_NONE);
}

MemoryUse memory_use() { return {region().limit, region().reserved}; }

void set_memory_limit(size_t bytes) { region().limit = bytes > 0 ? bytes : host_memory(); }

}  // namespace fbt::simt
