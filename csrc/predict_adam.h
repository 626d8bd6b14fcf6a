#pragma once

#include <cmath>

#include "host_device.h"

// What one element of `predict_adam` does: the parameter after `horizon` more steps with today's
// moments. The order of operations is that of torch's fused Adam, bias corrections in double.
namespace pyparallel {

struct PredictAdamScalars {
  float step_size, correction, eps;
};

PYPARALLEL_HOST_DEVICE PredictAdamScalars predict_adam_scalars(double lr, double beta1,
                                                               double beta2, double eps,
                                                               double step, double horizon) {
  return {static_cast<float>(lr * horizon / (1 - pow(beta1, step))),
          static_cast<float>(sqrt(1 - pow(beta2, step))), static_cast<float>(eps)};
}

template <typename Float, typename Sqrt>
PYPARALLEL_HOST_DEVICE Float predict_adam(Float param, Float exp_avg, Float exp_avg_sq,
                                          const PredictAdamScalars& scalars, Sqrt square_root) {
  const Float denominator = square_root(exp_avg_sq) / scalars.correction + scalars.eps;
  return param - scalars.step_size * exp_avg / denominator;
}

}  // namespace pyparallel
