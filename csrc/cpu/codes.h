#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>

#include "cpu/lanes.h"
#include "quantize.h"
#include "tensor_checks.h"

#ifdef __AVX2__
// Equivalent to one instruction, bit for bit.
namespace pyparallel {

template <>
inline cpu::Lanes round_down(cpu::Lanes value) {
  return _mm256_floor_ps(value);
}

template <>
inline cpu::Lanes shift_down(cpu::Lanes value) {
  return _mm256_floor_ps(value) + kNoFraction;
}

template <>
inline cpu::Lanes at_most(cpu::Lanes value, float limit) {
  return _mm256_min_ps(value, _mm256_set1_ps(limit));
}

template <>
inline cpu::Lanes at_least(cpu::Lanes value, float limit) {
  return _mm256_max_ps(value, _mm256_set1_ps(limit));
}

template <>
inline cpu::Lanes random_fraction(cpu::LaneBits random) {
  const __m256 whole = _mm256_cvtepi32_ps(reinterpret_cast<__m256i>(random));
  return _mm256_fmadd_ps(whole, _mm256_set1_ps(0x1p-16f), _mm256_set1_ps(0x1p-17f));
}

}  // namespace pyparallel
#endif

// Quantized messages, eight entries at a time.
namespace pyparallel::cpu {

template <typename Format>
constexpr int64_t num_code_bytes(int64_t numel) {
  return (numel * Format::kBits + 7) / 8;
}

inline int64_t num_blocks(int64_t numel, int64_t block_size) {
  return (numel + block_size - 1) / block_size;
}

// The codes of entries i to i + 7, for i a multiple of eight.
template <typename Format>
LaneBits load_codes(const uint8_t* codes, int64_t i) {
  if constexpr (Format::kBits == 2) {
    uint16_t pairs;
    std::memcpy(&pairs, codes + i / 4, sizeof pairs);
    return (LaneBits{} + pairs) >> LaneBits{0, 2, 4, 6, 8, 10, 12, 14} & 3u;
  } else if constexpr (Format::kBits == 4) {
    uint32_t nibbles;
    std::memcpy(&nibbles, codes + i / 2, sizeof nibbles);
    return (LaneBits{} + nibbles) >> LaneBits{0, 4, 8, 12, 16, 20, 24, 28} & 15u;
  } else {
#ifdef __AVX2__
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i));
    return reinterpret_cast<LaneBits>(_mm256_cvtepu8_epi32(bytes));
#else
    LaneBits lanes;
    for (int64_t j = 0; j < kLanes; ++j) lanes[j] = codes[i + j];
    return lanes;
#endif
  }
}

// The fewer than eight codes at the end; the lanes beyond them are zero.
template <typename Format>
LaneBits load_some_codes(const uint8_t* codes, int64_t i, int64_t count) {
  uint8_t padded[kLanes] = {};
  std::memcpy(padded, codes + num_code_bytes<Format>(i), num_code_bytes<Format>(count));
  return load_codes<Format>(padded, 0);
}

typedef uint8_t Bytes __attribute__((vector_size(32)));

// Whether bytes contain a code that `quantize` never emits.
template <typename Format, typename Byte>
auto is_corrupt_byte(Byte byte) {
  constexpr uint8_t mask = Format::kCorruptMask, pattern = Format::kCorruptPattern;
  if constexpr (Format::kBits == 2) {
    return (byte & (byte >> 1) & 0x55) != 0;
  } else if constexpr (Format::kBits == 4) {
    constexpr uint8_t high_mask = mask << 4, high_pattern = pattern << 4;
    return ((byte & mask) == pattern) | ((byte & high_mask) == high_pattern);
  } else {
    constexpr uint8_t other = Format::kOtherPattern;
    return ((byte & mask) == pattern) | ((byte & mask) == other);
  }
}

template <typename Format>
bool any_corrupt_byte(const uint8_t* begin, const uint8_t* end) {
  Bytes found = {};
  for (; begin + sizeof(Bytes) <= end; begin += sizeof(Bytes)) {
    Bytes bytes;
    std::memcpy(&bytes, begin, sizeof bytes);
    found |= reinterpret_cast<Bytes>(is_corrupt_byte<Format>(bytes));
  }
  bool any = std::any_of(begin, end, [](uint8_t byte) { return is_corrupt_byte<Format>(byte); });
  for (size_t i = 0; i < sizeof(Bytes); ++i) any |= found[i] != 0;
  return any;
}

// Checks a whole message before anything is written.
template <typename Format>
void refuse_corrupt(const uint8_t* codes, const float* scales, int64_t numel, int64_t block_size) {
  std::atomic<bool> corrupt{
      Format::kHasScales &&
      std::any_of(scales, scales + num_blocks(numel, block_size), is_corrupt_scale)};
  const int64_t num_bytes = numel * Format::kBits / 8;  // the last byte may hold fewer codes
  torch::stable::parallel_for(0, num_bytes, 4 * kGrain, [&](int64_t begin, int64_t end) {
    if (any_corrupt_byte<Format>(codes + begin, codes + end)) corrupt = true;
  });
  if (num_bytes < num_code_bytes<Format>(numel)) {
    const uint8_t present = codes[num_bytes] & ((1u << (numel * Format::kBits % 8)) - 1);
    if (is_corrupt_byte<Format>(present)) corrupt = true;
  }
  STD_TORCH_CHECK(!corrupt, "codes and scales must be what quantize emits, got a corrupt message");
}

}  // namespace pyparallel::cpu
