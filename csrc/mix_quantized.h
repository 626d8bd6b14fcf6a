#pragma once

#include "mix.h"
#include "quantize.h"

// The arithmetic of `mix_quantized_` for one element: mix.h's average of entries decoded by
// quantize.h.
namespace pyparallel {

template <typename Format, typename Float, typename Bits>
PYPARALLEL_HOST_DEVICE Float mix_add_code(Float delta, Float own, Bits code, float scale,
                                          float coefficient) {
  const Float message = Format::template decode<Float>(code) * scale;
  return mix_add_message(delta, own, message, coefficient);
}

}  // namespace pyparallel
