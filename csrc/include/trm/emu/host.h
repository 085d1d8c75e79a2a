// SPDX-License-Identifier: Apache-2.0
// SIMT emulator, the part that whoever launches sees: schedules, buffers and faults.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace trm::emu {

// Who runs next. Every order is a legal execution; a kernel's answer may not depend on it.
enum class Order {
  kInOrder,     // round robin
  kReverse,     // round robin, backwards
  kShuffled,    // anyone, at every switch; also switches at accesses to shared memory
  kGreedyWarp,  // one random warp as far as it can go, with a few random changes of mind
  kLaneSerial,  // one lane as far as it can go: breaks whatever assumes lock-step
};

struct Schedule {
  Order order = Order::kInOrder;
  uint64_t seed = 0;
};

Order parse_order(const std::string& name);
const char* order_name(Order order);

// What a launch throws: the rule broken, by which thread, where in the source, and how to repeat
// it.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The figures that launches are planned by; as they were set last, at first 9.0 and 1.
void set_device(int compute_capability, int multiprocessors);
void set_schedule(Schedule schedule);
void set_shape(const std::string& shape);  // for the repro line
std::string repro();                       // of the last launch: kernel, shape, schedule, seed

// The global memory that launches may touch while this object lives, to the byte. Where memory
// accesses are instrumented, anything else faults, and so does a written buffer that a finished
// launch left incomplete. With no such object alive global memory is not checked.
class Buffers {
 public:
  Buffers();
  ~Buffers();
  Buffers(const Buffers&) = delete;
  Buffers& operator=(const Buffers&) = delete;
  void reads(const char* name, const void* data, size_t bytes);
  void writes(const char* name, void* data, size_t bytes);
  void updates(const char* name, void* data, size_t bytes);  // read and written, holds values
  void scratch(const char* name, void* data, size_t bytes);  // read only after it is written
  void finish();  // throws a Fault unless every written buffer is complete
};

struct Counters {
  uint64_t switches = 0;
  uint64_t accesses = 0;     // instrumented accesses beyond the thread's own stack
  uint64_t input_bytes = 0;  // read from registered buffers that are not written
};
Counters counters();

}  // namespace trm::emu
