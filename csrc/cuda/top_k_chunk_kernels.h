#pragma once

#include "cuda/packet.h"
#include "cuda/scan.h"
#include "top_k.h"
#include "top_k_chunks.h"

// The kernels of `top_k_chunks` and `scatter_chunks`: a block of threads for each chunk.
namespace pyparallel::cuda {

static_assert(kMaxChunk == kPerBlock, "a thread keeps eight entries of the chunk");

// The smallest key of those sent, bit by bit. Every thread of the block takes part.
__device__ __forceinline__ uint32_t find_last_key(const uint32_t (&keys)[kPerThread],
                                                  uint32_t num_sent) {
  __shared__ uint32_t totals[2][kWarps];
  uint32_t last = 0;
  for (int bit = 30; bit >= 0; --bit) {
    const uint32_t tried = last | 1u << bit;
    uint32_t count = 0;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) count += keys[i] >= tried;
    count = __reduce_add_sync(~0u, count);
    uint32_t (&of_warps)[kWarps] = totals[bit % 2];  // the other may still be read
    if (threadIdx.x % kWarp == 0) of_warps[threadIdx.x / kWarp] = count;
    __syncthreads();
    count = 0;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) count += of_warps[warp];
    if (count >= num_sent) last = tried;
    if (count == num_sent) break;
  }
  return last;
}

template <typename X, typename Kept>
__global__ void __launch_bounds__(kThreads)
    top_k_chunks_kernel(const X* x, Kept* residual, Chunks chunks, bool aligned, X* values,
                        uint8_t* indices) {
  __shared__ uint32_t totals[kWarps];
  __shared__ uint16_t chosen[kMaxChunk];
  const int64_t c = blockIdx.x;
  const int length = static_cast<int>(chunks.length(c)), first = threadIdx.x * kPerThread;
  const uint32_t num_sent = static_cast<uint32_t>(chunks.num_sent(c));
  const int rest = max(0, length - first);
  const Place<> own{c * chunks.chunk + first, rest, aligned && rest >= kPerThread};
  Packet<> entries{}, kept{};
  in_one_branch(own, [&](const Place<>& place) {
    entries = load_packet(x, place);
    if (residual) kept = load_packet(static_cast<const Kept*>(residual), place);
  });
  float acc[kPerThread];
  uint32_t keys[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    acc[i] = entries.get<X>(i) + (residual ? kept.get<Kept>(i) : 0.0f);
    keys[i] = own.exists(i) ? top_k_key(acc[i]) + 1 : 0;  // one more: 0 is below all
  }
  const uint32_t last = find_last_key(keys, num_sent);

  // Those above the last key, and in the upper half those equal to it, before this thread's.
  uint32_t count = 0, all;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) count += (keys[i] > last) + ((keys[i] == last) << 16);
  const uint32_t before = scan_block(count, totals, all);
  const uint32_t num_ties = num_sent - (all & 0xffff);
  uint32_t above = before & 0xffff, equal = before >> 16;
  X* sent = values + c * chunks.k;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const bool is_equal = keys[i] == last;
    float left = is_finite(acc[i]) ? acc[i] : 0.0f;
    if (keys[i] > last || (is_equal && equal < num_ties)) {
      const uint32_t position = above + min(equal, num_ties);
      const X value = static_cast<X>(acc[i]);
      sent[position] = value;
      chosen[position] = static_cast<uint16_t>(first + i);
      left = static_cast<float>(top_k_remainder<Kept>(acc[i], static_cast<float>(value)));
    }
    above += keys[i] > last;
    equal += is_equal;
    acc[i] = left;
  }
  if (residual) store_values(acc, residual, own);
  __syncthreads();
  uint8_t* bytes = indices + c * num_index_bytes(chunks.k);
  for (uint32_t i = 2 * threadIdx.x; i < num_sent; i += 2 * kThreads) {
    const bool has_second = i + 1 < num_sent;
    store_index_pair(bytes, i, chosen[i], has_second ? chosen[i + 1] : 0, has_second);
  }
}

// Adds messages one after the other. Corrupt entries are skipped and counted.
template <typename Out>
__global__ void __launch_bounds__(kThreads)
    scatter_chunks_kernel(Stream values, const uint8_t* indices, int64_t num_messages,
                          Chunks chunks, bool accumulate, Out* out, bool aligned,
                          unsigned long long* corrupt) {
  const int64_t c = blockIdx.x, begin = c * chunks.chunk;
  const int length = static_cast<int>(chunks.length(c)), first = threadIdx.x * kPerThread;
  if (!accumulate) {
    const int rest = max(0, length - first);
    store_packet(Packet<>{}, out, Place<>{begin + first, rest, aligned && rest >= kPerThread});
  }
  const int num_sent = static_cast<int>(chunks.num_sent(c));
  const int64_t num_bytes = chunks.num_bytes(), num_values = chunks.num_values();
  const uint8_t* bytes = indices + c * num_index_bytes(chunks.k);
  out += begin;
#pragma unroll 1
  for (int64_t place = c * chunks.k, end = place + num_messages * num_values; place < end;
       place += num_values, bytes += num_bytes) {
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < num_sent; i += kThreads) {
      const int index = load_index(bytes, i), previous = i > 0 ? load_index(bytes, i - 1) : -1;
      if (index <= previous || index >= length) {
        atomicAdd(corrupt, 1ull);
      } else {
        out[index] = scatter_add(out[index], read_element(values, place + i));
      }
    }
  }
}

}  // namespace pyparallel::cuda
