#pragma once

#include "cuda/launch.h"

namespace pyparallel::cuda {

constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;

// The sum of the values of all threads before this one, and that of all. Every thread of a block of
// kThreads takes part; `totals` is shared memory, free again once the block has passed a barrier.
template <typename T>
__device__ __forceinline__ T scan_block(T value, T (&totals)[kWarps], T& all) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  T sum = value;
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const T other = __shfl_up_sync(~0u, sum, distance);
    if (lane >= distance) sum += other;
  }
  if (lane == kWarp - 1) totals[warp] = sum;
  __syncthreads();
  T before = 0;
  all = 0;
  for (int i = 0; i < kWarps; ++i) {
    if (i == warp) before = all;
    all += totals[i];
  }
  return before + sum - value;
}

}  // namespace pyparallel::cuda
