#pragma once

#include <optional>
#include <string>

#include "block_arguments.h"
#include "corrupt_arguments.h"
#include "philox_arguments.h"
#include "quantize.h"
#include "tensor_checks.h"

// Argument checks of the compiled `quantize` and `dequantize`.
namespace pyparallel {

// Calls function(Format{}) with the format named by the ops' arguments.
template <typename Function>
void with_format(int64_t bits, const std::string& format, Function&& function) {
  if (bits == 8 && format == "int") {
    function(Int8{});
  } else if (bits == 4 && format == "int") {
    function(Int4{});
  } else if (bits == 8 && format == "e4m3") {
    function(E4M3{});
  } else if (bits == 8 && format == "e5m2") {
    function(E5M2{});
  } else {
    STD_TORCH_CHECK(false,
                    "bits and format must be 8 and int, 4 and int, 8 and e4m3, or 8 and e5m2, got ",
                    bits, " and ", format);
  }
}

// A message with as many entries as the model.
inline void check_message(const std::string& codes_name, const Tensor& codes,
                          const std::string& scales_name, const Tensor& scales, int64_t bits,
                          const std::string& format, int64_t block_size, const Tensor& model) {
  const int64_t numel = model.numel();
  const bool is_signed = bits == 8 && format == "int";
  check_flat(codes_name, codes, is_signed ? ScalarType::Char : ScalarType::Byte,
             bits == 8 ? numel : numel / 2 + numel % 2, model);
  check_flat(scales_name, scales, ScalarType::Float, numel / block_size + (numel % block_size != 0),
             model);
}

inline void check_quantize_arguments(const Tensor& x, int64_t bits, const std::string& format,
                                     int64_t block_size, const std::optional<Tensor>& residual,
                                     const Tensor& offset, const Tensor& codes,
                                     const Tensor& scales) {
  check_buffer("x", x);
  with_format(bits, format, [](auto) {});
  check_block_size(block_size);
  if (residual) check_like("residual", *residual, "x", x);
  check_offset(offset, x);
  check_message("codes", codes, "scales", scales, bits, format, block_size, x);
}

inline void check_dequantize_arguments(const Tensor& codes, const Tensor& scales, int64_t bits,
                                       const std::string& format, int64_t block_size,
                                       const Tensor& out, const Tensor& corrupt) {
  with_format(bits, format, [](auto) {});
  check_block_size(block_size);
  check_buffer("out", out);
  check_message("codes", codes, "scales", scales, bits, format, block_size, out);
  check_corrupt(corrupt, out);
}

}  // namespace pyparallel
