#pragma once

#include "cuda/launch.h"

namespace pyparallel::cuda {

constexpr int kWarp = 32;
constexpr int kWarps = kThreads / kWarp;

// The exclusive prefix sum of this thread, and the sum of all threads. Every thread of a block of
// kThreads takes part; `totals` is shared memory, reusable after the next barrier of the block.
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
