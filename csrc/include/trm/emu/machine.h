// SPDX-License-Identifier: Apache-2.0
// SIMT emulator, the machine: blocks of fibers, a scheduler, and the checks. One translation unit
// includes it, which is never instrumented: a sanitizer sees the kernels' accesses and no others.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "trm/emu/fiber.h"
#include "trm/emu/parts.h"
#include "trm/emu/symbols.h"

namespace trm::emu {

struct Machine {
  // Set by whoever launches.
  Schedule schedule;
  int compute_capability = 90;
  int multiprocessors = 1;
  std::string shape;
  std::vector<Buffer> buffers;
  int scopes = 0;
  Counters counters;
  std::mutex one_launch;

  // The launch.
  LaunchConfig config;
  void (*kernel)(void*) = nullptr;
  void* parameters = nullptr;
  size_t parameter_bytes = 0;
  const void* kernel_address = nullptr;
  Random random{0};
  char launch_end = 0;

  // The gang: blocks that are resident together (a cluster), run one gang at a time.
  std::deque<Block> gang;
  std::deque<Block> retired;  // only where a race detector still looks at their memory
  std::vector<Thread*> at;    // by position; null where a warp has no such lane
  std::vector<unsigned> place_of_position;
  std::vector<unsigned> position_of_place;
  std::vector<uint32_t> ready;  // bits by place
  unsigned live = 0;
  unsigned exited = 0;
  Barrier cluster_barrier;
  uint64_t idle_yields = 0;

  Fiber main;
  Thread* current = nullptr;
  std::vector<Stack> stacks;
  size_t stacks_used = 0;
  std::string fault;
  const void* fault_address = nullptr;

  // ---- failing -----------------------------------------------------------------------------

  std::string who(const Thread& thread) const {
    return text("thread (%u,%u,%u) of block (%u,%u,%u), lane %u of warp %u", thread.index.x,
                thread.index.y, thread.index.z, thread.block->index.x, thread.block->index.y,
                thread.block->index.z, thread.lane,
                static_cast<unsigned>(thread.position / kWarp % thread.block->warps.size()));
  }

  std::string repro() const {
    const std::string name = function_at(kernel_address);
    return text(
        "repro: kernel=%s grid=(%u,%u,%u) block=(%u,%u,%u) shape=\"%s\" schedule=%s seed=%llu",
        name.c_str(), config.grid.x, config.grid.y, config.grid.z, config.block.x, config.block.y,
        config.block.z, shape.c_str(), order_name(schedule.order),
        static_cast<unsigned long long>(schedule.seed));
  }

  // Ends the launch. Called on a fiber it never returns; the fiber is abandoned as it stands.
  [[noreturn]] void fail(const std::string& rule, const Thread* thread, const std::string& where,
                         const void* address = nullptr) {
    fault = "emulator: " + rule;
    if (thread != nullptr) fault += "\n  " + who(*thread);
    if (!where.empty()) fault += "\n  at " + where;
    fault_address = address;
    if (current == nullptr) throw_fault();
    Fiber& from = current->fiber;
    current = nullptr;
    switch_fiber(from, main, true);
    abort();
  }

  [[noreturn]] void throw_fault() {
    std::string message = fault;
    fault.clear();
    if (fault_address != nullptr) message += "\n  at " + source_at(fault_address);
    throw Fault(message + "\n  " + repro());
  }

