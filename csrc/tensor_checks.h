#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstdint>

// What memory safety needs of the arguments, so that direct calls of torch.ops.pyparallel raise
// before they access memory. The functions of pyparallel.ops check more, and say what they got.
namespace pyparallel {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline void require(bool holds, const char* name, const char* rule) {
  STD_TORCH_CHECK(holds, name, ": expected ", rule, "; call the op of pyparallel.ops for details");
}

inline bool is_float(ScalarType dtype) {
  return dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half;
}

inline bool on_same_device(const Tensor& a, const Tensor& b) {
  if (a.is_cpu()) return b.is_cpu();
  return !b.is_cpu() && a.get_device_index() == b.get_device_index();
}

// A contiguous 1-d tensor of this dtype and length on the model's device.
inline bool is_flat(const Tensor& tensor, ScalarType dtype, int64_t length, const Tensor& model) {
  return tensor.scalar_type() == dtype && tensor.dim() == 1 && tensor.size(0) == length &&
         tensor.is_contiguous() && on_same_device(tensor, model);
}

// A 0-d tensor of this dtype on the model's device.
inline bool is_number(const Tensor& tensor, ScalarType dtype, const Tensor& model) {
  return tensor.scalar_type() == dtype && tensor.dim() == 0 && on_same_device(tensor, model);
}

inline void check_buffer(const char* name, const Tensor& tensor) {
  require(tensor.dim() == 1 && tensor.is_contiguous() && is_float(tensor.scalar_type()), name,
          "a contiguous 1-d tensor of float32, bfloat16 or float16");
}

inline void check_like(const char* name, const Tensor& tensor, const Tensor& model) {
  check_buffer(name, tensor);
  require(tensor.numel() == model.numel() && on_same_device(tensor, model), name,
          "the length and device of the op's other buffers");
}

// A scalar that may change every step: read on the host, or on the device without synchronization.
inline void check_scalar(const char* name, const Tensor& tensor, const Tensor& model) {
  require(is_number(tensor, ScalarType::Double, tensor.is_cpu() ? tensor : model), name,
          "a 0-d float64 tensor on the cpu or the buffers' device");
}

inline void check_offset(const Tensor& offset, const Tensor& model) {
  require(is_number(offset, ScalarType::Long, offset.is_cpu() ? offset : model), "offset",
          "a 0-d int64 tensor on the cpu or the buffers' device");
}

// The counter of corrupt entries.
inline void check_corrupt(const Tensor& corrupt, const Tensor& model) {
  require(is_number(corrupt, ScalarType::Long, model), "corrupt",
          "a 0-d int64 tensor on the buffers' device");
}

// The memory of a contiguous tensor.
struct Extent {
  intptr_t begin, end;

  explicit Extent(const Tensor& tensor)
      : begin(reinterpret_cast<intptr_t>(tensor.data_ptr())),
        end(begin + static_cast<intptr_t>(tensor.numel() * tensor.element_size())) {}

  bool overlaps(const Extent& other) const {
    return std::min(end, other.end) > std::max(begin, other.begin);
  }
};

// An output must not lie in memory that the same pass reads or writes as another buffer.
inline void check_apart(const char* name, const Extent& output, const Extent& other) {
  require(!output.overlaps(other), name, "memory apart from the op's other buffers");
}

inline void check_apart(const char* name, const Tensor& tensor, const Tensor& other) {
  const Extent output(tensor), taken(other);
  if (output.overlaps(taken) && on_same_device(tensor, other)) check_apart(name, output, taken);
}

// The dtype and device of one of many tensors: each is a call into torch.
struct Kind {
  int32_t dtype, device_type, device_index;

  explicit Kind(const Tensor& tensor) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &device_type));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), &device_index));
  }

  bool operator==(const Kind& other) const {
    return dtype == other.dtype && device_type == other.device_type &&
           device_index == other.device_index;
  }
};

}  // namespace pyparallel
