#include "orthogonalize.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "cuda/launch.h"
#include "float_types.h"
#include "orthogonalize_arguments.h"

namespace pyparallel::cuda {
namespace {

// One block of threads per matrix, as there are typically dozens; but of a very tall one, the rows
// are divided into parts, each with a block. Parts depend on the shape alone, so results do too.
constexpr int kBlock = 256;
constexpr int kTile = kBlock * kPerThread;  // floats of some rows, in shared memory
constexpr int kPairsPerThread = (kMaxPacked + kBlock - 1) / kBlock;
constexpr int kMaxTensors = 64;  // per launch, passed in the kernel's arguments

struct Batch {
  void* data;
  double* scratch;  // of each matrix in several parts: see Scratch
  int64_t num_rows;
  int num_columns, num_parts;
  int first_block;
};

struct Batches {
  Batch at[kMaxTensors];
  int count;
};

// A multiple of the row length and of a thread's accesses.
PYPARALLEL_HOST_DEVICE int rows_of_tile(int num_columns) {
  return kTile / num_columns / kPerThread * kPerThread;
}

PYPARALLEL_HOST_DEVICE int64_t ceil_div(int64_t number, int64_t by) {
  return (number + by - 1) / by;
}

// One for few tiles, for which the additional launches would take longer than the work. At most as
// many that it takes less than a launch to read the Gram matrices of all parts, as every block
// does.
int parts_of(int64_t num_rows, int num_columns) {
  constexpr int kFewTiles = 8;
  const int64_t num_tiles = ceil_div(num_rows, rows_of_tile(num_columns));
  if (num_tiles <= kFewTiles) return 1;
  const auto most = static_cast<int64_t>(std::sqrt((1 << 23) / packed(0, num_columns)));
  const int64_t parts = std::min({2 * num_tiles / kFewTiles, most, int64_t{512}});
  return static_cast<int>(ceil_div(num_tiles, ceil_div(num_tiles, parts)));
}

PYPARALLEL_HOST_DEVICE int64_t rows_of_part(int64_t num_rows, int num_columns, int num_parts) {
  const int tile = rows_of_tile(num_columns);
  return ceil_div(ceil_div(num_rows, tile), num_parts) * tile;
}

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

  __device__ Matrix(T* data, int64_t num_rows, int num_columns)
      : data(data),
        num_rows(num_rows),
        num_columns(num_columns),
        aligned(reinterpret_cast<uintptr_t>(data) % 16 == 0) {}

  __device__ Matrix(const Batch& batch, int64_t index)
      : Matrix(static_cast<T*>(batch.data) + index * batch.num_rows * batch.num_columns,
               batch.num_rows, batch.num_columns) {}

  __device__ int tile_rows() const { return rows_of_tile(num_columns); }

  __device__ Matrix part(int index, int num_parts) const {
    const int64_t rows = rows_of_part(num_rows, num_columns, num_parts);
    return {data + index * rows * num_columns, min(rows, num_rows - index * rows), num_columns};
  }
};

// What the blocks of a matrix tell each other, between launches.
struct Scratch {
  double *first_grams, *second_grams;  // of each pass, those of all parts
  double* is_dependent;                // 1 if a column depends on the earlier ones, 0 if not

  static int64_t size(int num_columns, int num_parts) {
    return 2 * int64_t{num_parts} * packed(0, num_columns) + 1;
  }

  __device__ Scratch(const Batch& batch, int64_t index) {
    const int64_t size_of_grams = int64_t{batch.num_parts} * packed(0, batch.num_columns);
    first_grams = batch.scratch + index * (2 * size_of_grams + 1);
    second_grams = first_grams + size_of_grams;
    is_dependent = second_grams + size_of_grams;
  }
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
    const int rest = static_cast<int>(rows) * matrix.num_columns - first;
    present = max(0, min(kPerThread, rest));
    at = matrix.data + row * matrix.num_columns + first;
    // Not `present == kPerThread`: of that ptxas 13.0 makes a predicate of VIMNMX.RELU for sm_90,
    // which on an H200 was true of fewer elements too.
    whole = matrix.aligned && rest >= kPerThread;
  }
};

template <typename T>
__device__ void load_tile(const Place<T>& place, float* tile) {
  float values[kPerThread];
  load_floats(place.at, place.whole, place.present, values);
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) tile[place.first + i] = values[i];
}

