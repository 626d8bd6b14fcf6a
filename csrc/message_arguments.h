#pragma once

#include <torch/csrc/stable/stableivalue_conversions.h>

#include <optional>
#include <string>
#include <vector>

#include "host_device.h"
#include "pack_signs.h"
#include "quantize.h"
#include "statistical.h"
#include "step_arguments.h"
#include "tensor_checks.h"

// Argument checks of the compiled ops on messages with one scale for each block of neighbors:
// `quantize`, `dequantize`, `dequantize_sum`, `quantize_difference_`, `mix_quantized_`,
// `pack_signs`, `unpack_signs`, or with a table: `quantize_statistical`, `dequantize_statistical`.
namespace pyparallel {

// The name of a format, as an argument of an op. Not std::string itself: torch's conversion of one
// (ToImpl<std::string> in 2.10 to 2.13) never deletes its copy, which leaks 48 bytes a call.
struct FormatName : std::string {
  using std::string::string;
};

}  // namespace pyparallel

template <>
struct torch::stable::detail::ToImpl<pyparallel::FormatName> {
  static pyparallel::FormatName call(StableIValue value, uint64_t, bool) {
    const StringHandle handle = to<StringHandle>(value);
    size_t length = 0;
    const char* data = nullptr;
    const bool is_read = torch_string_length(handle, &length) == AOTI_TORCH_SUCCESS &&
                         torch_string_c_str(handle, &data) == AOTI_TORCH_SUCCESS;
    pyparallel::FormatName name(is_read ? data : "", length);
    pyparallel::require(torch_delete_string(handle) == AOTI_TORCH_SUCCESS && is_read, "format",
                        "a string");
    return name;
  }
};

namespace pyparallel {

// Calls function(Format{}) with the format named by the ops' arguments.
template <typename Function>
void with_format_of_differences(int64_t bits, const std::string& format, Function&& function) {
  if (bits == 8 && format == "int") {
    function(Int8{});
  } else if (bits == 4 && format == "int") {
    function(Int4{});
  } else if (bits == 8 && format == "e4m3") {
    function(E4M3{});
  } else if (bits == 8 && format == "e5m2") {
    function(E5M2{});
  } else {
    require(false, "bits and format", "8 and int, 4 and int, 8 and e4m3, or 8 and e5m2");
  }
}

// The same for `quantize` and `dequantize`, which have more formats.
template <typename Function>
void with_format(int64_t bits, const std::string& format, Function&& function) {
  if (bits == 2 && format == "ternary") {
    function(Ternary{});
  } else if (bits == 8 && format == "natural") {
    function(Natural{});
  } else if (bits == 4 && format == "e3m0") {
    function(E3M0{});
  } else {
    with_format_of_differences(bits, format, function);
  }
}

inline void check_block_size(int64_t block_size) {
  require(block_size >= 32 && block_size <= 4096 && (block_size & (block_size - 1)) == 0,
          "block_size", "a power of two from 32 to 4096");
}

inline void check_scales(const Tensor& scales, int64_t block_size, const Tensor& model) {
  require(is_flat(scales, ScalarType::Float, num_scales(model.numel(), block_size), model),
          "scales", "a contiguous float32 tensor with one scale per block on the buffers' device");
}

inline void check_format(int64_t bits, const std::string& format, int64_t block_size) {
  with_format(bits, format, [](auto) {});
  check_block_size(block_size);
}

inline void check_format_of_differences(int64_t bits, const std::string& format,
                                        int64_t block_size) {
  with_format_of_differences(bits, format, [](auto) {});
  check_block_size(block_size);
}

inline ScalarType dtype_of_codes(int64_t bits, const std::string& format) {
  return bits == 8 && format == "int" ? ScalarType::Char : ScalarType::Byte;
}

// A message with as many entries as the model; its format has been checked.
inline void check_codes(const Tensor& codes, const Tensor& scales, int64_t bits,
                        const std::string& format, int64_t block_size, const Tensor& model) {
  const int64_t numel = model.numel();
  require(is_flat(codes, dtype_of_codes(bits, format), num_scales(numel, 8 / bits), model), "codes",
          "a contiguous tensor of the format's codes for every entry on the buffers' device");
  if (format == "natural") {
    require(is_flat(scales, ScalarType::Float, 0, model), "scales",
            "an empty float32 tensor on the buffers' device for natural");
  } else {
    check_scales(scales, block_size, model);
  }
}

// A matrix whose rows may lie apart.
inline bool has_rows(const Tensor& tensor, ScalarType dtype, const Tensor& model) {
  return tensor.scalar_type() == dtype && tensor.dim() == 2 && on_same_device(tensor, model) &&
         (tensor.size(1) <= 1 || tensor.stride(1) == 1) &&
         (tensor.size(0) <= 1 || tensor.stride(0) >= tensor.size(1));
}

// Where the codes and scales of a block lie: those of a message in one piece follow each other,
// those of one in rows, of as many blocks each, but for the gaps between the rows.
struct Rows {
  int64_t blocks = 0;                   // of a row; 0: one piece
  uint64_t reciprocal = 0;              // 2^63 / blocks, rounded up
  int64_t code_gap = 0, scale_gap = 0;  // in bytes; in floats

