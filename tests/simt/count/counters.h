// Counts how kernels access memory, as a GPU's profiler would: bank conflicts in shared memory, and
// 32-byte sectors in global memory. The code that is counted must be compiled with
// -fsanitize=thread, whose calls counters.cpp defines instead of ThreadSanitizer.
//
// The k-th execution of an instruction by each lane of a warp counts as one access of the warp.
// That is so on a GPU unless lanes went through a loop unequally often before. Reads are counted as
// written in the source (one read of a float4 is one of 16 bytes); stores of neighbouring words one
// right after the other count as one, because that is what the compiler makes of a vector's store.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace fbt::simt {

struct Counts {
    std::string kernel;
    uint64_t launches = 0;
    uint64_t loads = 0, stores = 0;  // of global memory, by warps
    uint64_t sectors = 0;            // that those touched
    uint64_t ideal_sectors = 0;      // that hold as many bytes as were asked for
    uint64_t shared_accesses = 0;    // by warps
    uint64_t extra_wavefronts = 0;   // passes over the banks beyond those that the bytes need

    double sector_ratio() const {
        return ideal_sectors ? double(sectors) / double(ideal_sectors) : 1;
    }
};

void start_counting();
// Of what has run since, by kernel, in the order of their first launches.
std::vector<Counts> stop_counting();
std::string table(const std::vector<Counts>& counts);

}  // namespace fbt::simt
