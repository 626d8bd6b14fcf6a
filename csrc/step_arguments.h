#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "mix_arguments.h"
#include "tensor_checks.h"

// Arguments shared by the compiled optimizer steps, and their checks.
namespace pyparallel {

struct StepTensors {
  Tensor param, grad;
  std::vector<std::pair<const char*, Tensor>> states;  // with the names they have in the op
  Tensor mass;
  std::vector<Tensor> messages;
  Tensor masses;
  std::optional<Tensor> prediction, message;
};

inline void check_output(const char* name, const Tensor& output, const StepTensors& tensors) {
  check_like(name, output, "param", tensors.param);
  check_apart(name, output, "param", tensors.param);
  check_apart(name, output, "grad", tensors.grad);
  for (const auto& [state_name, state] : tensors.states) {
    check_apart(name, output, state_name, state);
  }
  for (size_t j = 0; j < tensors.messages.size(); ++j) {
    check_apart(name, output, "messages[" + std::to_string(j) + "]", tensors.messages[j]);
  }
}

inline void check_step_arguments(const StepTensors& tensors) {
  const Tensor& param = tensors.param;
  check_buffer("param", param);
  check_like("grad", tensors.grad, "param", param);
  for (const auto& [name, state] : tensors.states) check_like(name, state, "param", param);
  const int64_t num_messages = static_cast<int64_t>(tensors.messages.size());
  // Without messages the mass is only a scalar, and may be a kernel argument.
  const bool is_number = num_messages == 0 && tensors.mass.is_cpu();
  check_doubles("mass", tensors.mass, 0, 1, is_number ? tensors.mass : param, "param");
  check_doubles("masses", tensors.masses, 1, num_messages,
                num_messages == 0 ? tensors.masses : param, "param");
  check_messages(tensors.messages, "param", param);
  if (tensors.prediction) check_output("prediction", *tensors.prediction, tensors);
  if (tensors.message) check_output("message", *tensors.message, tensors);
  if (tensors.prediction && tensors.message) {
    check_apart("message", *tensors.message, "prediction", *tensors.prediction);
  }
}

}  // namespace pyparallel
