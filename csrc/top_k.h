#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "host_device.h"

// The arithmetic of `top_k` and `scatter_add_` for one element; the files in cpu and cuda iterate
// over the elements.
namespace pyparallel {

constexpr uint32_t kInfinityKey = 0x7f800000;
constexpr uint32_t kNanKey = 0x7fc00000;

PYPARALLEL_HOST_DEVICE uint32_t float_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

PYPARALLEL_HOST_DEVICE float float_of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// Keys order as the magnitudes do; all NaNs are equal, and above infinity. A key is also the bits
// of the magnitude itself.
PYPARALLEL_HOST_DEVICE uint32_t top_k_key(float acc) {
  const uint32_t bits = float_bits(acc) & 0x7fffffff;
  return bits > kInfinityKey ? kNanKey : bits;
}

PYPARALLEL_HOST_DEVICE bool is_finite(float acc) { return top_k_key(acc) < kInfinityKey; }

// Keys of at least this contain the k largest, unless the k-th magnitude has shrunk by more than
// 1/32 and a statistical margin since the last step. (Early in the training of a transformer it
// shrinks by 1 % a step, by more than 1/128 in half of the steps and by more than 1/32 in a tenth.)
// A larger margin would cost: under error feedback most entries lie just below the threshold.
// 0 (all keys) if the last one is unknown.
PYPARALLEL_HOST_DEVICE uint32_t top_k_guess(float threshold, int64_t k) {
  const float slack = 0.03125f + 1.0f / sqrtf(static_cast<float>(k));
  const uint32_t key = top_k_key(threshold);
  return key < kInfinityKey && slack < 1.0f ? top_k_key(threshold * (1.0f - slack)) : 0;
}

// The rank among `num_samples` random entries that is beyond the k-th of n: the expected one plus
// four standard deviations.
PYPARALLEL_HOST_DEVICE int64_t top_k_sample_rank(int64_t k, int64_t numel, int64_t num_samples) {
  const double expected = static_cast<double>(k) / numel * num_samples;
  return static_cast<int64_t>(expected + 4 * sqrt(expected) + 4);
}

constexpr int64_t kMaxSamples = 32768;

// The position of sample i: one in every `stride` entries, at a varying offset, because a fixed one
// might always hit the same column of a matrix.
PYPARALLEL_HOST_DEVICE int64_t top_k_sample_index(int64_t i, int64_t stride) {
  const uint32_t scrambled = static_cast<uint32_t>(i) * 2654435769u;
  return i * stride + static_cast<int64_t>(static_cast<uint64_t>(scrambled) * stride >> 32);
}

// With more candidates than this, selecting among them does not pay off.
PYPARALLEL_HOST_DEVICE int64_t top_k_max_candidates(int64_t k, int64_t numel) {
  const int64_t most = 4 * k + numel / 256 + 65536;
  return most < numel ? most : numel;
}

// The residual of an entry that was sent as `sent`. A residual that is not finite would corrupt all
// later steps; the value was sent unchanged.
template <typename Kept>
PYPARALLEL_HOST_DEVICE Kept top_k_remainder(float acc, float sent) {
  const Kept kept = static_cast<Kept>(acc - sent);
  return is_finite(static_cast<float>(kept)) ? kept : static_cast<Kept>(0.0f);
}

// Keys are selected by three digits of 11, 10 and 10 bits, the highest first.
constexpr int kNumDigits = 3;
constexpr int kBins = 2048;

struct Digit {
  int shift, bits;

  PYPARALLEL_HOST_DEVICE static Digit at(int position) {
    return position == 0 ? Digit{20, 11} : Digit{10 * (2 - position), 10};
  }

  PYPARALLEL_HOST_DEVICE uint32_t bin(uint32_t key) const {
    return (key >> shift) & ((1u << bits) - 1);
  }

  // Whether the digits above this one are those of `prefix`.
  PYPARALLEL_HOST_DEVICE bool follows(uint32_t key, uint32_t prefix) const {
    return (key ^ prefix) >> (shift + bits) == 0;
  }
};

PYPARALLEL_HOST_DEVICE bool is_corrupt_index(int64_t index, int64_t numel, bool has_previous,
                                             int64_t previous) {
  return index < 0 || index >= numel || (has_previous && index <= previous);
}

template <typename Dense>
PYPARALLEL_HOST_DEVICE Dense scatter_add(Dense dense, float value) {
  return static_cast<Dense>(static_cast<float>(dense) + value);
}

}  // namespace pyparallel
