// SPDX-License-Identifier: Apache-2.0
// The emulator's entry points, and the hooks through which it sees memory accesses.
//
// Kernels are compiled with -fsanitize=thread, which puts a call before every access that may be
// shared. In the plain lane (TRM_EMU_HOOKS) the functions it calls are ours, below; in the race
// lane they are ThreadSanitizer's. This file itself is never instrumented.
#include "trm/emu/machine.h"

namespace trm::emu {

namespace {

constexpr const char* kOrders[] = {"inorder", "reverse", "shuffled", "greedy-one-warp",
                                   "lane-serial"};

}  // namespace

Order parse_order(const std::string& name) {
  for (int i = 0; i < 5; ++i) {
    if (name == kOrders[i]) return static_cast<Order>(i);
  }
  throw std::invalid_argument("no schedule is called " + name);
}

const char* order_name(Order order) { return kOrders[static_cast<int>(order)]; }

void set_device(int compute_capability, int multiprocessors) {
  machine().compute_capability = compute_capability;
  machine().multiprocessors = multiprocessors;
}
void set_schedule(Schedule schedule) { machine().schedule = schedule; }
void set_shape(const std::string& shape) { machine().shape = shape; }
std::string repro() { return machine().repro(); }
Counters counters() { return machine().counters; }

Buffers::Buffers() { ++machine().scopes; }

Buffers::~Buffers() {
  if (--machine().scopes == 0) machine().buffers.clear();
}

namespace {

void add_buffer(const char* name, const void* data, size_t bytes, bool writable, bool holds) {
  if (data == nullptr || bytes == 0) return;
  Buffer& buffer = machine().buffers.emplace_back();
  buffer.name = name;
  buffer.begin = reinterpret_cast<uintptr_t>(data);
  buffer.end = buffer.begin + bytes;
  buffer.writable = writable;
#if defined(TRM_EMU_HOOKS)
  if (!holds) buffer.written.reset(new uint8_t[bytes]());
#else
  (void)holds;
#endif
}

}  // namespace

void Buffers::reads(const char* name, const void* data, size_t bytes) {
  add_buffer(name, data, bytes, false, true);
}

void Buffers::writes(const char* name, void* data, size_t bytes) {
  add_buffer(name, data, bytes, true, false);
}

void Buffers::updates(const char* name, void* data, size_t bytes) {
  add_buffer(name, data, bytes, true, true);
}

void Buffers::scratch(const char* name, void* data, size_t bytes) {
  const size_t before = machine().buffers.size();
  add_buffer(name, data, bytes, true, false);
  if (machine().buffers.size() > before) machine().buffers.back().scratch = true;
}

void Buffers::finish() {
  for (const Buffer& buffer : machine().buffers) {
    if (buffer.written == nullptr || buffer.scratch) continue;
    const size_t bytes = buffer.end - buffer.begin;
    const void* hole = memchr(buffer.written.get(), 0, bytes);
    if (hole == nullptr) continue;
    const auto at = static_cast<const uint8_t*>(hole) - buffer.written.get();
    machine().fail(text("output `%s` was left unwritten at byte %lld of %zu", buffer.name.c_str(),
                        static_cast<long long>(at), bytes),
                   nullptr, "");
  }
}

// ---- what kernels call -------------------------------------------------------------------------

dim3 thread_index() { return machine().current->index; }
dim3 block_index() { return machine().current->block->index; }
dim3 block_size() { return machine().config.block; }
dim3 grid_size() { return machine().config.grid; }
unsigned cluster_rank() { return machine().current->block->rank; }
unsigned cluster_size() { return machine().config.cluster; }

void* shared_bytes(const void* type, size_t bytes, size_t alignment, const char* name,
                   Where where) {
  const Quiet quiet;
  return machine().shared(type, bytes, alignment, name, where);
}

void* dynamic_shared_bytes(size_t alignment, Where where) {
  const Quiet quiet;
  return machine().dynamic_shared(alignment, where);
}

void* cluster_bytes(const void* object, unsigned rank, Where where) {
  const Quiet quiet;
  return machine().cluster_object(object, rank, where);
}

int block_barrier(Reduction reduction, int predicate, const char* name, Where where) {
  const Quiet quiet;
  Block& block = *machine().current->block;
  const int size = static_cast<int>(block.threads.size());
  block.barrier.count += predicate != 0;
  machine().barrier_wait(block.barrier, block.threads.size(), block.exited, name, where, &block);
  const int count = block.barrier.result;
  if (reduction == Reduction::kAnd) return count == size;
  if (reduction == Reduction::kOr) return count != 0;
  return count;
}

void cluster_barrier(Where where) {
  const Quiet quiet;
  Machine& m = machine();
  m.barrier_wait(m.cluster_barrier, m.live, m.exited, "cluster_sync", where, nullptr);
}

uint64_t warp_collective(Collective collective, unsigned mask, uint64_t value, unsigned argument,
                         unsigned width, const char* name, Where where) {
  const Quiet quiet;
  return machine().collective(collective, mask, value, argument, width, name, where);
}

int compute_capability() { return machine().compute_capability; }
int multiprocessors() { return machine().multiprocessors; }

// Nothing is promised about who else is active, so nobody is.
unsigned active_mask() { return 1u << machine().current->lane; }

void fence() {
  const Quiet quiet;
  machine().fence();
}

void check_access(const Access& access, Where where) {
  const Quiet quiet;
#if defined(TRM_EMU_HOOKS)
  machine().access(access, nullptr, &where);
#else
  Machine& m = machine();
  if (reinterpret_cast<uintptr_t>(access.place) % access.alignment != 0) {
    m.fail(text("%s: misaligned access of %zu bytes", access.name, access.bytes), m.current,
           place_of(where));
  }
#endif
}

// An atomic is where another thread may cut in. Published by a fence before it, it orders memory
// for whoever meets the same place and then fences.
void begin_atomic(const Access& access, Where where) {
  const Quiet quiet;
  check_access(access, where);
  Machine& m = machine();
  m.yield(true);
  if (m.current->fenced) tsan_release(const_cast<void*>(access.place));
}

void end_atomic(const void* place) {
  const Quiet quiet;
  std::vector<const void*>& seen = machine().current->atomics;
  if (kRaceDetector && std::find(seen.begin(), seen.end(), place) == seen.end()) {
    seen.push_back(place);
  }
}

void run_grid(const LaunchConfig& config, void (*kernel)(void*), void* parameters,
              size_t parameter_bytes, const void* kernel_address) {
  Machine& m = machine();
  const std::lock_guard<std::mutex> one(m.one_launch);
  m.config = config;
  m.kernel = kernel;
  m.parameters = parameters;
  m.parameter_bytes = parameter_bytes;
  m.kernel_address = kernel_address;
  m.run();
}

}  // namespace trm::emu

