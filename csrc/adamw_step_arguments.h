#pragma once

#include "step_arguments.h"

// Argument checks of the compiled `adamw_step_`.
namespace pyparallel {

inline void check_adamw_step_arguments(const StepTensors& tensors, const Tensor& lr,
                                       const Tensor& step, const Tensor& horizon) {
  check_step_arguments(tensors);
  const ScalarType mean = tensors.states[0].second.scalar_type();
  const ScalarType square = tensors.states[1].second.scalar_type();
  STD_TORCH_CHECK(mean == square, "exp_avg and exp_avg_sq must have one dtype, got ",
                  dtype_name(mean), " and ", dtype_name(square));
  check_scalar("lr", lr, tensors.param);
  check_scalar("step", step, tensors.param);
  check_scalar("horizon", horizon, tensors.param);
}

}  // namespace pyparallel
