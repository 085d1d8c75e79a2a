// SPDX-License-Identifier: Apache-2.0
// SIMT emulator: shared memory, registered buffers, and the rules of one access. Part of machine.h.
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "trm/emu/machine.h"

namespace trm::emu {

inline SharedObject& Machine::make_shared(const void* type, size_t bytes, size_t alignment,
                                          const char* name, const Where& where) {
  SharedObject& object = current->block->shared.emplace_back();
  object.type = type;
  object.name = name;
  object.where = where;
  object.memory.reset(new char[bytes + 2 * kRedZone + alignment]);
  const auto raw = reinterpret_cast<uintptr_t>(object.memory.get()) + kRedZone;
  object.begin = (raw + alignment - 1) / alignment * alignment;
  object.end = object.begin + bytes;
  object.written.reset(new uint8_t[bytes]());
  memset(object.memory.get(), 0xff, bytes + 2 * kRedZone + alignment);  // NaN in any format
#if defined(TRM_EMU_ASAN)
  ASAN_POISON_MEMORY_REGION(reinterpret_cast<void*>(object.begin - kRedZone), kRedZone);
  ASAN_POISON_MEMORY_REGION(reinterpret_cast<void*>(object.end), kRedZone);
#endif
  return object;
}

inline void* Machine::shared(const void* type, size_t bytes, size_t alignment, const char* name,
                             const Where& where) {
  Block& block = *current->block;
  for (SharedObject& object : block.shared) {
    if (object.type == type && same_place(object.where, where) && object.name == name) {
      return reinterpret_cast<void*>(object.begin);
    }
  }
  block.static_shared += bytes;
  if (block.static_shared > kMostStaticShared ||
      block.static_shared + config.dynamic_shared > kMostShared) {
    fail(text("`%s` takes static shared memory to %zu bytes, the limit is %zu", name,
              block.static_shared, kMostStaticShared),
         current, place_of(where));
  }
  return reinterpret_cast<void*>(make_shared(type, bytes, alignment, name, where).begin);
}

inline void* Machine::dynamic_shared(size_t alignment, const Where& where) {
  static const char kDynamic = 0;
  if (config.dynamic_shared == 0) {
    fail("dynamic shared memory is used but the launch asked for none", current, place_of(where));
  }
  for (SharedObject& object : current->block->shared) {
    if (object.type == &kDynamic) return reinterpret_cast<void*>(object.begin);
  }
  return reinterpret_cast<void*>(make_shared(&kDynamic, config.dynamic_shared,
                                             std::max<size_t>(alignment, 16),
                                             "dynamic shared memory", where)
                                     .begin);
}

inline void* Machine::cluster_object(const void* pointer, unsigned rank, const Where& where) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  if (rank >= gang.size()) {
    fail(text("block %u of a cluster of %zu", rank, gang.size()), current, place_of(where));
  }
  for (const SharedObject& mine : current->block->shared) {
    if (address < mine.begin || address >= mine.end) continue;
    for (const SharedObject& theirs : gang[rank].shared) {
      if (theirs.type == mine.type && same_place(theirs.where, mine.where)) {
        return reinterpret_cast<void*>(theirs.begin + (address - mine.begin));
      }
    }
    fail(text("block %u of the cluster has not reached `%s` yet", rank, mine.name.c_str()), current,
         place_of(where));
  }
  fail("cluster_shared of something that is not in shared memory", current, place_of(where));
}

