// SPDX-License-Identifier: Apache-2.0
// The ceiling: reads two buffers once, two streams per thread, and does nothing with them.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

namespace {

typedef uint64_t Line __attribute__((vector_size(64)));

// ahead: lines that a prefetch runs in front; 0 leaves it to the processor. kLocality: 3 asks for
// the first cache, 2 for the second.
template <int kLocality>
uint64_t read_range(const Line* a, const Line* b, size_t lines, size_t ahead) {
  Line total[4] = {};
  for (size_t i = 0; i + 2 <= lines; i += 2) {
    if (ahead != 0) {
      __builtin_prefetch(a + i + ahead, 0, kLocality);
      __builtin_prefetch(a + i + ahead + 1, 0, kLocality);
      __builtin_prefetch(b + i + ahead, 0, kLocality);
      __builtin_prefetch(b + i + ahead + 1, 0, kLocality);
    }
    total[0] |= a[i];
    total[1] |= a[i + 1];
    total[2] |= b[i];
    total[3] |= b[i + 1];
  }
  const Line all = (total[0] | total[1]) | (total[2] | total[3]);
  return all[0] | all[7];
}

}  // namespace

// cache: 1 or 2, where prefetched lines go.
extern "C" uint64_t read_pair(const void* a, const void* b, size_t bytes, int threads, size_t ahead,
                              int cache) {
  // Threads take pieces as they come free, as the kernels do.
  constexpr size_t kPiece = size_t{1} << 13;  // lines
  const size_t lines = bytes / sizeof(Line);
  std::atomic<size_t> next{0};
  std::vector<uint64_t> found(static_cast<size_t>(threads));
  std::vector<std::thread> workers;
  for (int t = 0; t < threads; ++t) {
    workers.emplace_back([=, &found, &next] {
      for (size_t first; (first = next.fetch_add(kPiece)) < lines;) {
        const size_t count = std::min(kPiece, lines - first);
        const Line* const from_a = static_cast<const Line*>(a) + first;
        const Line* const from_b = static_cast<const Line*>(b) + first;
        found[static_cast<size_t>(t)] |= cache == 2 ? read_range<2>(from_a, from_b, count, ahead)
                                                    : read_range<3>(from_a, from_b, count, ahead);
      }
    });
  }
  for (auto& worker : workers) worker.join();
  uint64_t all = 0;
  for (uint64_t value : found) all |= value;
  return all;
}
