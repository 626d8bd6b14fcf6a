#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "cuda/intrinsics.h"

// The interface of csrc/cuda/device.h on the CPU.
namespace pyparallel::cuda {

using cudaStream_t = void*;

constexpr int kMaxWeights = 1 << 14;

// Fewer for tests that exceed them.
inline int max_weights() { return std::getenv("EMULATED_NO_WEIGHTS") != nullptr ? 0 : kMaxWeights; }

struct DeviceGuard {
  explicit DeviceGuard(int32_t /*index*/) {}
};

inline cudaStream_t current_stream(const torch::stable::Tensor& /*tensor*/) { return nullptr; }

// Scalars are treated as device memory, the harder case, unless the environment asks for the other.
inline bool is_on_host(const torch::stable::Tensor& /*tensor*/) {
  return std::getenv("EMULATED_SCALARS_ON_HOST") != nullptr;
}

// As if for two multiprocessors.
inline int64_t loop_blocks(int64_t most) { return std::min(most, int64_t{8}); }

inline int64_t num_launches = 0;

inline void set_to_zero(void* memory, int64_t num_bytes, cudaStream_t /*stream*/) {
  ++num_launches;
  std::memset(memory, 0, static_cast<size_t>(num_bytes));
}

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), int64_t num_blocks, int num_threads,
            cudaStream_t /*stream*/, const Arguments&... arguments) {
  ++num_launches;
  const std::function<void()> body = [&] { kernel(arguments...); };
  emulator::grid_size() = {static_cast<unsigned>(num_blocks), 1, 1};
  for (unsigned i = 0; i < num_blocks; ++i) {
    emulator::block_index() = {i, 0, 0};
    emulator::Block::current().run(num_threads, body);
  }
}

}  // namespace pyparallel::cuda

// Launches of this process so far, and bytes of whole accesses to buffers, for tests.
extern "C" __attribute__((visibility("default"), used)) inline int64_t emulated_launches() {
  return pyparallel::cuda::num_launches;
}
extern "C" __attribute__((visibility("default"), used)) inline int64_t emulated_bytes() {
  return emulator::num_bytes;
}