// The rules of one access; `caller` is its return address where the compiler instrumented it.
inline void Machine::access(const Access& a, const void* caller, const Where* where) {
  Thread* thread = current;
  if (thread == nullptr) return;
  const auto address = reinterpret_cast<uintptr_t>(a.place);
  const Stack& stack = thread->fiber.stack;
  if (address - reinterpret_cast<uintptr_t>(stack.base) < stack.bytes) return;
  ++counters.accesses;
  const auto broken = [&](const std::string& rule) {
    const std::string name = a.name != nullptr ? std::string(a.name) + ": " : "";
    fail(name + rule, thread, where != nullptr ? place_of(*where) : "", caller);
  };
  const char* verb = a.writes ? "write" : "read";
  if (address % a.alignment != 0) {
    broken(text("misaligned %s of %zu bytes: the address is %zu modulo %zu", verb, a.bytes,
                address % a.alignment, a.alignment));
  }
  for (Block& block : gang) {
    for (SharedObject& object : block.shared) {
      if (address + a.bytes <= object.begin - kRedZone || address >= object.end + kRedZone) {
        continue;
      }
      if (address < object.begin || address + a.bytes > object.end) {
        broken(text("%s of %zu bytes outside shared `%s`, at byte %lld of %zu", verb, a.bytes,
                    object.name.c_str(), static_cast<long long>(address - object.begin),
                    object.end - object.begin));
      }
      uint8_t* written = object.written.get() + (address - object.begin);
      if (a.reads && memchr(written, 0, a.bytes) != nullptr) {
        broken(text("read of %zu bytes of uninitialised shared memory, `%s` at byte %zu", a.bytes,
                    object.name.c_str(), address - object.begin));
      }
      if (a.writes) memset(written, 1, a.bytes);
      if (schedule.order == Order::kShuffled && random.below(8) == 0) yield(false);
      return;
    }
  }
  Buffer* buffer = find_buffer(address);
  if (buffer == nullptr || address + a.bytes > buffer->end) {
    for (const Stack& other : stacks) {
      if (address - reinterpret_cast<uintptr_t>(other.base) < other.bytes) {
        broken(text("%s of another thread's local memory", verb));
      }
    }
    const auto parameter = reinterpret_cast<uintptr_t>(parameters);
    if (address >= parameter && address + a.bytes <= parameter + parameter_bytes) return;
    if (scopes == 0 || (!a.writes && in_loaded_image(a.place))) return;
    broken(text("%s of %zu bytes outside every registered buffer", verb, a.bytes) +
           nearest(address));
  }
  // A named access is a check that the access itself follows.
  if (a.reads && !buffer->writable && a.name == nullptr) counters.input_bytes += a.bytes;
  if (a.writes && !buffer->writable) {
    broken(text("write into `%s`, which is an input", buffer->name.c_str()));
  }
  if (buffer->written != nullptr) {
    uint8_t* written = buffer->written.get() + (address - buffer->begin);
    if (a.reads && memchr(written, 0, a.bytes) != nullptr) {
      broken(text("read of `%s` at byte %zu, which nobody has written", buffer->name.c_str(),
                  address - buffer->begin));
    }
    if (a.writes) memset(written, 1, a.bytes);
  }
}

// Sorts the registered buffers; inputs that overlap (views of one tensor) become one.
inline void Machine::index_buffers() {
  std::sort(buffers.begin(), buffers.end(),
            [](const Buffer& a, const Buffer& b) { return a.begin < b.begin; });
  std::vector<Buffer> merged;
  for (Buffer& buffer : buffers) {
    Buffer* last = merged.empty() ? nullptr : &merged.back();
    if (last != nullptr && buffer.begin < last->end) {
      if (last->writable || buffer.writable) {
        fail("`" + last->name + "` and `" + buffer.name + "` overlap", nullptr, "");
      }
      if (last->name.find(buffer.name) == std::string::npos) last->name += "|" + buffer.name;
      last->end = std::max(last->end, buffer.end);
    } else {
      merged.push_back(std::move(buffer));
    }
  }
  buffers = std::move(merged);
}

inline Buffer* Machine::find_buffer(uintptr_t address) {
  const auto after =
      std::upper_bound(buffers.begin(), buffers.end(), address,
                       [](uintptr_t value, const Buffer& buffer) { return value < buffer.begin; });
  if (after == buffers.begin()) return nullptr;
  Buffer* found = &*(after - 1);
  return address < found->end ? found : nullptr;
}

inline std::string Machine::nearest(uintptr_t address) const {
  const Buffer* best = nullptr;
  uint64_t best_gap = ~0ull;
  for (const Buffer& buffer : buffers) {
    const uint64_t gap = address < buffer.begin ? buffer.begin - address : address + 1 - buffer.end;
    if (gap < best_gap) best = &buffer, best_gap = gap;
  }
  if (best == nullptr) return "";
  return text(": the nearest is `%s`, at byte %lld of %zu", best->name.c_str(),
              static_cast<long long>(address - best->begin), best->end - best->begin);
}

inline void Machine::fence() {
  for (const void* place : current->atomics) tsan_acquire(const_cast<void*>(place));
  current->atomics.clear();
  current->fenced = true;
}

}  // namespace trm::emu
