// SPDX-License-Identifier: Apache-2.0
// SIMT emulator: what a launch is made of, and a few words that every part of it uses.
#pragma once

#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "trm/emu/emulator.h"
#include "trm/emu/fiber.h"
#include "trm/emu/host.h"

namespace trm::emu {

constexpr unsigned kWarp = 32;
constexpr unsigned kMostThreads = 1024;
constexpr unsigned kMostClusterBlocks = 8;
constexpr size_t kMostStaticShared = 48 * 1024;
constexpr size_t kMostShared = 227 * 1024;
constexpr size_t kRedZone = 256;
constexpr uint64_t kMostIdleYields = 2'000'000;

inline std::string text(const char* format, ...) {
  char buffer[1024];
  va_list list;
  va_start(list, format);
  vsnprintf(buffer, sizeof(buffer), format, list);
  va_end(list);
  return buffer;
}

inline std::string place_of(const Where& where) {
  return text("%s:%u in %s", where.file_name(), where.line(), where.function_name());
}

inline bool same_place(const Where& a, const Where& b) {
  return a.line() == b.line() && a.column() == b.column() &&
         (a.file_name() == b.file_name() || strcmp(a.file_name(), b.file_name()) == 0);
}

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 0x1234567u) {}
  uint64_t next() {  // splitmix64
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  unsigned below(unsigned bound) { return static_cast<unsigned>((next() >> 32) * bound >> 32); }

 private:
  uint64_t state_;
};

struct Block;
struct Warp;

enum class State { kReady, kWaiting, kExited };

struct Thread {
  Fiber fiber;
  Block* block = nullptr;
  Warp* warp = nullptr;
  dim3 index;
  unsigned position = 0;  // in the gang: block by block, each in whole warps
  unsigned lane = 0;
  State state = State::kReady;
  const char* waits_at = "";
  Where where;
  uint64_t value = 0;  // deposited at a warp collective
  unsigned argument = 0;
  unsigned width = 0;
  uint64_t result = 0;
  bool fenced = false;                 // a fence was passed: later atomics publish
  std::vector<const void*> atomics{};  // touched since the last fence
};

// Lanes of one mask that meet; lives as long as its block, so that a race detector's clocks do too.
struct Group {
  unsigned mask = 0;
  unsigned arrived = 0;
  Collective collective = Collective::kSyncWarp;
  const char* name = "";
  Where where;
  unsigned generation = 0;
  char sync[2] = {};
};

struct Warp {
  unsigned lanes = 0;  // that exist
  unsigned exited = 0;
  Thread* threads[kWarp] = {};
  std::deque<Group> groups;
};

struct Barrier {
  unsigned arrived = 0;
  unsigned generation = 0;
  const char* name = "";
  Where where;
  int count = 0;
  int result = 0;
  char sync[2] = {};
};

struct SharedObject {
  const void* type = nullptr;
  std::string name;
  Where where;
  uintptr_t begin = 0;
  uintptr_t end = 0;
  std::unique_ptr<char[]> memory;
  std::unique_ptr<uint8_t[]> written;
};

struct Block {
  dim3 index;
  unsigned rank = 0;  // in its cluster
  unsigned live = 0;
  unsigned exited = 0;
  std::deque<Thread> threads;
  std::deque<Warp> warps;
  std::deque<SharedObject> shared;
  size_t static_shared = 0;
  Barrier barrier;
};

struct Buffer {
  std::string name;
  uintptr_t begin = 0;
  uintptr_t end = 0;
  bool writable = false;
  bool scratch = false;                // may be left incomplete
  std::unique_ptr<uint8_t[]> written;  // null: holds values from the start
};

}  // namespace trm::emu
