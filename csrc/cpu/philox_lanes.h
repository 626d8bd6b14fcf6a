#pragma once

#include "cpu/lanes.h"
#include "philox.h"

// The random bits of csrc/philox.h, for 64 elements at a time: the requested group of eight and the
// seven after it.
namespace pyparallel::cpu {

constexpr int kPhiloxGroups = 8;

#ifdef __AVX2__

// Four counters, one in each lane of 64 bits. Only the lower half of a lane is a word of Philox:
// the multiplication reads no more, so the upper half need not be cleared.
class PhiloxLanes {
 public:
  PhiloxLanes(uint64_t seed, uint64_t offset)
      : c2_(_mm256_set1_epi64x(offset)), c3_(_mm256_set1_epi64x(offset >> 32)) {
    uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < kPhiloxRounds; ++round) {
      keys0_[round] = _mm256_set1_epi64x(key0);
      keys1_[round] = _mm256_set1_epi64x(key1);
      key0 += kPhiloxKeyStep0;
      key1 += kPhiloxKeyStep1;
    }
  }

  void draw(uint64_t first_group, Words (&bits)[kPhiloxGroups]) const {
    const __m256i multiplier0 = _mm256_set1_epi64x(kPhiloxMultiplier0);
    const __m256i multiplier1 = _mm256_set1_epi64x(kPhiloxMultiplier1);
    __m256i c0[2], c1[2], c2[2], c3[2];  // two chains of multiplications hide each other's latency
    for (int half = 0; half < 2; ++half) {
      c0[half] = _mm256_add_epi64(_mm256_set1_epi64x(first_group + 4 * half),
                                  _mm256_setr_epi64x(0, 1, 2, 3));
      c1[half] = _mm256_srli_epi64(c0[half], 32);
      c2[half] = c2_;
      c3[half] = c3_;
    }
#pragma GCC unroll 7
    for (int round = 0; round < kPhiloxRounds; ++round) {
      for (int half = 0; half < 2; ++half) {
        const __m256i product0 = _mm256_mul_epu32(c0[half], multiplier0);
        const __m256i product1 = _mm256_mul_epu32(c2[half], multiplier1);
        const __m256i keyed0 = _mm256_xor_si256(c1[half], keys0_[round]);
        const __m256i keyed1 = _mm256_xor_si256(c3[half], keys1_[round]);
        c0[half] = _mm256_xor_si256(_mm256_srli_epi64(product1, 32), keyed0);
        c1[half] = product1;
        c2[half] = _mm256_xor_si256(_mm256_srli_epi64(product0, 32), keyed1);
        c3[half] = product0;
      }
    }
    for (int half = 0; half < 2; ++half) {
      const __m256i front = join(c0[half], c1[half]), back = join(c2[half], c3[half]);
      const __m256i even = _mm256_unpacklo_epi64(front, back);  // the words of groups 0 and 2
      const __m256i odd = _mm256_unpackhi_epi64(front, back);   // of 1 and 3
      Words* target = bits + 4 * half;
      target[0] = reinterpret_cast<Words>(_mm256_castsi256_si128(even));
      target[1] = reinterpret_cast<Words>(_mm256_castsi256_si128(odd));
      target[2] = reinterpret_cast<Words>(_mm256_extracti128_si256(even, 1));
      target[3] = reinterpret_cast<Words>(_mm256_extracti128_si256(odd, 1));
    }
  }

 private:
  static __m256i join(__m256i low, __m256i high) {
    return _mm256_blend_epi32(low, _mm256_slli_epi64(high, 32), 0b10101010);
  }

  __m256i keys0_[kPhiloxRounds], keys1_[kPhiloxRounds], c2_, c3_;
};

#else

class PhiloxLanes {
 public:
  PhiloxLanes(uint64_t seed, uint64_t offset) : seed_(seed), offset_(offset) {}

  void draw(uint64_t first_group, Words (&bits)[kPhiloxGroups]) const {
    for (int group = 0; group < kPhiloxGroups; ++group) {
      const PhiloxWords words = philox_of_group(first_group + group, offset_, seed_);
      for (int i = 0; i < kLanes; ++i) {
        bits[group][i] = static_cast<uint16_t>(philox_bits(words, i));
      }
    }
  }

 private:
  uint64_t seed_, offset_;
};

#endif

}  // namespace pyparallel::cpu
