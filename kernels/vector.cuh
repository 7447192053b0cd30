// Rows in pieces of 16 bytes, the widest access a thread has. A kernel gives every thread the same
// elements whether a piece is moved at once or element by element, so alignment changes no bit.
#pragma once
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "kernels/gpu.h"

namespace fbt::kernels::cuda {

// Neighbouring elements that one thread takes.
template <class T>
inline constexpr int kPack = 16 / int(sizeof(T));

// Kept as the words that were loaded: nothing waits for the load before the first use of a value.
template <class T>
struct alignas(16) Pack {
    uint32_t word[4];

    __device__ float operator[](int j) const {
        if constexpr (sizeof(T) == 2)
            return std::bit_cast<float>(j % 2 ? word[j / 2] & 0xffff0000u : word[j / 2] << 16);
        else
            return std::bit_cast<float>(word[j]);
    }
    // The halves of a word are set in the order of j.
    __device__ void set(int j, T x) {
        if constexpr (sizeof(T) == 2)
            word[j / 2] = j % 2 ? (word[j / 2] & 0xffffu) | uint32_t(x.bits) << 16 : x.bits;
        else
            word[j] = std::bit_cast<uint32_t>(x);
    }
    __device__ T element(int j) const {
        if constexpr (sizeof(T) == 2)
            return std::bit_cast<T>(uint16_t(word[j / 2] >> (j % 2 * 16)));
        else
            return std::bit_cast<T>(word[j]);
    }
};

// Elements [0, count) of `from`; those beyond are 0. `whole` promises that all are there and that
// `from` is aligned to 16 bytes.
template <class T>
__device__ inline Pack<T> load_pack(const T* from, int64_t count, bool whole) {
    if (whole) return *reinterpret_cast<const Pack<T>*>(from);
    Pack<T> pack;
#pragma unroll
    for (int j = 0; j < kPack<T>; ++j) pack.set(j, j < count ? from[j] : T(0.f));
    return pack;
}
template <class T>
__device__ inline void store_pack(T* to, const Pack<T>& pack, int64_t count, bool whole) {
    if (whole) {
        *reinterpret_cast<Pack<T>*>(to) = pack;
        return;
    }
#pragma unroll
    for (int j = 0; j < kPack<T>; ++j)
        if (j < count) to[j] = pack.element(j);
}

// The floats that stand beside a pack of T: gains, masters, gradients of parameters.
template <class T>
struct Floats {
    float v[kPack<T>];
};
template <class T>
__device__ inline Floats<T> load_floats(const float* from, int64_t count, bool whole) {
    Floats<T> floats;
#pragma unroll
    for (int j = 0; j < kPack<T>; j += kPack<float>) {
        const Pack<float> pack = load_pack(from + j, count - j, whole);
#pragma unroll
        for (int i = 0; i < kPack<float>; ++i) floats.v[j + i] = pack[i];
    }
    return floats;
}
template <class T>
__device__ inline void store_floats(float* to, const Floats<T>& floats, int64_t count, bool whole) {
#pragma unroll
    for (int j = 0; j < kPack<T>; j += kPack<float>) {
        Pack<float> pack;
#pragma unroll
        for (int i = 0; i < kPack<float>; ++i) pack.set(i, floats.v[j + i]);
        store_pack(to + j, pack, count - j, whole);
    }
}

__device__ inline float sigmoid(float x) { return 1.f / (1.f + std::exp(-x)); }

// On the host: may every row of `width` elements of T be moved in whole packs? A null pointer
// stands for an absent array.
template <class... P>
bool aligned16(const P*... pointers) {
    return ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
}
template <class T, class... P>
bool whole_packs(int64_t width, const P*... pointers) {
    return width % kPack<T> == 0 && aligned16(pointers...);
}

// Calls run with `whole` as a type: where a loop has several loads under way, no branch may stand
// between them.
template <class F>
Status with_whole(bool whole, F run) {
    return whole ? run(std::true_type{}) : run(std::false_type{});
}

// Calls move<Piece>(elements of T in a piece) with the type in which rows can be copied: a Pack
// where they are whole packs, else T.
template <class T, class F>
Status with_pieces(bool whole, F move) {
    if (whole) return move.template operator()<Pack<T>>(kPack<T>);
    return move.template operator()<T>(1);
}

// ---- arrays without rows: a thread a pack

inline constexpr int kElementThreads = 256;

template <class T>
Launch element_launch(int64_t n) {
    return {.grid = dim3(unsigned(ceil_div(n, int64_t(kElementThreads) * kPack<T>))),
            .block = dim3(kElementThreads)};
}
// The thread's first element; it may lie beyond the end.
template <class T>
__device__ inline int64_t first_element() {
    return (int64_t(blockIdx.x) * kElementThreads + threadIdx.x) * kPack<T>;
}

// ---- arrays of rows: threadIdx.x along a row, in strides of blockDim.x pieces, threadIdx.y over
// rows. A warp takes a wide row, or several narrow ones.

inline constexpr int kRowThreads = 256;

// A power of two, up to a warp.
inline int row_lanes(int64_t pieces) {
    int lanes = 1;
    while (lanes < 32 && lanes < pieces) lanes *= 2;
    return lanes;
}
inline Launch row_launch(int64_t N, int64_t pieces) {
    const int lanes = row_lanes(pieces), rows = kRowThreads / lanes;
    return {.grid = dim3(unsigned(ceil_div(N, rows))), .block = dim3(lanes, rows)};
}
// The thread's row; it may lie beyond the end.
__device__ inline int64_t block_row() { return int64_t(blockIdx.x) * blockDim.y + threadIdx.y; }

}  // namespace fbt::kernels::cuda
