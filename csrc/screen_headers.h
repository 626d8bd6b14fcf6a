#pragma once

#include <torch/csrc/stable/tensor.h>

#include "host_device.h"
#include "tensor_checks.h"

// `screen_headers` for one row of eight numbers.
namespace pyparallel {

// Columns of a row, and of what is expected of it: there a bound of the mass is in the first and in
// the last.
enum Column { kMass = 0, kFirstField = 1, kForwards = 6, kNonfinite = 7, kColumns = 8 };
constexpr double kAny = -1;  // on either side it is not compared
constexpr int64_t kNonfiniteUnit = int64_t{1} << 21, kForwardsUnit = int64_t{1} << 42;

// Returns the mass, or 0 of a row that is not as expected, and adds what was found.
PYPARALLEL_HOST_DEVICE double screen_row(const double* row, const double* expected,
                                         int64_t& found) {
  bool fits = row[kMass] > expected[kMass] && row[kMass] <= expected[kNonfinite];
  bool same_forwards = true;
  for (int i = kFirstField; i <= kForwards; ++i) {
    const bool same = row[i] == expected[i] || row[i] == kAny || expected[i] == kAny;
    if (i == kForwards) {
      same_forwards = same;
    } else {
      fits = fits && same;
    }
  }
  found += (fits ? 0 : 1) + (row[kNonfinite] != 0 ? kNonfiniteUnit : 0) +
           (same_forwards ? 0 : kForwardsUnit);
  return fits ? row[kMass] : 0;
}

inline void check_screen_headers_arguments(const Tensor& rows, const Tensor& expected,
                                           const Tensor& masses, const Tensor& counter) {
  const auto is_table = [&](const Tensor& tensor) {
    return tensor.scalar_type() == ScalarType::Double && tensor.dim() == 2 &&
           tensor.size(0) == rows.size(0) && tensor.size(1) == kColumns && tensor.is_contiguous();
  };
  require(rows.dim() == 2 && is_table(rows), "rows", "a contiguous (k, 8) float64 tensor");
  require(is_table(expected) && expected.is_cpu(), "expected",
          "a contiguous float64 tensor on the cpu with a row for each of rows");
  require(is_flat(masses, ScalarType::Double, rows.size(0), rows), "masses",
          "a contiguous float64 tensor with a number for each row on the rows' device");
  require(is_number(counter, ScalarType::Long, rows), "counter",
          "a 0-d int64 tensor on the rows' device");
}

}  // namespace pyparallel
