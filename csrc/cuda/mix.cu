#include "mix.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <vector>

#include "cuda/mix_cuda.h"
#include "cuda/mix_kernel.h"
#include "float_types.h"
#include "step_arguments.h"

namespace pyparallel::cuda {
namespace {

__global__ void add_masses_kernel(double* weight, const double* masses, int count) {
  double total = *weight;
  for (int j = 0; j < count; ++j) total += masses[j];
  *weight = total;
}

template <typename Z, typename Message>
void mix_group(const Tensor& z, const Tensor& weight, const Tensor* messages, const double* masses,
               int count) {
  const cudaStream_t stream = current_stream(z);
  Z* own = z.mutable_data_ptr<Z>();
  bool aligned = is_aligned(own);
  MessagePointers<Message> pointers{};
  for (int j = 0; j < count; ++j) {
    pointers.at[j] = messages[j].const_data_ptr<Message>();
    aligned = aligned && is_aligned(pointers.at[j]);
  }
  double* total = weight.mutable_data_ptr<double>();
  if (z.numel() > 0) {
    const auto kernel = count == 1   ? mix_kernel<DefaultTile, Z, Message, 1>
                        : count == 2 ? mix_kernel<DefaultTile, Z, Message, 2>
                                     : mix_kernel<DefaultTile, Z, Message, 0>;
    launch(kernel, num_blocks(z.numel()), kThreads, stream, own, total, pointers, masses, count,
           z.numel(), aligned);
  }
  add_masses(total, masses, count, stream);
}

}  // namespace

void add_masses(double* weight, const double* masses, int count, cudaStream_t stream) {
  launch(add_masses_kernel, 1, 1, stream, weight, masses, count);
}

void mix_cuda(Tensor z, Tensor weight, std::vector<Tensor> messages, Tensor masses) {
  check_mix_arguments(z, weight, messages, masses);
  if (messages.empty()) return;
  const DeviceGuard guard(z.get_device_index());
  with_float_type(z.scalar_type(), [&](auto own_type) {
    with_float_type(messages[0].scalar_type(), [&](auto message_type) {
      // PushSum is associative: mixing in groups gives the average of all.
      const int num_messages = static_cast<int>(messages.size());
      for (int first = 0; first < num_messages; first += kMaxMessages) {
        mix_group<decltype(own_type), decltype(message_type)>(
            z, weight, messages.data() + first, masses.const_data_ptr<double>() + first,
            std::min(kMaxMessages, num_messages - first));
      }
    });
  });
}

}  // namespace pyparallel::cuda

STABLE_TORCH_LIBRARY_IMPL(pyparallel, CUDA, library) {
  library.impl("mix_", TORCH_BOX(&pyparallel::cuda::mix_cuda));
}
