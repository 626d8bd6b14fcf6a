#pragma once

#include "cuda/codes.h"
#include "cuda/packet.h"
#include "statistical.h"

// The kernels of `quantize_statistical` and its inverse.
namespace pyparallel::cuda {

constexpr int kMostWarps = kThreads / kWarp;

// The units of a block's bins, by warp, so that few threads add to one place.
template <int BITS>
struct BinTotals {
  int sums[kMostWarps][BinCodes<BITS>::kBins];
  int counts[kMostWarps][BinCodes<BITS>::kBins];
};

// Adds the thread's entries, of which `count` exist, to the totals of its warp.
template <int BITS>
__device__ __forceinline__ void add_to_bins(const int (&units)[kPerThread],
                                            const uint32_t (&codes)[kPerThread], int count,
                                            BinTotals<BITS>& totals) {
  constexpr int kBins = BinCodes<BITS>::kBins;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  int (&sums)[kBins] = totals.sums[warp];
  int (&counts)[kBins] = totals.counts[warp];
  if constexpr (BITS == 8) {
    for (int bin = lane; bin < kBins; bin += kWarp) sums[bin] = counts[bin] = 0;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (i < count) {
        atomicAdd(&sums[codes[i]], units[i]);
        atomicAdd(&counts[codes[i]], 1);
      }
    }
  } else {
    for (int bin = 0; bin < kBins; ++bin) {
      unsigned sum = 0, number = 0;
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        const bool is_in = i < count && codes[i] == static_cast<uint32_t>(bin);
        sum += is_in ? static_cast<unsigned>(units[i]) : 0u;
        number += is_in;
      }
      sum = __reduce_add_sync(~0u, sum);
      number = __reduce_add_sync(~0u, number);
      if (lane == 0) {
        sums[bin] = static_cast<int>(sum);
        counts[bin] = static_cast<int>(number);
      }
    }
  }
}

// A block of threads for each block of entries: eight each, so one warp at least.
template <int BITS>
__global__ void __launch_bounds__(kThreads)
    quantize_statistical_kernel(Stream x, Stream residual, int64_t numel, int64_t block_size,
                                bool aligned, uint8_t* codes, float* tables) {
  constexpr int kBins = BinCodes<BITS>::kBins;
  __shared__ uint32_t largest_of[kMostWarps];
  __shared__ int sum_of[kMostWarps];
  __shared__ double squares_of[kMostWarps];
  __shared__ Bins bins;
  __shared__ BinTotals<BITS> totals;
  __shared__ float table[kBins];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int num_warps = static_cast<int>(blockDim.x) / kWarp, first = threadIdx.x * kPerThread;
  const int64_t begin = blockIdx.x * block_size;
  const int64_t count = min(block_size, numel - begin);
  const int rest = static_cast<int>(max(int64_t{0}, count - first));
  const Place<> own{begin + first, rest, aligned && rest >= kPerThread};
  Packet<> entries{}, kept{};
  in_one_branch(own, [&](const Place<>& place) {
    entries = load_packet(x, place);
    kept = load_packet(residual, place);
  });
  float acc[kPerThread], values[kPerThread];
  unpack(entries, x.dtype, acc);
  unpack(kept, residual.dtype, values);
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    if (residual.data != nullptr) acc[i] += values[i];
    bits = max(bits, same_bits<uint32_t>(acc[i]) & kMagnitudeMask);
  }
  bits = __reduce_max_sync(~0u, bits);
  if (lane == 0) largest_of[warp] = bits;
  __syncthreads();
  for (int i = 0; i < num_warps; ++i) bits = max(bits, largest_of[i]);
  const float largest = same_bits<float>(bits);
  const bool is_finite = largest < __builtin_inff();
  const bool is_live = is_finite && largest >= kSmallestMagnitude;

  // If it is not live, all that follows is computed and not used: threads stay together.
  const float per_unit = kUnits / (is_live ? largest : 1.0f);
  int units[kPerThread], sum = 0;
  double squares = 0.0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    units[i] = is_live ? __float2int_rn(acc[i] * per_unit) : 0;
    sum += units[i];
    squares += static_cast<double>(units[i]) * units[i];
  }
  sum = static_cast<int>(__reduce_add_sync(~0u, static_cast<unsigned>(sum)));
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    squares += __shfl_xor_sync(~0u, squares, distance);
  }
  if (lane == 0) {
    sum_of[warp] = sum;
    squares_of[warp] = squares;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    double all = 0.0, all_squares = 0.0;
    for (int i = 0; i < num_warps; ++i) {
      all += sum_of[i];
      all_squares += squares_of[i];
    }
    bins = find_bins(all, all_squares, count, kBins);
  }
  __syncthreads();

  uint32_t numbers[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const float place = floorf(place_in_bins(static_cast<float>(units[i]), bins, kBins));
    numbers[i] = static_cast<uint32_t>(fmaxf(0.0f, fminf(kBins - 1.0f, place)));
  }
  add_to_bins<BITS>(units, numbers, own.count(), totals);
  __syncthreads();
  for (int bin = threadIdx.x; bin < kBins; bin += static_cast<int>(blockDim.x)) {
    int64_t bin_sum = 0, bin_count = 0;
    for (int i = 0; i < num_warps; ++i) {
      bin_sum += totals.sums[i][bin];
      bin_count += totals.counts[i][bin];
    }
    float mean = mean_of_bin(bin_sum, bin_count, bin, kBins, bins, largest / kUnits);
    if (!is_live) mean = is_finite ? 0.0f : same_bits<float>(0x7fc00000u);
    table[bin] = mean;
    tables[blockIdx.x * int64_t{kBins} + bin] = mean;
  }
  __syncthreads();

