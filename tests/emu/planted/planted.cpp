// SPDX-License-Identifier: Apache-2.0
// Runs the row kernel with each planted bug over vocabularies of every kind of remainder, and
// compares with the host and, bit for bit, with the first schedule that ran.
#include <sys/mman.h>

#include <cmath>
#include <cstring>

#include "harness.h"
#include "row_sums.h"

namespace {

using harness::expect;
using planted::Bug;

struct Shape {
  int64_t vocab;
  int64_t row_stride;
  int64_t offset;  // of the first row, in elements: a view that is not aligned
};

constexpr int64_t kRows = 3;
constexpr int64_t kFar = int64_t{1} << 30;  // row 2 starts 2^31 elements after row 0

float logit(int64_t row, int64_t column) {
  return -static_cast<float>((column * 37 + row * 11) % 101) / 25.0f;
}

// Sparse memory for rows that are gigabytes apart.
class Rows {
 public:
  explicit Rows(const Shape& shape)
      : bytes_(static_cast<size_t>(shape.offset + kRows * shape.row_stride + shape.vocab) * 4) {
    void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) harness::wrong("no address space");
    data_ = static_cast<float*>(memory) + shape.offset;
    base_ = memory;
    for (int64_t row = 0; row < kRows; ++row) {
      for (int64_t v = 0; v < shape.vocab; ++v) data_[row * shape.row_stride + v] = logit(row, v);
    }
  }
  ~Rows() { munmap(base_, bytes_); }
  Rows(const Rows&) = delete;
  Rows& operator=(const Rows&) = delete;
  const float* data() const { return data_; }

 private:
  size_t bytes_;
  void* base_ = nullptr;
  float* data_ = nullptr;
};

template <Bug bug>
void run(const Shape& shape) {
  const Rows rows(shape);
  harness::Heap<float> sums(2 * kRows);
  trm::emu::set_shape("rows=3 vocab=" + std::to_string(shape.vocab) +
                      " stride=" + std::to_string(shape.row_stride));
  trm::emu::Buffers buffers;
  for (int64_t row = 0; row < kRows; ++row) {
    buffers.reads("data", rows.data() + row * shape.row_stride,
                  static_cast<size_t>(shape.vocab) * sizeof(float));
  }
  buffers.writes("sums", sums.data(), sums.bytes());
  trm::launch({dim3(kRows), dim3(planted::kThreads)}, &planted::row_sums_kernel<bug>, rows.data(),
              shape.row_stride, shape.vocab, sums.data());
  buffers.finish();
  for (int64_t row = 0; row < kRows; ++row) {
    double mass = 0.0, first = 0.0;
    for (int64_t v = 0; v < shape.vocab; ++v) {
      const double x = logit(row, v);
      mass += std::exp(x);
      first += x * std::exp(x);
    }
    const float* got = sums.data() + 2 * row;
    const std::string where =
        " of row " + std::to_string(row) + ", vocab " + std::to_string(shape.vocab);
    // 4099 / 128 terms per lane and a tree of 128: well below 2^-24 * 64.
    expect(std::fabs(got[0] - mass) <= 4e-6 * mass, "mass" + where);
    expect(std::fabs(got[1] - first) <= 4e-6 * std::fabs(first), "first moment" + where);
  }
  static std::map<int64_t, std::vector<float>> seen;
  const std::vector<float> now(sums.data(), sums.data() + sums.size());
  const auto [entry, fresh] = seen.emplace(shape.vocab, now);
  expect(fresh || std::memcmp(entry->second.data(), now.data(), sums.bytes()) == 0,
         "bits differ between schedules, vocab " + std::to_string(shape.vocab));
}

template <Bug bug>
void all_shapes() {
  for (const int64_t vocab :
       {int64_t{1}, int64_t{7}, int64_t{33}, int64_t{257}, int64_t{1024}, int64_t{4099}}) {
    run<bug>({vocab, vocab + 3, 1});
  }
  if (bug == Bug::kNone || bug == Bug::kRowOffset32Bit) run<bug>({100, kFar, 0});
}

}  // namespace

int main(int count, char** arguments) {
  return harness::run(
      {
          {"none", all_shapes<Bug::kNone>},
          {"missing_barrier_after_write", all_shapes<Bug::kMissingBarrierAfterWrite>},
          {"missing_barrier_before_reuse", all_shapes<Bug::kMissingBarrierBeforeReuse>},
          {"wrong_mask", all_shapes<Bug::kWrongMask>},
          {"shared_index_off_by_one", all_shapes<Bug::kSharedIndexOffByOne>},
          {"row_offset_32_bit", all_shapes<Bug::kRowOffset32Bit>},
          {"misaligned_vector_load", all_shapes<Bug::kMisalignedVectorLoad>},
          {"lost_tail", all_shapes<Bug::kLostTail>},
          {"phantom_column", all_shapes<Bug::kPhantomColumn>},
          {"merge_order", all_shapes<Bug::kMergeOrder>},
          {"uninitialised_accumulator", all_shapes<Bug::kUninitialisedAccumulator>},
          {"early_return", all_shapes<Bug::kEarlyReturn>},
          {"wrong_shuffle_lane", all_shapes<Bug::kWrongShuffleLane>},
      },
      count, arguments);
}
