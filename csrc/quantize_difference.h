#pragma once

#include "quantize.h"

// The arithmetic of `quantize_difference_` for one element, around that of quantize.h.
namespace pyparallel {

// `ratio` is the mass that is sent over the mass that is kept.
template <typename Float>
PYPARALLEL_HOST_DEVICE Float retain_residual(Float own, Float replica, float ratio) {
  return own + (own - replica) * ratio;
}

}  // namespace pyparallel
