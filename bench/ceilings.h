// What this machine can do at most, measured in the same run as what is compared with it. Every
// rate is the best of several tries, since whatever else runs can only make one slower.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace fbt::bench {

// Multiply-adds on numbers that stay in registers, FLOP/s (two a multiply-add). 0 where the
// processor (or -march) lacks the instruction.
double fma_rate(int threads);        // float
double bf16_dot_rate(int threads);   // pairs of bf16 into float: vdpbf16ps
double bf16_tile_rate(int threads);  // tiles of bf16 into float: AMX

// Bytes/s of reading `bytes` again and again, each thread its own part of them.
double read_rate(int64_t bytes, int threads);
// Bytes/s of reading and writing the whole footprint in place, both counted. A core waits for what
// it reads and not for what it writes, so this can be more than reading alone.
double update_rate(int threads);

// Memory that no processor's caches hold, at least 256 MiB, aligned to 64 bytes: ops rotate their
// arrays through it and the rates of memory are measured on it, so both find it in the same place.
int64_t footprint();
float* memory();

struct Ceiling {
    std::string what;
    int threads;
    bool is_flops;  // else bytes
    double rate;    // a second
};
// All of the above, on one thread and on `threads`.
std::vector<Ceiling> measure_ceilings(int threads);

std::string processor_name();

}  // namespace fbt::bench
