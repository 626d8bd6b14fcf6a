#pragma once

#include <cstdint>

#include "tensor_checks.h"

// Calls function(T{}) with the C++ type T of indices that have passed check_indices.
namespace pyparallel {

inline bool is_index_type(ScalarType dtype) {
  return dtype == ScalarType::Int || dtype == ScalarType::Long;
}

template <typename Function>
void with_index_type(ScalarType dtype, Function&& function) {
  if (dtype == ScalarType::Int) {
    function(int32_t{});
  } else {
    function(int64_t{});
  }
}

}  // namespace pyparallel
