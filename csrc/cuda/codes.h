#pragma once

#include "cuda/launch.h"
#include "quantize.h"

// Quantized messages: a thread processes kPerThread neighboring codes, eight, four or two bytes.
namespace pyparallel::cuda {

static_assert(kPerThread == 8, "the codes of a thread are one access, of Format::kBits bytes");

// A thread's codes as they were loaded.
template <typename Format>
struct alignas(8) Codes {
  uint32_t words[2];

  __device__ __forceinline__ uint32_t get(int i) const {
    const int bit = i * Format::kBits;
    return words[bit / 32] >> (bit % 32) & ((1u << Format::kBits) - 1);
  }
};

template <typename Format>
__device__ __forceinline__ Codes<Format> load_codes(const uint8_t* codes, const Place<>& place) {
  constexpr int kPerByte = 8 / Format::kBits;
  const uint8_t* source = codes + place.begin / kPerByte;
  Codes<Format> loaded{};
  if (place.whole) {
    load_words<Format::kBits>(source, loaded.words);
  } else {
#pragma unroll
    for (int i = 0; i < Format::kBits; ++i) {
      if (place.exists(i * kPerByte)) loaded.words[i / 4] |= uint32_t{source[i]} << (i % 4 * 8);
    }
  }
  return loaded;
}

// Codes of elements past the end must be zero: an odd tail shares a byte with one.
template <typename Format>
__device__ __forceinline__ void store_codes(const uint32_t (&values)[kPerThread], uint8_t* codes,
                                            const Place<>& place) {
  constexpr int kPerByte = 8 / Format::kBits;
  uint8_t* target = codes + place.begin / kPerByte;
  Codes<Format> packed{};
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int bit = i * Format::kBits;
    packed.words[bit / 32] |= values[i] << (bit % 32);
  }
  if (place.whole) {
    store_words<Format::kBits>(target, packed.words);
  } else {
#pragma unroll
    for (int i = 0; i < Format::kBits; ++i) {
      if (place.exists(i * kPerByte)) {
        target[i] = static_cast<uint8_t>(packed.words[i / 4] >> (i % 4 * 8));
      }
    }
  }
}

__device__ __forceinline__ void count_corrupt(int64_t* corrupt, int found) {
  add_to_counter(corrupt, found);
}

// The base-2 logarithm of block_size, a power of two.
inline int shift_of(int64_t block_size) {
  int shift = 0;
  while (int64_t{1} << shift < block_size) ++shift;
  return shift;
}

}  // namespace pyparallel::cuda