  // Who waits where, warp by warp; lanes with the same story share a line.
  std::string dump() const {
    std::string lines;
    for (const Block& block : gang) {
      for (size_t w = 0; w < block.warps.size(); ++w) {
        std::vector<std::pair<std::string, unsigned>> stories;
        for (unsigned lane = 0; lane < kWarp; ++lane) {
          const Thread* thread = block.warps[w].threads[lane];
          if (thread == nullptr) continue;
          std::string story = "is ready";
          if (thread->state == State::kExited) story = "has exited";
          if (thread->state == State::kWaiting) {
            story = std::string("waits in ") + thread->waits_at + " at " + place_of(thread->where);
          }
          auto found = std::find_if(stories.begin(), stories.end(),
                                    [&](const auto& entry) { return entry.first == story; });
          if (found == stories.end()) found = stories.insert(stories.end(), {story, 0u});
          found->second |= 1u << lane;
        }
        for (const auto& [story, lanes] : stories) {
          lines += text("\n    block (%u,%u,%u) warp %zu lanes 0x%08x: ", block.index.x,
                        block.index.y, block.index.z, w, lanes) +
                   story;
        }
      }
    }
    return lines;
  }

  // ---- scheduling --------------------------------------------------------------------------

  void set_ready(const Thread& thread, bool value) {
    const unsigned place = place_of_position[thread.position];
    const uint32_t bit = 1u << (place % kWarp);
    if (value) {
      ready[place / kWarp] |= bit;
    } else {
      ready[place / kWarp] &= ~bit;
    }
  }

  // First ready place at or after `from`, cyclically; -1 if nobody is ready.
  int next_ready(unsigned from) const {
    const auto words = static_cast<unsigned>(ready.size());
    unsigned word = from / kWarp % words;
    uint32_t bits = ready[word] & (0xffffffffu << (from % kWarp));
    for (unsigned step = 0; step <= words; ++step) {
      if (bits != 0) return static_cast<int>(word * kWarp + __builtin_ctz(bits));
      word = word + 1 == words ? 0 : word + 1;
      bits = ready[word];
    }
    return -1;
  }

  // The place that runs next. `yields`: the caller stays ready but would rather not be chosen.
  int choose(unsigned now, bool yields) {
    const auto places = static_cast<unsigned>(position_of_place.size());
    switch (schedule.order) {
      case Order::kShuffled:
        return next_ready(random.below(places));
      case Order::kGreedyWarp: {
        const unsigned word = now / kWarp;
        const uint32_t mine = yields ? ready[word] & ~(1u << (now % kWarp)) : ready[word];
        if (mine != 0 && random.below(1024) != 0) {
          const uint32_t later = mine & ~((2u << (now % kWarp)) - 1u);
          return static_cast<int>(word * kWarp + __builtin_ctz(later != 0 ? later : mine));
        }
        return next_ready(random.below(places / kWarp) * kWarp);
      }
      case Order::kLaneSerial:
        return next_ready(yields ? now + 1 : 0);
      default:
        return next_ready(now + 1);
    }
  }

  void run_next(bool yields, bool exits = false) {
    Thread* from = current;
    const int place = choose(place_of_position[from->position], yields);
    if (place < 0) {
      if (live != 0) {
        fail("deadlock: nobody can run" + dump(), nullptr, "");
      }
      current = nullptr;
      switch_fiber(from->fiber, main, exits);
      return;
    }
    Thread* to = at[position_of_place[static_cast<unsigned>(place)]];
    if (to == from) return;
    ++counters.switches;
    current = to;
    switch_fiber(from->fiber, to->fiber, exits);
  }

  void wait(const char* name, const Where& where) {
    current->state = State::kWaiting;
    current->waits_at = name;
    current->where = where;
    set_ready(*current, false);
    run_next(false);
  }

  void wake(Thread& thread) {
    thread.state = State::kReady;
    set_ready(thread, true);
  }

  // A point where another thread may run although this one could go on.
  void yield(bool spins) {
    if (spins && ++idle_yields > kMostIdleYields) {
      fail("livelock: atomics spin and nothing else happens" + dump(), current, "");
    }
    run_next(true);
  }

  static void entry();

  void run_thread() {
    enter_fiber(main);
    kernel(parameters);
    end_thread(*current);
    tsan_release(&launch_end);
    run_next(false, true);
    abort();
  }

