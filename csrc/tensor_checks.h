#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <string>

// The checks of pyparallel/ops/_checks.py, with the same messages: direct calls of
// torch.ops.pyparallel raise an error instead of accessing memory outside a buffer.
namespace pyparallel {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline const char* dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    default:
      return "another dtype";
  }
}

inline std::string device_name(const Tensor& tensor) {
  if (tensor.is_cpu()) return "cpu";
  return "cuda:" + std::to_string(static_cast<int>(tensor.get_device_index()));
}

inline std::string describe(const Tensor& tensor) {
  std::ostringstream text;
  text << dtype_name(tensor.scalar_type()) << " of shape [";
  for (int64_t i = 0; i < tensor.dim(); ++i) text << (i ? ", " : "") << tensor.size(i);
  text << "] on " << device_name(tensor);
  if (!tensor.is_contiguous()) text << ", not contiguous";
  return text.str();
}

inline bool is_low_or_single_precision(ScalarType dtype) {
  return dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half;
}

inline bool on_same_device(const Tensor& a, const Tensor& b) {
  return a.is_cpu() == b.is_cpu() && a.get_device_index() == b.get_device_index();
}

inline void check_buffer(const char* name, const Tensor& tensor) {
  STD_TORCH_CHECK(tensor.dim() == 1 && tensor.is_contiguous() &&
                      is_low_or_single_precision(tensor.scalar_type()),
                  name, " must be a contiguous 1-d tensor of float32, bfloat16 or float16, got ",
                  describe(tensor));
}

inline void check_like(const std::string& name, const Tensor& tensor, const char* model_name,
                       const Tensor& model) {
  STD_TORCH_CHECK(tensor.dim() == 1 && tensor.is_contiguous() &&
                      is_low_or_single_precision(tensor.scalar_type()) &&
                      tensor.numel() == model.numel() && on_same_device(tensor, model),
                  name, " must be a contiguous 1-d tensor of float32, bfloat16 or float16 with ",
                  model_name, "'s length and device (", describe(model), "), got ",
                  describe(tensor));
}

inline void check_doubles(const char* name, const Tensor& tensor, int64_t dim, int64_t numel,
                          const Tensor& model, const char* model_name = "z") {
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Double && tensor.dim() == dim &&
                      tensor.numel() == numel && tensor.is_contiguous() &&
                      on_same_device(tensor, model),
                  name, " must be a contiguous float64 tensor of shape [",
                  dim == 0 ? std::string() : std::to_string(numel), "] on ", model_name,
                  "'s device, got ", describe(tensor));
}

// An output must not lie in memory that the same pass reads or writes as another buffer.
inline void check_apart(const char* name, const Tensor& tensor, const std::string& other_name,
                        const Tensor& other) {
  const auto begin = [](const Tensor& t) { return reinterpret_cast<intptr_t>(t.data_ptr()); };
  const auto end = [&](const Tensor& t) {
    return begin(t) + static_cast<intptr_t>(t.numel() * t.element_size());
  };
  const intptr_t common = std::min(end(tensor), end(other)) - std::max(begin(tensor), begin(other));
  STD_TORCH_CHECK(!on_same_device(tensor, other) || common <= 0, name, " must not overlap ",
                  other_name, ", got ", common, " bytes in common");
}

// A contiguous 1-d tensor of this dtype and length on the model's device.
inline void check_flat(const std::string& name, const Tensor& tensor, ScalarType dtype,
                       int64_t length, const Tensor& model) {
  STD_TORCH_CHECK(tensor.scalar_type() == dtype && tensor.dim() == 1 && tensor.size(0) == length &&
                      tensor.is_contiguous() && on_same_device(tensor, model),
                  name, " must be a contiguous ", dtype_name(dtype), " tensor of shape [", length,
                  "] on ", device_name(model), ", got ", describe(tensor));
}

// A scalar that may change every step: read on the host, or on the device without synchronization.
inline void check_scalar(const char* name, const Tensor& tensor, const Tensor& model) {
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Double && tensor.dim() == 0 &&
                      (tensor.is_cpu() || on_same_device(tensor, model)),
                  name, " must be a number, or a 0-d tensor on the cpu or param's device, got ",
                  describe(tensor));
}

}  // namespace pyparallel
