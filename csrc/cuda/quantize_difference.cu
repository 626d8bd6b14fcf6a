#include "quantize_difference.h"

#include <torch/csrc/stable/library.h>

#include <optional>
#include <string>

#include "cuda/encode.h"
#include "cuda/launch.h"
#include "cuda/scalar.h"
#include "float_types.h"
#include "message_arguments.h"

namespace pyparallel::cuda {
namespace {

template <typename Format, typename Z>
__global__ void __launch_bounds__(kThreads, 2)
    quantize_difference_kernel(Z* z, Z* replica, Scalar<double> ratio, int64_t numel, int shift,
                               Draws draws, uint8_t* codes, float* scales, bool aligned) {
  const Place<> place = place_of_thread(numel, aligned);
  Packet<> own_packet, copy_packet;
  DrawsOfThread<DefaultTile> drawn;
  in_one_branch(place, [&](const Place<>& place) {
    own_packet = load_packet(z, place);
    copy_packet = load_packet(replica, place);
    drawn = draws.of_thread(place);
  });
  const float factor = static_cast<float>(ratio.get());
  float own[kPerThread], copy[kPerThread], differences[kPerThread], decoded[kPerThread];
  unpack<Z, DefaultTile>(own_packet, own);
  unpack<Z, DefaultTile>(copy_packet, copy);
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) differences[i] = own[i] - copy[i];
  const BlockScale scale = scale_of_group<Format>(differences, place, shift, scales);
  encode_and_store<Format>(
      differences, scale, draws.stochastic, drawn, [=] { return codes; }, place, decoded);
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    copy[i] = static_cast<float>(static_cast<Z>(copy[i] + decoded[i]));
    own[i] = retain_residual(own[i], copy[i], factor);
  }
  store_together(pack<Z, DefaultTile>(copy), replica, place);
  store_together(pack<Z, DefaultTile>(own), z, place);
}

void quantize_difference_cuda(Tensor z, Tensor replica, Tensor ratio, int64_t bits,
                              FormatName format, int64_t block_size, std::optional<int64_t> seed,
                              Tensor offset, Tensor codes, Tensor scales) {
  check_quantize_difference_arguments(z, replica, ratio, bits, format, block_size, offset, codes,
                                      scales);
  if (z.numel() == 0) return;
  const DeviceGuard guard(z.get_device_index());
  uint8_t* target = static_cast<uint8_t*>(codes.mutable_data_ptr());
  with_format_of_differences(bits, format, [&](auto kind) {
    with_float_type(z.scalar_type(), [&](auto type) {
      using Z = decltype(type);
      Z *own = z.mutable_data_ptr<Z>(), *copy = replica.mutable_data_ptr<Z>();
      const bool aligned = is_aligned(own) && is_aligned(copy) && is_aligned(target);
      launch(quantize_difference_kernel<decltype(kind), Z>, num_blocks(z.numel()), kThreads,
             current_stream(z), own, copy, Scalar<double>(ratio), z.numel(), shift_of(block_size),
             Draws(seed, offset), target, scales.mutable_data_ptr<float>(), aligned);
    });
  });
}

}  // namespace
}  // namespace pyparallel::cuda

STABLE_TORCH_LIBRARY_IMPL(pyparallel, CUDA, library) {
  library.impl("quantize_difference_", TORCH_BOX(&pyparallel::cuda::quantize_difference_cuda));
}
