#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cmath>
#include <optional>

#include "host_device.h"
#include "quantize.h"
#include "tensor_checks.h"

// The arithmetic of `add_or_clear_` for one element.
namespace pyparallel {

// own + times * other, rounded once.
PYPARALLEL_HOST_DEVICE float add_times(float own, float other, float times) {
  return fmaf(other, times, own);
}

inline void check_add_or_clear_arguments(const Tensor& x, const std::optional<Tensor>& y,
                                         const std::optional<Tensor>& clear) {
  check_buffer("x", x);
  if (y) {
    check_like("y", *y, x);
    check_apart("y", *y, x);
  }
  if (clear) {
    require(is_number(*clear, ScalarType::Bool, x), "clear",
            "a 0-d bool tensor on the buffers' device");
  }
}

}  // namespace pyparallel
