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

// Of the two moments, which begin at zero.
struct AdamCorrections {
  double first, second;  // 1 - beta1^step, sqrt(1 - beta2^step)
};

PYPARALLEL_HOST_DEVICE AdamCorrections adam_corrections(double beta1, double beta2, double step) {
  return {1 - pow(beta1, step), sqrt(1 - pow(beta2, step))};
}

PYPARALLEL_HOST_DEVICE PredictAdamScalars predict_adam_scalars(double lr, double eps,
                                                               const AdamCorrections& corrections,
                                                               double horizon) {
  return {static_cast<float>(lr * horizon / corrections.first * corrections.second),
          static_cast<float>(eps * corrections.second)};
}

template <typename Float, typename Sqrt>
PYPARALLEL_HOST_DEVICE Float predict_adam(Float param, Float exp_avg, Float exp_avg_sq,
                                          const PredictAdamScalars& scalars, Sqrt square_root) {
  return param - scalars.step_size * exp_avg / (square_root(exp_avg_sq) + scalars.eps);
}

}  // namespace pyparallel
