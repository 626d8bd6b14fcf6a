#pragma once

#include <cstdint>

#include "cuda/device.h"

// Launches on the GPU: short blocks of one fixed size (never a persistent grid, which would lock
// NCCL's blocks out), each thread processing kPerThread neighbors with 16-byte accesses.
namespace pyparallel::cuda {

constexpr int kThreads = 512;
constexpr int kPerThread = 8;
constexpr int64_t kPerBlock = int64_t{kThreads} * kPerThread;

inline int64_t num_blocks(int64_t numel) { return (numel + kPerBlock - 1) / kPerBlock; }

inline bool is_aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

// kPerThread neighbors as floats, of which `count` exist; all if the access is whole.
template <typename T>
__device__ __forceinline__ void load_floats(const T* source, bool whole, int count, float* values) {
  if (whole) {
    constexpr int kAccesses = kPerThread * sizeof(T) / 16;
    int4 raw[kAccesses];
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) raw[i] = __ldcs(reinterpret_cast<const int4*>(source) + i);
    const T* typed = reinterpret_cast<const T*>(raw);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) values[i] = static_cast<float>(typed[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      values[i] = i < count ? static_cast<float>(source[i]) : 0.0f;
    }
  }
}

template <typename T>
__device__ __forceinline__ void store_floats(T* target, bool whole, int count,
                                             const float* values) {
  if (whole) {
    constexpr int kAccesses = kPerThread * sizeof(T) / 16;
    int4 raw[kAccesses];
    T* typed = reinterpret_cast<T*>(raw);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) typed[i] = static_cast<T>(values[i]);
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) __stcs(reinterpret_cast<int4*>(target) + i, raw[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (i < count) target[i] = static_cast<T>(values[i]);
    }
  }
}

}  // namespace pyparallel::cuda
