#include "tests/simt/fiber.h"

#include <cstdint>

#if FBT_SIMT_ASAN
#include <sanitizer/common_interface_defs.h>
#endif

#if defined(__x86_64__)
// Saves the registers that a System V function must preserve, and returns on the other stack.
// swapcontext would do, but makes a system call each time.
extern "C" void fbt_simt_switch(void** save, void* load);
asm(R"(
.text
.globl fbt_simt_switch
.type fbt_simt_switch,@function
fbt_simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size fbt_simt_switch,.-fbt_simt_switch
)");
#endif

namespace fbt::simt {
namespace {

#if FBT_SIMT_ASAN
Fiber* left;  // whom the last switch left
#endif

// The first thing after a switch, on the stack of the fiber that goes on. Reports the bounds of
// the stack that was left: that is how the host thread's become known.
void arrived([[maybe_unused]] void* own_stack) {
#if FBT_SIMT_ASAN
    const void* bottom = nullptr;
    size_t bytes = 0;
    __sanitizer_finish_switch_fiber(own_stack, &bottom, &bytes);
    left->stack = static_cast<char*>(const_cast<void*>(bottom));
    left->stack_bytes = bytes;
#endif
}

}  // namespace

void fiber_prepare(Fiber& fiber, void (*entry)()) {
#if defined(__x86_64__)
    // As fbt_simt_switch leaves a stack: six registers, then where to return; above it the zero
    // that stands for entry's own return address, at 8 modulo 16 as the ABI wants on entry.
    void** top = reinterpret_cast<void**>(
        (reinterpret_cast<uintptr_t>(fiber.stack) + fiber.stack_bytes) & ~uintptr_t(15));
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(entry);
    for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
    fiber.stack_pointer = top;
#else
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack;
    fiber.context.uc_stack.ss_size = fiber.stack_bytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, entry, 0);
#endif
    fiber.asan_stack = nullptr;
}

void fiber_entered() { arrived(nullptr); }

void fiber_switch(Fiber& from, Fiber& to, [[maybe_unused]] bool finished) {
#if FBT_SIMT_TSAN
    __tsan_switch_to_fiber(to.tsan_fiber, __tsan_switch_to_fiber_no_sync);
#endif
#if FBT_SIMT_ASAN
    left = &from;
    __sanitizer_start_switch_fiber(finished ? nullptr : &from.asan_stack, to.stack, to.stack_bytes);
#endif
#if defined(__x86_64__)
    fbt_simt_switch(&from.stack_pointer, to.stack_pointer);
#else
    swapcontext(&from.context, &to.context);
#endif
    arrived(from.asan_stack);
}

}  // namespace fbt::simt
