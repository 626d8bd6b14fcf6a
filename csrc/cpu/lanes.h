#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__F16C__)
#include <immintrin.h>
#endif

// Elements are walked eight at a time, as one vector of floats whatever the buffer's dtype. `Lanes`
// is a vector type of the compiler: the arithmetic of csrc/X.h reads the same for it and for float.
namespace pyparallel::cpu {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;

constexpr int64_t kLanes = 8;
constexpr int64_t kGrain = 32 * 1024;  // elements a thread takes at the least

typedef float Lanes __attribute__((vector_size(32)));
typedef uint32_t LaneBits __attribute__((vector_size(32)));

// Between eight 16-bit words in memory and eight 32-bit ones. The intrinsics are what a compiler
// should make of the loops, and g++ 12 does not.
inline LaneBits widen(const BFloat16* source) {
#ifdef __AVX2__
  const __m128i* words = reinterpret_cast<const __m128i*>(source);
  return reinterpret_cast<LaneBits>(_mm256_cvtepu16_epi32(_mm_loadu_si128(words)));
#else
  LaneBits bits;
  for (int64_t i = 0; i < kLanes; ++i) bits[i] = source[i].x;
  return bits;
#endif
}

inline void narrow(LaneBits bits, BFloat16* target) {
#ifdef __AVX2__
  const __m256i packed =
      _mm256_packus_epi32(reinterpret_cast<__m256i>(bits), _mm256_setzero_si256());
  const __m128i words = _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0b1000));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(target), words);
#else
  for (int64_t i = 0; i < kLanes; ++i) target[i].x = static_cast<uint16_t>(bits[i]);
#endif
}

inline Lanes load_lanes(const float* source) {
  Lanes lanes;
  std::memcpy(&lanes, source, sizeof lanes);
  return lanes;
}

inline Lanes load_lanes(const BFloat16* source) {
  return reinterpret_cast<Lanes>(widen(source) << 16);
}

inline Lanes load_lanes(const Half* source) {
  Lanes lanes;
#ifdef __F16C__
  __m128i halves;
  std::memcpy(&halves, source, sizeof halves);
  lanes = _mm256_cvtph_ps(halves);
#else
  for (int64_t i = 0; i < kLanes; ++i) lanes[i] = static_cast<float>(source[i]);
#endif
  return lanes;
}

inline void store_lanes(Lanes lanes, float* target) { std::memcpy(target, &lanes, sizeof lanes); }

inline void store_lanes(Lanes lanes, BFloat16* target) {
  const LaneBits bits = reinterpret_cast<LaneBits>(lanes);
  const LaneBits rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest, ties even
  const LaneBits is_nan = reinterpret_cast<LaneBits>((bits & 0x7fffffffu) > 0x7f800000u);
  const LaneBits stored = (rounded & ~is_nan) | (is_nan & 0x7fc0u);
  narrow(stored, target);
}

inline void store_lanes(Lanes lanes, Half* target) {
#ifdef __F16C__
  const __m128i halves = _mm256_cvtps_ph(lanes, _MM_FROUND_TO_NEAREST_INT);
  std::memcpy(target, &halves, sizeof halves);
#else
  for (int64_t i = 0; i < kLanes; ++i) target[i] = Half(lanes[i]);
#endif
}

struct SquareRoot {
  float operator()(float value) const { return std::sqrt(value); }
  Lanes operator()(Lanes lanes) const {
#ifdef __AVX2__
    return _mm256_sqrt_ps(lanes);
#else
    for (int64_t i = 0; i < kLanes; ++i) lanes[i] = std::sqrt(lanes[i]);
    return lanes;
#endif
  }
};

// The fewer than kLanes elements at the end of a range; the lanes beyond them are zero.
template <typename T>
Lanes load_some_lanes(const T* source, int64_t count) {
  T padded[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) padded[i] = source[i];
  return load_lanes(padded);
}

template <typename T>
void store_some_lanes(Lanes lanes, T* target, int64_t count) {
  T padded[kLanes];
  store_lanes(lanes, padded);
  for (int64_t i = 0; i < count; ++i) target[i] = padded[i];
}

}  // namespace pyparallel::cpu
