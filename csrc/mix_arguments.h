#pragma once

#include <string>
#include <vector>

#include "tensor_checks.h"

// Argument checks of the compiled ops that mix messages in.
namespace pyparallel {

inline void check_messages(const std::vector<Tensor>& messages, const char* model_name,
                           const Tensor& model) {
  for (size_t j = 0; j < messages.size(); ++j) {
    check_like("messages[" + std::to_string(j) + "]", messages[j], model_name, model);
    STD_TORCH_CHECK(messages[j].scalar_type() == messages[0].scalar_type(),
                    "messages must have one dtype, got ", dtype_name(messages[0].scalar_type()),
                    " and ", dtype_name(messages[j].scalar_type()));
  }
}

inline void check_mix_arguments(const Tensor& z, const Tensor& weight,
                                const std::vector<Tensor>& messages, const Tensor& masses) {
  check_buffer("z", z);
  check_doubles("weight", weight, 0, 1, z);
  check_doubles("masses", masses, 1, static_cast<int64_t>(messages.size()), z);
  check_messages(messages, "z", z);
}

}  // namespace pyparallel
