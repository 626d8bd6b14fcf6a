#pragma once

#include <cmath>

#include "host_device.h"

// The arithmetic of `predict_adam` for one element: the parameter after `horizon` more steps with
// the current moments. Numerator and denominator of Adam's update are both multiplied by
// sqrt(1 - beta2^step), which saves a division per element.
namespace pyparallel {

struct PredictAdamScalars {
  float step_size, eps;
};

PYPARALLEL_HOST_DEVICE PredictAdamScalars predict_adam_scalars(double lr, double beta1,
                                                               double beta2, double eps,
                                                               double step, double horizon) {
  const double correction = sqrt(1 - pow(beta2, step));
  return {static_cast<float>(lr * horizon / (1 - pow(beta1, step)) * correction),
          static_cast<float>(eps * correction)};
}

template <typename Float, typename Sqrt>
PYPARALLEL_HOST_DEVICE Float predict_adam(Float param, Float exp_avg, Float exp_avg_sq,
                                          const PredictAdamScalars& scalars, Sqrt square_root) {
  return param - scalars.step_size * exp_avg / (square_root(exp_avg_sq) + scalars.eps);
}

}  // namespace pyparallel
