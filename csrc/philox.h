#pragma once

#include <cstdint>

#include "host_device.h"

// Random numbers as a function of a seed, an offset and an element's index: Philox-4x32 with seven
// rounds (Salmon et al., SC 2011). It is stateless, so every implementation gives the same bits in
// whatever order it processes the elements.
namespace pyparallel {

constexpr int kPhiloxRounds = 7;
constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53u, kPhiloxMultiplier1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxKeyStep0 = 0x9E3779B9u, kPhiloxKeyStep1 = 0xBB67AE85u;

struct PhiloxWords {
  uint32_t at[4];
};

// As one instruction: nvcc adds a zero to the upper half of what it multiplies by itself.
PYPARALLEL_HOST_DEVICE uint64_t wide_product(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  uint64_t product;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
#else
  return uint64_t{a} * b;
#endif
}

PYPARALLEL_HOST_DEVICE PhiloxWords philox(PhiloxWords counter, uint64_t seed) {
  uint32_t c0 = counter.at[0], c1 = counter.at[1], c2 = counter.at[2], c3 = counter.at[3];
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t product0 = wide_product(c0, kPhiloxMultiplier0);
    const uint64_t product1 = wide_product(c2, kPhiloxMultiplier1);
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ key0;
    c1 = static_cast<uint32_t>(product1);
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ key1;
    c3 = static_cast<uint32_t>(product0);
    key0 += kPhiloxKeyStep0;
    key1 += kPhiloxKeyStep1;
  }
  return {{c0, c1, c2, c3}};
}

// Group g is elements 8g to 8g+7 of a buffer, which share a counter.
PYPARALLEL_HOST_DEVICE PhiloxWords philox_of_group(uint64_t group, uint64_t offset, uint64_t seed) {
  return philox({{static_cast<uint32_t>(group), static_cast<uint32_t>(group >> 32),
                  static_cast<uint32_t>(offset), static_cast<uint32_t>(offset >> 32)}},
                seed);
}

// The 16 bits of the group's element i: half of word i / 2, the lower half if i is even.
PYPARALLEL_HOST_DEVICE uint32_t philox_bits(const PhiloxWords& words, int i) {
  return words.at[i / 2] >> (i % 2 * 16) & 0xffffu;
}

}  // namespace pyparallel
