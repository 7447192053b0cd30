// A fiber: a suspended computation with its own stack, resumed by an explicit switch. The
// sanitizers are told about every switch (FBT_SIMT_ASAN, FBT_SIMT_TSAN say which one is linked).
#pragma once
#include <cstddef>

#ifndef FBT_SIMT_ASAN
#define FBT_SIMT_ASAN 0
#endif
#ifndef FBT_SIMT_TSAN
#define FBT_SIMT_TSAN 0
#endif
#if FBT_SIMT_TSAN
#include <sanitizer/tsan_interface.h>
#endif
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace fbt::simt {

struct Fiber {
    char* stack = nullptr;  // lowest address; null in the fiber that is the host thread
    size_t stack_bytes = 0;
#if defined(__x86_64__)
    void* stack_pointer = nullptr;
#else
    ucontext_t context{};
#endif
    void* asan_stack = nullptr;  // AddressSanitizer's fake stack while suspended
    void* tsan_fiber = nullptr;  // ThreadSanitizer's logical thread
};

// Makes the next switch to `fiber` call entry() on its stack. entry calls fiber_entered() first,
// and leaves by a switch with `finished`, never by returning.
void fiber_prepare(Fiber& fiber, void (*entry)());
void fiber_entered();
void fiber_switch(Fiber& from, Fiber& to, bool finished = false);

// Happens-before edges for ThreadSanitizer: what came before order_release(token) is visible after
// order_acquire(token). Nothing in other builds.
#if FBT_SIMT_TSAN
inline void order_release(void* token) { __tsan_release(token); }
inline void order_acquire(void* token) { __tsan_acquire(token); }
#else
inline void order_release(void*) {}
inline void order_acquire(void*) {}
#endif

}  // namespace fbt::simt
