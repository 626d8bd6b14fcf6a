#pragma once

#include <cmath>

#include "host_device.h"

// The small triangular matrices of `orthogonalize_`, CholeskyQR2: for a matrix A with Gram matrix
// G = A^T A, the weights W, upper triangular, such that A W has orthonormal columns. Column by
// column, where column j of R = W^-1 is the projections:
//   projections[i] = w_i . G e_j,   w_j = (e_j - sum_i projections[i] w_i) / norm.
// Products of float32 numbers are exact in double, where squares do not overflow either. A second
// pass removes the rounding error of the first.
namespace pyparallel {

constexpr int kMaxColumns = 64;
constexpr int kMaxPacked = kMaxColumns * (kMaxColumns + 1) / 2;
constexpr double kDependent = 1e-12;

// The index of an entry of an upper triangle, stored by columns.
PYPARALLEL_HOST_DEVICE int packed(int row, int column) { return column * (column + 1) / 2 + row; }

PYPARALLEL_HOST_DEVICE double orthogonalize_projection(const double* gram, const double* weights,
                                                       int i, int j) {
  double sum = 0;
  for (int k = 0; k <= i; ++k) sum += weights[packed(k, i)] * gram[packed(k, j)];
  return sum;
}

// The factor that gives column j norm 1; 0 if it depends on the earlier ones. NaN is propagated.
PYPARALLEL_HOST_DEVICE double orthogonalize_scale(const double* gram, const double* projections,
                                                  int j) {
  const double before = gram[packed(j, j)];
  double left = before;
  for (int i = 0; i < j; ++i) left -= projections[i] * projections[i];
  return left <= kDependent * before ? 0 : 1 / sqrt(left);
}

PYPARALLEL_HOST_DEVICE double orthogonalize_weight(const double* weights, const double* projections,
                                                   double scale, int k, int j) {
  if (k == j) return scale;
  double sum = 0;
  for (int i = k; i < j; ++i) sum += weights[packed(k, i)] * projections[i];
  return -sum * scale;
}

// A dependent column becomes the component of a unit vector e_row orthogonal to the others (rows
// of them: `at_row` the unit's row, `here` the requested one).
template <typename T>
PYPARALLEL_HOST_DEVICE double orthogonalize_complete(const float* at_row, const T* here,
                                                     int num_columns, bool is_row, double norm) {
  double value = is_row ? 1 : 0;
  for (int k = 0; k < num_columns; ++k) {
    value -= static_cast<double>(at_row[k]) * static_cast<double>(static_cast<float>(here[k]));
  }
  return value / norm;
}

// The squared norm of the component of e_row in the span of orthonormal columns.
template <typename T>
PYPARALLEL_HOST_DEVICE double orthogonalize_leverage(const T* row, int num_columns) {
  double sum = 0;
  for (int k = 0; k < num_columns; ++k) {
    const double value = static_cast<double>(static_cast<float>(row[k]));
    sum += value * value;
  }
  return sum;
}

}  // namespace pyparallel
