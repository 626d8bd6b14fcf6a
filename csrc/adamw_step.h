#pragma once

#include <cmath>

#include "host_device.h"
#include "predict_adam.h"
#include "step_scalars.h"

// The arithmetic of `adamw_step_` for one element. On the numerator x = mass * param decoupled
// decay is scale-free, Adam's decay adds weight_decay * mass * param to the gradient, and the
// update has learning rate lr / mass. It is `predict_adam` one step ahead, so the step and the
// prediction share their arithmetic.
namespace pyparallel {

struct AdamwStep {
  static constexpr int kNumStates = 2;

  float factor, decay, weight_decay, pull, beta2, share;
  bool from_average;  // interpolate from exp_avg towards the gradient by `pull`, or the reverse
  bool decoupled;     // `decay` is of the parameter, or else `weight_decay` adds to the gradient
  PredictAdamScalars next, ahead;

  template <typename Float, typename Sqrt>
  PYPARALLEL_HOST_DEVICE void step(Float& param, Float grad, Float (&states)[2],
                                   Sqrt square_root) const {
    grad = factor * grad;
    if (!decoupled) grad = grad + weight_decay * param;
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
  bool decoupled, maximize;
};

// The last step that was taken if this one is skipped, which the caller has counted.
PYPARALLEL_HOST_DEVICE double adam_taken(double step) { return fmax(step - 1, 1.0); }

// Of the step, or of the prediction, whose moments are those of the last step that was taken.
PYPARALLEL_HOST_DEVICE PredictAdamScalars adamw_step_scalars(const AdamwOptions& options,
                                                             const StepScalars& scalars,
                                                             bool predicts,
                                                             const AdamCorrections& at_step,
                                                             const AdamCorrections& at_taken) {
  const double mass = predicts ? scalars.mass_after : scalars.mass;
  const double horizon = predicts ? scalars.horizon : 1;
  const bool earlier = predicts && scalars.skipped;
  const AdamCorrections corrections = earlier ? at_taken : at_step;
  return predict_adam_scalars(scalars.lr / mass, options.eps, corrections, horizon);
}

PYPARALLEL_HOST_DEVICE AdamwStep make_adamw_step(const AdamwOptions& options,
                                                 const StepScalars& scalars,
                                                 const PredictAdamScalars& next,
                                                 const PredictAdamScalars& ahead) {
  // Interpolate from the nearer operand: with beta1 = 0 the average must be exactly the gradient.
  const double share = 1 - options.beta1;
  const bool from_average = share < 0.5;
  return {grad_factor(options.maximize, scalars.grad_scale),
          options.decoupled ? static_cast<float>(1 - scalars.lr * options.weight_decay) : 1.0f,
          static_cast<float>(options.weight_decay * scalars.mass),
          static_cast<float>(from_average ? share : -options.beta1),
          static_cast<float>(options.beta2),
          static_cast<float>(1 - options.beta2),
          from_average,
          options.decoupled,
          next,
          ahead};
}

PYPARALLEL_HOST_DEVICE AdamwStep make_adamw_step(const AdamwOptions& options,
                                                 const StepScalars& scalars,
                                                 const AdamCorrections& at_step,
                                                 const AdamCorrections& at_taken) {
  return make_adamw_step(options, scalars,
                         adamw_step_scalars(options, scalars, false, at_step, at_taken),
                         adamw_step_scalars(options, scalars, true, at_step, at_taken));
}

PYPARALLEL_HOST_DEVICE AdamwStep make_adamw_step(const AdamwOptions& options,
                                                 const StepScalars& scalars, double step) {
  return make_adamw_step(options, scalars, adam_corrections(options.beta1, options.beta2, step),
                         adam_corrections(options.beta1, options.beta2, adam_taken(step)));
}

}  // namespace pyparallel
