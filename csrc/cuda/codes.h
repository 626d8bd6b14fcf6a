#pragma once

#include <type_traits>

#include "cuda/launch.h"
#include "quantize.h"

// Quantized messages: a thread processes 8 or 16 neighboring codes, which are one access.
namespace pyparallel::cuda {

// A thread's codes as they were loaded.
template <typename Format, int COUNT = kPerThread>
struct alignas(COUNT) Codes {
  static constexpr int kBytes = COUNT * Format::kBits / 8;
  uint32_t words[COUNT / 4];

  __device__ __forceinline__ uint32_t get(int i) const {
    const int bit = i * Format::kBits;
    return words[bit / 32] >> (bit % 32) & ((1u << Format::kBits) - 1);
  }

  // What code i decodes to.
  __device__ __forceinline__ float number(int i) const {
    if constexpr (std::is_same_v<Format, Int8>) {
      // One instruction puts a byte into 2^23, after one has flipped four sign bits.
      const uint32_t flipped = words[i / 4] ^ in_each_code(Format::kSign);
      return Format::template decode_flipped<float>(
          __byte_perm(kTwoTo23Bits, flipped, 0x3104 + i % 4));
    } else {
      return Format::template decode<float>(get(i));
    }
  }

  // Not 0 if a code is corrupt.
  __device__ __forceinline__ uint32_t corrupt_bits() const {
    constexpr uint32_t kTop = 1u << (Format::kBits - 1);
    uint32_t found = 0;
#pragma unroll
    for (int i = 0; i < (kBytes + 3) / 4; ++i) {
      const uint32_t masked = words[i] & in_each_code(Format::kCorruptMask);
      // The top bit of a code that has a pattern, and of none if none has: of 0 - 1.
      const auto find = [&](uint32_t pattern) {
        const uint32_t same_top = pattern & kTop ? masked : ~masked;
        return ((masked ^ in_each_code(pattern)) - in_each_code(1)) & same_top;
      };
      found |= find(Format::kCorruptPattern) | find(Format::kOtherPattern);
    }
    return found & in_each_code(kTop);
  }

 private:
  static constexpr __device__ uint32_t in_each_code(uint32_t bits) {
    return ~0u / ((1u << Format::kBits) - 1) * bits;
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

// Calls take(i, entry) for the codes of each message that are not corrupt, and counts the others
// that exist. All are tested at once: one is corrupt only where something has failed.
template <int COUNT, typename Format, typename Take>
__device__ __forceinline__ void decode_codes(const Codes<Format>* codes, const float* scales,
                                             const Place<>& place, int& corrupt, const Take& take) {
  uint32_t found = 0, largest = 0;
#pragma unroll
  for (int j = 0; j < COUNT; ++j) {
    found |= codes[j].corrupt_bits();
    largest = max(largest, same_bits<uint32_t>(scales[j]));
  }
  if (found == 0 && largest < kInfinityBits) {
#pragma unroll
    for (int j = 0; j < COUNT; ++j) {
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) take(i, codes[j].number(i) * scales[j]);
    }
  } else {
#pragma unroll
    for (int j = 0; j < COUNT; ++j) {
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        if (is_corrupt_scale(scales[j]) || is_corrupt_code<Format>(codes[j].get(i))) {
          corrupt += place.exists(i);
        } else {
          take(i, codes[j].number(i) * scales[j]);
        }
      }
    }
  }
}

template <typename Format, int COUNT>
__device__ __forceinline__ Codes<Format, COUNT> pack_codes(const uint32_t (&values)[COUNT]) {
  Codes<Format, COUNT> packed{};
  if constexpr (Format::kBits == 8) {
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) {
      const uint32_t low = __byte_perm(values[i], values[i + 1], 0x0040);
      const uint32_t high = __byte_perm(values[i + 2], values[i + 3], 0x0040);
      packed.words[i / 4] = __byte_perm(low, high, 0x5410);
    }
  } else {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const int bit = i * Format::kBits;
      packed.words[bit / 32] |= values[i] << (bit % 32);
    }
  }
  return packed;
}

// Codes of elements past the end must be zero: an odd tail shares a byte with one.
template <typename Format, int COUNT, typename Shape>
__device__ __forceinline__ void store_codes(const Codes<Format, COUNT>& packed, uint8_t* codes,
                                            const Place<Shape>& place) {
  static_assert(COUNT == Shape::kEach);
  constexpr int kPerByte = 8 / Format::kBits, kBytes = Codes<Format, COUNT>::kBytes;
  uint8_t* target = codes + place.begin / kPerByte;
  if (place.whole) {
    store_words<kBytes>(target, packed.words);
  } else {
#pragma unroll
    for (int i = 0; i < kBytes; ++i) {
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
