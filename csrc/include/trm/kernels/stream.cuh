// SPDX-License-Identifier: Apache-2.0
// What the streaming kernels share: a run of consecutive columns in a lane's registers, read with
// one aligned load of 8 or 16 bytes where the rows allow it and column by column where not.
#pragma once

#include "trm/row.h"

namespace trm::kernels {

constexpr int kWarpLanes = 32;
constexpr unsigned kWholeWarp = 0xffffffffu;

// exp(x) = 2^(kLog2e x): the float constant is 1.3e-8 off log2(e), and kNats is its own reciprocal,
// so an exponent and the frame it was taken in convert back alike.
constexpr float kLog2e = 1.44269504f;
constexpr double kNats = 1.0 / static_cast<double>(kLog2e);

// How a storage type packs into words.
template <typename Storage>
struct Packing;

template <>
struct Packing<float> {
  static constexpr StorageType kType = StorageType::kFloat32;
  static constexpr int kPerWord = 1;
  static constexpr uint32_t kNegativeInfinity = 0xff800000u;
  TRM_INLINE static float at(uint32_t word, int) { return bit_cast<float>(word); }
  TRM_INLINE static uint32_t pack(const float* value) { return bit_cast<uint32_t>(value[0]); }
  TRM_INLINE static uint32_t larger(uint32_t a, uint32_t b) {
    return bit_cast<uint32_t>(std::fmax(bit_cast<float>(a), bit_cast<float>(b)));
  }
};

template <>
struct Packing<BFloat16> {
  static constexpr StorageType kType = StorageType::kBFloat16;
  static constexpr int kPerWord = 2;
  static constexpr uint32_t kNegativeInfinity = 0xff80ff80u;
  TRM_INLINE static float at(uint32_t word, int i) {
    return bit_cast<float>(i == 0 ? word << 16 : word & 0xffff0000u);
  }
  TRM_INLINE static uint32_t pack(const float* value) {
#if defined(__CUDA_ARCH__)
    uint32_t word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(value[1]), "f"(value[0]));
    return word;
#else
    return to_bfloat16(value[0]).bits | static_cast<uint32_t>(to_bfloat16(value[1]).bits) << 16;
#endif
  }
  TRM_INLINE static uint32_t larger(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
    uint32_t out;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
#else
    const float low = std::fmax(at(a, 0), at(b, 0));
    const float high = std::fmax(at(a, 1), at(b, 1));
    return bit_cast<uint32_t>(low) >> 16 | (bit_cast<uint32_t>(high) & 0xffff0000u);
#endif
  }
};

template <>
struct Packing<Float16> {
  static constexpr StorageType kType = StorageType::kFloat16;
  static constexpr int kPerWord = 2;
  static constexpr uint32_t kNegativeInfinity = 0xfc00fc00u;
  TRM_INLINE static float at(uint32_t word, int i) {
    return half_to_float(static_cast<uint16_t>(i == 0 ? word & 0xffffu : word >> 16));
  }
  TRM_INLINE static uint32_t pack(const float* value) {
#if defined(__CUDA_ARCH__)
    uint32_t word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(value[1]), "f"(value[0]));
    return word;
#else
    return to_float16(value[0]).bits | static_cast<uint32_t>(to_float16(value[1]).bits) << 16;
#endif
  }
  TRM_INLINE static uint32_t larger(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
    uint32_t out;
    asm("max.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
#else
    const float low = std::fmax(at(a, 0), at(b, 0));
    const float high = std::fmax(at(a, 1), at(b, 1));
    return to_float16(low).bits | static_cast<uint32_t>(to_float16(high).bits) << 16;
#endif
  }
};

// Columns that one lane reads at a time: 16 bytes of the wider of two storage types.
template <typename Rollout, typename Train>
constexpr int kRunColumns =
    16 / (sizeof(Rollout) > sizeof(Train) ? sizeof(Rollout) : sizeof(Train));

template <typename Storage, int Columns>
struct Run {
  static constexpr int kWords = Columns * static_cast<int>(sizeof(Storage)) / 4;
  Words<kWords> words;

  TRM_INLINE float operator[](int i) const {
    constexpr int kPerWord = Packing<Storage>::kPerWord;
    return Packing<Storage>::at(words.word[i / kPerWord], i % kPerWord);
  }

  // The largest of each place in a word, NaN aside.
  TRM_INLINE uint32_t larger_word() const {
    uint32_t out = words.word[0];
    for (int i = 1; i < kWords; ++i) out = Packing<Storage>::larger(out, words.word[i]);
    return out;
  }

  TRM_INLINE float largest() const {
    const uint32_t word = larger_word();
    const float first = Packing<Storage>::at(word, 0);
    return Packing<Storage>::kPerWord == 1 ? first
                                           : std::fmax(first, Packing<Storage>::at(word, 1));
  }

  // Whether a logit is above the limit, which stands in every place of a word.
  TRM_INLINE bool exceeds(uint32_t limit) const {
    if constexpr (Packing<Storage>::kPerWord == 1) {
      return largest() > bit_cast<float>(limit);
    } else {
      return Packing<Storage>::larger(larger_word(), limit) != limit;
    }
  }
};

// A number, rounded to the storage type, in every place of a word.
template <typename Storage>
TRM_INLINE uint32_t repeated(float value) {
  const float both[2] = {value, value};
  return Packing<Storage>::pack(both);
}

template <typename Storage, int Columns>
__device__ __forceinline__ Run<Storage, Columns> load_run(const Storage* place) {
  return {load_streaming<Run<Storage, Columns>::kWords>(place)};
}

// Columns [0, count) of a run, at once or by words where `bytes` says that rows are so aligned, by
// elements else; columns from `count` on are -inf.
template <typename Storage, int Columns>
__device__ __forceinline__ Run<Storage, Columns> load_part(const Storage* place, int count,
                                                           int bytes) {
  constexpr int kPerWord = Packing<Storage>::kPerWord;
  if (bytes == 16 && count >= Columns) return load_run<Storage, Columns>(place);
  Run<Storage, Columns> run;
  if (bytes >= 4 && count >= Columns) {
#pragma unroll
    for (int w = 0; w < Run<Storage, Columns>::kWords; ++w) {
      run.words.word[w] = load_vector<uint32_t>(place + w * kPerWord);
    }
    return run;
  }
#pragma unroll
  for (int w = 0; w < Run<Storage, Columns>::kWords; ++w) {
    uint32_t word = Packing<Storage>::kNegativeInfinity;
    if constexpr (kPerWord == 1) {
      if (w < count) word = bit_cast<uint32_t>(place[w]);
    } else {
      if (2 * w < count) word = (word & 0xffff0000u) | place[2 * w].bits;
      if (2 * w + 1 < count) {
        word = (word & 0xffffu) | static_cast<uint32_t>(place[2 * w + 1].bits) << 16;
      }
    }
    run.words.word[w] = word;
  }
  return run;
}

template <typename Storage, int Columns>
__device__ __forceinline__ void store_run(Storage* place, const float* values) {
  constexpr int kPerWord = Packing<Storage>::kPerWord;
  Words<Run<Storage, Columns>::kWords> words;
#pragma unroll
  for (int w = 0; w < Run<Storage, Columns>::kWords; ++w) {
    words.word[w] = Packing<Storage>::pack(values + w * kPerWord);
  }
  store_streaming(place, words);
}

}  // namespace trm::kernels
