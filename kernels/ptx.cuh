// The instructions that CUDA C++ has no words for: the only file with inline PTX. First the
// hardware's, then, in the same order, the twins that the emulator runs in their place.
//
// Fragments of m16n8k16, for lane = 4 g + p of the warp, bf16 in pairs (the lower column or row in
// the lower half), f32 singly:
//   a  [16,16] register r: row g + 8 (r % 2), columns 2p + 8 (r / 2) and the next
//   b  [16,8]  register r: rows 2p + 8 r and the next, column g
//   d  [16,8]  element r:  row g + 8 (r / 2), column 2p + r % 2
#pragma once
#include <cmath>
#include <limits>

#include "kernels/gpu.h"

namespace fbt::kernels::cuda::ptx {

#if defined(__CUDACC__)

// ---- hardware ----

__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return uint32_t(__cvta_generic_to_shared(p));
}

// Loads four 8 x 8 matrices of 16-bit elements from shared memory, with the whole warp. Lane l
// passes the address of row l % 8 of matrix l / 8: 8 elements, aligned to 16 bytes. Register r gets
// elements (g, 2p) and (g, 2p + 1) of matrix r; with _trans elements (2p, g) and (2p + 1, g).
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// d += a b, with the whole warp: bf16 products, f32 sums. The order of the 16 additions is the
// hardware's own, but the same for every element and every call.
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4],
                                             const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Starts to copy 16 bytes from global to shared memory, past the L1 cache; both addresses are
// aligned to 16 bytes. Only the first source_bytes are read, the rest becomes zeros; with none read
// `from` may point anywhere that is aligned. This thread sees the bytes after the cp_async_wait
// that covers their group, other threads after a barrier that follows it.
__device__ __forceinline__ void cp_async_16(void* to, const void* from,
                                            uint32_t source_bytes = 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(shared_address(to)), "l"(from), "r"(source_bytes)
                 : "memory");
}
// The same for 4 or 8 bytes, through the L1 cache.
template <int Bytes>
__device__ __forceinline__ void cp_async_small(void* to, const void* from,
                                               uint32_t source_bytes = Bytes) {
    static_assert(Bytes == 4 || Bytes == 8);
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                 :
                 : "r"(shared_address(to)), "l"(from), "n"(Bytes), "r"(source_bytes)
                 : "memory");
}
// Closes the group of all copies started since the last commit; it may be empty.
__device__ __forceinline__ void cp_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
// Waits until at most `Groups` of the latest groups are in flight.
template <int Groups>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Groups) : "memory");
}

// 2^x within 2 ulp; results that would be subnormal are 0.
__device__ __forceinline__ float ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two values rounded to bf16 (nearest, ties to even), `lower` in the lower half.
__device__ __forceinline__ uint32_t pack_bf16(float lower, float upper) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(upper), "f"(lower));
    return pair;
}

#else

// ---- emulated ----

// Each lane loads its own elements, so that sanitizers blame the right thread. The counter of
// accesses takes the whole instruction for one.
inline void ldmatrix_x4(uint32_t (&r)[4], const void* row, FBT_SIMT_WHERE) {
    const simt::MatrixRows rows = simt::ldmatrix_rows(row, false, where);
    const simt::Uncounted one_access;
    for (int matrix = 0; matrix < 4; ++matrix)
        r[matrix] = static_cast<const uint32_t*>(rows.row[matrix][0])[simt::lane % 4];
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row, FBT_SIMT_WHERE) {
    const simt::MatrixRows rows = simt::ldmatrix_rows(row, true, where);
    const simt::Uncounted one_access;
    for (int matrix = 0; matrix < 4; ++matrix) {
        const uint32_t lower = static_cast<const uint16_t*>(rows.row[matrix][0])[simt::lane / 4];
        const uint32_t upper = static_cast<const uint16_t*>(rows.row[matrix][1])[simt::lane / 4];
        r[matrix] = lower | upper << 16;
    }
}

inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                         FBT_SIMT_WHERE) {
    simt::mma_m16n8k16(d, a, b, where);
}

// The destination is undefined while the copy is in flight: here it is NaN, and the data arrives,
// and is read, at the last moment that the wait allows.
inline void cp_async(const simt::AsyncCopy& copy, simt::Where where) {
    simt::cp_async_issue(copy, where);
    const simt::Uncounted one_access;
    for (uint32_t i = 0; i < copy.bytes / 4; ++i) static_cast<uint32_t*>(copy.to)[i] = ~0u;
}
inline void cp_async_16(void* to, const void* from, uint32_t source_bytes = 16, FBT_SIMT_WHERE) {
    cp_async({to, from, 16, source_bytes}, where);
}
template <int Bytes>
void cp_async_small(void* to, const void* from, uint32_t source_bytes = Bytes, FBT_SIMT_WHERE) {
    static_assert(Bytes == 4 || Bytes == 8);
    cp_async({to, from, Bytes, source_bytes}, where);
}
inline void cp_async_commit() { simt::cp_async_commit(); }
template <int Groups>
void cp_async_wait() {
    const simt::Uncounted accesses_of_the_issue;
    for (simt::AsyncCopy copy; simt::cp_async_landing(Groups, copy);)
        for (uint32_t i = 0; i < copy.bytes; ++i)
            static_cast<uint8_t*>(copy.to)[i] =
                i < copy.source_bytes ? static_cast<const uint8_t*>(copy.from)[i] : 0;
}

inline float ex2(float x) {
    const float y = std::exp2(x);
    return y < std::numeric_limits<float>::min() ? 0.f : y;
}

inline uint32_t pack_bf16(float lower, float upper) {
    return bf16(lower).bits | uint32_t(bf16(upper).bits) << 16;
}

#endif

}  // namespace fbt::kernels::cuda::ptx
