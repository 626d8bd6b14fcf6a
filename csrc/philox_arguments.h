#pragma once

#include "tensor_checks.h"

// Argument checks of the compiled ops that draw random numbers.
namespace pyparallel {

inline void check_offset(const Tensor& offset, const Tensor& model) {
  STD_TORCH_CHECK(
      offset.scalar_type() == ScalarType::Long && offset.dim() == 0 &&
          (offset.is_cpu() || on_same_device(offset, model)),
      "offset must be a number, or a 0-d int64 tensor on the cpu or the buffer's device, got ",
      describe(offset));
}

}  // namespace pyparallel