#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    acc[i] -= is_live ? table[numbers[i]] : 0.0f;
    if (!(fabsf(acc[i]) < __builtin_inff())) acc[i] = 0.0f;  // two large numbers of one bin
    if (!is_live || !own.exists(i)) numbers[i] = 0;
  }
  store_codes(pack_codes<BinCodes<BITS>>(numbers), codes, own);
  if (residual.data != nullptr && is_finite) {
    store_packet(pack<DefaultTile>(acc, residual.dtype), residual, own);
  }
}

// The entries of a block with a corrupt table are zero, or add nothing, and are counted.
template <int BITS, typename Out>
__global__ void __launch_bounds__(kThreads)
    dequantize_statistical_kernel(const uint8_t* codes, const float* tables, int block_bits,
                                  bool accumulate, Out* out, int64_t numel, bool aligned,
                                  unsigned long long* corrupt) {
  constexpr int kBins = BinCodes<BITS>::kBins;
  __shared__ bool is_corrupt[kPerBlock / 32];  // by table of the block of threads
  const Place<> place = place_of_thread(numel, aligned);
  const auto loaded = load_codes<BinCodes<BITS>>(codes, place);
  Packet<> old{};
  if (accumulate) old = load_packet(out, place);
  const int64_t first = blockIdx.x * kPerBlock, last = min(numel, first + kPerBlock) - 1;
  const float* own = tables + (first >> block_bits << BITS);
  const int num_tables = static_cast<int>((last >> block_bits) - (first >> block_bits)) + 1;
  for (int i = threadIdx.x; i < num_tables; i += kThreads) is_corrupt[i] = false;
  __syncthreads();
  for (int i = threadIdx.x; i < num_tables * kBins; i += kThreads) {
    if (is_corrupt_mean(own + i / kBins * kBins, i % kBins, kBins)) is_corrupt[i / kBins] = true;
  }
  __syncthreads();
  const int index = static_cast<int>(threadIdx.x) * kPerThread >> block_bits;
  const bool is_left_out = place.rest > 0 && is_corrupt[index];
  if (is_left_out) atomicAdd(corrupt, static_cast<unsigned long long>(place.count()));
  const int table = index < num_tables ? index * kBins : 0;  // past the end: any
  float values[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const float mean = is_left_out ? 0.0f : own[table + static_cast<int>(loaded.get(i))];
    values[i] = accumulate ? old.get<Out>(i) + mean : mean;
  }
  store_together(cuda::pack<Out, DefaultTile>(values), out, place);
}

}  // namespace pyparallel::cuda
