#include "add_or_clear.h"

#include <torch/csrc/stable/library.h>

#include "cuda/launch.h"
#include "cuda/packet.h"

namespace pyparallel::cuda {
namespace {

// `y` is null if there is nothing to add: the kernel then reads the flag and, if it is not set, is
// over.
__global__ void __launch_bounds__(kThreads, 2)
    add_or_clear_kernel(Stream x, Stream y, float times, const bool* clear, int64_t numel,
                        bool aligned) {
  const bool clears = clear != nullptr && *clear;
  if (!clears && y.data == nullptr) return;
  const Place<> place = place_of_thread(numel, aligned);
  Packet<> result{};
  if (!clears) {
    Packet<> own, other;
    in_one_branch(place, [&](const Place<>& place) {
      own = load_packet(x, place);
      other = load_packet(y, place);
    });
    float before[kPerThread], added[kPerThread], sums[kPerThread];
    unpack(own, x.dtype, before);
    unpack(other, y.dtype, added);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) sums[i] = add_times(before[i], added[i], times);
    result = pack<DefaultTile>(sums, x.dtype);
    unpack(result, x.dtype, sums);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (!is_finite<uint32_t>(sums[i])) sums[i] = before[i];
    }
    result = pack<DefaultTile>(sums, x.dtype);
  }
  store_together(result, x, place);
}

void add_or_clear_cuda(Tensor x, std::optional<Tensor> y, double times,
                       std::optional<Tensor> clear) {
  check_add_or_clear_arguments(x, y, clear);
  if (x.numel() == 0 || (!y && !clear)) return;
  const DeviceGuard guard(x.get_device_index());
  const Stream own(x), other = y ? Stream(*y) : Stream();
  const bool* flag = clear ? static_cast<const bool*>(clear->const_data_ptr()) : nullptr;
  launch(add_or_clear_kernel, num_blocks(x.numel()), kThreads, current_stream(x), own, other,
         static_cast<float>(times), flag, x.numel(),
         is_aligned(own.data) && is_aligned(other.data));
}

}  // namespace
}  // namespace pyparallel::cuda

STABLE_TORCH_LIBRARY_IMPL(pyparallel, CUDA, library) {
  library.impl("add_or_clear_", TORCH_BOX(&pyparallel::cuda::add_or_clear_cuda));
}
