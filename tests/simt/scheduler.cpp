// Runs a grid: one block after another, a block's threads as fibers that hand over to each other
// only at barriers, at warp operations and at their end.
//
// This file and fiber.cpp are compiled without sanitizer instrumentation. What runs on a fiber uses
// neither containers nor libc's memory functions: ThreadSanitizer intercepts those, and would take
// the scheduler's own bookkeeping for races of the kernel.
#include "tests/simt/scheduler.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "tests/simt/emu.h"
#include "tests/simt/fiber.h"

#if FBT_SIMT_ASAN
#include <sanitizer/asan_interface.h>
#endif

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace fbt::simt {

int lane;

namespace {

constexpr unsigned kMaxThreads = 1024;  // of a block
constexpr unsigned kLanes = 32;
constexpr size_t kPage = 4096;
constexpr size_t kStackBytes = 64 * 1024;
constexpr size_t kSharedBytes = 163 * 1024;      // of a block: sm_80's, the least that fbt supports
constexpr size_t kPlainSharedBytes = 48 * 1024;  // without opt-in
constexpr size_t kArenaBytes = 2 * kSharedBytes / kPage * kPage;  // red zones included
constexpr size_t kRedZone = 128;

enum class State : uint8_t { ready, at_barrier, at_warp_op, finished };

struct Thread {
    Fiber fiber;
    uint3 id;  // its threadIdx
    State state;
    // Where it waits, and for whom.
    const char* op;
    Where where;
    unsigned mask;
    // What it brings to a meeting and takes from it.
    Payload payload, received;
    int source;
    bool predicate;
    unsigned votes;
    void* brought;  // to meet_warp
    // Tokens of the happens-before edges into and out of a meeting.
    char arrived, released;
    void* previous;  // ThreadSanitizer's logical thread of the block before
};

Schedule schedule;
uint64_t random_state;

Fiber host;
Thread threads[kMaxThreads];
Thread* running;
unsigned thread_count, finished_count;
char launch_token, finish_token;

Thread* first_at_barrier;  // null while nobody waits there
unsigned at_barrier_count, barrier_votes;

uint64_t block_serial;  // of all blocks ever run; 0 is none
unsigned char* arena;   // the running block's shared memory
size_t arena_used;
size_t shared_used;  // red zones not counted
void* dynamic_shared;

const Observer* observer;
bool uncounted;
void (*kernel_body)(const void*);
const void* kernel_arguments;

char error_text[2048];
bool aborted;

// ---- who runs next ----

// Ready threads, in order of arrival: a ring, in which every thread stands at most once.
uint16_t ready[kMaxThreads];
unsigned ready_first, ready_count;

uint16_t& ready_at(unsigned i) { return ready[(ready_first + i) % kMaxThreads]; }

void make_ready(Thread& thread) {
    thread.state = State::ready;
    ready_at(ready_count++) = uint16_t(&thread - threads);
}

// Makes threads of [begin, begin + count) ready: the members of `mask`, or all.
void make_ready(unsigned begin, unsigned count, unsigned mask, bool all) {
    for (unsigned i = 0; i < count; ++i) {
        const unsigned member = schedule.order == Order::reverse ? count - 1 - i : i;
        if (all || (mask >> member & 1)) make_ready(threads[begin + member]);
    }
}

uint64_t next_random() {  // xorshift64
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

Thread* take_ready() {
    if (ready_count == 0) return nullptr;
    const unsigned last = ready_count - 1;
    if (schedule.order == Order::random)
        std::swap(ready_at(unsigned(next_random() % ready_count)), ready_at(last));
    --ready_count;
    if (schedule.order == Order::random || schedule.order == Order::lifo)
        return &threads[ready_at(last)];
    Thread* thread = &threads[ready[ready_first]];
    ready_first = (ready_first + 1) % kMaxThreads;
    return thread;
}

void set_running(Thread* thread) {
    running = thread;
    threadIdx = thread->id;
    lane = int((thread - threads) % kLanes);
}

// Leaves the running thread for the next ready one, or for the host when there is none.
void hand_over(bool finished = false) {
    Thread* me = running;
    Thread* next = take_ready();
    if (next == me) return;
    if (next) set_running(next);
    fiber_switch(me->fiber, next ? next->fiber : host, finished);
}

// ---- errors ----

void append_error(const char* format, va_list arguments) {
    const size_t used = strlen(error_text);
    vsnprintf(error_text + used, sizeof error_text - used, format, arguments);
}
__attribute__((format(printf, 1, 2))) void append_error(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    append_error(format, arguments);
    va_end(arguments);
}

// Ends the launch from inside a thread. Its stack, like those of all others, is abandoned.
[[noreturn]] __attribute__((format(printf, 2, 3))) void fail(Where where, const char* format, ...) {
    append_error("%s:%d: block (%u,%u,%u) thread (%u,%u,%u): ", where.file, where.line, blockIdx.x,
                 blockIdx.y, blockIdx.z, threadIdx.x, threadIdx.y, threadIdx.z);
    va_list arguments;
    va_start(arguments, format);
    append_error(format, arguments);
    va_end(arguments);
    aborted = true;
    order_release(&finish_token);
    fiber_switch(running->fiber, host);
    abort();  // nobody switches back
}

// Nobody is ready and not all have finished: says who waits where.
void report_deadlock() {
    append_error("deadlock in block (%u,%u,%u): %u of %u threads have exited", blockIdx.x,
                 blockIdx.y, blockIdx.z, finished_count, thread_count);
    for (unsigned i = 0; i < thread_count;) {
        const Thread& first = threads[i];
        unsigned end = i + 1;
        while (end < thread_count && threads[end].state == first.state &&
               threads[end].where.line == first.where.line)
            ++end;
        if (first.state != State::finished)
            append_error("; threads %u to %u wait at %s:%d in %s", i, end - 1, first.where.file,
                         first.where.line, first.op);
        i = end;
    }
}

// ---- meetings ----

bool same_text(const char* a, const char* b) {
    if (a == b) return true;  // nearly always
    while (*a && *a == *b) ++a, ++b;
    return *a == *b;
}
bool same_place(const Thread& thread, const char* op, Where where) {
    return thread.where.line == where.line && same_text(thread.op, op) &&
           same_text(thread.where.file, where.file);
}

void arrive(Thread& me, State state, const char* op, Where where, unsigned mask) {
    me.state = state;
    me.op = op;
    me.where = where;
    me.mask = mask;
}

// Suspends the running thread until its lanes have met. `complete` then runs once, in the last lane
// to arrive, on the warp's first thread and the mask of its existing members.
template <class Complete>
void meet_lanes(unsigned mask, const char* op, Where where, Complete complete) {
    Thread& me = *running;
    const unsigned index = unsigned(&me - threads), lane = index % kLanes, base = index - lane;
    // A full mask is right in a block's last, partial warp too: it names the lanes that exist.
    const unsigned lanes = std::min(kLanes, thread_count - base);
    mask &= ~0u >> (kLanes - lanes);
    if (!(mask >> lane & 1)) fail(where, "%s: the own lane is not in mask %08x", op, mask);
    arrive(me, State::at_warp_op, op, where, mask);
    bool all_here = true;
    for (unsigned i = 0; i < lanes; ++i) {
        if (!(mask >> i & 1)) continue;
        const Thread& other = threads[base + i];
        if (other.state == State::finished)
            fail(where, "%s (mask %08x) waits for lane %u, which has exited", op, mask, i);
        const bool here =
            other.state == State::at_warp_op && other.mask == mask && same_place(other, op, where);
        if (!here && other.state == State::at_warp_op && (other.mask >> lane & 1))
            fail(where, "divergent %s (mask %08x): lane %u is at %s:%d in %s (mask %08x)", op, mask,
                 i, other.where.file, other.where.line, other.op, other.mask);
        all_here = all_here && here;
    }
    if (all_here) {
        complete(threads + base, mask);
        make_ready(base, lanes, mask, false);
    }
    hand_over();
}

// ---- blocks ----

// For AddressSanitizer. (The header's macros would do nothing in a file that is not instrumented.)
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

char* reserve(size_t bytes) {
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        perror("simt: mmap");
        abort();
    }
    return static_cast<char*>(memory);
}

char* stacks;  // of all threads, each above its guard page

void reserve_memory() {
    if (stacks) return;
    stacks = reserve(kMaxThreads * kStackBytes);
    arena = reinterpret_cast<unsigned char*>(reserve(kArenaBytes));
    for (unsigned i = 0; i < kMaxThreads; ++i) {
        char* lowest = stacks + i * kStackBytes;
        // Under ThreadSanitizer the stacks are renewed, guards and all, so there are none.
        if (!FBT_SIMT_TSAN) mprotect(lowest, kPage, PROT_NONE);
        threads[i].fiber.stack = lowest + kPage;
        threads[i].fiber.stack_bytes = kStackBytes - kPage;
    }
}

unsigned char* take_shared(size_t bytes) {
    unsigned char* memory = arena + arena_used;
    shared_used += bytes;
    arena_used += (bytes + kRedZone - 1) / kRedZone * kRedZone + kRedZone;
    if (shared_used > kSharedBytes || arena_used > kArenaBytes) return nullptr;
    unpoison(memory, bytes);
    for (size_t i = 0; i < bytes; ++i) memory[i] = 0xff;
    return memory;
}

// For ThreadSanitizer: gives stacks and shared memory back, fresh and zero, so that it forgets who
// touched them. The next block uses the same addresses, and that is no race.
void forget_accesses() {
#if FBT_SIMT_TSAN
    const auto renew = [](void* memory, size_t bytes) {
        mmap(memory, bytes, PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    };
    renew(stacks, thread_count * kStackBytes);
    renew(arena, kArenaBytes);
    // It tells only 255 logical threads apart and numbers them in turn; one more a block keeps
    // thread i of a block of 128 from sharing its number with thread i of the next.
    __tsan_destroy_fiber(__tsan_create_fiber(0));
#endif
}

// For ThreadSanitizer: every CUDA thread is a logical thread of its own. It reports no race with
// one that it has forgotten, so a block's threads are kept until the next block has run, and the
// last ones to the end of the grid.
void create_logical_thread([[maybe_unused]] Thread& thread) {
#if FBT_SIMT_TSAN
    if (thread.previous) __tsan_destroy_fiber(thread.previous);
    thread.previous = thread.fiber.tsan_fiber;
    thread.fiber.tsan_fiber = __tsan_create_fiber(0);
#endif
}
void destroy_logical_threads() {
#if FBT_SIMT_TSAN
    for (Thread& thread : threads)
        for (void** fiber : {&thread.previous, &thread.fiber.tsan_fiber}) {
            if (*fiber) __tsan_destroy_fiber(*fiber);
            *fiber = nullptr;
        }
#endif
}

// Tells the sanitizers that `thread` will not run again: its frames are no more, and whatever it
// did comes before whatever follows.
void abandon(Thread& thread) {
    unpoison(thread.fiber.stack, thread.fiber.stack_bytes);
#if FBT_SIMT_TSAN
    __tsan_switch_to_fiber(thread.fiber.tsan_fiber, __tsan_switch_to_fiber_no_sync);
    order_release(&finish_token);
    __tsan_switch_to_fiber(host.tsan_fiber, __tsan_switch_to_fiber_no_sync);
#endif
}

void thread_entry() {
    fiber_entered();
    Thread& me = *running;
    order_acquire(&launch_token);
    cp_async_forget();
    kernel_body(kernel_arguments);
    if (const Where* copy = cp_async_in_flight())
        fail(*copy, "the thread exits while this cp.async is in flight");
    order_release(&finish_token);
    me.state = State::finished;
    ++finished_count;
    hand_over(true);
    abort();  // nobody switches back
}

void run_block(dim3 grid, dim3 block, uint64_t index, size_t dynamic_bytes) {
    ++block_serial;
    finished_count = 0;
    first_at_barrier = nullptr;
    at_barrier_count = barrier_votes = 0;
    ready_first = ready_count = 0;
    forget_accesses();
    poison(arena, kArenaBytes);
    arena_used = shared_used = 0;
    dynamic_shared = dynamic_bytes > 0 ? take_shared(dynamic_bytes) : nullptr;

    const uint64_t layer = uint64_t(grid.x) * grid.y;
    blockIdx = {unsigned(index % grid.x), unsigned(index % layer / grid.x),
                unsigned(index / layer)};
    blockDim = block;
    gridDim = grid;
    for (unsigned i = 0; i < thread_count; ++i) {
        Thread& thread = threads[i];
        thread.id = {i % block.x, i / block.x % block.y, i / (block.x * block.y)};
        fiber_prepare(thread.fiber, thread_entry);
        create_logical_thread(thread);
    }
    make_ready(0, thread_count, 0, true);
    order_release(&launch_token);
    set_running(take_ready());
    fiber_switch(host, running->fiber);
    running = nullptr;
    uncounted = false;
    if (observer) observer->block_ends();
    if (!aborted && finished_count != thread_count) {
        report_deadlock();
        aborted = true;
    }
    if (aborted)
        for (unsigned i = 0; i < thread_count; ++i) abandon(threads[i]);
}

std::map<const void*, size_t>& dynamic_shared_limits() {
    static std::map<const void*, size_t> limits;
    return limits;
}

}  // namespace

const char* last_error() { return error_text; }
void set_last_error(const char* text) { snprintf(error_text, sizeof error_text, "%s", text); }

int block_barrier(bool predicate, const char* op, Where where) {
    Thread& me = *running;
    if (finished_count > 0)
        fail(where, "%s after %u threads of the block have exited", op, finished_count);
    if (first_at_barrier && !same_place(*first_at_barrier, op, where))
        fail(where, "divergent %s: thread %u waits at %s:%d in %s", op,
             unsigned(first_at_barrier - threads), first_at_barrier->where.file,
             first_at_barrier->where.line, first_at_barrier->op);
    arrive(me, State::at_barrier, op, where, 0);
    if (!first_at_barrier) first_at_barrier = &me;
    barrier_votes += predicate;
    order_release(&me.arrived);
    if (++at_barrier_count == thread_count) {
        for (unsigned i = 0; i < thread_count; ++i) order_acquire(&threads[i].arrived);
        for (unsigned i = 0; i < thread_count; ++i) {
            order_release(&threads[i].released);
            threads[i].votes = barrier_votes;
        }
        first_at_barrier = nullptr;
        at_barrier_count = barrier_votes = 0;
        make_ready(0, thread_count, 0, true);
    }
    hand_over();
    order_acquire(&me.released);
    return int(me.votes);
}

void warp_barrier(unsigned mask, Where where) {
    Thread& me = *running;
    order_release(&me.arrived);
    meet_lanes(mask, "__syncwarp", where, [](Thread* warp, unsigned members) {
        for (unsigned i = 0; i < kLanes; ++i)
            if (members >> i & 1) order_acquire(&warp[i].arrived);
        for (unsigned i = 0; i < kLanes; ++i)
            if (members >> i & 1) order_release(&warp[i].released);
    });
    order_acquire(&me.released);
}

void exchange(unsigned mask, Payload& payload, int source, const char* op, Where where) {
    Thread& me = *running;
    const unsigned lanes =
        std::min(kLanes, thread_count - unsigned(&me - threads) / kLanes * kLanes);
    if (!(mask >> source & 1) || unsigned(source) >= lanes)
        fail(where, "%s reads lane %d, which is not in mask %08x", op, source, mask);
    me.payload = payload;
    me.source = source;
    meet_lanes(mask, op, where, [](Thread* warp, unsigned members) {
        for (unsigned i = 0; i < kLanes; ++i)
            if (members >> i & 1) warp[i].received = warp[warp[i].source].payload;
    });
    payload = me.received;
}

unsigned ballot(unsigned mask, bool predicate, const char* op, Where where) {
    Thread& me = *running;
    me.predicate = predicate;
    meet_lanes(mask, op, where, [](Thread* warp, unsigned members) {
        unsigned votes = 0;
        for (unsigned i = 0; i < kLanes; ++i)
            if ((members >> i & 1) && warp[i].predicate) votes |= 1u << i;
        for (unsigned i = 0; i < kLanes; ++i)
            if (members >> i & 1) warp[i].votes = votes;
    });
    return me.votes;
}

void meet_warp(void* mine, void (*complete)(void* const* lanes), const char* op, Where where) {
    Thread& me = *running;
    if (thread_count - unsigned(&me - threads) / kLanes * kLanes < kLanes)
        fail(where, "%s in a warp of fewer than %u threads", op, kLanes);
    me.brought = mine;
    meet_lanes(~0u, op, where, [complete](Thread* warp, unsigned) {
        void* lanes[kLanes];
        for (unsigned i = 0; i < kLanes; ++i) lanes[i] = warp[i].brought;
        complete(lanes);
    });
}

void fail_launch(const char* message, Where where) { fail(where, "%s", message); }

void* shared_memory(SharedSlot& slot, size_t bytes) {
    if (slot.block != block_serial) {
        slot.block = block_serial;
        slot.memory = take_shared(bytes);
        if (!slot.memory)
            fail(Where::current(), "the block uses more than %zu bytes of shared memory",
                 kSharedBytes);
    }
    return slot.memory;
}

void* dynamic_shared_memory() { return dynamic_shared; }

cudaError_t allow_dynamic_shared(const void* kernel, size_t bytes) {
    if (bytes > kSharedBytes) return cudaErrorInvalidValue;
    dynamic_shared_limits()[kernel] = bytes;
    return cudaSuccess;
}

void set_observer(const Observer* o) { observer = o; }

int counted_thread() { return running && !uncounted ? int(running - threads) : -1; }

bool is_shared_memory(const void* p) { return p >= arena && p < arena + kArenaBytes; }

void count_access(const void* memory, size_t bytes, bool write, Where where) {
    if (observer && running)
        observer->access(unsigned(running - threads), memory, bytes, write,
                         reinterpret_cast<const void*>(uintptr_t(where.file) + where.line));
}

Uncounted::Uncounted() { uncounted = true; }
Uncounted::~Uncounted() { uncounted = false; }

size_t dynamic_shared_limit(const void* kernel) {
    const auto limit = dynamic_shared_limits().find(kernel);
    return limit == dynamic_shared_limits().end() ? kPlainSharedBytes : limit->second;
}

cudaError_t check_grid(const void* kernel, dim3 grid, dim3 block, size_t dynamic_bytes) {
    const uint64_t count = uint64_t(block.x) * block.y * block.z;
    if (count == 0 || count > kMaxThreads || block.z > 64 || grid.x == 0 || grid.x > 0x7fffffff ||
        grid.y == 0 || grid.y > 65535 || grid.z == 0 || grid.z > 65535)
        return cudaErrorInvalidConfiguration;
    return dynamic_bytes <= dynamic_shared_limit(kernel) ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t run_grid(const void* kernel, dim3 grid, dim3 block, size_t dynamic_bytes,
                     Schedule order, void (*body)(const void*), const void* arguments) {
    reserve_memory();
#if FBT_SIMT_TSAN
    host.tsan_fiber = __tsan_get_current_fiber();
#endif
    if (observer) observer->grid_begins(kernel);
    schedule = order;
    thread_count = block.x * block.y * block.z;
    kernel_body = body;
    kernel_arguments = arguments;
    random_state = schedule.seed * 0x9E3779B97F4A7C15u | 1;  // xorshift needs a non-zero state
    error_text[0] = '\0';
    aborted = false;
    const uint64_t blocks = uint64_t(grid.x) * grid.y * grid.z;
    for (uint64_t i = 0; i < blocks && !aborted; ++i)
        run_block(grid, block, schedule.order == Order::reverse ? blocks - 1 - i : i,
                  dynamic_bytes);
    order_acquire(&finish_token);
    destroy_logical_threads();
    return aborted ? cudaErrorLaunchFailure : cudaSuccess;
}

}  // namespace fbt::simt
