#pragma once

#include <cmath>

#include "host_device.h"

// The small triangles of `orthogonalize_`, CholeskyQR2: from a matrix A with the Gram matrix
// G = A^T A follow the weights W, upper triangular, with which A W has orthonormal columns. Column
// by column, with column j of R = W^-1 called the projections:
//   projections[i] = w_i . G e_j,   w_j = (e_j - sum_i projections[i] w_i) / norm.
// Products of float32 numbers are exact in double, where squares do not overflow either. What
// rounding leaves unorthogonal, a second pass over the result removes.
namespace pyparallel {

constexpr int kMaxColumns = 64;
constexpr int kMaxPacked = kMaxColumns * (kMaxColumns + 1) / 2;
constexpr double kDependent = 1e-12;

// Where the entry of an upper triangle lies: column after column.
PYPARALLEL_HOST_DEVICE int packed(int row, int column) { return column * (column + 1) / 2 + row; }

PYPARALLEL_HOST_DEVICE double orthogonalize_projection(const double* gram, const double* weights,
                                                       int i, int j) {
  double sum = 0;
  for (int k = 0; k <= i; ++k) sum += weights[packed(k, i)] * gram[packed(k, j)];
  return sum;
}

// The factor that gives column j norm 1; 0 if nothing is left of it beside the earlier ones. A NaN
// is not hidden.
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

// A dependent column becomes the part of a unit vector e_row outside the span of the others (rows
// of them: `at_row` of the unit's row, `here` of the row asked for).
template <typename T>
PYPARALLEL_HOST_DEVICE double orthogonalize_complete(const float* at_row, const T* here,
                                                     int num_columns, bool is_row, double norm) {
  double value = is_row ? 1 : 0;
  for (int k = 0; k < num_columns; ++k) {
    value -= static_cast<double>(at_row[k]) * static_cast<double>(static_cast<float>(here[k]));
  }
  return value / norm;
}

// How much of a unit vector e_row lies in the span of orthonormal columns.
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
