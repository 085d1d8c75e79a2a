// SPDX-License-Identifier: Apache-2.0
// What the emulator's test programs share: named cases, the schedules, and one line per outcome.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "trm/emu/host.h"

namespace harness {

using trm::emu::Order;
using trm::emu::Schedule;

constexpr Order kOrders[] = {Order::kInOrder, Order::kReverse, Order::kShuffled, Order::kGreedyWarp,
                             Order::kLaneSerial};

// Memory exactly as long as asked for, so that a sanitizer sees the byte beyond it.
template <typename T>
class Heap {
 public:
  explicit Heap(size_t count, T value = T()) : data_(new T[count]), count_(count) {
    for (size_t i = 0; i < count; ++i) data_[i] = value;
  }
  ~Heap() { delete[] data_; }
  Heap(const Heap&) = delete;
  Heap& operator=(const Heap&) = delete;
  T* data() { return data_; }
  size_t size() const { return count_; }
  size_t bytes() const { return count_ * sizeof(T); }
  T& operator[](size_t i) { return data_[i]; }

 private:
  T* data_;
  size_t count_;
};

[[noreturn]] inline void wrong(const std::string& what) { throw std::runtime_error(what); }

inline void expect(bool holds, const std::string& what) {
  if (!holds) wrong(what);
}

using Cases = std::map<std::string, std::function<void()>>;

// Runs one case: `PROGRAM list`, or `PROGRAM CASE SCHEDULE FIRST_SEED [SEEDS]`; SCHEDULE may be
// "all". Exit status 0: as it should be; 3: a fault; 4: a wrong answer.
inline int run(const Cases& cases, int count, char** arguments) {
  if (count == 2 && std::string(arguments[1]) == "list") {
    for (const auto& [name, body] : cases) std::printf("%s\n", name.c_str());
    return 0;
  }
  if (count < 4) return 2;
  const auto found = cases.find(arguments[1]);
  if (found == cases.end()) return 2;
  const std::string name = arguments[2];
  const uint64_t first = std::strtoull(arguments[3], nullptr, 10);
  const uint64_t seeds = count > 4 ? std::strtoull(arguments[4], nullptr, 10) : 1;
  for (Order order : kOrders) {
    if (name != "all" && name != trm::emu::order_name(order)) continue;
    for (uint64_t seed = first; seed < first + seeds; ++seed) {
      trm::emu::set_schedule({order, seed});
      try {
        found->second();
      } catch (const trm::emu::Fault& fault) {
        std::printf("%s\n", fault.what());
        return 3;
      } catch (const std::exception& error) {
        std::printf("wrong answer: %s\n  %s\n", error.what(), trm::emu::repro().c_str());
        return 4;
      }
    }
  }
  std::printf("ok\n");
  return 0;
}

}  // namespace harness
