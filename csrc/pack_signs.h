#pragma once

#include <cstdint>

#include "host_device.h"

// The arithmetic of `pack_signs` and `unpack_signs` for one element, and the scale of a block.
// `Float` is a float, or a vector of them.
//
// Every implementation adds up the magnitudes of a block in the same order: elements kPartialSums
// apart in sequence; then kNeighbors each as a balanced tree; then the two halves of the rest,
// repeatedly. Elements missing from the last block count as zeros.
namespace pyparallel {

constexpr int kPartialSums = 256;
constexpr int kNeighbors = 8;

// A block with a smaller mean magnitude is sent as zeros.
constexpr float kSmallestMean = 0x1p-100f;

PYPARALLEL_HOST_DEVICE int64_t num_words(int64_t numel) { return numel / 8 + (numel % 8 != 0); }

PYPARALLEL_HOST_DEVICE int64_t num_scales(int64_t numel, int64_t block_size) {
  return numel / block_size + (numel % block_size != 0);
}

// Whether a block is sent and its residual updated; other blocks decode to nan.
PYPARALLEL_HOST_DEVICE bool pack_signs_is_finite(float sum) { return sum < __builtin_inff(); }

PYPARALLEL_HOST_DEVICE float pack_signs_scale(float sum, int64_t count) {
  if (!pack_signs_is_finite(sum)) return __builtin_nanf("");
  const float mean = sum / static_cast<float>(count);
  return mean < kSmallestMean ? 0.0f : mean;
}

template <typename Float>
PYPARALLEL_HOST_DEVICE Float pack_signs_add_neighbors(const Float* e) {
  return ((e[0] + e[1]) + (e[2] + e[3])) + ((e[4] + e[5]) + (e[6] + e[7]));
}

// The residual of an element that is sent as `positive` or `negative`.
template <typename Float>
PYPARALLEL_HOST_DEVICE Float pack_signs_remain(Float accumulated, Float positive, Float negative) {
  return accumulated - (accumulated >= 0.0f ? positive : negative);
}

PYPARALLEL_HOST_DEVICE bool is_corrupt_sign_scale(float scale) {
  return scale < 0.0f || scale == __builtin_inff();
}

}  // namespace pyparallel
