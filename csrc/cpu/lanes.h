#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__F16C__)
#include <immintrin.h>
#endif

// Elements are processed eight at a time, as one vector of floats whatever the buffer's dtype.
// `Lanes` is a vector type of the compiler: the arithmetic of csrc/X.h works for it and for float.
namespace pyparallel::cpu {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;

constexpr int64_t kLanes = 8;
constexpr int64_t kGrain = 32 * 1024;  // minimum elements per thread

typedef float Lanes __attribute__((vector_size(32)));
typedef uint32_t LaneBits __attribute__((vector_size(32)));
typedef int32_t LaneInts __attribute__((vector_size(32)));

typedef uint16_t Words __attribute__((vector_size(16)));  // eight floats of 16 bits, as in memory

inline Lanes load_lanes(const float* source) {
  Lanes lanes;
  std::memcpy(&lanes, source, sizeof lanes);
  return lanes;
}

inline LaneBits widen(Words words) {
#ifdef __AVX2__
  return reinterpret_cast<LaneBits>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(words)));
#else
  return __builtin_convertvector(words, LaneBits);
#endif
}

inline Lanes to_lanes(Words words, BFloat16 /*kind*/) {
  return reinterpret_cast<Lanes>(widen(words) << 16);
}

inline Words to_words(Lanes lanes, BFloat16 /*kind*/) {
  const LaneBits bits = reinterpret_cast<LaneBits>(lanes);
  const LaneBits rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // nearest, ties to even
  const LaneBits nan = LaneBits{} + 0x7fc0u;
  const LaneBits wide = lanes == lanes ? rounded : nan;
#ifdef __AVX2__  // g++ 12 does not generate these from __builtin_convertvector
  const __m256i packed =
      _mm256_packus_epi32(reinterpret_cast<__m256i>(wide), _mm256_setzero_si256());
  const __m128i low = _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0b1000));
  return reinterpret_cast<Words>(low);
#else
  return __builtin_convertvector(wide, Words);
#endif
}

inline Lanes to_lanes(Words words, Half /*kind*/) {
#ifdef __F16C__
  return _mm256_cvtph_ps(reinterpret_cast<__m128i>(words));
#else
  Half halves[kLanes];
  std::memcpy(halves, &words, sizeof halves);
  Lanes lanes;
  for (int64_t i = 0; i < kLanes; ++i) lanes[i] = static_cast<float>(halves[i]);
  return lanes;
#endif
}

inline Words to_words(Lanes lanes, Half /*kind*/) {
#ifdef __F16C__
  return reinterpret_cast<Words>(_mm256_cvtps_ph(lanes, _MM_FROUND_TO_NEAREST_INT));
#else
  Half halves[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) halves[i] = Half(lanes[i]);
  Words words;
  std::memcpy(&words, halves, sizeof words);
  return words;
#endif
}

template <typename T>
Lanes load_lanes(const T* source) {
  Words words;
  std::memcpy(&words, source, sizeof words);
  return to_lanes(words, T{});
}

typedef uint16_t WideWords __attribute__((vector_size(32)));  // sixteen of them

template <typename T>
WideWords join_words(Lanes low, Lanes high, T kind) {
  const Words parts[2] = {to_words(low, kind), to_words(high, kind)};
  WideWords words;
  std::memcpy(&words, parts, sizeof words);
  return words;
}

inline WideWords to_words(Lanes low, Lanes high, BFloat16 kind) {
#ifdef __AVX2__
  if (_mm256_movemask_ps(_mm256_cmp_ps(low, high, _CMP_UNORD_Q)) == 0) {  // no nan
    const auto round = [](Lanes lanes) {
      const LaneBits bits = reinterpret_cast<LaneBits>(lanes);
      return reinterpret_cast<__m256i>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
    };
    const __m256i mingled = _mm256_packus_epi32(round(low), round(high));
    return reinterpret_cast<WideWords>(_mm256_permute4x64_epi64(mingled, 0b11011000));
  }
#endif
  return join_words(low, high, kind);
}

inline WideWords to_words(Lanes low, Lanes high, Half kind) { return join_words(low, high, kind); }

inline void store_lanes(Lanes lanes, float* target) { std::memcpy(target, &lanes, sizeof lanes); }

template <typename T>
void store_lanes(Lanes lanes, T* target) {
  const Words words = to_words(lanes, T{});
  std::memcpy(target, &words, sizeof words);
}

// Sixteen at once: halves the stores of 16-bit floats and the rounding work to bfloat16.
inline void store_lanes(Lanes low, Lanes high, float* target) {
  store_lanes(low, target);
  store_lanes(high, target + kLanes);
}

template <typename T>
void store_lanes(Lanes low, Lanes high, T* target) {
  const WideWords words = to_words(low, high, T{});
  std::memcpy(target, &words, sizeof words);
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

// All lanes of a vector, or the first `count` of them.
struct WholeLanes {
  template <typename T>
  Lanes load(const T* source) const {
    return load_lanes(source);
  }
  template <typename T>
  void store(Lanes lanes, T* target) const {
    store_lanes(lanes, target);
  }
};

struct SomeLanes {
  int64_t count;

  template <typename T>
  Lanes load(const T* source) const {
    return load_some_lanes(source, count);
  }
  template <typename T>
  void store(Lanes lanes, T* target) const {
    store_some_lanes(lanes, target, count);
  }
};

// The lanes, rounded to a buffer's dtype.
inline Lanes round_lanes(Lanes lanes, float /*kind*/) { return lanes; }

template <typename T>
Lanes round_lanes(Lanes lanes, T kind) {
  return to_lanes(to_words(lanes, kind), kind);
}

}  // namespace pyparallel::cpu