  void end_thread(Thread& thread) {
    const Quiet quiet;
    Block& block = *thread.block;
    thread.state = State::kExited;
    set_ready(thread, false);
    thread.warp->exited |= 1u << thread.lane;
    ++block.exited;
    ++exited;
    --block.live;
    --live;
    idle_yields = 0;
    if (block.barrier.arrived != 0) {
      fail(std::string("a thread exits while others wait in ") + block.barrier.name + dump(),
           &thread, place_of(block.barrier.where));
    }
    if (cluster_barrier.arrived != 0) {
      fail("a thread exits while others wait in cluster_sync" + dump(), &thread,
           place_of(cluster_barrier.where));
    }
    for (const Group& group : thread.warp->groups) {
      if (group.arrived != 0 && (group.mask >> thread.lane & 1u)) {
        fail(text("%s: mask 0x%08x names lane %u, which exits", group.name, group.mask,
                  thread.lane) +
                 dump(),
             &thread, place_of(group.where));
      }
    }
  }

  // ---- launching ---------------------------------------------------------------------------

  Stack take_stack() {
    if (stacks_used == stacks.size()) stacks.push_back(map_stack());
    return stacks[stacks_used++];
  }

  void check_config() {
    const dim3 g = config.grid, b = config.block;
    const uint64_t threads = uint64_t{b.x} * b.y * b.z;
    if (threads == 0 || threads > kMostThreads || b.z > 64) {
      fail(text("invalid configuration: block (%u,%u,%u) has %llu threads, the limit is %u", b.x,
                b.y, b.z, static_cast<unsigned long long>(threads), kMostThreads),
           nullptr, "");
    }
    if (g.x == 0 || g.y == 0 || g.z == 0 || g.x > 0x7fffffffu || g.y > 65535 || g.z > 65535) {
      fail(text("invalid configuration: grid (%u,%u,%u)", g.x, g.y, g.z), nullptr, "");
    }
    if (config.cluster == 0 || config.cluster > kMostClusterBlocks || g.x % config.cluster != 0) {
      fail(text("invalid configuration: clusters of %u blocks", config.cluster), nullptr, "");
    }
    if (config.dynamic_shared > kMostShared) {
      fail(text("invalid configuration: %zu bytes of dynamic shared memory, the limit is %zu",
                config.dynamic_shared, kMostShared),
           nullptr, "");
    }
  }

  void start_gang(uint64_t first) {
    gang.clear();
    at.clear();
    live = exited = 0;
    cluster_barrier = Barrier{};
    const dim3 size = config.block;
    const unsigned threads = size.x * size.y * size.z;
    const unsigned padded = (threads + kWarp - 1) / kWarp * kWarp;
    for (unsigned rank = 0; rank < config.cluster; ++rank) {
      Block& block = gang.emplace_back();
      const uint64_t flat = first + rank;
      block.index = dim3(static_cast<unsigned>(flat % config.grid.x),
                         static_cast<unsigned>(flat / config.grid.x % config.grid.y),
                         static_cast<unsigned>(flat / config.grid.x / config.grid.y));
      block.rank = rank;
      block.live = threads;
      block.warps.resize(padded / kWarp);
      for (unsigned t = 0; t < threads; ++t) {
        Thread& thread = block.threads.emplace_back();
        thread.block = &block;
        thread.warp = &block.warps[t / kWarp];
        thread.warp->threads[t % kWarp] = &thread;
        thread.warp->lanes |= 1u << (t % kWarp);
        thread.index = dim3(t % size.x, t / size.x % size.y, t / size.x / size.y);
        thread.position = rank * padded + t;
        thread.lane = t % kWarp;
        make_fiber(thread.fiber, take_stack(), &Machine::entry);
        at.push_back(&thread);
      }
      at.resize((rank + 1) * padded, nullptr);
      live += threads;
    }
    const auto places = static_cast<unsigned>(at.size());
    position_of_place.resize(places);
    place_of_position.resize(places);
    for (unsigned i = 0; i < places; ++i) position_of_place[i] = i;
    if (schedule.order == Order::kReverse) {
      std::reverse(position_of_place.begin(), position_of_place.end());
    }
    if (schedule.order == Order::kLaneSerial) shuffle(position_of_place);
    for (unsigned i = 0; i < places; ++i) place_of_position[position_of_place[i]] = i;
    ready.assign(places / kWarp, 0u);
    for (Thread* thread : at) {
      if (thread != nullptr) set_ready(*thread, true);
    }
  }

