#pragma once

#include "mix.h"
#include "quantize.h"

// The arithmetic of `mix_quantized_` for one element: mix.h's average of entries decoded by
// quantize.h, or of replicas to which they are added.
namespace pyparallel {

template <typename Format, typename Float, typename Bits>
PYPARALLEL_HOST_DEVICE Float mix_add_code(Float delta, Float own, Bits code, float scale,
                                          float coefficient) {
  const Float message = Format::template decode<Float>(code) * scale;
  return mix_add_message(delta, own, message, coefficient);
}

template <typename Format, typename Float, typename Bits>
PYPARALLEL_HOST_DEVICE Float add_code(Float replica, Bits code, float scale) {
  return replica + Format::template decode<Float>(code) * scale;
}

}  // namespace pyparallel
