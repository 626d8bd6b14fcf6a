#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/lanes.h"
#include "top_k.h"

// Sources from which `top_k` reads acc, updating the residual in the same pass.
namespace pyparallel::cpu {

// acc is in a buffer.
template <typename T>
struct Plain {
  const T* buffer;

  Lanes load(int64_t i) const { return load_lanes(buffer + i); }
  float at(int64_t i) const { return static_cast<float>(buffer[i]); }
};

// acc = x + residual; the residual is unchanged.
template <typename X, typename Kept>
struct Sum {
  const X* x;
  const Kept* residual;

  Lanes load(int64_t i) const { return load_lanes(x + i) + load_lanes(residual + i); }
  float at(int64_t i) const { return static_cast<float>(x[i]) + static_cast<float>(residual[i]); }
};

// acc = x + residual; the residual becomes acc, so every element may be read only once.
template <typename X, typename Kept>
struct Accumulate {
  const X* x;
  Kept* residual;

  Lanes load(int64_t i) const {
    const Lanes acc = Sum<X, Kept>{x, residual}.load(i);
    store_lanes(acc, residual + i);
    return acc;
  }

  float at(int64_t i) const {
    const float acc = Sum<X, Kept>{x, residual}.at(i);
    residual[i] = static_cast<Kept>(acc);
    return acc;
  }
};

constexpr int64_t kGroup = 4 * kLanes;  // elements processed together

constexpr uint32_t kUnreachable = 0x80000000;  // above all magnitudes

// The smallest bits of a magnitude with at least this key: NaNs differ in their bits.
inline uint32_t lowest_bits(uint32_t key) { return std::min(key, kInfinityKey + 1); }

inline uint32_t lanes_at_least(Lanes acc, uint32_t lowest) {
  const int32_t below = static_cast<int32_t>(lowest - 1);
#ifdef __AVX2__
  const __m256i magnitude =
      _mm256_and_si256(reinterpret_cast<__m256i>(acc), _mm256_set1_epi32(0x7fffffff));
  const __m256i large = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(below));
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(large)));
#else
  uint32_t mask = 0;
  for (int64_t i = 0; i < kLanes; ++i) {
    mask |= static_cast<uint32_t>(static_cast<int32_t>(float_bits(acc[i]) & 0x7fffffff) > below)
            << i;
  }
  return mask;
#endif
}

// Reads the elements of a range once, and calls visit(i, acc), in order, for those whose magnitude
// has at least the bits `lowest`.
template <typename Source, typename Visitor>
void visit_large(const Source& source, int64_t begin, int64_t end, uint32_t lowest,
                 Visitor&& visit) {
  int64_t i = begin;
  for (; i + kGroup <= end; i += kGroup) {
    Lanes acc[kGroup / kLanes];
    uint32_t large = 0;
    for (int64_t j = 0; j < kGroup / kLanes; ++j) {
      acc[j] = source.load(i + j * kLanes);
      large |= lanes_at_least(acc[j], lowest) << (j * kLanes);
    }
    if (large == 0) continue;
    float values[kGroup];
    std::memcpy(values, acc, sizeof values);
    for (; large != 0; large &= large - 1) {
      const int j = __builtin_ctz(large);
      visit(i + j, values[j]);
    }
  }
  for (; i < end; ++i) {
    const float acc = source.at(i);
    if ((float_bits(acc) & 0x7fffffff) >= lowest) visit(i, acc);
  }
}

}  // namespace pyparallel::cpu
