#pragma once

#include "cuda/launch.h"
#include "quantize.h"

// Quantized messages: a thread processes kPerThread neighboring codes, eight, four or two bytes.
namespace pyparallel::cuda {

static_assert(kPerThread == 8, "the codes of a thread are one access");

template <typename Format>
__device__ __forceinline__ void load_codes(const uint8_t* codes, int64_t begin, bool whole,
                                           int count, uint32_t* values) {
  constexpr int kPerByte = 8 / Format::kBits;
  const uint8_t* source = codes + begin / kPerByte;
  uint32_t words[2] = {0, 0};
  if (whole && Format::kBits == 8) {
    const uint2 both = __ldcs(reinterpret_cast<const uint2*>(source));
    words[0] = both.x;
    words[1] = both.y;
  } else if (whole && Format::kBits == 2) {
    words[0] = __ldcs(reinterpret_cast<const uint16_t*>(source));
  } else if (whole) {
    words[0] = __ldcs(reinterpret_cast<const uint32_t*>(source));
  } else {
#pragma unroll
    for (int i = 0; i < kPerThread / kPerByte; ++i) {
      if (i * kPerByte < count) words[i / 4] |= uint32_t{source[i]} << (i % 4 * 8);
    }
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int bit = i * Format::kBits;
    values[i] = words[bit / 32] >> (bit % 32) & ((1u << Format::kBits) - 1);
  }
}

// Codes of elements past the end must be zero: an odd tail shares a byte with one.
template <typename Format>
__device__ __forceinline__ void store_codes(uint8_t* codes, int64_t begin, bool whole, int count,
                                            const uint32_t* values) {
  constexpr int kPerByte = 8 / Format::kBits;
  uint8_t* target = codes + begin / kPerByte;
  uint32_t words[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int bit = i * Format::kBits;
    words[bit / 32] |= values[i] << (bit % 32);
  }
  if (whole && Format::kBits == 8) {
    __stcs(reinterpret_cast<uint2*>(target), make_uint2(words[0], words[1]));
  } else if (whole && Format::kBits == 2) {
    __stcs(reinterpret_cast<uint16_t*>(target), static_cast<uint16_t>(words[0]));
  } else if (whole) {
    __stcs(reinterpret_cast<uint32_t*>(target), words[0]);
  } else {
#pragma unroll
    for (int i = 0; i < kPerThread / kPerByte; ++i) {
      if (i * kPerByte < count) target[i] = static_cast<uint8_t>(words[i / 4] >> (i % 4 * 8));
    }
  }
}

__device__ __forceinline__ void count_corrupt(int64_t* corrupt, int found) {
  if (found) {
    atomicAdd(reinterpret_cast<unsigned long long*>(corrupt),
              static_cast<unsigned long long>(found));
  }
}

// The base-2 logarithm of block_size, a power of two.
inline int shift_of(int64_t block_size) {
  int shift = 0;
  while (int64_t{1} << shift < block_size) ++shift;
  return shift;
}

}  // namespace pyparallel::cuda
