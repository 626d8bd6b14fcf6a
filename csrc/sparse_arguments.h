#pragma once

#include <cstdint>
#include <optional>

#include "tensor_checks.h"
#include "top_k_chunks.h"

// Argument checks of the compiled ops with indices: `top_k`, `scatter_add_`, `top_k_chunks`,
// `scatter_chunks`, `random_k_indices` and `random_k`. On the CPU the ops also check the indices
// themselves; GPU kernels skip wrong ones.
namespace pyparallel {

// Calls function(T{}) with the C++ type T of indices that have been checked.
template <typename Function>
void with_index_type(ScalarType dtype, Function&& function) {
  if (dtype == ScalarType::Int) {
    function(int32_t{});
  } else {
    function(int64_t{});
  }
}

inline void check_indices(const Tensor& indices, int64_t numel, const Tensor& model) {
  const ScalarType dtype = indices.scalar_type();
  require(dtype == ScalarType::Long || (dtype == ScalarType::Int && numel <= INT32_MAX), "indices",
          "int64, or int32 for fewer than 2**31 elements");
  require(is_flat(indices, dtype, model.numel(), model), "indices",
          "a contiguous 1-d tensor with the length and device of its values");
}

inline void check_values(const Tensor& values, const Tensor& x) {
  check_buffer("values", values);
  require(on_same_device(values, x), "values", "the device of the op's other buffers");
}

inline void check_top_k_arguments(const Tensor& x, const std::optional<Tensor>& residual,
                                  const std::optional<Tensor>& threshold, const Tensor& values,
                                  const Tensor& indices) {
  check_buffer("x", x);
  if (residual) check_like("residual", *residual, x);
  if (threshold) {
    require(is_number(*threshold, ScalarType::Float, x), "threshold",
            "a 0-d float32 tensor on the buffers' device");
  }
  check_values(values, x);
  require(values.scalar_type() == x.scalar_type() && values.numel() <= x.numel(), "values",
          "the dtype of x, and at most its length");
  check_indices(indices, x.numel(), values);
}

inline void check_scatter_add_arguments(const Tensor& dense, const Tensor& values,
                                        const Tensor& indices, const Tensor& corrupt) {
  check_buffer("dense", dense);
  check_values(values, dense);
  check_indices(indices, 0, values);  // int32 can index a part of any buffer
  check_corrupt(corrupt, dense);
}

// Of values or indices: one, flat, or a row for each.
inline int64_t num_messages(const Tensor& rows) { return rows.dim() == 2 ? rows.size(0) : 1; }

// A contiguous tensor of this dtype and length, or with rows of it, on the model's device.
inline bool has_rows(const Tensor& tensor, ScalarType dtype, int64_t length, const Tensor& model) {
  return tensor.scalar_type() == dtype && (tensor.dim() == 1 || tensor.dim() == 2) &&
         tensor.size(tensor.dim() - 1) == length && tensor.is_contiguous() &&
         on_same_device(tensor, model);
}

inline void check_chunks(const Chunks& chunks, const Tensor& values, const Tensor& indices,
                         const Tensor& model) {
  require(
      chunks.chunk >= 32 && chunks.chunk <= kMaxChunk && (chunks.chunk & (chunks.chunk - 1)) == 0,
      "chunk", "a power of two from 32 to 4096");
  require(1 <= chunks.k && chunks.k <= chunks.chunk, "k", "a number from 1 to chunk");
  require(is_float(values.scalar_type()) &&
              has_rows(values, values.scalar_type(), chunks.num_values(), model),
          "values", "k floats of each chunk, contiguous, on the buffers' device");
  require(has_rows(indices, ScalarType::Byte, chunks.num_bytes(), model), "indices",
          "a contiguous uint8 tensor with 12 bits for each value on the buffers' device");
  require(indices.dim() == values.dim() && num_messages(indices) == num_messages(values), "indices",
          "as many rows as values");
}

inline void check_top_k_chunks_arguments(const Tensor& x, const Chunks& chunks,
                                         const std::optional<Tensor>& residual,
                                         const Tensor& values, const Tensor& indices) {
  check_buffer("x", x);
  if (residual) check_like("residual", *residual, x);
  check_chunks(chunks, values, indices, x);
  require(values.dim() == 1 && values.scalar_type() == x.scalar_type(), "values",
          "1-d, of the dtype of x");
}

inline void check_scatter_chunks_arguments(const Tensor& values, const Tensor& indices,
                                           const Chunks& chunks, const Tensor& out,
                                           const Tensor& corrupt) {
  check_buffer("out", out);
  check_chunks(chunks, values, indices, out);
  check_corrupt(corrupt, out);
}

inline void check_random_k_indices_arguments(int64_t numel, const Tensor& offset,
                                             int64_t run_length, const Tensor& indices) {
  constexpr int64_t kLargest = int64_t{1} << 62;
  require(0 <= numel && numel <= kLargest, "numel", "a number in [0, 2**62]");
  require(1 <= run_length && run_length <= kLargest, "run_length", "a number in [1, 2**62]");
  check_indices(indices, numel, indices);
  require(indices.numel() <= numel / run_length * run_length, "indices",
          "no more than the whole runs in numel elements");
  check_offset(offset, indices);
}

inline void check_random_k_arguments(const Tensor& x, const Tensor& indices,
                                     const std::optional<Tensor>& residual, const Tensor& values) {
  check_buffer("x", x);
  if (residual) check_like("residual", *residual, x);
  check_values(values, x);
  require(values.scalar_type() == x.scalar_type(), "values", "the dtype of x");
  check_indices(indices, 0, values);
}

}  // namespace pyparallel
