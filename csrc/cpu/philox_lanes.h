#pragma once

#include "cpu/lanes.h"
#include "philox.h"

// The random bits of csrc/philox.h, for 32 elements at a time.
namespace pyparallel::cpu {

constexpr int kPhiloxGroups = 4;

#ifdef __AVX2__

// Four counters, one in each lane of 64 bits. Only the lower half of a lane is a word of Philox:
// the multiplication looks at no more, so what is left above it need not be cleared.
struct PhiloxLanes {
  __m256i c0, c1, c2, c3;
};

inline PhiloxLanes philox_round(const PhiloxLanes& c, uint32_t key0, uint32_t key1) {
  const __m256i product0 = _mm256_mul_epu32(c.c0, _mm256_set1_epi64x(kPhiloxMultiplier0));
  const __m256i product1 = _mm256_mul_epu32(c.c2, _mm256_set1_epi64x(kPhiloxMultiplier1));
  const __m256i high0 = _mm256_srli_epi64(product0, 32), high1 = _mm256_srli_epi64(product1, 32);
  return {_mm256_xor_si256(high1, _mm256_xor_si256(c.c1, _mm256_set1_epi64x(key0))), product1,
          _mm256_xor_si256(high0, _mm256_xor_si256(c.c3, _mm256_set1_epi64x(key1))), product0};
}

inline void philox_lanes(uint64_t first_group, uint64_t offset, uint64_t seed,
                         Words (&bits)[kPhiloxGroups]) {
  const __m256i group =
      _mm256_add_epi64(_mm256_set1_epi64x(first_group), _mm256_setr_epi64x(0, 1, 2, 3));
  PhiloxLanes c{group, _mm256_srli_epi64(group, 32), _mm256_set1_epi64x(offset),
                _mm256_set1_epi64x(offset >> 32)};
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
#pragma GCC unroll 7
  for (int round = 0; round < kPhiloxRounds; ++round) {
    c = philox_round(c, key0, key1);
    key0 += kPhiloxKeyStep0;
    key1 += kPhiloxKeyStep1;
  }
  const __m256i front = _mm256_blend_epi32(c.c0, _mm256_slli_epi64(c.c1, 32), 0b10101010);
  const __m256i back = _mm256_blend_epi32(c.c2, _mm256_slli_epi64(c.c3, 32), 0b10101010);
  const __m256i even = _mm256_unpacklo_epi64(front, back);  // the words of groups 0 and 2
  const __m256i odd = _mm256_unpackhi_epi64(front, back);   // of 1 and 3
  bits[0] = reinterpret_cast<Words>(_mm256_castsi256_si128(even));
  bits[1] = reinterpret_cast<Words>(_mm256_castsi256_si128(odd));
  bits[2] = reinterpret_cast<Words>(_mm256_extracti128_si256(even, 1));
  bits[3] = reinterpret_cast<Words>(_mm256_extracti128_si256(odd, 1));
}

#else

inline void philox_lanes(uint64_t first_group, uint64_t offset, uint64_t seed,
                         Words (&bits)[kPhiloxGroups]) {
  for (int group = 0; group < kPhiloxGroups; ++group) {
    const PhiloxWords words = philox_of_group(first_group + group, offset, seed);
    for (int i = 0; i < kLanes; ++i) {
      bits[group][i] = static_cast<uint16_t>(philox_bits(words, i));
    }
  }
}

#endif

}  // namespace pyparallel::cpu
