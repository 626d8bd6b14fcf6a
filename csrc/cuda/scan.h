#pragma once

#include <algorithm>

#include "cuda/launch.h"

namespace pyparallel::cuda {

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

// The sum of the warps before this one, and of the block.
__device__ inline uint64_t sum_of_earlier_warps(uint32_t of_lane, uint64_t* totals, uint64_t& all) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const uint32_t sum = __reduce_add_sync(~0u, of_lane);
  if (threadIdx.x % kWarp == 0) totals[warp] = sum;
  __syncthreads();
  uint64_t before = 0;
  all = 0;
  for (int i = 0; i < kWarps; ++i) {
    if (i < warp) before += totals[i];
    all += totals[i];
  }
  return before;
}

// Consecutive ranges, one per block, for kernels whose blocks count entries and then write them
// after those of all earlier ranges, in one launch. It is all zero at first.
struct Ranges {
  static constexpr int kMost = 1024;

  unsigned int num_started;
  unsigned long long counts[2][kMost];  // twice a range's count, plus 1 when it is known

  static int64_t limited(int64_t num_blocks) { return std::min(num_blocks, int64_t{kMost}); }
};

// How many blocks have started before this one: waiting for those cannot deadlock, however few
// blocks are resident.
__device__ inline int take_turn(unsigned int& num_started) {
  __shared__ int turn;
  if (threadIdx.x == 0) turn = static_cast<int>(atomicAdd(&num_started, 1u));
  __syncthreads();
  return turn;
}

// The sum of the counts of all ranges before this one. Every thread of the block takes part.
__device__ inline uint64_t count_before(unsigned long long* counts, int range, uint64_t count) {
  __shared__ uint64_t totals[kWarps];
  if (threadIdx.x == 0)
    atomicExch(counts + range, (static_cast<unsigned long long>(count) << 1) + 1);
  uint64_t sum = 0, all;
  for (int i = static_cast<int>(threadIdx.x); i < range; i += kThreads) {
    const volatile unsigned long long* place = counts + i;
    unsigned long long word = *place;
    while (word % 2 == 0) word = *place;
    sum += word >> 1;
  }
  scan_block(sum, totals, all);
  __syncthreads();  // before the next call writes the totals
  return all;
}

}  // namespace pyparallel::cuda
