#include "mix.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "add_or_clear.h"
#include "cuda/mix_cuda.h"
#include "cuda/mix_kernel.h"
#include "cuda/packet.h"
#include "float_types.h"
#include "screen_headers.h"
#include "step_arguments.h"

namespace pyparallel::cuda {
namespace {

__global__ void add_masses_kernel(double* weight, const double* masses, int count) {
  add_masses(weight, masses, count);
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
  const int readers = z.numel() > 0 ? readers_of(total) : -1;
  if (z.numel() > 0) {
    const auto kernel = count == 1   ? mix_kernel<DefaultTile, Z, Message, 1>
                        : count == 2 ? mix_kernel<DefaultTile, Z, Message, 2>
                                     : mix_kernel<DefaultTile, Z, Message, 0>;
    launch(kernel, num_blocks(z.numel()), kThreads, stream, own, total, pointers, masses, count,
           readers, z.numel(), aligned);
  }
  if (readers < 0) launch_add_masses(total, masses, count, stream);
}

// Where nothing is added. Mostly it is over at once, so it loops, with few blocks.
__global__ void __launch_bounds__(kThreads, 2)
    clear_kernel(Stream x, const bool* clear, int64_t numel, bool aligned) {
  if (!*clear) return;
  for (int64_t block = blockIdx.x; block * kPerBlock < numel; block += gridDim.x) {
    store_together(Packet<>{}, x, place_of_thread(numel, aligned, block));
  }
}

__global__ void __launch_bounds__(kThreads, 2)
    add_or_clear_kernel(Stream x, Stream y, float times, const bool* clear, int64_t numel,
                        bool aligned) {
  const bool clears = clear != nullptr && *clear;
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
  const bool aligned = is_aligned(own.data) && is_aligned(other.data);
  const bool* flag = clear ? static_cast<const bool*>(clear->const_data_ptr()) : nullptr;
  const int64_t blocks = num_blocks(x.numel());
  if (!y) {
    launch(clear_kernel, loop_blocks(blocks), kThreads, current_stream(x), own, flag, x.numel(),
           aligned);
    return;
  }
  launch(add_or_clear_kernel, blocks, kThreads, current_stream(x), own, other,
         static_cast<float>(times), flag, x.numel(), aligned);
}

// What is expected of a warp's rows, passed in the kernel's arguments: nothing is copied before.
struct Expected {
  double rows[kWarp][kColumns];
};

__global__ void screen_headers_kernel(const double* rows, const __grid_constant__ Expected expected,
                                      int count, double* masses, int64_t* counter) {
  const int i = static_cast<int>(threadIdx.x);
  if (i >= count) return;
  int64_t found = 0;
  masses[i] = screen_row(rows + i * kColumns, expected.rows[i], found);
  add_to_counter(counter, found);
}

void screen_headers_cuda(Tensor rows, Tensor expected, Tensor masses, Tensor counter) {
  check_screen_headers_arguments(rows, expected, masses, counter);
  if (rows.size(0) == 0) return;
  const DeviceGuard guard(rows.get_device_index());
  const double *row = rows.const_data_ptr<double>(), *wanted = expected.const_data_ptr<double>();
  for (int64_t first = 0; first < rows.size(0); first += kWarp) {
    const int count = static_cast<int>(std::min<int64_t>(kWarp, rows.size(0) - first));
    Expected some;
    std::memcpy(some.rows, wanted + first * kColumns, count * sizeof some.rows[0]);
    launch(screen_headers_kernel, 1, kWarp, current_stream(rows), row + first * kColumns, some,
           count, masses.mutable_data_ptr<double>() + first, counter.mutable_data_ptr<int64_t>());
  }
}

}  // namespace

void launch_add_masses(double* weight, const double* masses, int count, cudaStream_t stream) {
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
  library.impl("add_or_clear_", TORCH_BOX(&pyparallel::cuda::add_or_clear_cuda));
  library.impl("screen_headers", TORCH_BOX(&pyparallel::cuda::screen_headers_cuda));
}
