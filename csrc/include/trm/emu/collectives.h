// SPDX-License-Identifier: Apache-2.0
// SIMT emulator: the barriers of a block and of a cluster, and the collectives of a warp. Part of
// machine.h.
#pragma once

#include <algorithm>
#include <string>

#include "trm/emu/machine.h"

namespace trm::emu {

inline void Machine::barrier_wait(Barrier& barrier, unsigned expected, unsigned gone,
                                  const char* name, const Where& where, Block* only) {
  if (gone != 0) {
    fail(std::string(name) + " is reached after threads of the block have exited" + dump(), current,
         place_of(where));
  }
  if (barrier.arrived != 0 &&
      (strcmp(barrier.name, name) != 0 || !same_place(barrier.where, where))) {
    fail(std::string(name) + " meets " + barrier.name + " at " + place_of(barrier.where), current,
         place_of(where));
  }
  barrier.name = name;
  barrier.where = where;
  char* sync = &barrier.sync[barrier.generation & 1u];
  tsan_release(sync);
  if (++barrier.arrived < expected) {
    wait(name, where);
  } else {
    barrier.arrived = 0;
    ++barrier.generation;
    barrier.result = barrier.count;
    barrier.count = 0;
    idle_yields = 0;
    for (Block& block : gang) {
      if (only != nullptr && &block != only) continue;
      for (Thread& thread : block.threads) wake(thread);
    }
    run_next(false);
  }
  tsan_acquire(sync);
}

inline void Machine::finish_collective(Group& group, Warp& warp) {
  uint64_t votes = 0;
  uint64_t sum = 0, low = 0, high = 0, both = ~0ull, either = 0, parity = 0;
  int64_t low_signed = 0, high_signed = 0;
  bool first = true;
  bool equal = true;
  uint64_t reference = 0;
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    if (!(group.mask >> lane & 1u)) continue;
    const uint64_t value = warp.threads[lane]->value;
    const auto as_signed = static_cast<int64_t>(static_cast<int32_t>(value));
    if (value != 0) votes |= 1ull << lane;
    if (first) reference = low = high = value, low_signed = high_signed = as_signed;
    first = false;
    equal = equal && value == reference;
    sum += value;
    low = std::min(low, value);
    high = std::max(high, value);
    low_signed = std::min(low_signed, as_signed);
    high_signed = std::max(high_signed, as_signed);
    both &= value;
    either |= value;
    parity ^= value;
  }
  for (unsigned lane = 0; lane < kWarp; ++lane) {
    if (!(group.mask >> lane & 1u)) continue;
    Thread& thread = *warp.threads[lane];
    switch (group.collective) {
      case Collective::kSyncWarp:
        break;
      case Collective::kShuffle:
      case Collective::kShuffleUp:
      case Collective::kShuffleDown:
      case Collective::kShuffleXor:
        thread.result = shuffled(group, warp, thread);
        break;
      case Collective::kAll:
        thread.result = votes == group.mask;
        break;
      case Collective::kAny:
        thread.result = votes != 0;
        break;
      case Collective::kBallot:
        thread.result = votes;
        break;
      case Collective::kMatchAny:
        thread.result = 0;
        for (unsigned other = 0; other < kWarp; ++other) {
          if ((group.mask >> other & 1u) && warp.threads[other]->value == thread.value) {
            thread.result |= 1ull << other;
          }
        }
        break;
      case Collective::kMatchAll:
        thread.result = equal ? group.mask : 0u;
        break;
      case Collective::kReduceAdd:
        thread.result = sum & 0xffffffffu;
        break;
      case Collective::kReduceMin:
        thread.result = low;
        break;
      case Collective::kReduceMax:
        thread.result = high;
        break;
      case Collective::kReduceMinSigned:
        thread.result = static_cast<uint64_t>(low_signed);
        break;
      case Collective::kReduceMaxSigned:
        thread.result = static_cast<uint64_t>(high_signed);
        break;
      case Collective::kReduceAnd:
        thread.result = both;
        break;
      case Collective::kReduceOr:
        thread.result = either;
        break;
      case Collective::kReduceXor:
        thread.result = parity;
        break;
    }
  }
}

