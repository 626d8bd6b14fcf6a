#pragma once

#include <optional>

#include "index_types.h"
#include "philox_arguments.h"
#include "tensor_checks.h"

// Argument checks of the compiled `random_k_indices` and `random_k`.
namespace pyparallel {

inline void check_random_k_indices_arguments(int64_t numel, const Tensor& offset,
                                             int64_t run_length, const Tensor& indices) {
  constexpr int64_t kLargest = int64_t{1} << 62;
  STD_TORCH_CHECK(0 <= numel && numel <= kLargest, "numel must be in [0, 2**62], got ", numel);
  STD_TORCH_CHECK(1 <= run_length && run_length <= kLargest,
                  "run_length must be in [1, 2**62], got ", run_length);
  const bool wide = numel > INT32_MAX;
  STD_TORCH_CHECK(
      indices.dim() == 1 && indices.is_contiguous() && is_index_type(indices.scalar_type()) &&
          !(wide && indices.scalar_type() == ScalarType::Int),
      "indices must be a contiguous 1-d tensor of int64, or of int32 where numel is below 2**31, "
      "got ",
      describe(indices));
  STD_TORCH_CHECK(indices.numel() <= numel / run_length * run_length, "k must be in [0, ",
                  numel / run_length * run_length, "], the whole runs of ", run_length, " in ",
                  numel, " elements, got ", indices.numel());
  check_offset(offset, indices);
}

inline void check_random_k_arguments(const Tensor& x, const Tensor& indices,
                                     const std::optional<Tensor>& residual, const Tensor& values) {
  check_buffer("x", x);
  STD_TORCH_CHECK(indices.dim() == 1 && indices.is_contiguous() &&
                      is_index_type(indices.scalar_type()) && on_same_device(indices, x),
                  "indices must be a contiguous 1-d tensor of int32 or int64 on x's device, got ",
                  describe(indices));
  if (residual) check_like("residual", *residual, "x", x);
  check_like("values", values, "indices", indices);
  STD_TORCH_CHECK(values.scalar_type() == x.scalar_type(), "values must have x's dtype ",
                  dtype_name(x.scalar_type()), ", got ", dtype_name(values.scalar_type()));
}

}  // namespace pyparallel
