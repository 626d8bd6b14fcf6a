#pragma once

#include "host_device.h"
#include "predict_sgd.h"
#include "step_scalars.h"

// The arithmetic of `sgd_step_` for one element. On the numerator
// x = mass * param the decay adds weight_decay * mass * param to the gradient, and the update has
// learning rate lr / mass.
namespace pyparallel {

struct SgdStep {
  static constexpr int kNumStates = 1;

  float factor, weight_decay, momentum, share, next, ahead;
  bool nesterov;

  // Without a momentum buffer the state is zero before, and the gradient after.
  template <typename Float, typename Sqrt>
  PYPARALLEL_HOST_DEVICE void step(Float& param, Float grad, Float (&states)[1],
                                   Sqrt /*square_root*/) const {
    grad = factor * grad + weight_decay * param;
    states[0] = momentum * states[0] + share * grad;
    const Float update = nesterov ? grad + momentum * states[0] : states[0];
    param = predict_sgd(param, update, next);
  }

  template <typename Float, typename Sqrt>
  PYPARALLEL_HOST_DEVICE Float predict(Float param, const Float (&states)[1],
                                       Sqrt /*square_root*/) const {
    return predict_sgd(param, states[0], ahead);
  }
};

struct SgdOptions {
  double momentum, dampening, weight_decay;
  bool nesterov, maximize;
};

PYPARALLEL_HOST_DEVICE SgdStep make_sgd_step(const SgdOptions& options,
                                             const StepScalars& scalars) {
  return {grad_factor(options.maximize, scalars.grad_scale),
          static_cast<float>(options.weight_decay * scalars.mass),
          static_cast<float>(options.momentum),
          static_cast<float>(1 - options.dampening),
          predict_sgd_scale(scalars.lr / scalars.mass, 1),
          predict_sgd_scale(scalars.lr / scalars.mass_after, scalars.horizon),
          options.nesterov};
}

}  // namespace pyparallel
