#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>

#include "cuda/device.h"
#include "host_device.h"

namespace pyparallel::cuda {

// Which draw of a seed: a number that travels with the launch, or one that only the device reads,
// so that each replay of a graph can draw anew.
struct Offset {
  const int64_t* on_device;
  int64_t value;

  explicit Offset(const torch::stable::Tensor& tensor)
      : on_device(is_on_host(tensor) ? nullptr : tensor.const_data_ptr<int64_t>()),
        value(is_on_host(tensor) ? *tensor.const_data_ptr<int64_t>() : 0) {}

  PYPARALLEL_HOST_DEVICE uint64_t get() const { return on_device ? *on_device : value; }
};

}  // namespace pyparallel::cuda
