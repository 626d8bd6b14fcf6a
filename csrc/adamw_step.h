#pragma once

#include "host_device.h"
#include "predict_adam.h"

// The arithmetic of `adamw_step_` for one element, after messages are mixed in. On the numerator
// x = mass * param the decay is scale-free, and the update has learning rate lr / mass. It is
// `predict_adam` one step ahead, so the step and the prediction share their arithmetic.
namespace pyparallel {

struct AdamwStep {
  static constexpr int kNumStates = 2;

  float sign, decay, pull, beta2, share;
  bool from_average;  // interpolate from exp_avg towards the gradient by `pull`, or the reverse
  PredictAdamScalars next, ahead;

  template <typename Float, typename Sqrt>
  PYPARALLEL_HOST_DEVICE void step(Float& param, Float grad, Float (&states)[2],
                                   Sqrt square_root) const {
    grad = sign * grad;
    const Float base = from_average ? states[0] : grad;
    states[0] = base + pull * (grad - states[0]);
    states[1] = beta2 * states[1] + share * grad * grad;
    param = predict_adam(param * decay, states[0], states[1], next, square_root);
  }

  template <typename Float, typename Sqrt>
  PYPARALLEL_HOST_DEVICE Float predict(Float param, const Float (&states)[2],
                                       Sqrt square_root) const {
    return predict_adam(param, states[0], states[1], ahead, square_root);
  }
};

struct AdamwOptions {
  double beta1, beta2, eps, weight_decay;
  bool maximize;
};

PYPARALLEL_HOST_DEVICE AdamwStep make_adamw_step(const AdamwOptions& options, double lr,
                                                 double step, double horizon, double mass) {
  // Interpolate from the nearer operand: with beta1 = 0 the average must be exactly the gradient.
  const double share = 1 - options.beta1;
  const bool from_average = share < 0.5;
  return {
      options.maximize ? -1.0f : 1.0f,
      static_cast<float>(1 - lr * options.weight_decay),
      static_cast<float>(from_average ? share : -options.beta1),
      static_cast<float>(options.beta2),
      static_cast<float>(1 - options.beta2),
      from_average,
      predict_adam_scalars(lr / mass, options.beta1, options.beta2, options.eps, step, 1),
      predict_adam_scalars(lr / mass, options.beta1, options.beta2, options.eps, step, horizon)};
}

}  // namespace pyparallel
