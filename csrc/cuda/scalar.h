#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "cuda/device.h"
#include "host_device.h"

namespace pyparallel::cuda {

// A 0-d tensor on the host, whose value is a kernel argument, or on the device, where the kernel
// reads it: the host never synchronizes, and each replay of a graph reads the current value.
template <typename T>
struct Scalar {
  const T* on_device;
  T value;

  explicit Scalar(const torch::stable::Tensor& tensor)
      : on_device(is_on_host(tensor) ? nullptr : tensor.const_data_ptr<T>()),
        value(is_on_host(tensor) ? *tensor.const_data_ptr<T>() : T{}) {}

  explicit Scalar(T number) : on_device(nullptr), value(number) {}

  Scalar(const std::optional<torch::stable::Tensor>& tensor, T otherwise)
      : Scalar(tensor ? Scalar(*tensor) : Scalar(otherwise)) {}

  PYPARALLEL_HOST_DEVICE T get() const { return on_device ? *on_device : value; }
};

}  // namespace pyparallel::cuda
