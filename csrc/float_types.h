#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include "tensor_checks.h"

// Calls function(T{}) with the C++ type T of a buffer that has passed check_buffer.
namespace pyparallel {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;

template <typename Function>
void with_float_type(ScalarType dtype, Function&& function) {
  if (dtype == ScalarType::Float) {
    function(float{});
  } else if (dtype == ScalarType::BFloat16) {
    function(BFloat16{});
  } else {
    function(Half{});
  }
}

// The same for several buffers at once: function(T{}, U{}, ...).
template <typename Function>
void with_float_types(Function&& function) {
  function();
}

template <typename Function, typename... Tensors>
void with_float_types(Function&& function, const Tensor& first, const Tensors&... rest) {
  with_float_type(first.scalar_type(), [&](auto type) {
    with_float_types([&](auto... types) { function(type, types...); }, rest...);
  });
}

}  // namespace pyparallel
