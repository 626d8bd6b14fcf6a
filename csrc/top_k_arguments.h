#pragma once

#include <optional>

#include "index_types.h"
#include "tensor_checks.h"

// Argument checks of the compiled `top_k` and `scatter_add_`.
namespace pyparallel {

inline void check_number_beside(const char* name, const char* rule, ScalarType dtype,
                                const Tensor& tensor, const Tensor& model) {
  STD_TORCH_CHECK(
      tensor.scalar_type() == dtype && tensor.dim() == 0 && on_same_device(tensor, model), name,
      " must be a 0-d ", rule, " tensor on ", model.is_cpu() ? "cpu" : "cuda", ", got ",
      describe(tensor));
}

inline void check_indices(const Tensor& indices, const Tensor& values) {
  STD_TORCH_CHECK(indices.dim() == 1 && indices.is_contiguous() &&
                      is_index_type(indices.scalar_type()) && indices.numel() == values.numel() &&
                      on_same_device(indices, values),
                  "indices must be a contiguous 1-d tensor of int32 or int64 with values's length "
                  "and device (",
                  describe(values), "), got ", describe(indices));
}

inline void check_beside(const char* name, const Tensor& tensor, const char* model_name,
                         const Tensor& model) {
  STD_TORCH_CHECK(on_same_device(tensor, model), name, " must be on ", model_name,
                  "'s device, got ", describe(tensor));
}

inline void check_top_k_arguments(const Tensor& x, const std::optional<Tensor>& residual,
                                  const std::optional<Tensor>& threshold, const Tensor& values,
                                  const Tensor& indices) {
  check_buffer("x", x);
  if (residual) check_like("residual", *residual, "x", x);
  if (threshold) check_number_beside("threshold", "float32", ScalarType::Float, *threshold, x);
  check_buffer("values", values);
  check_beside("values", values, "x", x);
  STD_TORCH_CHECK(values.scalar_type() == x.scalar_type(), "values must have x's dtype, got ",
                  describe(values));
  STD_TORCH_CHECK(values.numel() <= x.numel(), "k must be in [0, ", x.numel(), "], got ",
                  values.numel());
  check_indices(indices, values);
  STD_TORCH_CHECK(indices.scalar_type() == ScalarType::Long || x.numel() < int64_t{1} << 31,
                  "indices must be int64 from 2**31 elements on, got ", describe(indices));
}

inline void check_scatter_add_arguments(const Tensor& dense, const Tensor& values,
                                        const Tensor& indices, const Tensor& corrupt) {
  check_buffer("dense", dense);
  check_buffer("values", values);
  check_beside("values", values, "dense", dense);
  check_indices(indices, values);
  check_number_beside("corrupt", "int64", ScalarType::Long, corrupt, dense);
}

}  // namespace pyparallel
