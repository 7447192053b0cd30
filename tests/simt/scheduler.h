// What the emulated runtime needs of the scheduler.
#pragma once
#include "tests/simt/emu.h"

namespace fbt::simt {

void set_last_error(const char* text);

// Lets `kernel` be launched with so much dynamic shared memory: more than 48 KB is an opt-in.
cudaError_t allow_dynamic_shared(const void* kernel, size_t bytes);

// What a launch reports at once: a grid, block or shared memory that cannot be.
cudaError_t check_grid(const void* kernel, dim3 grid, dim3 block, size_t dynamic_shared);

// Runs body(arguments) in every thread of the grid, on the calling host thread. One grid at a time.
cudaError_t run_grid(const void* kernel, dim3 grid, dim3 block, size_t dynamic_shared,
                     Schedule order, void (*body)(const void*), const void* arguments);

}  // namespace fbt::simt
