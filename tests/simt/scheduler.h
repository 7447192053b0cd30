// What the emulated runtime needs of the scheduler.
#pragma once
#include "tests/simt/emu.h"

namespace fbt::simt {

void set_last_error(const char* text);

// Lets `kernel` be launched with so much dynamic shared memory: more than 48 KB is an opt-in.
cudaError_t allow_dynamic_shared(const void* kernel, size_t bytes);
size_t dynamic_shared_limit(const void* kernel);

// What a launch reports at once: a grid, block or shared memory that cannot be.
cudaError_t check_grid(const void* kernel, dim3 grid, dim3 block, size_t dynamic_shared);

// Runs body(arguments) in every thread of the grid, on the calling host thread. One grid at a time.
cudaError_t run_grid(const void* kernel, dim3 grid, dim3 block, size_t dynamic_shared,
                     Schedule order, void (*body)(const void*), const void* arguments);

// Who counts the memory accesses of kernels, if anybody does (count/counters.h).
struct Observer {
    void (*grid_begins)(const void* kernel);
    void (*block_ends)();
    // Of a thread, by its number in the block. Equal `site`s are one instruction.
    void (*access)(unsigned thread, const void* memory, size_t bytes, bool write, const void* site);
};
void set_observer(const Observer* observer);

// Number in the block of the thread whose accesses now count; -1 on the host and in an Uncounted.
int counted_thread();
bool is_shared_memory(const void* p);

}  // namespace fbt::simt
