// The emulated device's memory: one region of addresses that the host may not touch except while
// queued work runs. All functions need the runtime's lock (streams.h).
#pragma once
#include <cstddef>

namespace fbt::simt {

bool is_device_memory(const void* p);

// An address for an allocation, which does not live yet; null where the limit is reached.
void* reserve_device_memory(size_t bytes);
// Whether `p` is what reserve gave and not yet given to release.
bool is_reserved(const void* p);
// No second release of `p`; its memory lives on until end_life.
void release(const void* p);

// From begin to end the bytes may be used; both fill them with ones (NaN), so that what is read
// before it is written, or after it was freed, shows. Between open and close only.
void begin_life(void* p);
void end_life(void* p);

// Whether all of these bytes are of one allocation that lives.
bool lives(const void* p, size_t bytes);

void open_device_memory();
void close_device_memory();

struct MemoryUse {
    size_t limit;     // what there is
    size_t reserved;  // by allocations
};
MemoryUse memory_use();
void set_memory_limit(size_t bytes);  // also in emu.h

}  // namespace fbt::simt
