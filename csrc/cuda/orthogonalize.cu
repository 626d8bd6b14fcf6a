#include "orthogonalize.h"

#include <torch/csrc/stable/library.h>

#include <vector>

#include "cuda/launch.h"
#include "float_types.h"
#include "orthogonalize_arguments.h"

namespace pyparallel::cuda {
namespace {

// One block of threads per matrix: there are typically dozens of tall, narrow matrices.
constexpr int kBlock = 256;
constexpr int kTile = kBlock * kPerThread;  // floats of some rows, in shared memory
constexpr int kPairsPerThread = (kMaxPacked + kBlock - 1) / kBlock;
constexpr int kMaxTensors = 64;  // per launch, passed in the kernel's arguments

struct Batch {
  void* data;
  int64_t num_rows;
  int num_columns;
  int first_block;
};

struct Batches {
  Batch at[kMaxTensors];
  int count;
};

struct Shared {
  float tile[kTile];
  double gram[kMaxPacked], weights[kMaxPacked];
  double projections[kMaxColumns];
  double partial[kBlock];
  int64_t rows[kBlock];
  float at_row[kMaxColumns];
};

template <typename T>
struct Matrix {
  T* data;
  int64_t num_rows;
  int num_columns;
  bool aligned;

  // A multiple of the row length and of a thread's accesses.
  __device__ int tile_rows() const { return kTile / num_columns / kPerThread * kPerThread; }
};

// This thread's neighbors in the tile that starts at a row, and their number.
template <typename T>
struct Place {
  T* at;
  int first, present;
  bool whole;

  __device__ Place(const Matrix<T>& matrix, int64_t row) {
    const int64_t rows = min(int64_t{matrix.tile_rows()}, matrix.num_rows - row);
    first = static_cast<int>(threadIdx.x) * kPerThread;
    present = max(0, min(kPerThread, static_cast<int>(rows) * matrix.num_columns - first));
    at = matrix.data + row * matrix.num_columns + first;
    whole = matrix.aligned && present == kPerThread;
  }
};

template <typename T>
__device__ void load_tile(const Place<T>& place, float* tile) {
  float values[kPerThread];
  load_floats(place.at, place.whole, place.present, values);
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) tile[place.first + i] = values[i];
}

// With few columns, several threads share a pair of columns, each with a stride over the rows.
// Their sums are added in a fixed order.
template <typename T>
__device__ void find_gram(const Matrix<T>& matrix, Shared& shared) {
  const int num_columns = matrix.num_columns, num_pairs = packed(0, num_columns);
  const int num_slices = max(1, kBlock / num_pairs);
  const int thread = static_cast<int>(threadIdx.x);
  const int slice = thread / num_pairs < num_slices ? thread / num_pairs : -1;
  double sums[kPairsPerThread] = {};
  for (int64_t begin = 0; begin < matrix.num_rows; begin += matrix.tile_rows()) {
    load_tile(Place<T>(matrix, begin), shared.tile);
    __syncthreads();
    const int rows = static_cast<int>(min(int64_t{matrix.tile_rows()}, matrix.num_rows - begin));
#pragma unroll
    for (int n = 0; n < kPairsPerThread; ++n) {
      const int pair = num_slices > 1 ? thread % num_pairs : thread + n * kBlock;
      if (pair >= num_pairs || slice < 0 || (n > 0 && num_slices > 1)) continue;
      int j = static_cast<int>((sqrtf(8.0f * static_cast<float>(pair) + 1.0f) - 1.0f) * 0.5f);
      j += packed(0, j + 1) <= pair;
      j -= packed(0, j) > pair;
      const int i = pair - packed(0, j);
      for (int row = num_slices > 1 ? slice : 0; row < rows; row += num_slices) {
        const float* here = shared.tile + row * num_columns;
        sums[n] += static_cast<double>(here[i]) * static_cast<double>(here[j]);
      }
    }
    __syncthreads();
  }
  if (num_slices == 1) {
#pragma unroll
    for (int n = 0; n < kPairsPerThread; ++n) {
      if (thread + n * kBlock < num_pairs) shared.gram[thread + n * kBlock] = sums[n];
    }
  } else {
    shared.partial[thread] = sums[0];
    __syncthreads();
    if (thread < num_pairs) {
      double sum = 0;
      for (int k = 0; k < num_slices; ++k) sum += shared.partial[k * num_pairs + thread];
      shared.gram[thread] = sum;
    }
  }
  __syncthreads();
}

__device__ void find_weights(int num_columns, Shared& shared) {
  const int thread = static_cast<int>(threadIdx.x);
  for (int j = 0; j < num_columns; ++j) {
    if (thread < j) {
      shared.projections[thread] = orthogonalize_projection(shared.gram, shared.weights, thread, j);
    }
    __syncthreads();
    if (thread <= j) {
      const double scale = orthogonalize_scale(shared.gram, shared.projections, j);
      shared.weights[packed(thread, j)] =
          orthogonalize_weight(shared.weights, shared.projections, scale, thread, j);
    }
    __syncthreads();
  }
}

template <typename T>
__device__ void apply_weights(const Matrix<T>& matrix, Shared& shared) {
  const int num_columns = matrix.num_columns;
  for (int64_t begin = 0; begin < matrix.num_rows; begin += matrix.tile_rows()) {
    const Place<T> place(matrix, begin);
    load_tile(place, shared.tile);
    __syncthreads();
    float results[kPerThread];
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      const int row = (place.first + k) / num_columns, j = (place.first + k) % num_columns;
      double sum = 0;
      for (int i = 0; i <= j && k < place.present; ++i) {
        const double value = static_cast<double>(shared.tile[row * num_columns + i]);
        sum += shared.weights[packed(i, j)] * value;
      }
      results[k] = static_cast<float>(sum);
    }
    store_floats(place.at, place.whole, place.present, results);
    __syncthreads();
  }
}