// With few columns, several threads share a pair of columns. Their sums are added in order.
__device__ void add_slices(double sum_of_thread, int num_pairs, int num_slices, Shared& shared) {
  const int thread = static_cast<int>(threadIdx.x);
  shared.partial[thread] = sum_of_thread;
  __syncthreads();
  if (thread < num_pairs) {
    double sum = 0;
    for (int k = 0; k < num_slices; ++k) sum += shared.partial[k * num_pairs + thread];
    shared.gram[thread] = sum;
  }
  __syncthreads();
}

// With few columns, several threads share a pair of columns, each with a stride over the rows.
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
    __syncthreads();
  } else {
    add_slices(sums[0], num_pairs, num_slices, shared);
  }
}

// The Gram matrix of all parts.
__device__ void add_grams(const double* grams, int num_parts, int num_columns, Shared& shared) {
  const int num_pairs = packed(0, num_columns);
  const int num_slices = max(1, kBlock / num_pairs);
  const int thread = static_cast<int>(threadIdx.x);
  if (num_slices == 1) {
    for (int pair = thread; pair < num_pairs; pair += kBlock) {
      double sum = 0;
#pragma unroll 8
      for (int part = 0; part < num_parts; ++part) sum += grams[part * num_pairs + pair];
      shared.gram[pair] = sum;
    }
    __syncthreads();
  } else {
    const int slice = thread / num_pairs;
    double sum = 0;
#pragma unroll 8
    for (int part = slice; part < num_parts; part += num_slices) {
      sum += grams[part * num_pairs + thread % num_pairs];
    }
    add_slices(sum, num_pairs, num_slices, shared);
  }
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

// The batch whose block this is, and the number of the block within it.
__device__ const Batch& find_batch(const Batches& batches, int& block) {
  int which = 0;
  block = static_cast<int>(blockIdx.x);
  while (which + 1 < batches.count && batches.at[which + 1].first_block <= block) ++which;
  block -= batches.at[which].first_block;
  return batches.at[which];
}

// A block per matrix: of those in one part all of the work, of the others what is left after the
// first pass if columns have to be completed.
template <typename T>
__global__ void __launch_bounds__(kBlock, 4)
    orthogonalize_kernel(const __grid_constant__ Batches batches) {
  __shared__ Shared shared;
  int index;
  const Batch& batch = find_batch(batches, index);
  const Matrix<T> matrix(batch, index);
  // Of all parts; nullptr: there are none, or no longer. Shared, because registers are scarce.
  __shared__ const double* first_grams;
  if (batch.num_parts > 1 && *Scratch(batch, index).is_dependent == 0) return;
  if (threadIdx.x == 0) {
    first_grams = batch.num_parts > 1 ? Scratch(batch, index).first_grams : nullptr;
  }
  __syncthreads();
  for (int pass = 0; pass < 2; ++pass) {
    if (first_grams) {
      add_grams(first_grams, batch.num_parts, batch.num_columns, shared);
    } else {
      find_gram(matrix, shared);
    }
    find_weights(matrix.num_columns, shared);
    if (!first_grams) apply_weights(matrix, shared);
    for (int j = 0; j < matrix.num_columns; ++j) {
      if (shared.weights[packed(j, j)] == 0) complete_column(matrix, j, shared);
    }
    __syncthreads();  // before the weights are written again
    if (threadIdx.x == 0) first_grams = nullptr;
    __syncthreads();
  }
}

template <typename T>
__device__ void store_gram(const Matrix<T>& part, double* grams, int index, Shared& shared) {
  const int num_pairs = packed(0, part.num_columns);
  find_gram(part, shared);
  for (int pair = static_cast<int>(threadIdx.x); pair < num_pairs; pair += kBlock) {
    grams[int64_t{index} * num_pairs + pair] = shared.gram[pair];
  }
}

// A block per part.
template <typename T>
__global__ void __launch_bounds__(kBlock, 4) gram_kernel(const __grid_constant__ Batches batches) {
  __shared__ Shared shared;
  int block;
  const Batch& batch = find_batch(batches, block);
  const int index = block / batch.num_parts, part = block % batch.num_parts;
  store_gram(Matrix<T>(batch, index).part(part, batch.num_parts), Scratch(batch, index).first_grams,
             part, shared);
}

// One pass over a part, and its Gram matrix for the next one. After the first pass the columns are
// nearly orthonormal: the second finds none that depends on the others.
template <typename T>
__global__ void __launch_bounds__(kBlock, 4)
    apply_kernel(const __grid_constant__ Batches batches, int pass) {
  __shared__ Shared shared;
  int block;
  const Batch& batch = find_batch(batches, block);
  const int index = block / batch.num_parts, number = block % batch.num_parts;
  const Scratch scratch(batch, index);
  if (pass == 1 && *scratch.is_dependent != 0) return;
  const Matrix<T> part = Matrix<T>(batch, index).part(number, batch.num_parts);
  add_grams(pass == 0 ? scratch.first_grams : scratch.second_grams, batch.num_parts,
            batch.num_columns, shared);
  find_weights(part.num_columns, shared);
  apply_weights(part, shared);
  if (pass == 1) return;
  store_gram(part, scratch.second_grams, number, shared);
  if (number == 0 && threadIdx.x == 0) {
    bool is_dependent = false;
    for (int j = 0; j < part.num_columns; ++j) {
      is_dependent = is_dependent || shared.weights[packed(j, j)] == 0;
    }
    *scratch.is_dependent = is_dependent ? 1 : 0;
  }
}

// Tensors of one launch.
struct Group {
  Batches batches{};
  int64_t num_blocks = 0;

  void add(const Batch& batch, int64_t num_blocks_of_batch) {
    batches.at[batches.count] = batch;
    batches.at[batches.count++].first_block = static_cast<int>(num_blocks);
    num_blocks += num_blocks_of_batch;
  }

  template <typename... Arguments>
  void run(void (*kernel)(Batches, Arguments...), cudaStream_t stream, Arguments... arguments) {
    if (num_blocks > 0) launch(kernel, num_blocks, kBlock, stream, batches, arguments...);
  }
};

struct Shape {
  int64_t count, rows;
  int columns, parts;

  explicit Shape(const Tensor& tensor)
      : count(tensor.dim() == 3 ? tensor.size(0) : 1),
        rows(tensor.size(tensor.dim() - 2)),
        columns(static_cast<int>(tensor.size(tensor.dim() - 1))),
        parts(parts_of(rows, columns)) {}

  int64_t scratch_size() const { return parts > 1 ? count * Scratch::size(columns, parts) : 0; }
};

// One launch, or four if a matrix has several parts.
template <typename T>
void orthogonalize_some(const std::vector<Tensor>& matrices, cudaStream_t stream) {
  Group whole, divided;
  int64_t scratch_size = 0;
  for (const Tensor& tensor : matrices) scratch_size += Shape(tensor).scratch_size();
  const Tensor scratch = torch::stable::new_empty(
      matrices[0], {scratch_size * int64_t{sizeof(double)}}, ScalarType::Byte);
  auto* next = static_cast<double*>(scratch.mutable_data_ptr());
  for (const Tensor& tensor : matrices) {
    const Shape shape(tensor);
    const Batch batch{
        tensor.mutable_data_ptr<T>(), next, shape.rows, shape.columns, shape.parts, 0};
    whole.add(batch, shape.count);
    if (shape.parts > 1) divided.add(batch, shape.count * shape.parts);
    next += shape.scratch_size();
  }
  divided.run(gram_kernel<T>, stream);
  divided.run(apply_kernel<T>, stream, 0);
  whole.run(orthogonalize_kernel<T>, stream);
  divided.run(apply_kernel<T>, stream, 1);
}

// Tensors of one dtype share launches, kMaxTensors of them.
template <typename T>
void orthogonalize_all(const std::vector<Tensor>& matrices, ScalarType dtype) {
  std::vector<Tensor> some;
  for (size_t i = 0; i <= matrices.size(); ++i) {
    if (some.size() == kMaxTensors || (i == matrices.size() && !some.empty())) {
      orthogonalize_some<T>(some, current_stream(some[0]));
      some.clear();
    }
    if (i == matrices.size()) break;
    if (matrices[i].scalar_type() == dtype && matrices[i].numel() > 0) some.push_back(matrices[i]);
  }
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