// ---- memory hooks ------------------------------------------------------------------------------

#if defined(TRM_EMU_HOOKS)

using trm::emu::machine;

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

#define TRM_EMU_HOOK(name, bytes, alignment, reads, writes)             \
  void name(void* place) {                                              \
    machine().access({place, bytes, alignment, reads, writes, nullptr}, \
                     __builtin_return_address(0), nullptr);             \
  }
#define TRM_EMU_HOOKS_OF(bytes)                                         \
  TRM_EMU_HOOK(__tsan_read##bytes, bytes, bytes, true, false)           \
  TRM_EMU_HOOK(__tsan_write##bytes, bytes, bytes, false, true)          \
  TRM_EMU_HOOK(__tsan_volatile_read##bytes, bytes, bytes, true, false)  \
  TRM_EMU_HOOK(__tsan_volatile_write##bytes, bytes, bytes, false, true) \
  TRM_EMU_HOOK(__tsan_unaligned_read##bytes, bytes, 1, true, false)     \
  TRM_EMU_HOOK(__tsan_unaligned_write##bytes, bytes, 1, false, true)
TRM_EMU_HOOKS_OF(1)
TRM_EMU_HOOKS_OF(2)
TRM_EMU_HOOKS_OF(4)
TRM_EMU_HOOKS_OF(8)
TRM_EMU_HOOKS_OF(16)
#undef TRM_EMU_HOOKS_OF
#undef TRM_EMU_HOOK

void __tsan_read_range(void* place, size_t bytes) {
  machine().access({place, bytes, 1, true, false, nullptr}, __builtin_return_address(0), nullptr);
}
void __tsan_write_range(void* place, size_t bytes) {
  machine().access({place, bytes, 1, false, true, nullptr}, __builtin_return_address(0), nullptr);
}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

// Atomics were checked by begin_atomic; only the two shapes that atomic_change uses exist.
#define TRM_EMU_ATOMIC_HOOKS(bits)                                                       \
  uint##bits##_t __tsan_atomic##bits##_load(const volatile uint##bits##_t* place, int) { \
    return *place;                                                                       \
  }                                                                                      \
  bool __tsan_atomic##bits##_compare_exchange_strong(volatile uint##bits##_t* place,     \
                                                     uint##bits##_t* expected,           \
                                                     uint##bits##_t desired, int, int) { \
    const uint##bits##_t seen = *place;                                                  \
    if (seen == *expected) {                                                             \
      *place = desired;                                                                  \
      return true;                                                                       \
    }                                                                                    \
    *expected = seen;                                                                    \
    return false;                                                                        \
  }
TRM_EMU_ATOMIC_HOOKS(8)  // guards of static locals
TRM_EMU_ATOMIC_HOOKS(32)
TRM_EMU_ATOMIC_HOOKS(64)
#undef TRM_EMU_ATOMIC_HOOKS

}  // extern "C"

#endif
