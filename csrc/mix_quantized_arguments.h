#pragma once

#include <string>
#include <vector>

#include "quantize_arguments.h"
#include "tensor_checks.h"

// Argument checks of the compiled `mix_quantized_`.
namespace pyparallel {

inline void check_mix_quantized_arguments(const Tensor& z, const Tensor& weight,
                                          const std::vector<Tensor>& codes,
                                          const std::vector<Tensor>& scales, const Tensor& masses,
                                          int64_t bits, const std::string& format,
                                          int64_t block_size, const Tensor& corrupt) {
  check_buffer("z", z);
  with_format(bits, format, [](auto) {});
  check_block_size(block_size);
  check_doubles("weight", weight, 0, 1, z);
  check_doubles("masses", masses, 1, static_cast<int64_t>(codes.size()), z);
  STD_TORCH_CHECK(scales.size() == codes.size(), "scales must be as many as codes, ", codes.size(),
                  ", got ", scales.size());
  for (size_t j = 0; j < codes.size(); ++j) {
    const std::string index = "[" + std::to_string(j) + "]";
    check_message("codes" + index, codes[j], "scales" + index, scales[j], bits, format, block_size,
                  z);
  }
  check_corrupt(corrupt, z);
}

}  // namespace pyparallel