  Rows() = default;
  Rows(const Tensor& codes, const Tensor& scales, int64_t bits, int64_t block_size) {
    if (codes.dim() < 2) return;
    blocks = codes.size(1) * 8 / bits / block_size;
    reciprocal = ((uint64_t{1} << 63) + blocks - 1) / blocks;
    code_gap = codes.stride(0) - codes.size(1);
    scale_gap = scales.stride(0) - scales.size(1);
  }

  // Of a block, of which a buffer has less than 2^31: the quotient without a division, which would
  // take a thread dozens of instructions. The error of the reciprocal is too small to matter.
  PYPARALLEL_HOST_DEVICE uint32_t row(int64_t block) const {
    const uint32_t twice = 2 * static_cast<uint32_t>(block);
    const uint64_t low = uint64_t{twice} * static_cast<uint32_t>(reciprocal) >> 32;
    const uint64_t high = uint64_t{twice} * static_cast<uint32_t>(reciprocal >> 32);
    return static_cast<uint32_t>((high + low) >> 32);
  }
};

// A message in one piece, or in rows.
inline void check_message(const Tensor& codes, const Tensor& scales, int64_t bits,
                          const std::string& format, int64_t block_size, const Tensor& model) {
  if (codes.dim() != 2) {
    check_codes(codes, scales, bits, format, block_size, model);
    return;
  }
  const int64_t blocks = codes.size(1) * 8 / bits / block_size, rows = codes.size(0);
  require(has_rows(codes, dtype_of_codes(bits, format), model) && blocks > 0 &&
              blocks * block_size * bits == 8 * codes.size(1) &&
              rows * blocks * block_size >= model.numel(),
          "codes", "rows of whole blocks for every entry on the buffers' device");
  require(has_rows(scales, ScalarType::Float, model) && scales.size(0) == rows &&
              scales.size(1) == (format == "natural" ? 0 : blocks),
          "scales", "as many rows as codes, with a float32 per block on the buffers' device");
}

inline void check_quantize_arguments(const Tensor& x, int64_t bits, const std::string& format,
                                     int64_t block_size, const std::optional<Tensor>& residual,
                                     const Tensor& offset, const Tensor& codes,
                                     const Tensor& scales) {
  check_buffer("x", x);
  check_format(bits, format, block_size);
  if (residual) check_like("residual", *residual, x);
  check_offset(offset, x);
  check_message(codes, scales, bits, format, block_size, x);
}

inline void check_dequantize_arguments(const Tensor& codes, const Tensor& scales, int64_t bits,
                                       const std::string& format, int64_t block_size,
                                       const Tensor& out, const Tensor& corrupt) {
  check_format(bits, format, block_size);
  check_buffer("out", out);
  check_message(codes, scales, bits, format, block_size, out);
  check_corrupt(corrupt, out);
}

inline void check_dequantize_sum_arguments(const Tensor& codes, const Tensor& scales, int64_t bits,
                                           const std::string& format, int64_t block_size,
                                           double divisor, const Tensor& out,
                                           const Tensor& corrupt) {
  check_format(bits, format, block_size);
  check_buffer("out", out);
  const int64_t numel = out.numel();
  require(has_rows(codes, dtype_of_codes(bits, format), out) && codes.size(0) > 0 &&
              codes.size(1) == num_scales(numel, 8 / bits),
          "codes", "a row of the format's codes for each message on the buffers' device");
  require(has_rows(scales, ScalarType::Float, out) && scales.size(0) == codes.size(0) &&
              scales.size(1) == (format == "natural" ? 0 : num_scales(numel, block_size)),
          "scales", "a row of float32 for each message, one per block, on the buffers' device");
  require(divisor != 0, "divisor", "a number other than 0");
  check_corrupt(corrupt, out);
}

// A copy of a rank's values, written in the same pass as z.
inline void check_replica(const char* name, const Tensor& replica, const Tensor& z) {
  check_like(name, replica, z);
  require(replica.scalar_type() == z.scalar_type(), name, "the dtype of z");
  check_apart(name, replica, z);
}

inline void check_quantize_difference_arguments(const Tensor& z, const Tensor& replica,
                                                const Tensor& ratio, int64_t bits,
                                                const std::string& format, int64_t block_size,
                                                const Tensor& offset, const Tensor& codes,
                                                const Tensor& scales) {
  check_buffer("z", z);
  check_replica("replica", replica, z);
  check_scalar("ratio", ratio, z);
  check_format_of_differences(bits, format, block_size);
  check_offset(offset, z);
  check_codes(codes, scales, bits, format, block_size, z);
}

inline void check_mix_quantized_arguments(const Tensor& z, const Tensor& weight,
                                          const std::vector<Tensor>& codes,
                                          const std::vector<Tensor>& scales, const Tensor& masses,
                                          int64_t bits, const std::string& format,
                                          int64_t block_size, const std::vector<Tensor>& replicas,
                                          const Tensor& corrupt) {
  check_buffer("z", z);
  check_format_of_differences(bits, format, block_size);
  check_mass("weight", weight, z);
  check_masses(masses, codes.size(), z);
  require(scales.size() == codes.size(), "scales", "as many tensors as codes");
  for (size_t j = 0; j < codes.size(); ++j) {
    check_codes(codes[j], scales[j], bits, format, block_size, z);
  }
  require(replicas.empty() || replicas.size() == codes.size(), "replicas",
          "no tensors, or as many as codes");
  for (size_t j = 0; j < replicas.size(); ++j) {
    check_replica("replicas", replicas[j], z);
    for (size_t i = 0; i < j; ++i) check_apart("replicas", replicas[j], replicas[i]);
  }
  check_corrupt(corrupt, z);
}

inline void check_signs(const Tensor& words, const Tensor& scales, int64_t block_size,
                        const Tensor& model) {
  check_block_size(block_size);
  require(is_flat(words, ScalarType::Byte, num_words(model.numel()), model), "words",
          "a contiguous uint8 tensor with one bit per entry on the buffers' device");
  check_scales(scales, block_size, model);
}

inline void check_pack_signs_arguments(const Tensor& x, int64_t block_size,
                                       const std::optional<Tensor>& residual, const Tensor& words,
                                       const Tensor& scales) {
  check_buffer("x", x);
  if (residual) check_like("residual", *residual, x);
  check_signs(words, scales, block_size, x);
}

// Calls function(BinCodes<bits>{}).
template <typename Function>
void with_bin_codes(int64_t bits, Function&& function) {
  if (bits == 2) return function(BinCodes<2>{});
  if (bits == 4) return function(BinCodes<4>{});
  require(bits == 8, "bits", "2, 4 or 8");
  function(BinCodes<8>{});
}

inline void check_bins(const Tensor& codes, const Tensor& tables, int64_t bits, int64_t block_size,
                       const Tensor& model) {
  with_bin_codes(bits, [](auto) {});
  check_block_size(block_size);
  require(is_flat(codes, ScalarType::Byte, num_scales(model.numel(), 8 / bits), model), "codes",
          "a contiguous uint8 tensor of the codes of every entry on the buffers' device");
  const int64_t num_means = num_scales(model.numel(), block_size) << bits;
  require(is_flat(tables, ScalarType::Float, num_means, model), "tables",
          "a contiguous float32 tensor with a mean per bin of every block on the buffers' device");
}

inline void check_quantize_statistical_arguments(const Tensor& x, int64_t bits, int64_t block_size,
                                                 const std::optional<Tensor>& residual,
                                                 const Tensor& codes, const Tensor& tables) {
  check_buffer("x", x);
  if (residual) check_like("residual", *residual, x);
  check_bins(codes, tables, bits, block_size, x);
}

inline void check_dequantize_statistical_arguments(const Tensor& codes, const Tensor& tables,
                                                   int64_t bits, int64_t block_size,
                                                   const Tensor& out, const Tensor& corrupt) {
  check_buffer("out", out);
  check_bins(codes, tables, bits, block_size, out);
  check_corrupt(corrupt, out);
}

inline void check_unpack_signs_arguments(const Tensor& words, const Tensor& scales,
                                         int64_t block_size, const Tensor& out,
                                         const Tensor& corrupt) {
  check_buffer("out", out);
  check_signs(words, scales, block_size, out);
  check_corrupt(corrupt, out);
}

}  // namespace pyparallel
