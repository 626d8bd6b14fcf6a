#pragma once

#include "host_device.h"

// What the scalars of an optimizer step hold, from which X_step.h makes the numbers of its rule.
namespace pyparallel {

struct StepScalars {
  double lr, horizon;
  double mass;        // the rank's own while it steps
  double mass_after;  // while it predicts: with the messages' masses
  float grad_scale;   // 1 without gradient scaling
  bool skipped;       // found_inf: no element is stepped, though the caller has counted the step
};

// What each gradient is multiplied by.
PYPARALLEL_HOST_DEVICE float grad_factor(bool maximize, float grad_scale) {
  const float inverse = static_cast<float>(1 / static_cast<double>(grad_scale));
  return maximize ? -inverse : inverse;
}

}  // namespace pyparallel
