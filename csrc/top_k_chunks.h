#pragma once

#include <cstdint>

#include "host_device.h"

// The layout of messages of `top_k_chunks`: k entries of each chunk, all of a last one that is
// shorter; indices of 12 bits, two in three bytes, so that every chunk begins with a byte.
namespace pyparallel {

constexpr int kMaxChunk = 4096;

PYPARALLEL_HOST_DEVICE int64_t num_index_bytes(int64_t k) { return (3 * k + 1) / 2; }

struct Chunks {
  int64_t numel, k, chunk;

  PYPARALLEL_HOST_DEVICE int64_t count() const { return (numel + chunk - 1) / chunk; }
  PYPARALLEL_HOST_DEVICE int64_t length(int64_t c) const {
    return numel - c * chunk < chunk ? numel - c * chunk : chunk;
  }
  PYPARALLEL_HOST_DEVICE int64_t num_sent(int64_t c) const { return length(c) < k ? length(c) : k; }
  PYPARALLEL_HOST_DEVICE int64_t num_values() const {
    return count() == 0 ? 0 : (count() - 1) * k + num_sent(count() - 1);
  }
  PYPARALLEL_HOST_DEVICE int64_t num_bytes() const {
    return count() == 0
               ? 0
               : (count() - 1) * num_index_bytes(k) + num_index_bytes(num_sent(count() - 1));
  }
};

// The bytes of the pair of indices that begins at an even i; of the last of an odd number, two.
PYPARALLEL_HOST_DEVICE void store_index_pair(uint8_t* bytes, int64_t i, uint32_t first,
                                             uint32_t second, bool has_second) {
  const uint32_t word = first | second << 12;
  uint8_t* target = bytes + i / 2 * 3;
  target[0] = static_cast<uint8_t>(word);
  target[1] = static_cast<uint8_t>(word >> 8);
  if (has_second) target[2] = static_cast<uint8_t>(word >> 16);
}

PYPARALLEL_HOST_DEVICE int load_index(const uint8_t* bytes, int64_t i) {
  const uint8_t* source = bytes + i / 2 * 3 + i % 2;
  return i % 2 == 0 ? source[0] | (source[1] & 15) << 8 : source[0] >> 4 | source[1] << 4;
}

}  // namespace pyparallel
