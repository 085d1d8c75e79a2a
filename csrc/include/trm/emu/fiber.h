// SPDX-License-Identifier: Apache-2.0
// One fiber: a stack with a guard page and a saved context. Switching is fifteen instructions on
// x86-64; ucontext elsewhere and under a sanitizer, whose annotations live here too.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>

#if defined(TRM_EMU_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(TRM_EMU_TSAN)
#include <sanitizer/tsan_interface.h>
extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

#if defined(__x86_64__) && !defined(TRM_EMU_ASAN) && !defined(TRM_EMU_TSAN)
#define TRM_EMU_OWN_SWITCH 1
#else
#include <ucontext.h>
#define TRM_EMU_OWN_SWITCH 0
#endif

namespace trm::emu {

#if defined(TRM_EMU_TSAN)
constexpr bool kRaceDetector = true;
#else
constexpr bool kRaceDetector = false;
#endif

// Happens-before edges for the race detector; nothing in other builds.
inline void tsan_release([[maybe_unused]] void* object) {
#if defined(TRM_EMU_TSAN)
  __tsan_release(object);
#endif
}
inline void tsan_acquire([[maybe_unused]] void* object) {
#if defined(TRM_EMU_TSAN)
  __tsan_acquire(object);
#endif
}

// While it lives, what this fiber allocates, fills and frees is the machine's business: the race
// detector intercepts those calls even in code that is not instrumented.
struct Quiet {
#if defined(TRM_EMU_TSAN)
  Quiet() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~Quiet() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
#else
  Quiet() {}
  ~Quiet() {}
#endif
  Quiet(const Quiet&) = delete;
  Quiet& operator=(const Quiet&) = delete;
};

struct Stack {
  char* base = nullptr;  // lowest usable byte; a guard page lies below
  size_t bytes = 0;
};

inline Stack map_stack() {
#if TRM_EMU_OWN_SWITCH
  constexpr size_t kBytes = 64 * 1024;
#else
  constexpr size_t kBytes = 256 * 1024;
#endif
  const size_t guard = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* memory = mmap(nullptr, kBytes + guard, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
  if (memory == MAP_FAILED) abort();
  if (mprotect(memory, guard, PROT_NONE) != 0) abort();
  return {static_cast<char*>(memory) + guard, kBytes};
}

struct Fiber {
  Stack stack;  // empty for the thread that called launch
#if TRM_EMU_OWN_SWITCH
  void* stack_pointer = nullptr;
#else
  ucontext_t context;
#endif
#if defined(TRM_EMU_ASAN)
  void* fake_stack = nullptr;
#endif
#if defined(TRM_EMU_TSAN)
  void* tsan = nullptr;
#endif
};

#if TRM_EMU_OWN_SWITCH
extern "C" void trm_emu_switch(void** saved, void* next);
asm(R"(
.pushsection .text
.globl trm_emu_switch
.hidden trm_emu_switch
.type trm_emu_switch, @function
trm_emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size trm_emu_switch, . - trm_emu_switch
.popsection
)");
#endif

// Prepares a fiber that will start in `entry`, which never returns.
inline void make_fiber(Fiber& fiber, Stack stack, void (*entry)()) {
  fiber.stack = stack;
#if TRM_EMU_OWN_SWITCH
  void** top = reinterpret_cast<void**>(stack.base + stack.bytes);
  *--top = nullptr;  // entry's return address, were it to return; rsp = 8 mod 16 on entry
  *--top = reinterpret_cast<void*>(entry);
  for (int registers = 0; registers < 6; ++registers) *--top = nullptr;
  fiber.stack_pointer = top;
#else
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = stack.base;
  fiber.context.uc_stack.ss_size = stack.bytes;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, entry, 0);
#endif
#if defined(TRM_EMU_ASAN)
  fiber.fake_stack = nullptr;
#endif
#if defined(TRM_EMU_TSAN)
  fiber.tsan = __tsan_create_fiber(0);  // ordered after everything its creator did
#endif
}

inline void drop_fiber([[maybe_unused]] Fiber& fiber) {
#if defined(TRM_EMU_TSAN)
  __tsan_destroy_fiber(fiber.tsan);
  fiber.tsan = nullptr;
#endif
}

// First thing a fiber does. `caller` learns its own stack from it, where it did not know.
inline void enter_fiber([[maybe_unused]] Fiber& caller) {
#if defined(TRM_EMU_ASAN)
  const void* bottom = nullptr;
  size_t bytes = 0;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
  if (caller.stack.base == nullptr) {
    caller.stack = {const_cast<char*>(static_cast<const char*>(bottom)), bytes};
  }
#endif
}

inline void switch_fiber(Fiber& from, Fiber& to, [[maybe_unused]] bool last_time) {
#if defined(TRM_EMU_TSAN)
  __tsan_switch_to_fiber(to.tsan, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(TRM_EMU_ASAN)
  __sanitizer_start_switch_fiber(last_time ? nullptr : &from.fake_stack, to.stack.base,
                                 to.stack.bytes);
#endif
#if TRM_EMU_OWN_SWITCH
  trm_emu_switch(&from.stack_pointer, to.stack_pointer);
#else
  swapcontext(&from.context, &to.context);
#endif
#if defined(TRM_EMU_ASAN)
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

}  // namespace trm::emu
