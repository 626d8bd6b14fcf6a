#pragma once

#include <array>
#include <cstdint>

#include "cpu/lanes.h"

namespace pyparallel::cpu {

// For each mask, the indices of the set lanes, a byte each, in order.
constexpr std::array<uint64_t, 256> list_lanes() {
  std::array<uint64_t, 256> lanes{};
  for (unsigned mask = 0; mask < lanes.size(); ++mask) {
    int count = 0;
    for (uint64_t lane = 0; lane < 8; ++lane) {
      if (mask >> lane & 1) lanes[mask] |= lane << 8 * count++;
    }
  }
  return lanes;
}

inline constexpr std::array<uint64_t, 256> kLanesOf = list_lanes();

// Writes the lanes that are set in the mask contiguously, without branches, and returns their
// number. Eight elements of both targets are overwritten.
inline int64_t compress_lanes(Lanes values, LaneBits tags, uint32_t mask, float* value_target,
                              uint32_t* tag_target) {
#ifdef __AVX2__
  const __m256i order =
      _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(kLanesOf[mask])));
  _mm256_storeu_ps(value_target, _mm256_permutevar8x32_ps(values, order));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(tag_target),
                      _mm256_permutevar8x32_epi32(reinterpret_cast<__m256i>(tags), order));
#else
  for (uint64_t i = 0; i < kLanes; ++i) {
    const uint64_t lane = kLanesOf[mask] >> 8 * i & 7;
    value_target[i] = values[lane];
    tag_target[i] = tags[lane];
  }
#endif
  return __builtin_popcount(mask);
}

// One bit per lane: whether it is all ones.
inline uint32_t mask_of(LaneBits lanes) {
#ifdef __AVX2__
  return static_cast<uint32_t>(_mm256_movemask_ps(reinterpret_cast<__m256>(lanes)));
#else
  uint32_t mask = 0;
  for (int64_t i = 0; i < kLanes; ++i) mask |= (lanes[i] >> 31) << i;
  return mask;
#endif
}

}  // namespace pyparallel::cpu