  template <typename T>
  void shuffle(std::vector<T>& values) {
    for (size_t i = values.size(); i > 1; --i) {
      std::swap(values[i - 1], values[random.below(static_cast<unsigned>(i))]);
    }
  }

  void run_gang(uint64_t first) {
    start_gang(first);
    const auto places = static_cast<unsigned>(at.size());
    const bool greedy = schedule.order == Order::kGreedyWarp;
    const int place = choose(greedy ? random.below(places) : places - 1, false);
    current = at[position_of_place[static_cast<unsigned>(place)]];
    switch_fiber(main, current->fiber, false);
    if (!fault.empty()) {
#if !TRM_EMU_OWN_SWITCH
      stacks.clear();  // abandoned: a sanitizer remembers what was on them
#endif
      stacks_used = 0;
      throw_fault();
    }
    for (Block& block : gang) {
      for (Thread& thread : block.threads) drop_fiber(thread.fiber);
    }
    if (kRaceDetector) {
      for (Block& block : gang) retired.push_back(std::move(block));
    } else {
      stacks_used = 0;
    }
  }

  void run() {
    random = Random(schedule.seed);
    fault.clear();
    idle_yields = 0;
    main = Fiber{};
#if defined(TRM_EMU_TSAN)
    main.tsan = __tsan_get_current_fiber();
#endif
    check_config();
    index_buffers();
    const uint64_t gangs = uint64_t{config.grid.x} * config.grid.y * config.grid.z / config.cluster;
    std::vector<uint64_t> order(gangs);
    for (uint64_t i = 0; i < gangs; ++i) order[i] = i;
    if (schedule.order == Order::kReverse) {
      std::reverse(order.begin(), order.end());
    } else if (schedule.order != Order::kInOrder) {
      shuffle(order);
    }
    for (const uint64_t index : order) run_gang(index * config.cluster);
    tsan_acquire(&launch_end);
    retired.clear();
    stacks_used = 0;
  }

  // ---- collectives.h -------------------------------------------------------------------------

  void barrier_wait(Barrier& barrier, unsigned expected, unsigned gone, const char* name,
                    const Where& where, Block* only);
  void finish_collective(Group& group, Warp& warp);
  uint64_t shuffled(const Group& group, const Warp& warp, const Thread& thread);
  uint64_t collective(Collective kind, unsigned mask, uint64_t value, unsigned argument,
                      unsigned width, const char* name, const Where& where);

  // ---- memory.h ------------------------------------------------------------------------------

  SharedObject& make_shared(const void* type, size_t bytes, size_t alignment, const char* name,
                            const Where& where);
  void* shared(const void* type, size_t bytes, size_t alignment, const char* name,
               const Where& where);
  void* dynamic_shared(size_t alignment, const Where& where);
  void* cluster_object(const void* pointer, unsigned rank, const Where& where);
  void access(const Access& a, const void* caller, const Where* where);
  void index_buffers();
  Buffer* find_buffer(uintptr_t address);
  std::string nearest(uintptr_t address) const;
  void fence();
};

inline Machine& machine() {
  static Machine* the_one = new Machine;  // never destroyed: fibers may outlive static storage
  return *the_one;
}

inline void Machine::entry() { machine().run_thread(); }

}  // namespace trm::emu

#include "trm/emu/collectives.h"
#include "trm/emu/memory.h"