inline uint64_t Machine::shuffled(const Group& group, const Warp& warp, const Thread& thread) {
  const unsigned width = thread.width;
  if (width == 0 || width > kWarp || (width & (width - 1)) != 0) {
    fail(text("%s: width %u is not a power of two up to 32", group.name, width), &thread,
         place_of(group.where));
  }
  const unsigned first = thread.lane & ~(width - 1);
  const unsigned last = first + width - 1;
  unsigned source = thread.lane;
  switch (group.collective) {
    case Collective::kShuffle:
      source = first + (thread.argument & (width - 1));
      break;
    case Collective::kShuffleUp:
      if (thread.argument <= thread.lane - first) source = thread.lane - thread.argument;
      break;
    case Collective::kShuffleDown:
      if (thread.argument <= last - thread.lane) source = thread.lane + thread.argument;
      break;
    default:
      if ((thread.lane ^ thread.argument) <= last) source = thread.lane ^ thread.argument;
  }
  if (!(group.mask >> source & 1u)) {
    fail(text("%s reads from lane %u, which is not in its mask 0x%08x", group.name, source,
              group.mask),
         &thread, place_of(group.where));
  }
  return warp.threads[source]->value;
}

inline uint64_t Machine::collective(Collective kind, unsigned mask, uint64_t value,
                                    unsigned argument, unsigned width, const char* name,
                                    const Where& where) {
  Thread& thread = *current;
  Warp& warp = *thread.warp;
  if (!(mask >> thread.lane & 1u)) {
    fail(text("%s: lane %u is missing from its own mask 0x%08x", name, thread.lane, mask), &thread,
         place_of(where));
  }
  if ((mask & warp.exited) != 0) {
    fail(text("%s: mask 0x%08x names lanes 0x%08x, which have exited", name, mask,
              mask & warp.exited),
         &thread, place_of(where));
  }
  if ((mask & ~warp.lanes) != 0) {
    fail(text("%s: mask 0x%08x names lanes 0x%08x, which do not exist", name, mask,
              mask & ~warp.lanes),
         &thread, place_of(where));
  }
  Group* group = nullptr;
  for (Group& other : warp.groups) {
    if (other.mask == mask) {
      group = &other;
    } else if ((other.arrived & mask) != 0 && (other.mask >> thread.lane & 1u)) {
      fail(text("%s with mask 0x%08x meets %s with mask 0x%08x at ", name, mask, other.name,
                other.mask) +
               place_of(other.where),
           &thread, place_of(where));
    }
  }
  if (group == nullptr) {
    group = &warp.groups.emplace_back();
    group->mask = mask;
  }
  if (group->arrived != 0 && (group->collective != kind || !same_place(group->where, where))) {
    fail(text("lanes of mask 0x%08x are at different call sites: %s meets %s at ", mask, name,
              group->name) +
             place_of(group->where),
         &thread, place_of(where));
  }
  group->collective = kind;
  group->name = name;
  group->where = where;
  thread.value = value;
  thread.argument = argument;
  thread.width = width;
  // Only __syncwarp orders memory: a shuffle or a vote exchanges registers and no more.
  char* sync = &group->sync[group->generation & 1u];
  if (kind == Collective::kSyncWarp) tsan_release(sync);
  group->arrived |= 1u << thread.lane;
  if (group->arrived != mask) {
    wait(name, where);
  } else {
    finish_collective(*group, warp);
    group->arrived = 0;
    ++group->generation;
    idle_yields = 0;
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      if (mask >> lane & 1u) wake(*warp.threads[lane]);
    }
    run_next(false);
  }
  if (kind == Collective::kSyncWarp) tsan_acquire(sync);
  return thread.result;
}

}  // namespace trm::emu
