#pragma once

#include "host_device.h"
#include "predict_adam.h"

// What one element of `adamw_step_` does after the messages are mixed in. On the numerator
// x = mass * param the decay is scale free, and the update becomes lr / mass times the usual one.
// It is `predict_adam` one step ahead, so the step and the prediction are the same arithmetic.
namespace pyparallel {

struct AdamwStep {
  static constexpr int kNumStates = 2;

  float sign, decay, pull, beta2, share;
  bool from_average;  // exp_avg moves towards the gradient, by `pull`; or is reached from there
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
  // Whichever operand is nearer: with beta1 = 0 the average must be the gradient, exactly.
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
