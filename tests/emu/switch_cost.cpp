// SPDX-License-Identifier: Apache-2.0
// Prints what one switch between fibers costs, in nanoseconds, with the scheduling around it.
#include <chrono>

#include "harness.h"
#include "trm/portability.h"

namespace {

__global__ void barriers_kernel(int rounds) {
  for (int round = 0; round < rounds; ++round) __syncthreads();  // nothing to protect: it is timed
}

}  // namespace

int main() {
  for (const trm::emu::Order order : harness::kOrders) {
    trm::emu::set_schedule({order, 1});
    const uint64_t before = trm::emu::counters().switches;
    const auto start = std::chrono::steady_clock::now();
    trm::launch({dim3(1), dim3(256)}, &barriers_kernel, 4000);
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start;
    const auto switches = static_cast<double>(trm::emu::counters().switches - before);
    std::printf("%s %.1f\n", trm::emu::order_name(order), took.count() / switches);
  }
}
