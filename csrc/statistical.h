#pragma once

#include <cmath>
#include <cstdint>

#include "host_device.h"

// The arithmetic of `quantize_statistical`. Entries are counted in units of 2^-20 of the largest
// magnitude of their block: sums of integers are exact, in any order and so on every device.
namespace pyparallel {

constexpr float kUnits = 0x1p20f;  // the squares of 4096 numbers up to this sum to 2^52 at most

// The codes of BITS bits, as the helpers of formats take them.
template <int BITS>
struct BinCodes {
  static constexpr int kBits = BITS;
  static constexpr int kBins = 1 << BITS;
};

// Where the bins of a block are: of equal width, half of them on each side of the mean.
struct Bins {
  float middle, per_width;  // the mean, and 1 / width, 0 if all entries are equal
};

PYPARALLEL_HOST_DEVICE Bins find_bins(double sum, double squares, int64_t count, int num_bins) {
  const double mean = sum / static_cast<double>(count);
  const double variance = squares / static_cast<double>(count) - mean * mean;
  const double width = sqrt(variance > 0.0 ? variance : 0.0) * (6.0 / num_bins);
  return {static_cast<float>(mean), width > 0.0 ? static_cast<float>(1.0 / width) : 0.0f};
}

// The number of the bin, to be rounded down and clamped.
template <typename Float>
PYPARALLEL_HOST_DEVICE Float place_in_bins(Float units, const Bins& bins, int num_bins) {
  return (units - bins.middle) * bins.per_width + static_cast<float>(num_bins / 2);
}

// The mean of the entries in a bin; of an empty one its center, at most the largest magnitude.
PYPARALLEL_HOST_DEVICE float mean_of_bin(int64_t sum, int64_t count, int bin, int num_bins,
                                         const Bins& bins, float unit) {
  if (count > 0) {
    return static_cast<float>(static_cast<double>(sum) / static_cast<double>(count)) * unit;
  }
  const double width = bins.per_width > 0.0f ? 1.0 / static_cast<double>(bins.per_width) : 0.0;
  const double center = static_cast<double>(bins.middle) + (bin - num_bins / 2 + 0.5) * width;
  const double least = -kUnits, most = kUnits;
  return static_cast<float>(center < least ? least : center > most ? most : center) * unit;
}

// The means of a table ascend and are finite, or are all nan. The first or the last has at least
// 1/100 of the largest magnitude, which is no less than 2^-100, or all are zero.
PYPARALLEL_HOST_DEVICE bool is_corrupt_mean(const float* table, int bin, int num_bins) {
  const float mean = table[bin], next = table[bin + 1 < num_bins ? bin + 1 : bin];
  if (mean != mean) return next == next;
  const float last = table[num_bins - 1];
  const bool is_tiny = mean > -0x1p-110f && last < 0x1p-110f && (mean != 0.0f || last != 0.0f);
  const bool is_finite = mean > -__builtin_inff() && mean < __builtin_inff();
  return !(is_finite && mean <= next) || (bin == 0 && is_tiny);
}

}  // namespace pyparallel
