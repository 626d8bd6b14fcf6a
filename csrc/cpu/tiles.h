#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <cstring>

#ifdef __F16C__
#include <immintrin.h>
#endif

// Buffers are walked in tiles that stay in the first-level cache. Arithmetic is on float tiles; a
// float buffer is used where it lies, a 16-bit one is converted into scratch and back.
namespace pyparallel::cpu {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;

constexpr int64_t kTile = 1024;        // 4 KiB of floats
constexpr int64_t kGrain = 32 * 1024;  // elements a thread takes at the least

inline const float* read_tile(const float* buffer, float* /*scratch*/, int64_t /*size*/) {
  return buffer;
}

inline const float* read_tile(const BFloat16* buffer, float* scratch, int64_t size) {
  for (int64_t i = 0; i < size; ++i) {
    const uint32_t bits = static_cast<uint32_t>(buffer[i].x) << 16;
    std::memcpy(scratch + i, &bits, sizeof(float));
  }
  return scratch;
}

inline const float* read_tile(const Half* buffer, float* scratch, int64_t size) {
  int64_t i = 0;
#ifdef __F16C__
  for (; i + 8 <= size; i += 8) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(buffer + i));
    _mm256_storeu_ps(scratch + i, _mm256_cvtph_ps(halves));
  }
#endif
  for (; i < size; ++i) scratch[i] = static_cast<float>(buffer[i]);
  return scratch;
}

// For a buffer that write_tile will rewrite.
template <typename T>
inline float* read_tile_to_update(T* buffer, float* scratch, int64_t size) {
  return const_cast<float*>(read_tile(buffer, scratch, size));
}

inline void write_tile(const float* /*tile*/, float* /*buffer*/, int64_t /*size*/) {}

inline void write_tile(const float* tile, BFloat16* buffer, int64_t size) {
  for (int64_t i = 0; i < size; ++i) {
    uint32_t bits;
    std::memcpy(&bits, tile + i, sizeof(float));
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest, ties even
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    buffer[i].x = static_cast<uint16_t>(is_nan ? 0x7fc0u : rounded);
  }
}

inline void write_tile(const float* tile, Half* buffer, int64_t size) {
  int64_t i = 0;
#ifdef __F16C__
  for (; i + 8 <= size; i += 8) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(tile + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(buffer + i), halves);
  }
#endif
  for (; i < size; ++i) buffer[i] = Half(tile[i]);
}

}  // namespace pyparallel::cpu
