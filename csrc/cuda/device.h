#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>

// All host calls to the CUDA runtime and to torch's CUDA part. tests/csrc/emulator has a file of
// the same name, with which a C++ compiler builds the .cu files for machines without a GPU.
namespace pyparallel::cuda {

using DeviceGuard = torch::stable::accelerator::DeviceGuard;

constexpr int kMaxWeights = 1 << 14;  // whose readers mix_masses.h counts
constexpr int max_weights() { return kMaxWeights; }

inline cudaStream_t current_stream(const torch::stable::Tensor& tensor) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

// Whether the host may read the tensor without synchronization.
inline bool is_on_host(const torch::stable::Tensor& tensor) { return tensor.is_cpu(); }

// Blocks for a loop over much more work than fits the GPU at once, or over none: few enough to be
// over quickly in the second case.
inline int64_t loop_blocks(int64_t most) {
  int device = 0, multiprocessors = 0;
  STD_CUDA_CHECK(cudaGetDevice(&device));
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  return std::min(most, int64_t{4} * multiprocessors);
}

inline void set_to_zero(void* memory, int64_t num_bytes, cudaStream_t stream) {
  STD_CUDA_CHECK(cudaMemsetAsync(memory, 0, static_cast<size_t>(num_bytes), stream));
}

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), int64_t num_blocks, int num_threads, cudaStream_t stream,
            const Arguments&... arguments) {
  kernel<<<static_cast<unsigned>(num_blocks), num_threads, 0, stream>>>(arguments...);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace pyparallel::cuda
