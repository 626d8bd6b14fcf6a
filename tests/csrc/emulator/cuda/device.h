#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <cstdlib>

#include "cuda/intrinsics.h"

// The interface of csrc/cuda/device.h on the CPU.
namespace pyparallel::cuda {

using cudaStream_t = void*;

constexpr int kMaxWeights = 4;  // few, so that tests exceed them

struct DeviceGuard {
  explicit DeviceGuard(int32_t /*index*/) {}
};

inline cudaStream_t current_stream(const torch::stable::Tensor& /*tensor*/) { return nullptr; }

// Scalars are treated as device memory, the harder case, unless the environment asks for the other.
inline bool is_on_host(const torch::stable::Tensor& /*tensor*/) {
  return std::getenv("EMULATED_SCALARS_ON_HOST") != nullptr;
}

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), int64_t num_blocks, int num_threads,
            cudaStream_t /*stream*/, const Arguments&... arguments) {
  const std::function<void()> body = [&] { kernel(arguments...); };
  emulator::grid_size() = {static_cast<unsigned>(num_blocks), 1, 1};
  for (unsigned i = 0; i < num_blocks; ++i) {
    emulator::block_index() = {i, 0, 0};
    emulator::Block::current().run(num_threads, body);
  }
}

}  // namespace pyparallel::cuda
