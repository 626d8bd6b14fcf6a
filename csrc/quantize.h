#pragma once

#include <cstdint>
#include <cstring>

#include "host_device.h"

// The arithmetic of `quantize` and `dequantize` for one element; cpu/quantize.cpp and
// cuda/quantize.cu iterate over the elements. `Float` is a float and `Bits` an uint32_t, or vectors
// of them. A code, as returned by `encode`, has zeros above its bits.
namespace pyparallel {

// A block whose largest magnitude is below 2^-100 is encoded as zero: its scale has no inverse.
constexpr float kSmallestMagnitude = 0x1p-100f;
constexpr uint32_t kInfinityBits = 0x7f800000u;
constexpr uint32_t kMagnitudeMask = 0x7fffffffu;
constexpr uint32_t kTwoTo23Bits = 0x4b000000u;

template <typename To, typename From>
PYPARALLEL_HOST_DEVICE To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

constexpr float power_of_two(int exponent) {
  return exponent < 0   ? 0.5f * power_of_two(exponent + 1)
         : exponent > 0 ? 2.0f * power_of_two(exponent - 1)
                        : 1.0f;
}

struct BlockScale {
  float scale, inverse;
  bool is_live;    // otherwise all codes are zero
  bool is_finite;  // otherwise the residual is unchanged
};

// From the largest bit pattern among the block's magnitudes: that of a nan is above infinity's.
template <typename Format>
PYPARALLEL_HOST_DEVICE BlockScale block_scale(uint32_t largest_bits) {
  const float absmax = same_bits<float>(largest_bits);
  if (!Format::kHasScales) return {1.0f, 1.0f, true, absmax <= Format::kLargest};
  if (largest_bits >= kInfinityBits) return {same_bits<float>(0x7fc00000u), 0.0f, false, false};
  if (absmax < kSmallestMagnitude) return {0.0f, 0.0f, false, true};
  return {absmax / Format::kLargest, Format::kLargest / absmax, true, true};
}

PYPARALLEL_HOST_DEVICE bool is_corrupt_scale(float scale) {
  return scale < 0 || same_bits<uint32_t>(scale) == kInfinityBits;
}

// (random + 0.5) / 65536, for 16 random bits: from 128 on, floats are 1 / 65536 apart.
template <typename Float, typename Bits>
PYPARALLEL_HOST_DEVICE Float random_fraction(Bits random) {
  return same_bits<Float>(random | 0x43000000u) - (128.0f - 0x1p-17f);
}

// Added to magnitudes below 2^22, this leaves no bits for a fraction.
constexpr float kNoFraction = 0x1.8p23f;

// The value rounded down, plus kNoFraction.
template <typename Float>
PYPARALLEL_HOST_DEVICE Float shift_down(Float value) {
#ifdef __CUDA_ARCH__
  return __fadd_rd(value, kNoFraction);
#else
  const Float nearest = value + kNoFraction;
  return nearest - kNoFraction > value ? nearest - 1.0f : nearest;
#endif
}

template <typename Float>
PYPARALLEL_HOST_DEVICE Float round_down(Float value) {
  return shift_down(value) - kNoFraction;
}

template <typename Float>
PYPARALLEL_HOST_DEVICE Float at_most(Float value, float limit) {
  const Float limits = Float{} + limit;
  return value < limits ? value : limits;
}

template <typename Float>
PYPARALLEL_HOST_DEVICE Float at_least(Float value, float limit) {
  const Float limits = Float{} + limit;
  return value > limits ? value : limits;
}

// An element's code, and the number it decodes to.
template <typename Float, typename Bits>
struct Coded {
  Bits code;
  Float number;
};

// What most formats have in common.
struct Scaled {
  static constexpr bool kHasScales = true;   // otherwise numbers are encoded as they are
  static constexpr bool kFitsScale = false;  // of a message with a residual, after the draws
  static constexpr bool kBounded = true;     // what is encoded is at most kLargest
};

// Two's complement without the most negative number.
template <int BITS>
struct Integers : Scaled {
  static constexpr int kBits = BITS;
  static constexpr float kLargest = (1 << (BITS - 1)) - 1;
  static constexpr uint32_t kSign = 1u << (BITS - 1), kMask = (1u << BITS) - 1;
  // A code is corrupt if these of its bits have this pattern, or the other one.
  static constexpr uint32_t kCorruptMask = kMask, kCorruptPattern = kSign;
  static constexpr uint32_t kOtherPattern = kCorruptPattern;

