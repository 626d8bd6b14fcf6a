#pragma once

#include "host_device.h"

// The arithmetic of `predict_sgd` for one element: the parameter after `horizon` more steps along
// the momentum.
namespace pyparallel {

PYPARALLEL_HOST_DEVICE float predict_sgd_scale(double lr, double horizon) {
  return static_cast<float>(lr * horizon);
}

template <typename Float>
PYPARALLEL_HOST_DEVICE Float predict_sgd(Float param, Float momentum_buffer, float scale) {
  return param - scale * momentum_buffer;
}

}  // namespace pyparallel
