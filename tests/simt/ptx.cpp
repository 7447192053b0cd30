// What the emulated twins in kernels/ptx.cuh need of the whole warp, and the queues of asynchronous
// copies. Compiled without sanitizer instrumentation, under the same rules as scheduler.cpp: loads
// and stores of the kernel's own data are done in ptx.cuh, so that sanitizers see them.
#include <bit>

#include "tests/simt/emu.h"

namespace fbt::simt {
namespace {

constexpr int kLanes = 32;
constexpr unsigned kMaxThreads = 1024;  // of a block

// A lane's place in a fragment: PTX numbers lanes as 8 groups of 4.
constexpr int group_of(int lane) { return lane / 4; }
constexpr int pair_of(int lane) { return lane % 4 * 2; }  // of the first of its two columns

struct MatrixRequest {
    const void* row;
    bool transposed;
    MatrixRows result;
};

void give_rows(void* const* lanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
        auto& mine = *static_cast<MatrixRequest*>(lanes[lane]);
        for (int matrix = 0; matrix < 4; ++matrix)
            for (int i = 0; i < 2; ++i) {
                const int row = mine.transposed ? pair_of(lane) + i : group_of(lane);
                mine.result.row[matrix][i] =
                    static_cast<const MatrixRequest*>(lanes[matrix * 8 + row])->row;
            }
    }
}

struct MmaOperands {
    float* d;
    const uint32_t *a, *b;
};

float lower(uint32_t pair) { return std::bit_cast<float>(pair << 16); }
float upper(uint32_t pair) { return std::bit_cast<float>(pair & 0xffff0000u); }

// Fragments of m16n8k16 (PTX ISA, "Matrix Fragments for mma.m16n8k16"), for lane = 4 g + p:
//   a  register r: row g + 8 (r % 2), columns 2p + 8 (r / 2) and the next
//   b  register r: rows 2p + 8 r and the next, column g
//   d  element r:  row g + 8 (r / 2), column 2p + r % 2
void multiply(void* const* lanes) {
    float a[16][16], b[16][8], d[16][8];
    for (int lane = 0; lane < kLanes; ++lane) {
        const auto& mine = *static_cast<const MmaOperands*>(lanes[lane]);
        const int g = group_of(lane), p = pair_of(lane);
        for (int r = 0; r < 4; ++r) {
            a[g + r % 2 * 8][p + r / 2 * 8] = lower(mine.a[r]);
            a[g + r % 2 * 8][p + r / 2 * 8 + 1] = upper(mine.a[r]);
            d[g + r / 2 * 8][p + r % 2] = mine.d[r];
        }
        for (int r = 0; r < 2; ++r) {
            b[p + r * 8][g] = lower(mine.b[r]);
            b[p + r * 8 + 1][g] = upper(mine.b[r]);
        }
    }
    for (int row = 0; row < 16; ++row)
        for (int k = 0; k < 16; ++k)
            for (int column = 0; column < 8; ++column) d[row][column] += a[row][k] * b[k][column];
    for (int lane = 0; lane < kLanes; ++lane) {
        const auto& mine = *static_cast<const MmaOperands*>(lanes[lane]);
        for (int r = 0; r < 4; ++r)
            mine.d[r] = d[group_of(lane) + r / 2 * 8][pair_of(lane) + r % 2];
    }
}

// A thread's copies in flight, oldest first: a ring.
constexpr unsigned kMaxCopies = 512;
struct Queue {
    struct Entry {
        AsyncCopy copy;
        Where where;
        unsigned group;  // how many were committed before it
    } entries[kMaxCopies];
    unsigned first, count, committed;
} queues[kMaxThreads];

Queue& my_queue() {
    return queues[threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)];
}

}  // namespace

MatrixRows ldmatrix_rows(const void* row, bool transposed, Where where) {
    if (reinterpret_cast<uintptr_t>(row) % 16 != 0)
        fail_launch("ldmatrix: the row is not aligned to 16 bytes", where);
    count_access(row, 16, false, where);
    MatrixRequest request{row, transposed, {}};
    meet_warp(&request, give_rows, transposed ? "ldmatrix.trans" : "ldmatrix", where);
    return request.result;
}

void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], Where where) {
    MmaOperands operands{d, a, b};
    meet_warp(&operands, multiply, "mma", where);
}

void cp_async_issue(const AsyncCopy& copy, Where where) {
    if (reinterpret_cast<uintptr_t>(copy.to) % copy.bytes != 0)
        fail_launch("cp.async: the destination is not aligned to the copy's size", where);
    if (reinterpret_cast<uintptr_t>(copy.from) % copy.bytes != 0)
        fail_launch("cp.async: the source is not aligned to the copy's size", where);
    if (copy.source_bytes > copy.bytes)
        fail_launch("cp.async: more source bytes than the copy has", where);
    if (copy.source_bytes > 0) count_access(copy.from, copy.source_bytes, false, where);
    count_access(copy.to, copy.bytes, true, where);
    Queue& queue = my_queue();
    if (queue.count == kMaxCopies)
        fail_launch("cp.async: the emulator holds 512 copies of a thread in flight", where);
    queue.entries[(queue.first + queue.count++) % kMaxCopies] = {copy, where, queue.committed};
}

void cp_async_commit() { ++my_queue().committed; }

bool cp_async_landing(unsigned groups, AsyncCopy& copy) {
    Queue& queue = my_queue();
    const Queue::Entry& oldest = queue.entries[queue.first];
    if (queue.count == 0 || oldest.group + groups >= queue.committed) return false;
    copy = oldest.copy;
    queue.first = (queue.first + 1) % kMaxCopies;
    --queue.count;
    return true;
}

void cp_async_forget() {
    Queue& queue = my_queue();
    queue.first = queue.count = queue.committed = 0;
}

const Where* cp_async_in_flight() {
    Queue& queue = my_queue();
    return queue.count > 0 ? &queue.entries[queue.first].where : nullptr;
}

}  // namespace fbt::simt
