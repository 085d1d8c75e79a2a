// SPDX-License-Identifier: Apache-2.0
// SIMT emulator, the part a kernel sees: CUDA's names, meaning one fiber per thread. Test-only.
// The machine behind them is machine.h; docs/testing_without_a_gpu.md says what it proves.
//
// Every call records where it stands in the source, for the checks and their messages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <source_location>
#include <tuple>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)

struct dim3 {
  unsigned x = 1;
  unsigned y = 1;
  unsigned z = 1;
  constexpr dim3() = default;
  constexpr dim3(unsigned x, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

using cudaError_t = int;
using cudaStream_t = void*;
constexpr cudaError_t cudaSuccess = 0;
constexpr cudaError_t cudaErrorNotSupported = 801;
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

namespace trm {

struct LaunchConfig {
  dim3 grid;
  dim3 block;
  size_t dynamic_shared = 0;
  cudaStream_t stream = nullptr;
  unsigned cluster = 1;  // blocks per cluster, along x
};

namespace emu {

using Where = std::source_location;

enum class Collective {
  kSyncWarp,
  kShuffle,
  kShuffleUp,
  kShuffleDown,
  kShuffleXor,
  kAll,
  kAny,
  kBallot,
  kMatchAny,
  kMatchAll,
  kReduceAdd,
  kReduceMin,
  kReduceMax,
  kReduceMinSigned,
  kReduceMaxSigned,
  kReduceAnd,
  kReduceOr,
  kReduceXor,
};

enum class Reduction { kNone, kCount, kAnd, kOr };

struct Access {
  const void* place;
  size_t bytes;
  size_t alignment;
  bool reads;
  bool writes;
  const char* name;  // of the operation, or null for an ordinary access
};

// By value: an instrumented kernel must not be seen reading the machine's own memory.
dim3 thread_index();
dim3 block_index();
dim3 block_size();
dim3 grid_size();
unsigned cluster_rank();
unsigned cluster_size();

void* shared_bytes(const void* type, size_t bytes, size_t alignment, const char* name, Where where);
void* dynamic_shared_bytes(size_t alignment, Where where);
void* cluster_bytes(const void* object, unsigned rank, Where where);

int block_barrier(Reduction reduction, int predicate, const char* name, Where where);
void cluster_barrier(Where where);
uint64_t warp_collective(Collective collective, unsigned mask, uint64_t value, unsigned argument,
                         unsigned width, const char* name, Where where);
unsigned active_mask();
int compute_capability();  // of the emulated device
int multiprocessors();
void fence();
void check_access(const Access& access, Where where);
void begin_atomic(const Access& access, Where where);
void end_atomic(const void* place);

void run_grid(const LaunchConfig& config, void (*kernel)(void*), void* parameters,
              size_t parameter_bytes, const void* kernel_address);

template <typename T>
uint64_t to_bits(T value) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}

template <typename T>
T from_bits(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

template <typename T>
inline constexpr char kTypeKey = 0;

template <typename T>
T& shared_object(const char* name, Where where) {
  // nvcc drops the initialisers of T without a word: no constructor runs here either.
  static_assert(std::is_trivially_copyable_v<T> && std::is_trivially_destructible_v<T>);
  return *static_cast<T*>(shared_bytes(&kTypeKey<T>, sizeof(T), alignof(T), name, where));
}

// One atomic read-modify-write; relaxed, like CUDA's. The compare-exchange is what a race detector
// sees, so that a plain access next to it is still a race.
template <typename T, typename Change>
T atomic_change(T* place, const char* name, Where where, Change change) {
  using Word = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
  static_assert(sizeof(T) == sizeof(Word));
  begin_atomic({place, sizeof(T), sizeof(T), true, true, name}, where);
  Word* word = reinterpret_cast<Word*>(place);
  Word seen = __atomic_load_n(word, __ATOMIC_RELAXED);
  Word next = seen;
  do {
    next = static_cast<Word>(to_bits(change(from_bits<T>(seen))));
  } while (
      !__atomic_compare_exchange_n(word, &seen, next, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  end_atomic(place);
  return from_bits<T>(seen);
}

}  // namespace emu

template <typename T>
T* dynamic_shared(emu::Where where = emu::Where::current()) {
  return static_cast<T*>(emu::dynamic_shared_bytes(alignof(T), where));
}

template <typename Vector>
Vector load_vector(const void* place, emu::Where where = emu::Where::current()) {
  emu::check_access({place, sizeof(Vector), alignof(Vector), true, false, "load_vector"}, where);
  Vector loaded;
  memcpy(&loaded, place, sizeof(Vector));
  return loaded;
}

template <int N>
struct Words;

template <int N>
Words<N> load_streaming(const void* place, emu::Where where = emu::Where::current()) {
  emu::check_access({place, 4 * N, 4 * N, true, false, "load_streaming"}, where);
  Words<N> loaded;
  memcpy(&loaded, place, sizeof(loaded));
  return loaded;
}

template <int N>
void store_streaming(void* place, const Words<N>& words, emu::Where where = emu::Where::current()) {
  emu::check_access({place, 4 * N, 4 * N, false, true, "store_streaming"}, where);
  *static_cast<Words<N>*>(place) = words;
}

inline unsigned cluster_rank() { return emu::cluster_rank(); }
inline unsigned cluster_size() { return emu::cluster_size(); }
inline void cluster_sync(emu::Where where = emu::Where::current()) { emu::cluster_barrier(where); }

template <typename T>
T* cluster_shared(T* object, unsigned rank, emu::Where where = emu::Where::current()) {
  return static_cast<T*>(emu::cluster_bytes(object, rank, where));
}

template <typename... Parameters, typename... Arguments>
cudaError_t launch(const LaunchConfig& config, void (*kernel)(Parameters...),
                   const Arguments&... arguments) {
  struct Call {
    void (*kernel)(Parameters...);
    std::tuple<Parameters...> parameters;
  };
  Call call{kernel, {static_cast<Parameters>(arguments)...}};
  const auto run = [](void* opaque) {
    Call& own = *static_cast<Call*>(opaque);
    std::apply(own.kernel, own.parameters);
  };
  emu::run_grid(config, run, &call, sizeof(call), reinterpret_cast<const void*>(kernel));
  return cudaSuccess;
}

}  // namespace trm

#define threadIdx (::trm::emu::thread_index())
#define blockIdx (::trm::emu::block_index())
#define blockDim (::trm::emu::block_size())
#define gridDim (::trm::emu::grid_size())
#define warpSize 32

#define TRM_EMU_WHERE ::trm::emu::Where where = ::trm::emu::Where::current()

inline void __syncthreads(TRM_EMU_WHERE) {
  trm::emu::block_barrier(trm::emu::Reduction::kNone, 0, "__syncthreads", where);
}
inline int __syncthreads_count(int predicate, TRM_EMU_WHERE) {
  return trm::emu::block_barrier(trm::emu::Reduction::kCount, predicate, "__syncthreads_count",
                                 where);
}
inline int __syncthreads_and(int predicate, TRM_EMU_WHERE) {
  return trm::emu::block_barrier(trm::emu::Reduction::kAnd, predicate, "__syncthreads_and", where);
}
inline int __syncthreads_or(int predicate, TRM_EMU_WHERE) {
  return trm::emu::block_barrier(trm::emu::Reduction::kOr, predicate, "__syncthreads_or", where);
}

inline void __syncwarp(unsigned mask = 0xffffffffu, TRM_EMU_WHERE) {
  trm::emu::warp_collective(trm::emu::Collective::kSyncWarp, mask, 0, 0, 32, "__syncwarp", where);
}
inline unsigned __activemask() { return trm::emu::active_mask(); }

#define TRM_EMU_SHUFFLE(function, collective, Argument)                                    \
  template <typename T>                                                                    \
  T function(unsigned mask, T value, Argument argument, int width = 32, TRM_EMU_WHERE) {   \
    return trm::emu::from_bits<T>(trm::emu::warp_collective(                               \
        trm::emu::Collective::collective, mask, trm::emu::to_bits(value),                  \
        static_cast<unsigned>(argument), static_cast<unsigned>(width), #function, where)); \
  }
TRM_EMU_SHUFFLE(__shfl_sync, kShuffle, int)
TRM_EMU_SHUFFLE(__shfl_up_sync, kShuffleUp, unsigned)
TRM_EMU_SHUFFLE(__shfl_down_sync, kShuffleDown, unsigned)
TRM_EMU_SHUFFLE(__shfl_xor_sync, kShuffleXor, int)
#undef TRM_EMU_SHUFFLE

#define TRM_EMU_WARP(Result, function, collective, Value)                                        \
  inline Result function(unsigned mask, Value value, TRM_EMU_WHERE) {                            \
    return static_cast<Result>(trm::emu::warp_collective(trm::emu::Collective::collective, mask, \
                                                         trm::emu::to_bits(value), 0, 32,        \
                                                         #function, where));                     \
  }
TRM_EMU_WARP(int, __all_sync, kAll, int)
TRM_EMU_WARP(int, __any_sync, kAny, int)
TRM_EMU_WARP(unsigned, __ballot_sync, kBallot, int)
TRM_EMU_WARP(unsigned, __reduce_add_sync, kReduceAdd, unsigned)
TRM_EMU_WARP(int, __reduce_add_sync, kReduceAdd, int)
TRM_EMU_WARP(unsigned, __reduce_min_sync, kReduceMin, unsigned)
TRM_EMU_WARP(int, __reduce_min_sync, kReduceMinSigned, int)
TRM_EMU_WARP(unsigned, __reduce_max_sync, kReduceMax, unsigned)
TRM_EMU_WARP(int, __reduce_max_sync, kReduceMaxSigned, int)
TRM_EMU_WARP(unsigned, __reduce_and_sync, kReduceAnd, unsigned)
TRM_EMU_WARP(unsigned, __reduce_or_sync, kReduceOr, unsigned)
TRM_EMU_WARP(unsigned, __reduce_xor_sync, kReduceXor, unsigned)
#undef TRM_EMU_WARP

template <typename T>
unsigned __match_any_sync(unsigned mask, T value, TRM_EMU_WHERE) {
  return static_cast<unsigned>(trm::emu::warp_collective(trm::emu::Collective::kMatchAny, mask,
                                                         trm::emu::to_bits(value), 0, 32,
                                                         "__match_any_sync", where));
}
template <typename T>
unsigned __match_all_sync(unsigned mask, T value, int* predicate, TRM_EMU_WHERE) {
  const auto found = static_cast<unsigned>(
      trm::emu::warp_collective(trm::emu::Collective::kMatchAll, mask, trm::emu::to_bits(value), 0,
                                32, "__match_all_sync", where));
  *predicate = found != 0;
  return found;
}

inline void __threadfence_block() { trm::emu::fence(); }
inline void __threadfence() { trm::emu::fence(); }
inline void __threadfence_system() { trm::emu::fence(); }

#define TRM_EMU_ATOMIC(function, expression)                                                      \
  template <typename T>                                                                           \
  T function(T* place, std::type_identity_t<T> operand, TRM_EMU_WHERE) {                          \
    return trm::emu::atomic_change(place, #function, where,                                       \
                                   [operand](T old) -> T { return static_cast<T>(expression); }); \
  }
TRM_EMU_ATOMIC(atomicAdd, old + operand)
TRM_EMU_ATOMIC(atomicSub, old - operand)
TRM_EMU_ATOMIC(atomicMin, operand < old ? operand : old)
TRM_EMU_ATOMIC(atomicMax, old < operand ? operand : old)
TRM_EMU_ATOMIC(atomicAnd, old& operand)
TRM_EMU_ATOMIC(atomicOr, old | operand)
TRM_EMU_ATOMIC(atomicXor, old ^ operand)
TRM_EMU_ATOMIC(atomicExch, (static_cast<void>(old), operand))
TRM_EMU_ATOMIC(atomicInc, old >= operand ? T(0) : T(old + 1))
TRM_EMU_ATOMIC(atomicDec, old == T(0) || old > operand ? operand : T(old - 1))
#undef TRM_EMU_ATOMIC

template <typename T>
T atomicCAS(T* place, std::type_identity_t<T> expected, std::type_identity_t<T> desired,
            TRM_EMU_WHERE) {
  return trm::emu::atomic_change(place, "atomicCAS", where, [expected, desired](T old) {
    return old == expected ? desired : old;
  });
}

#undef TRM_EMU_WHERE