  // Rounds to nearest, ties to even. `scaled` is at most kLargest plus an ulp, so needs no clamp.
  template <typename Bits, typename Float>
  static PYPARALLEL_HOST_DEVICE Coded<Float, Bits> encode(Float scaled) {
    return coded<Bits>(scaled + kNoFraction);
  }

  template <typename Bits, typename Float>
  static PYPARALLEL_HOST_DEVICE Coded<Float, Bits> encode(Float scaled, Bits random) {
    const Float whole = shift_down(scaled + random_fraction<Float>(random));
    return coded<Bits>(at_least(at_most(whole, kNoFraction + kLargest), kNoFraction - kLargest));
  }

  // The same but where an ulp above kLargest rounds up to kLargest + 1: then the code is corrupt.
  template <typename Bits, typename Float>
  static PYPARALLEL_HOST_DEVICE Coded<Float, Bits> encode_unclamped(Float scaled, Bits random) {
    return coded<Bits>(shift_down(scaled + random_fraction<Float>(random)));
  }

  template <typename Float, typename Bits>
  static PYPARALLEL_HOST_DEVICE Float decode(Bits code) {
    return decode_flipped<Float>((code ^ kSign) | kTwoTo23Bits);
  }

  // Of a code whose sign bit is flipped, in the lowest bits of 2^23.
  template <typename Float, typename Bits>
  static PYPARALLEL_HOST_DEVICE Float decode_flipped(Bits bits) {
    return same_bits<Float>(bits) - (0x1p23f + kSign);
  }

 private:
  template <typename Bits, typename Float>
  static PYPARALLEL_HOST_DEVICE Coded<Float, Bits> coded(Float shifted) {
    return {same_bits<Bits>(shifted) & kMask, shifted - kNoFraction};
  }
};

// Floats of a sign, EXPONENT_BITS and MANTISSA_BITS; kLargest is a code here, not a number.
template <int MANTISSA_BITS, int BIAS, int LARGEST_CODE>
struct Floats : Scaled {
  static constexpr int kBits = 8;
  static constexpr int kDropped = 23 - MANTISSA_BITS;  // bits of a float's mantissa
  static constexpr uint32_t kRebias = (127 - BIAS) << MANTISSA_BITS;
  static constexpr uint32_t kHidden = 1u << MANTISSA_BITS;
  static constexpr uint32_t kExponentMask = 0x7fu & ~(kHidden - 1);
  static constexpr float kSmallestNormal = 2.0f / (1 << BIAS);
  static constexpr float kSubnormals = (1 << (BIAS - 1)) * static_cast<float>(kHidden);
  static constexpr float kLargest =
      (1.0f + (LARGEST_CODE % kHidden) / static_cast<float>(kHidden)) *
      static_cast<float>(1u << ((LARGEST_CODE >> MANTISSA_BITS) - BIAS));
  static constexpr uint32_t kCorruptMask = MANTISSA_BITS == 2 ? kExponentMask : 0x7fu;
  static constexpr uint32_t kCorruptPattern = kCorruptMask, kOtherPattern = kCorruptMask;

  template <typename Bits, typename Float>
  static PYPARALLEL_HOST_DEVICE Coded<Float, Bits> encode(Float scaled) {
    const Float magnitude = clamped_magnitude<Bits>(scaled);
    const Bits bits = same_bits<Bits>(magnitude);
    const Bits odd = bits >> kDropped & 1u;
    const Bits normal = ((bits + (1u << (kDropped - 1)) - 1u + odd) >> kDropped) - kRebias;
    return finish(scaled, magnitude, normal, magnitude * kSubnormals);
  }

  template <typename Bits, typename Float>
  static PYPARALLEL_HOST_DEVICE Coded<Float, Bits> encode(Float scaled, Bits random) {
    const Float magnitude = clamped_magnitude<Bits>(scaled);
    const Bits noise = (random << (kDropped - 16)) + (1u << (kDropped - 17));
    const Bits normal = ((same_bits<Bits>(magnitude) + noise) >> kDropped) - kRebias;
    const Float subnormal = round_down(magnitude * kSubnormals + random_fraction<Float>(random));
    return finish(scaled, magnitude, normal, subnormal);
  }

