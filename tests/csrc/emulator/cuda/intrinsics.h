#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cuda/block.h"

// CUDA's keywords and intrinsics, as far as the kernels of csrc/cuda use them.
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __restrict__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static  // blocks run in sequence

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

namespace emulator {

inline dim3& block_index() {
  static dim3 index{0, 0, 0};
  return index;
}

inline dim3& grid_size() {
  static dim3 size;
  return size;
}

inline dim3 thread_index() { return {static_cast<unsigned>(Block::current().thread()), 0, 0}; }
inline dim3 block_size() { return {static_cast<unsigned>(Block::current().num_threads()), 1, 1}; }

// Every lane publishes a value, then reads that of the lane chosen by `source`.
template <typename T>
T exchange(T value, int source_lane) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  Block& block = Block::current();
  const int thread = block.thread();
  std::memcpy(&block.slot(thread), &value, sizeof value);
  block.wait(State::kWaitsForWarp);
  T result = value;
  const int source = thread / kWarp * kWarp + source_lane;
  if (source_lane >= 0 && source_lane < kWarp && source < block.num_threads()) {
    std::memcpy(&result, &block.slot(source), sizeof result);
  }
  block.wait(State::kWaitsForWarp);
  return result;
}

template <typename T, typename Function>
T reduce_warp(T value, Function function) {
  Block& block = Block::current();
  const int thread = block.thread();
  std::memcpy(&block.slot(thread), &value, sizeof value);
  block.wait(State::kWaitsForWarp);
  const int first = thread / kWarp * kWarp;
  bool any = false;
  T result{};
  for (int i = first; i < std::min(first + kWarp, block.num_threads()); ++i) {
    if (block.is_done(i)) continue;
    T other;
    std::memcpy(&other, &block.slot(i), sizeof other);
    result = any ? function(result, other) : other;
    any = true;
  }
  block.wait(State::kWaitsForWarp);
  return result;
}

inline int lane() { return Block::current().thread() % kWarp; }

// Of buffers, by evict-first accesses.
inline int64_t num_bytes = 0;

}  // namespace emulator

#define threadIdx (emulator::thread_index())
#define blockDim (emulator::block_size())
#define blockIdx (emulator::block_index())
#define gridDim (emulator::grid_size())
constexpr int warpSize = emulator::kWarp;

struct alignas(8) int2 {
  int x, y;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

using std::max;
using std::min;

// 16-byte accesses fault at unaligned addresses, as on the device.
template <typename T>
void require_aligned(const T* pointer) {
  if (reinterpret_cast<uintptr_t>(pointer) % alignof(T) != 0) {
    std::fprintf(stderr, "emulator: misaligned access of %zu bytes\n", sizeof(T));
    std::abort();
  }
}

template <typename T>
T __ldg(const T* source) {
  require_aligned(source);
  return *source;
}
template <typename T>
T __ldcg(const T* source) {
  return __ldg(source);
}
template <typename T>
T __ldcs(const T* source) {
  emulator::num_bytes += sizeof(T);
  return __ldg(source);
}
template <typename T>
void __stcs(T* target, T value) {
  emulator::num_bytes += sizeof(T);
  require_aligned(target);
  *target = value;
}

inline void __syncthreads() { emulator::Block::current().wait(emulator::State::kWaitsForBlock); }
inline void __syncwarp(unsigned = ~0u) {
  emulator::Block::current().wait(emulator::State::kWaitsForWarp);
}
inline void __threadfence() {}

template <typename T>
T __shfl_sync(unsigned, T value, int source, int width = emulator::kWarp) {
  return emulator::exchange(value, emulator::lane() / width * width + source % width);
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask, int width = emulator::kWarp) {
  (void)width;
  return emulator::exchange(value, emulator::lane() ^ mask);
}
template <typename T>
T __shfl_up_sync(unsigned, T value, unsigned delta, int width = emulator::kWarp) {
  const int lane = emulator::lane(), source = lane - static_cast<int>(delta);
  return emulator::exchange(value, source < lane / width * width ? lane : source);
}
template <typename T>
T __shfl_down_sync(unsigned, T value, unsigned delta, int width = emulator::kWarp) {
  const int lane = emulator::lane(), source = lane + static_cast<int>(delta);
  return emulator::exchange(value, source >= lane / width * width + width ? lane : source);
}
inline unsigned __ballot_sync(unsigned, int predicate) {
  return emulator::reduce_warp(predicate ? 1u << emulator::lane() : 0u,
                               [](unsigned a, unsigned b) { return a | b; });
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, !predicate) == 0; }
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  return emulator::reduce_warp(value, [](unsigned a, unsigned b) { return std::max(a, b); });
}
inline unsigned __reduce_min_sync(unsigned, unsigned value) {
  return emulator::reduce_warp(value, [](unsigned a, unsigned b) { return std::min(a, b); });
}
inline unsigned __reduce_or_sync(unsigned, unsigned value) {
  return emulator::reduce_warp(value, [](unsigned a, unsigned b) { return a | b; });
}
inline unsigned __reduce_add_sync(unsigned, unsigned value) {
  return emulator::reduce_warp(value, [](unsigned a, unsigned b) { return a + b; });
}

inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const uint64_t bytes = uint64_t{high} << 32 | low;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<unsigned>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  }
  return result;
}
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __popcll(unsigned long long value) { return __builtin_popcountll(value); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __clz(int value) { return value ? __builtin_clz(static_cast<unsigned>(value)) : 32; }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32);
}

template <typename To, typename From>
To emulated_bit_cast(From from) {
  To to;
  static_assert(sizeof to == sizeof from);
  std::memcpy(&to, &from, sizeof to);
  return to;
}
inline unsigned __float_as_uint(float value) { return emulated_bit_cast<unsigned>(value); }
inline int __float_as_int(float value) { return emulated_bit_cast<int>(value); }
inline float __uint_as_float(unsigned value) { return emulated_bit_cast<float>(value); }
inline float __int_as_float(int value) { return emulated_bit_cast<float>(value); }
inline int __float2int_rn(float value) { return static_cast<int>(std::nearbyint(value)); }
inline int __float2int_rd(float value) { return static_cast<int>(std::floor(value)); }
inline float __fsqrt_rn(float value) { return std::sqrt(value); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }

template <typename T, typename U>
T atomicAdd(T* target, U value) {
  const T before = *target;
  *target = static_cast<T>(before + value);
  return before;
}
template <typename T, typename U>
T atomicMax(T* target, U value) {
  const T before = *target;
  *target = std::max(before, static_cast<T>(value));
  return before;
}
template <typename T, typename U>
T atomicMin(T* target, U value) {
  const T before = *target;
  *target = std::min(before, static_cast<T>(value));
  return before;
}
template <typename T, typename U>
T atomicOr(T* target, U value) {
  const T before = *target;
  *target = before | static_cast<T>(value);
  return before;
}
template <typename T, typename U>
T atomicExch(T* target, U value) {
  const T before = *target;
  *target = static_cast<T>(value);
  return before;
}
template <typename T>
T atomicCAS(T* target, T expected, T value) {
  const T before = *target;
  if (before == expected) *target = value;
  return before;
}
