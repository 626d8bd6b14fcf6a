#pragma once

#include <vector>

#include "orthogonalize.h"
#include "tensor_checks.h"

// Argument checks of the compiled `orthogonalize_`.
namespace pyparallel {

inline void check_orthogonalize_arguments(const std::vector<Tensor>& matrices) {
  static_assert(kMaxColumns == 64, "the error has this number");
  for (const Tensor& matrix : matrices) {
    const int64_t dim = matrix.dim();
    require(
        (dim == 2 || dim == 3) && matrix.is_contiguous() && is_float(matrix.scalar_type()) &&
            matrix.size(dim - 1) <= matrix.size(dim - 2) && matrix.size(dim - 1) <= kMaxColumns,
        "matrices",
        "contiguous (m, r) or (b, m, r) tensors of float32, bfloat16 or float16 with r <= m and "
        "r <= 64");
    require(on_same_device(matrix, matrices[0]), "matrices", "tensors of one device");
  }
}

}  // namespace pyparallel