  template <typename Float, typename Bits>
  static PYPARALLEL_HOST_DEVICE Float decode(Bits code) {
    const Bits shifted = (code & 0x7fu) << kDropped;
    const Float normal = same_bits<Float>(shifted + (uint32_t{127 - BIAS} << 23));
    const Float subnormal =
        same_bits<Float>(shifted + (uint32_t{128 - BIAS} << 23)) - kSmallestNormal;
    const Float magnitude = (code & kExponentMask) == 0u ? subnormal : normal;
    return same_bits<Float>(same_bits<Bits>(magnitude) | (code & 0x80u) << 24);
  }

 private:
  template <typename Bits, typename Float>
  static PYPARALLEL_HOST_DEVICE Float clamped_magnitude(Float scaled) {
    return at_most(same_bits<Float>(same_bits<Bits>(scaled) & kMagnitudeMask), kLargest);
  }

  // Subnormals are rounded as multiples of the smallest; the one past the last is the first normal.
  template <typename Bits, typename Float>
  static PYPARALLEL_HOST_DEVICE Coded<Float, Bits> finish(Float scaled, Float magnitude,
                                                          Bits normal, Float subnormal) {
    const Bits count = same_bits<Bits>(subnormal + 0x1p23f) & (2 * kHidden - 1);
    const Bits unsigned_code = magnitude < kSmallestNormal ? count : normal;
    const Bits code = unsigned_code | (same_bits<Bits>(scaled) >> 24 & 0x80u);
    return {code, decode<Float>(code)};
  }
};

// -1, 0 and 1 as 2, 0 and 1: an entry is sent with its magnitude as the probability (TernGrad).
struct Ternary : Scaled {
  static constexpr int kBits = 2;
  static constexpr float kLargest = 1.0f;
  static constexpr bool kFitsScale = true;
  static constexpr uint32_t kCorruptMask = 3, kCorruptPattern = 3, kOtherPattern = 3;

  template <typename Bits, typename Float>
  static PYPARALLEL_HOST_DEVICE Coded<Float, Bits> encode(Float scaled) {
    return send_above<Bits>(Float{} + 0.5f, scaled);
  }

  template <typename Bits, typename Float>
  static PYPARALLEL_HOST_DEVICE Coded<Float, Bits> encode(Float scaled, Bits random) {
    return send_above<Bits>(random_fraction<Float>(random), scaled);
  }

  template <typename Float, typename Bits>
  static PYPARALLEL_HOST_DEVICE Float decode(Bits code) {
    const Bits magnitude = code == 0u ? Bits{} : Bits{} + 0x3f800000u;
    return same_bits<Float>(magnitude | (code & 2u) << 30);
  }

 private:
  template <typename Bits, typename Float>
  static PYPARALLEL_HOST_DEVICE Coded<Float, Bits> send_above(Float threshold, Float scaled) {
    const Bits bits = same_bits<Bits>(scaled);
    const Bits sent = (bits >> 31) + 1u;
    const Bits code = threshold < same_bits<Float>(bits & kMagnitudeMask) ? sent : Bits{};
    return {code, decode<Float>(code)};
  }
};

// The scale of a ternary block with a residual is the mean magnitude of what is sent. Magnitudes
// are counted in units of 2^-18 of the largest: the sum of a block is exact, in any order.
template <typename Bits, typename Float>
PYPARALLEL_HOST_DEVICE Bits units_of(Float scaled, Bits code) {
  const Float magnitude = same_bits<Float>(same_bits<Bits>(scaled) & kMagnitudeMask);
  const Bits units = same_bits<Bits>(magnitude * 0x1p18f + 0x1p23f) & 0x7fffffu;
  return code == 0u ? Bits{} : units;
}

PYPARALLEL_HOST_DEVICE float fitted_scale(float scale, uint32_t units, uint32_t count) {
  const float mean = static_cast<float>(units) / static_cast<float>(count > 0 ? count : 1);
  return scale * (mean * 0x1p-18f);
}

// 0, and NUMBERS powers of two from 2^LOWEST of both signs, as codes from 1; with 8 bits, which
// have no scales, also inf and nan; neither -0 nor -nan. With BOUNDED there are only numbers to
// encode.
template <int BITS, int LOWEST, int NUMBERS, bool BOUNDED>
struct Powers : Scaled {
  using Bounded = Powers<BITS, LOWEST, NUMBERS, true>;
  static constexpr bool kBounded = BOUNDED;
  static constexpr int kBits = BITS;
  static constexpr bool kHasScales = BITS < 8;
  static constexpr float kSmallest = power_of_two(LOWEST);
  static constexpr float kLargest = power_of_two(LOWEST + NUMBERS - 1);
  static constexpr uint32_t kRebias = 127 + LOWEST - 1;  // the smallest has code 1
  static constexpr uint32_t kSign = 1u << (BITS - 1);
  static constexpr uint32_t kInfinity = NUMBERS + 1, kNan = NUMBERS + 2;
  static constexpr uint32_t kCorruptMask = 2 * kSign - 1, kCorruptPattern = kSign;
  static constexpr uint32_t kOtherPattern = kHasScales ? kSign : kSign + kNan;

