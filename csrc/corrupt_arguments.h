#pragma once

#include "tensor_checks.h"

// Checks of the counter of corrupt entries.
namespace pyparallel {

inline void check_corrupt(const Tensor& corrupt, const Tensor& model) {
  STD_TORCH_CHECK(corrupt.scalar_type() == ScalarType::Long && corrupt.dim() == 0 &&
                      on_same_device(corrupt, model),
                  "corrupt must be a 0-d int64 tensor on ", device_name(model), ", got ",
                  describe(corrupt));
}

}  // namespace pyparallel
