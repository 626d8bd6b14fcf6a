#pragma once

#include <optional>

#include "block_arguments.h"
#include "corrupt_arguments.h"
#include "pack_signs.h"
#include "tensor_checks.h"

// Argument checks of the compiled `pack_signs` and `unpack_signs`.
namespace pyparallel {

inline void check_sign_message(const Tensor& words, const Tensor& scales, int64_t block_size,
                               const Tensor& model) {
  check_block_size(block_size);
  check_flat("words", words, ScalarType::Byte, num_words(model.numel()), model);
  check_flat("scales", scales, ScalarType::Float, num_scales(model.numel(), block_size), model);
}

inline void check_pack_signs_arguments(const Tensor& x, int64_t block_size,
                                       const std::optional<Tensor>& residual, const Tensor& words,
                                       const Tensor& scales) {
  check_buffer("x", x);
  if (residual) check_like("residual", *residual, "x", x);
  check_sign_message(words, scales, block_size, x);
}

inline void check_unpack_signs_arguments(const Tensor& words, const Tensor& scales,
                                         int64_t block_size, const Tensor& out,
                                         const Tensor& corrupt) {
  check_buffer("out", out);
  check_sign_message(words, scales, block_size, out);
  check_corrupt(corrupt, out);
}

}  // namespace pyparallel
