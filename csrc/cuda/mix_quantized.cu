#include "mix_quantized.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <string>
#include <vector>

#include "cuda/codes.h"
#include "cuda/launch.h"
#include "cuda/mix_masses.h"
#include "cuda/packet.h"
#include "message_arguments.h"

namespace pyparallel::cuda {
namespace {

constexpr int kMaxMessages = 64;  // pointers per launch, passed in the kernel's arguments

struct Messages {
  const uint8_t* codes[kMaxMessages];
  const float* scales[kMaxMessages];
  void* replicas[kMaxMessages];

  __device__ Stream replica(int j, ScalarType dtype) const {
    Stream stream;
    stream.data = replicas[j];
    stream.dtype = dtype;
    return stream;
  }
};

// COUNT messages known at compile time are all loaded before the first use, like z; COUNT = 0 means
// `count`, loaded two at a time, or one with its replica, which has z's dtype.
template <typename Format, bool HAS_REPLICAS, int COUNT>
__global__ void __launch_bounds__(kThreads, 2)
    mix_quantized_kernel(Stream z, double* weight, const __grid_constant__ Messages messages,
                         const double* masses, int count, int readers, int64_t numel, int shift,
                         int64_t* corrupt, bool aligned) {
  constexpr int kBatch = COUNT ? COUNT : HAS_REPLICAS ? 1 : 2;
  const int num_messages = COUNT ? COUNT : count;
  const Place<> place = place_of_thread(numel, aligned);

  Packet<> own_packet, kept[kBatch];
  Codes<Format> codes[kBatch];
  float scales[kBatch];
  const auto load_batch = [&](const Place<>& place, int first) {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (!COUNT && first + j >= num_messages) break;
      codes[j] = load_codes<Format>(messages.codes[first + j], place);
      if (place.exists(0)) scales[j] = messages.scales[first + j][place.begin >> shift];
      if constexpr (HAS_REPLICAS) {
        kept[j] = load_packet(messages.replicas[first + j], z.dtype, place);
      }
    }
  };
  in_one_branch(place, [&](const Place<>& place) {
    own_packet = load_packet(z, place);
    load_batch(place, 0);
  });

  __shared__ float coefficients[kMaxMessages];
  share_coefficients(weight, masses, num_messages, coefficients);
  const WeightUpdate update(readers);

  float own[kPerThread], delta[kPerThread];
  unpack(own_packet, z.dtype, own);
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) delta[i] = mix_nothing<float>();
  int found = 0;
  for (int first = 0; first < num_messages; first += kBatch) {
    if (first > 0) {
      in_one_branch(place, [&](const Place<>& place) { load_batch(place, first); });
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (!COUNT && first + j >= num_messages) break;
      float message[kPerThread];  // a corrupt code leaves it as it is
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) message[i] = own[i];
      if constexpr (HAS_REPLICAS) unpack(kept[j], z.dtype, message);
      decode_codes<1>(&codes[j], &scales[j], place, found, [&](int i, float entry) {
        message[i] = HAS_REPLICAS ? message[i] + entry : entry;
      });
      if constexpr (HAS_REPLICAS) {
        kept[j] = pack<DefaultTile>(message, z.dtype);
        store_together(kept[j], messages.replica(first + j, z.dtype), place);
        unpack(kept[j], z.dtype, message);
      }
      const float coefficient = coefficients[first + j];
      if (coefficient == 0) continue;
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        delta[i] = mix_add_message(delta[i], own[i], message[i], coefficient);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) own[i] = mix_apply(own[i], delta[i]);
  store_together(pack<DefaultTile>(own, z.dtype), z, place);
  count_corrupt(corrupt, found);
  update.finish(weight, masses, num_messages);
}

// `replicas` is null without replicas.
template <typename Format, bool HAS_REPLICAS>
void mix_group(const Tensor& z, const Tensor& weight, const Tensor* codes, const Tensor* scales,
               const Tensor* replicas, const double* masses, int count, int64_t block_size,
               const Tensor& corrupt) {
  const cudaStream_t stream = current_stream(z);
  const Stream own(z);
  bool aligned = is_aligned(own.data);
  Messages messages{};
  for (int j = 0; j < count; ++j) {
    messages.codes[j] = static_cast<const uint8_t*>(codes[j].const_data_ptr());
    messages.scales[j] = scales[j].const_data_ptr<float>();
    if (replicas) messages.replicas[j] = replicas[j].mutable_data_ptr();
    aligned = aligned && is_aligned(messages.codes[j]) && is_aligned(messages.replicas[j]);
  }
  double* total = weight.mutable_data_ptr<double>();
  const int readers = z.numel() > 0 ? readers_of(total) : -1;
  if (z.numel() > 0) {
    const auto kernel = count == 1   ? mix_quantized_kernel<Format, HAS_REPLICAS, 1>
                        : count == 2 ? mix_quantized_kernel<Format, HAS_REPLICAS, 2>
                                     : mix_quantized_kernel<Format, HAS_REPLICAS, 0>;
    launch(kernel, num_blocks(z.numel()), kThreads, stream, own, total, messages, masses, count,
           readers, z.numel(), shift_of(block_size), corrupt.mutable_data_ptr<int64_t>(), aligned);
  }
  if (readers < 0) launch_add_masses(total, masses, count, stream);
}

void mix_quantized_cuda(Tensor z, Tensor weight, std::vector<Tensor> codes,
                        std::vector<Tensor> scales, Tensor masses, int64_t bits, FormatName format,
                        int64_t block_size, std::vector<Tensor> replicas, Tensor corrupt) {
  check_mix_quantized_arguments(z, weight, codes, scales, masses, bits, format, block_size,
                                replicas, corrupt);
  if (codes.empty()) return;
  const DeviceGuard guard(z.get_device_index());
  with_format_of_differences(bits, format, [&](auto kind) {
    using Format = decltype(kind);
    const auto mix = replicas.empty() ? mix_group<Format, false> : mix_group<Format, true>;
    // PushSum is associative: mixing in groups gives the average of all.
    const int num_messages = static_cast<int>(codes.size());
    for (int first = 0; first < num_messages; first += kMaxMessages) {
      mix(z, weight, codes.data() + first, scales.data() + first,
          replicas.empty() ? nullptr : replicas.data() + first,
          masses.const_data_ptr<double>() + first, std::min(kMaxMessages, num_messages - first),
          block_size, corrupt);
    }
  });
}

}  // namespace
}  // namespace pyparallel::cuda

STABLE_TORCH_LIBRARY_IMPL(pyparallel, CUDA, library) {
  library.impl("mix_quantized_", TORCH_BOX(&pyparallel::cuda::mix_quantized_cuda));
}
