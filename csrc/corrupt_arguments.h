#pragma once

#include "tensor_checks.h"

// What compiled ops that count the corrupt entries of messages demand of their counter.
namespace pyparallel {

inline void check_corrupt(const Tensor& corrupt, const Tensor& model) {
  STD_TORCH_CHECK(corrupt.scalar_type() == ScalarType::Long && corrupt.dim() == 0 &&
                      on_same_device(corrupt, model),
                  "corrupt must be a 0-d int64 tensor on ", device_name(model), ", got ",
                  describe(corrupt));
}

}  // namespace pyparallel
