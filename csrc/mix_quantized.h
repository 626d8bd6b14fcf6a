#pragma once

#include "mix.h"
#include "quantize.h"

// What one element of `mix_quantized_` does: mix.h's average of what quantize.h decodes.
namespace pyparallel {

template <typename Format, typename Float, typename Bits>
PYPARALLEL_HOST_DEVICE Float mix_add_code(Float delta, Float own, Bits code, float scale,
                                          float coefficient) {
  const Float message = Format::template decode<Float>(code) * scale;
  return mix_add_message(delta, own, message, coefficient);
}

}  // namespace pyparallel
