#include "quantize.h"

#include <torch/csrc/stable/library.h>

#include <optional>
#include <string>

#include "cuda/codes.h"
#include "cuda/encode.h"
#include "cuda/launch.h"
#include "cuda/packet.h"
#include "float_types.h"
#include "message_arguments.h"

namespace pyparallel::cuda {
namespace {

// The blocks of a multiprocessor: as many as need no spills, for each has its loads in flight.
template <typename Format, bool HAS_RESIDUAL>
constexpr int kQuantizeBlocks = !HAS_RESIDUAL        ? 4
                                : Format::kHasScales ? 3
                                                     : 2;

template <typename Format, typename X, bool HAS_RESIDUAL>
__global__ void __launch_bounds__(kThreads, kQuantizeBlocks<Format, HAS_RESIDUAL>)
    quantize_kernel(const X* x, Stream residual, int64_t numel, int shift, Draws draws,
                    uint8_t* codes, float* scales, bool aligned) {
  const Place<> place = place_of_thread(numel, aligned);
  Packet<> own, kept;
  PhiloxWords words;
  in_one_branch(place, [&](const Place<>& place) {
    own = load_packet(x, place);
    if constexpr (HAS_RESIDUAL) kept = load_packet(residual, place);
    words = draws.words(place);
  });
  float sums[kPerThread], lost[kPerThread];
  unpack<X, DefaultTile>(own, sums);
  if constexpr (HAS_RESIDUAL) {
    unpack(kept, residual.dtype, lost);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) sums[i] = sums[i] + lost[i];
  }
  const BlockScale scale = scale_of_group<Format>(sums, place, shift, scales);
  float decoded[kPerThread];
  encode_and_store<Format>(sums, scale, draws.stochastic, words, codes, place, decoded);
  if constexpr (HAS_RESIDUAL) {
    if (Format::kFitsScale) fit_scale(sums, scale, place, shift, scales, decoded);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const float error = sums[i] - decoded[i];
      const bool changes = Format::kHasScales || is_finite<uint32_t>(error);
      sums[i] = changes ? error : lost[i];
    }
    const Packet<> rest = pack<DefaultTile>(sums, residual.dtype);
    const bool changes = scale.is_finite || !Format::kHasScales;
    if (__all_sync(~0u, changes)) {
      store_together(rest, residual, place);
    } else if (changes) {
      store_packet(rest, residual, place);
    }
  }
}

void quantize_cuda(Tensor x, int64_t bits, FormatName format, int64_t block_size,
                   std::optional<Tensor> residual, std::optional<int64_t> seed, Tensor offset,
                   Tensor codes, Tensor scales) {
  check_quantize_arguments(x, bits, format, block_size, residual, offset, codes, scales);
  if (x.numel() == 0) return;
  const DeviceGuard guard(x.get_device_index());
  const Draws draws(seed, offset);
  const Stream lost = residual ? Stream(*residual) : Stream();
  uint8_t* target = static_cast<uint8_t*>(codes.mutable_data_ptr());
  with_format(bits, format, [&](auto kind) {
    using Format = decltype(kind);
    with_float_type(x.scalar_type(), [&](auto own) {
      using X = decltype(own);
      const X* source = x.const_data_ptr<X>();
      launch(residual ? quantize_kernel<Format, X, true> : quantize_kernel<Format, X, false>,
             num_blocks(x.numel()), kThreads, current_stream(x), source, lost, x.numel(),
             shift_of(block_size), draws, target, scales.mutable_data_ptr<float>(),
             is_aligned(source) && is_aligned(lost.data) && is_aligned(target));
    });
  });
}

template <typename Format, bool ACCUMULATE>
__global__ void __launch_bounds__(kThreads, 2)
    dequantize_kernel(const uint8_t* codes, const float* scales, int64_t numel, int shift,
                      Stream out, int64_t* corrupt, bool aligned) {
  const Place<> place = place_of_thread(numel, aligned);
  const bool has_scale = Format::kHasScales && place.rest > 0;
  const float scale = has_scale ? scales[place.begin >> shift] : 1.0f;
  Packet<> old{};
  Codes<Format> loaded;
  in_one_branch(place, [&](const Place<>& place) {
    loaded = load_codes<Format>(codes, place);
    if (ACCUMULATE) old = load_packet(out, place);
  });
  float result[kPerThread] = {};
  if (ACCUMULATE) unpack(old, out.dtype, result);
  int found = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const uint32_t code = loaded.get(i);
    if (is_corrupt_scale(scale) || is_corrupt_code<Format>(code)) {
      found += place.exists(i);
    } else {
      const float entry = Format::template decode<float>(code) * scale;
      result[i] = ACCUMULATE ? result[i] + entry : entry;
    }
  }
  store_together(pack<DefaultTile>(result, out.dtype), out, place);
  count_corrupt(corrupt, found);
}

void dequantize_cuda(Tensor codes, Tensor scales, int64_t bits, FormatName format,
                     int64_t block_size, bool accumulate, Tensor out, Tensor corrupt) {
  check_dequantize_arguments(codes, scales, bits, format, block_size, out, corrupt);
  if (out.numel() == 0) return;
  const DeviceGuard guard(out.get_device_index());
  const uint8_t* source = static_cast<const uint8_t*>(codes.const_data_ptr());
  const Stream target(out);
  with_format(bits, format, [&](auto kind) {
    using Format = decltype(kind);
    launch(accumulate ? dequantize_kernel<Format, true> : dequantize_kernel<Format, false>,
           num_blocks(out.numel()), kThreads, current_stream(out), source,
           scales.const_data_ptr<float>(), out.numel(), shift_of(block_size), target,
           corrupt.mutable_data_ptr<int64_t>(), is_aligned(source) && is_aligned(target.data));
  });
}

}  // namespace
}  // namespace pyparallel::cuda

STABLE_TORCH_LIBRARY_IMPL(pyparallel, CUDA, library) {
  library.impl("quantize", TORCH_BOX(&pyparallel::cuda::quantize_cuda));
  library.impl("dequantize", TORCH_BOX(&pyparallel::cuda::dequantize_cuda));
}
