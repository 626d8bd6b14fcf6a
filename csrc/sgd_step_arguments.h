#pragma once

#include "step_arguments.h"

// Argument checks of the compiled `sgd_step_`.
namespace pyparallel {

inline void check_sgd_step_arguments(const StepTensors& tensors, double momentum, const Tensor& lr,
                                     const Tensor& horizon) {
  check_step_arguments(tensors);
  STD_TORCH_CHECK(!tensors.states.empty() || momentum == 0,
                  "momentum_buffer must be given where momentum is not 0, got None");
  check_scalar("lr", lr, tensors.param);
  check_scalar("horizon", horizon, tensors.param);
}

}  // namespace pyparallel
