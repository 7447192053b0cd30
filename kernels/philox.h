// Philox4x32-10 counter-based random numbers (Salmon et al., "Parallel random numbers: as easy as
// 1, 2, 3", SC'11). A number is a pure function of its key and counter, so a recomputed, repacked,
// resumed or re-sharded run draws the same.
#pragma once
#include "kernels/types.h"

namespace fbt::kernels {

struct PhiloxKey {
    uint32_t k[2];
};
struct Philox4 {
    uint32_t v[4];
};

FBT_HOST_DEVICE inline Philox4 philox(PhiloxKey key, uint32_t c0, uint32_t c1, uint32_t c2,
                                      uint32_t c3) {
    uint32_t c[4] = {c0, c1, c2, c3};
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = uint64_t(0xD2511F53u) * c[0], b = uint64_t(0xCD9E8D57u) * c[2];
        const uint32_t n0 = uint32_t(b >> 32) ^ c[1] ^ key.k[0],
                       n2 = uint32_t(a >> 32) ^ c[3] ^ key.k[1];
        c[1] = uint32_t(b);
        c[3] = uint32_t(a);
        c[0] = n0;
        c[2] = n2;
        key.k[0] += 0x9E3779B9u;
        key.k[1] += 0xBB67AE85u;
    }
    return {{c[0], c[1], c[2], c[3]}};
}

// What a draw is for; part of the key, so that two uses never share numbers.
enum class Draw : uint32_t {
    initial_weights,
    passes,
    prefix,
    jitter,
    shuffle,
    task,
    sampling,
    disturb,
    probe,
    task_length
};

// The key of all numbers that one purpose draws in one step and pass of a run.
FBT_HOST_DEVICE inline PhiloxKey philox_key(uint64_t seed, Draw purpose, uint64_t step = 0,
                                            uint32_t pass = 0) {
    const PhiloxKey root{{uint32_t(seed), uint32_t(seed >> 32)}};
    const Philox4 r = philox(root, uint32_t(purpose), pass, uint32_t(step), uint32_t(step >> 32));
    return {{r.v[0], r.v[1]}};
}

// 32 random bits for (global sequence index, position, column). Columns are drawn four at a time.
FBT_HOST_DEVICE inline Philox4 philox_four(PhiloxKey key, uint64_t sequence, uint32_t position,
                                           uint32_t column4) {
    return philox(key, uint32_t(sequence), uint32_t(sequence >> 32), position, column4);
}
FBT_HOST_DEVICE inline uint32_t philox_bits(PhiloxKey key, uint64_t sequence, uint32_t position = 0,
                                            uint32_t column = 0) {
    return philox_four(key, sequence, position, column / 4).v[column % 4];
}

// Uniform on [0, 1): 24 bits, exact in float.
FBT_HOST_DEVICE inline float uniform_float(uint32_t bits) { return float(bits >> 8) * 0x1p-24f; }

// Uniform on 0..n-1 without bias worth the name (64-bit multiply, n < 2^31).
FBT_HOST_DEVICE inline uint32_t uniform_below(uint32_t bits, uint32_t n) {
    return uint32_t((uint64_t(bits) * n) >> 32);
}

}  // namespace fbt::kernels
