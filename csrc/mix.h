#pragma once

#include "host_device.h"

// The arithmetic of `mix_` for one element; cpu/mix.cpp and cuda/mix.cu iterate over the elements.
// `Float` is a float, or a vector of them.
//
// PushSum's average (weight * z + sum_j masses[j] * messages[j]) / total, with the total
// weight + sum_j masses[j], is evaluated as z + sum_j (masses[j] / total) * (messages[j] - z):
// equal messages then leave z unchanged bit for bit, while the plain form drifts. Messages with the
// coefficient 0 are left out, whatever they hold: 0 times an infinity would be nan. The sum starts
// at -0, which changes no z: 0 would change -0.
namespace pyparallel {

template <typename Float>
PYPARALLEL_HOST_DEVICE Float mix_nothing() {
  return -Float{};
}

PYPARALLEL_HOST_DEVICE float mix_coefficient(double mass, double total) {
  return static_cast<float>(mass / total);
}

template <typename Float>
PYPARALLEL_HOST_DEVICE Float mix_add_message(Float delta, Float own, Float message,
                                             float coefficient) {
  return delta + coefficient * (message - own);
}

template <typename Float>
PYPARALLEL_HOST_DEVICE Float mix_apply(Float own, Float delta) {
  return own + delta;
}

}  // namespace pyparallel
