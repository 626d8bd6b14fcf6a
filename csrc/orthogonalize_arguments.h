#pragma once

#include <string>
#include <vector>

#include "orthogonalize.h"
#include "tensor_checks.h"

// Argument checks of the compiled `orthogonalize_`.
namespace pyparallel {

inline void check_orthogonalize_arguments(const std::vector<Tensor>& matrices) {
  for (size_t i = 0; i < matrices.size(); ++i) {
    const Tensor& matrix = matrices[i];
    const std::string name = "matrices[" + std::to_string(i) + "]";
    const bool fits = (matrix.dim() == 2 || matrix.dim() == 3) && matrix.is_contiguous() &&
                      is_low_or_single_precision(matrix.scalar_type()) &&
                      matrix.size(matrix.dim() - 1) <= matrix.size(matrix.dim() - 2) &&
                      matrix.size(matrix.dim() - 1) <= kMaxColumns;
    STD_TORCH_CHECK(fits, name,
                    " must be a contiguous (m, r) or (b, m, r) tensor of float32, bfloat16 or "
                    "float16 with r <= m and r <= ",
                    kMaxColumns, ", got ", describe(matrix));
    STD_TORCH_CHECK(on_same_device(matrix, matrices[0]), name,
                    " must be on the device of matrices[0] (", describe(matrices[0]), "), got ",
                    describe(matrix));
  }
}

}  // namespace pyparallel
