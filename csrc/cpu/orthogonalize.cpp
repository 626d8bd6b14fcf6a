#include "orthogonalize.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "float_types.h"
#include "orthogonalize_arguments.h"

namespace pyparallel::cpu {
namespace {

constexpr int64_t kTileRows = 128;  // their columns, as doubles, fit the L1 cache
constexpr int64_t kChunkRows = 32 * kTileRows;

typedef double Doubles __attribute__((vector_size(32)));
constexpr int64_t kDoubles = 4;

// Some rows of a matrix, by columns. Missing rows are zero.
struct Tile {
  double columns[kMaxColumns][kTileRows];

  template <typename T>
  void load(const T* rows, int64_t num_rows, int num_columns) {
    for (int j = 0; j < num_columns; ++j) {
      for (int64_t i = 0; i < num_rows; ++i) {
        columns[j][i] = static_cast<double>(static_cast<float>(rows[i * num_columns + j]));
      }
      std::fill(columns[j] + num_rows, columns[j] + kTileRows, 0.0);
    }
  }

  template <typename T>
  void store(T* rows, int64_t num_rows, int num_columns) const {
    for (int j = 0; j < num_columns; ++j) {
      for (int64_t i = 0; i < num_rows; ++i) {
        rows[i * num_columns + j] = static_cast<T>(static_cast<float>(columns[j][i]));
      }
    }
  }

  double dot(int a, int b) const {
    Doubles sums[4] = {};
    for (int64_t i = 0; i < kTileRows; i += 4 * kDoubles) {
      for (int64_t k = 0; k < 4; ++k) {
        sums[k] += at(a, i + k * kDoubles) * at(b, i + k * kDoubles);
      }
    }
    const Doubles sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
  }

  // column[j] = sum over i <= j of weight(i, j) * column[i], in place, starting with the last.
  void weigh(const double* weights, int num_columns) {
    for (int j = num_columns - 1; j >= 0; --j) {
      for (int64_t row = 0; row < kTileRows; row += kDoubles) {
        Doubles sum = {};
        for (int i = 0; i <= j; ++i) sum += weights[packed(i, j)] * at(i, row);
        std::memcpy(columns[j] + row, &sum, sizeof sum);
      }
    }
  }

 private:
  Doubles at(int column, int64_t row) const {
    Doubles values;
    std::memcpy(&values, columns[column] + row, sizeof values);
    return values;
  }
};

template <typename T>
struct Matrix {
  T* data;
  int64_t num_rows;
  int num_columns;

  int64_t num_chunks() const { return (num_rows + kChunkRows - 1) / kChunkRows; }

  // Calls function(rows of a tile, number of rows) for all tiles of a chunk.
  template <typename Function>
  void for_tiles(int64_t chunk, const Function& function) const {
    const int64_t end = std::min(num_rows, (chunk + 1) * kChunkRows);
    for (int64_t row = chunk * kChunkRows; row < end; row += kTileRows) {
      function(data + row * num_columns, std::min(kTileRows, end - row));
    }
  }
};

// Chunks are summed in order, so that the result does not depend on the number of threads.
template <typename T>
std::vector<double> gram_matrix(const Matrix<T>& matrix) {
  const int size = packed(0, matrix.num_columns);
  std::vector<double> sums(matrix.num_chunks() * size, 0.0);
  torch::stable::parallel_for(0, matrix.num_chunks(), 1, [&](int64_t begin, int64_t end) {
    Tile tile;
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      double* sum = sums.data() + chunk * size;
      matrix.for_tiles(chunk, [&](const T* rows, int64_t num_rows) {
        tile.load(rows, num_rows, matrix.num_columns);
        for (int j = 0; j < matrix.num_columns; ++j) {
          for (int i = 0; i <= j; ++i) sum[packed(i, j)] += tile.dot(i, j);
        }
      });
    }
  });
  for (int64_t i = size; i < static_cast<int64_t>(sums.size()); ++i) sums[i % size] += sums[i];
  sums.resize(size);
  return sums;
}

std::vector<double> find_weights(const std::vector<double>& gram, int num_columns) {
  std::vector<double> weights(gram.size()), projections(num_columns);
  for (int j = 0; j < num_columns; ++j) {
    for (int i = 0; i < j; ++i) {
      projections[i] = orthogonalize_projection(gram.data(), weights.data(), i, j);
    }
    const double scale = orthogonalize_scale(gram.data(), projections.data(), j);
    for (int k = 0; k <= j; ++k) {
      weights[packed(k, j)] = orthogonalize_weight(weights.data(), projections.data(), scale, k, j);
    }
  }
  return weights;
}

template <typename T>
void apply_weights(const Matrix<T>& matrix, const std::vector<double>& weights) {
  torch::stable::parallel_for(0, matrix.num_chunks(), 1, [&](int64_t begin, int64_t end) {
    Tile tile;
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      matrix.for_tiles(chunk, [&](T* rows, int64_t num_rows) {
        tile.load(rows, num_rows, matrix.num_columns);
        tile.weigh(weights.data(), matrix.num_columns);
        tile.store(rows, num_rows, matrix.num_columns);
      });
    }
  });
}

template <typename T>
void complete_column(const Matrix<T>& matrix, int column) {
  const int n = matrix.num_columns;
  int64_t unit = 0;
  double least = 2;
  for (int64_t row = 0; row < matrix.num_rows; ++row) {
    const double leverage = orthogonalize_leverage(matrix.data + row * n, n);
    if (leverage < least) {
      least = leverage;
      unit = row;
    }
  }
  const std::vector<float> at_row(matrix.data + unit * n, matrix.data + (unit + 1) * n);
  const double norm = std::sqrt(1 - least);
  for (int64_t row = 0; row < matrix.num_rows; ++row) {
    T* here = matrix.data + row * n;
    here[column] = static_cast<T>(
        static_cast<float>(orthogonalize_complete(at_row.data(), here, n, row == unit, norm)));
  }
}

template <typename T>
void orthogonalize_matrix(const Matrix<T>& matrix) {
  for (int pass = 0; pass < 2; ++pass) {
    const std::vector<double> weights = find_weights(gram_matrix(matrix), matrix.num_columns);
    apply_weights(matrix, weights);
    for (int j = 0; j < matrix.num_columns; ++j) {
      if (weights[packed(j, j)] == 0) complete_column(matrix, j);
    }
  }
}

void orthogonalize_cpu(std::vector<Tensor> matrices) {
  check_orthogonalize_arguments(matrices);
  for (Tensor& tensor : matrices) {
    const int64_t rows = tensor.size(tensor.dim() - 2), columns = tensor.size(tensor.dim() - 1);
    const int64_t count = tensor.dim() == 3 ? tensor.size(0) : 1;
    if (tensor.numel() == 0) continue;
    with_float_type(tensor.scalar_type(), [&](auto type) {
      using T = decltype(type);
      T* data = tensor.mutable_data_ptr<T>();
      torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const Matrix<T> matrix{data + i * rows * columns, rows, static_cast<int>(columns)};
          orthogonalize_matrix(matrix);
        }
      });
    });
  }
}

}  // namespace
}  // namespace pyparallel::cpu

STABLE_TORCH_LIBRARY_IMPL(pyparallel, CPU, library) {
  library.impl("orthogonalize_", TORCH_BOX(&pyparallel::cpu::orthogonalize_cpu));
}