  template <typename Bits, typename Float>
  static PYPARALLEL_HOST_DEVICE Coded<Float, Bits> encode(Float value) {
    const Bits bits = same_bits<Bits>(value) & kMagnitudeMask;
    const Bits noise = (1u << 22) - 1u + (bits >> 23 & 1u);  // ties to even codes
    return finish(value, bits + noise, Float{} + 0.5f);
  }

  template <typename Bits, typename Float>
  static PYPARALLEL_HOST_DEVICE Coded<Float, Bits> encode(Float value, Bits random) {
    const Bits bits = same_bits<Bits>(value) & kMagnitudeMask;
    return finish(value, bits + (random << 7) + 64u, random_fraction<Float>(random));
  }

  template <typename Float, typename Bits>
  static PYPARALLEL_HOST_DEVICE Float decode(Bits code) {
    const Bits magnitude = code & (kSign - 1);
    Bits bits = magnitude == 0u ? Bits{} : (magnitude + kRebias) << 23;
    if (!kHasScales) {
      bits = magnitude == kInfinity ? Bits{} + kInfinityBits : bits;
      bits = magnitude == kNan ? Bits{} + 0x7fc00000u : bits;
    }
    return same_bits<Float>(bits | (code & kSign) << (32 - BITS));
  }

 private:
  // `rounded`: a carry out of the mantissa has raised the exponent.
  template <typename Bits, typename Float>
  static PYPARALLEL_HOST_DEVICE Coded<Float, Bits> finish(Float value, Bits rounded,
                                                          Float threshold) {
    const Bits bits = same_bits<Bits>(value), zero = {};
    const Float magnitude = same_bits<Float>(bits & kMagnitudeMask);
    const Bits sign = bits >> (32 - BITS) & kSign;
    const Bits small = threshold * kSmallest < magnitude ? sign | 1u : zero;
    const Bits code = magnitude < kSmallest ? small : ((rounded >> 23) - kRebias) | sign;
    if (BOUNDED) {
      const Bits power = (code & (kSign - 1)) + kRebias;
      return {code, same_bits<Float>(code == 0u ? zero : power << 23 | sign << (32 - BITS))};
    }
    const Bits infinite = magnitude > kLargest ? sign | kInfinity : code;
    const Bits any = value == value ? infinite : zero + kNan;
    return {any, decode<Float>(any)};
  }
};

template <typename Bits, typename Float>
PYPARALLEL_HOST_DEVICE auto is_finite(Float value) {
  return same_bits<Float>(same_bits<Bits>(value) & kMagnitudeMask) < __builtin_inff();
}

using Int8 = Integers<8>;
using Int4 = Integers<4>;
using Natural = Powers<8, -80, 125, false>;
using E3M0 = Powers<4, 0, 7, true>;  // the largest of a block is 64 times the smallest
using E4M3 = Floats<3, 7, 0x7e>;
using E5M2 = Floats<2, 15, 0x7b>;

template <typename Format, typename Bits>
PYPARALLEL_HOST_DEVICE auto is_corrupt_code(Bits code) {
  const auto masked = code & Format::kCorruptMask;
  return (masked == Format::kCorruptPattern) | (masked == Format::kOtherPattern);
}

static_assert(Int8::kLargest == 127 && Int4::kLargest == 7);
static_assert(E4M3::kLargest == 448 && E5M2::kLargest == 57344);

}  // namespace pyparallel