template <typename T>
__device__ void complete_column(const Matrix<T>& matrix, int column, Shared& shared) {
  const int num_columns = matrix.num_columns, thread = static_cast<int>(threadIdx.x);
  double least = 2;
  int64_t unit = 0;
  for (int64_t row = thread; row < matrix.num_rows; row += kBlock) {
    const double leverage = orthogonalize_leverage(matrix.data + row * num_columns, num_columns);
    if (leverage < least) {
      least = leverage;
      unit = row;
    }
  }
  shared.partial[thread] = least;
  shared.rows[thread] = unit;
  __syncthreads();
  for (int other = 0; other < kBlock; ++other) {
    const double leverage = shared.partial[other];
    const int64_t row = shared.rows[other];
    if (leverage < least || (leverage == least && row < unit)) {
      least = leverage;
      unit = row;
    }
  }
  if (thread < num_columns) {
    shared.at_row[thread] = static_cast<float>(matrix.data[unit * num_columns + thread]);
  }
  __syncthreads();
  const double norm = sqrt(1 - least);
  for (int64_t row = thread; row < matrix.num_rows; row += kBlock) {
    T* here = matrix.data + row * num_columns;
    const double value =
        orthogonalize_complete(shared.at_row, here, num_columns, row == unit, norm);
    here[column] = static_cast<T>(static_cast<float>(value));
  }
  __syncthreads();
}

template <typename T>
__global__ void __launch_bounds__(kBlock, 4)
    orthogonalize_kernel(const __grid_constant__ Batches batches) {
  __shared__ Shared shared;
  int which = 0;
  const int block = static_cast<int>(blockIdx.x);
  while (which + 1 < batches.count && batches.at[which + 1].first_block <= block) ++which;
  const Batch& batch = batches.at[which];
  T* data = static_cast<T*>(batch.data) +
            (block - batch.first_block) * batch.num_rows * batch.num_columns;
  const bool aligned = reinterpret_cast<uintptr_t>(data) % 16 == 0;
  const Matrix<T> matrix{data, batch.num_rows, batch.num_columns, aligned};
  for (int pass = 0; pass < 2; ++pass) {
    find_gram(matrix, shared);
    find_weights(matrix.num_columns, shared);
    apply_weights(matrix, shared);
    for (int j = 0; j < matrix.num_columns; ++j) {
      if (shared.weights[packed(j, j)] == 0) complete_column(matrix, j, shared);
    }
    __syncthreads();  // before the weights are written again
  }
}

template <typename T>
void orthogonalize_group(const Batches& batches, int64_t num_blocks, cudaStream_t stream) {
  if (num_blocks > 0) launch(orthogonalize_kernel<T>, num_blocks, kBlock, stream, batches);
}

// One launch per dtype, and one more for every kMaxTensors tensors.
template <typename T>
void orthogonalize_all(std::vector<Tensor>& matrices, ScalarType dtype) {
  Batches batches{};
  int64_t num_blocks = 0;
  for (Tensor& tensor : matrices) {
    if (tensor.scalar_type() != dtype || tensor.numel() == 0) continue;
    const int64_t rows = tensor.size(tensor.dim() - 2), columns = tensor.size(tensor.dim() - 1);
    batches.at[batches.count++] = {tensor.mutable_data_ptr<T>(), rows, static_cast<int>(columns),
                                   static_cast<int>(num_blocks)};
    num_blocks += tensor.dim() == 3 ? tensor.size(0) : 1;
    if (batches.count == kMaxTensors) {
      orthogonalize_group<T>(batches, num_blocks, current_stream(tensor));
      batches.count = 0;
      num_blocks = 0;
    }
  }
  if (batches.count) orthogonalize_group<T>(batches, num_blocks, current_stream(matrices[0]));
}

void orthogonalize_cuda(std::vector<Tensor> matrices) {
  check_orthogonalize_arguments(matrices);
  if (matrices.empty()) return;
  const DeviceGuard guard(matrices[0].get_device_index());
  for (const ScalarType dtype : {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half}) {
    with_float_type(dtype, [&](auto type) { orthogonalize_all<decltype(type)>(matrices, dtype); });
  }
}

}  // namespace
}  // namespace pyparallel::cuda

STABLE_TORCH_LIBRARY_IMPL(pyparallel, CUDA, library) {
  library.impl("orthogonalize_", TORCH_BOX(&pyparallel::cuda::orthogonalize_cuda));
}
