#pragma once

#include <optional>
#include <vector>

#include "tensor_checks.h"

// Argument checks of the compiled ops on parameters: mixing, predictions and optimizer steps.
namespace pyparallel {

inline void check_mass(const char* name, const Tensor& mass, const Tensor& model) {
  require(is_number(mass, ScalarType::Double, model), name,
          "a 0-d float64 tensor on the buffers' device");
}

inline void check_masses(const Tensor& masses, size_t num_messages, const Tensor& model) {
  require(is_flat(masses, ScalarType::Double, static_cast<int64_t>(num_messages), model), "masses",
          "a contiguous float64 tensor with one mass per message on the buffers' device");
}

inline void check_messages(const std::vector<Tensor>& messages, const Tensor& model) {
  for (const Tensor& message : messages) {
    check_like("messages", message, model);
    require(message.scalar_type() == messages[0].scalar_type(), "messages", "tensors of one dtype");
  }
}

inline void check_mix_arguments(const Tensor& z, const Tensor& weight,
                                const std::vector<Tensor>& messages, const Tensor& masses) {
  check_buffer("z", z);
  check_mass("weight", weight, z);
  check_masses(masses, messages.size(), z);
  check_messages(messages, z);
}

inline void check_moments(const Tensor& exp_avg, const Tensor& exp_avg_sq, const Tensor& param) {
  check_like("exp_avg", exp_avg, param);
  check_like("exp_avg_sq", exp_avg_sq, param);
  require(exp_avg.scalar_type() == exp_avg_sq.scalar_type(), "exp_avg and exp_avg_sq",
          "the same dtype");
}

inline void check_predict_sgd_arguments(const Tensor& param, const Tensor& momentum_buffer,
                                        const Tensor& lr, const Tensor& horizon,
                                        const Tensor& out) {
  check_buffer("param", param);
  check_like("momentum_buffer", momentum_buffer, param);
  check_scalar("lr", lr, param);
  check_scalar("horizon", horizon, param);
  check_like("out", out, param);
}

inline void check_predict_adam_arguments(const Tensor& param, const Tensor& exp_avg,
                                         const Tensor& exp_avg_sq, const Tensor& lr,
                                         const Tensor& step, const Tensor& horizon,
                                         const Tensor& out) {
  check_buffer("param", param);
  check_moments(exp_avg, exp_avg_sq, param);
  check_scalar("lr", lr, param);
  check_scalar("step", step, param);
  check_scalar("horizon", horizon, param);
  check_like("out", out, param);
}

// What all optimizer steps have in common.
struct StepTensors {
  Tensor param;
  std::vector<Tensor> grads;     // of any shape, all of one dtype
  std::vector<int64_t> offsets;  // of each gradient's first element in the flat buffers
  std::vector<Tensor> states;    // all of one dtype
  Tensor mass;
  std::vector<Tensor> messages;
  Tensor masses;
  bool mix_after;
  std::optional<Tensor> grad_scale, found_inf, nonfinite, prediction, message;
};

// Outputs lie on param's device, like all buffers, and in no other's memory.
inline void check_outputs(const StepTensors& tensors) {
  std::vector<Extent> taken;
  const auto check = [&](const char* name, const std::optional<Tensor>& output) {
    if (!output) return;
    check_like(name, *output, tensors.param);
    if (taken.empty()) {
      taken.emplace_back(tensors.param);
      for (const auto* buffers : {&tensors.grads, &tensors.states, &tensors.messages}) {
        for (const Tensor& buffer : *buffers) taken.emplace_back(buffer);
      }
    }
    const Extent own(*output);
    for (const Extent& other : taken) check_apart(name, own, other);
    taken.push_back(own);
  };
  check("prediction", tensors.prediction);
  check("message", tensors.message);
}

inline void check_grads(const StepTensors& tensors) {
  require(tensors.offsets.size() == tensors.grads.size(), "offsets", "one entry per gradient");
  const int64_t numel = tensors.param.numel();
  int64_t begin = 0;         // of what later gradients may cover
  std::optional<Kind> kind;  // of the first one
  for (size_t i = 0; i < tensors.grads.size(); ++i) {
    const Tensor& grad = tensors.grads[i];
    if (i == 0) {
      kind.emplace(grad);
      require(is_float(grad.scalar_type()) && on_same_device(grad, tensors.param), "grad",
              "tensors of float32, bfloat16 or float16 on param's device");
    }
    require(Kind(grad) == *kind, "grad", "tensors of one dtype on param's device");
    require(grad.is_contiguous(), "grad", "contiguous tensors");
    const int64_t offset = tensors.offsets[i], length = grad.numel();
    require(offset >= begin && length <= numel - offset, "offsets",
            "places inside param that ascend without overlap");
    begin = offset + length;
  }
}

// A 0-d float32 tensor of gradient scaling.
inline void check_factor(const char* name, const std::optional<Tensor>& tensor,
                         const Tensor& model) {
  require(!tensor || is_number(*tensor, ScalarType::Float, tensor->is_cpu() ? *tensor : model),
          name, "a 0-d float32 tensor on the cpu or param's device");
}

inline void check_step_arguments(const StepTensors& tensors) {
  const Tensor& param = tensors.param;
  check_buffer("param", param);
  check_grads(tensors);
  // Without messages the mass is only a scalar, and may be a kernel argument.
  const bool mixes = !tensors.messages.empty();
  const auto model = [&](const Tensor& own) { return !mixes && own.is_cpu() ? own : param; };
  check_mass("mass", tensors.mass, model(tensors.mass));
  check_masses(tensors.masses, tensors.messages.size(), model(tensors.masses));
  check_messages(tensors.messages, param);
  check_factor("grad_scale", tensors.grad_scale, param);
  check_factor("found_inf", tensors.found_inf, param);
  require(!tensors.nonfinite || is_number(*tensors.nonfinite, ScalarType::Double, param),
          "nonfinite", "a 0-d float64 tensor on param's device");
  check_outputs(tensors);
}

inline void check_sgd_step_arguments(const StepTensors& tensors, double momentum, const Tensor& lr,
                                     const Tensor& horizon) {
  check_step_arguments(tensors);
  for (const Tensor& state : tensors.states) check_like("momentum_buffer", state, tensors.param);
  require(!tensors.states.empty() || momentum == 0, "momentum_buffer",
          "a tensor where momentum is not 0");
  check_scalar("lr", lr, tensors.param);
  check_scalar("horizon", horizon, tensors.param);
}

inline void check_adamw_step_arguments(const StepTensors& tensors, const Tensor& lr,
                                       const Tensor& step, const Tensor& horizon) {
  check_step_arguments(tensors);
  check_moments(tensors.states[0], tensors.states[1], tensors.param);
  check_scalar("lr", lr, tensors.param);
  check_scalar("step", step, tensors.param);
  check_scalar("horizon", horizon, tensors.param);
}

}  // namespace pyparallel
