#include "quantize.h"

#include <torch/csrc/stable/library.h>

#include <cmath>
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

template <typename X, bool HAS_RESIDUAL>
using QuantizeTile = std::conditional_t<HAS_RESIDUAL || sizeof(X) == 4, DefaultTile, WideTile>;

// The blocks of a multiprocessor: as many as need no spills, for each has its loads in flight.
template <typename Format, typename X, bool HAS_RESIDUAL>
constexpr int kQuantizeBlocks =
    !HAS_RESIDUAL        ? (sizeof(X) == 4 ? kMaxResidentThreads / kThreads : 2)
    : Format::kHasScales ? 3
                         : 2;

// Hides where a number comes from: what follows from it is computed again where it is needed, and
// takes no register meanwhile.
__device__ __forceinline__ int64_t not_kept(int64_t number) {
#ifdef __CUDA_ARCH__
  asm volatile("" : "+l"(number));
#endif
  return number;
}

bool are_aligned(const void* codes, const Rows& rows) {
  return is_aligned(codes) && rows.code_gap % 16 == 0;
}

template <typename Format, typename X, bool HAS_RESIDUAL>
__global__ void __launch_bounds__(kThreads, kQuantizeBlocks<Format, X, HAS_RESIDUAL>)
    quantize_kernel(const X* x, Stream residual, int64_t numel, int shift, Draws draws,
                    uint8_t* codes, float* scales, Rows rows, bool aligned) {
  using Shape = QuantizeTile<X, HAS_RESIDUAL>;
  constexpr int kEach = Shape::kEach;
  const Place<Shape> place = place_of_thread<Shape>(numel, aligned);
  Packet<Shape> own, kept;
  DrawsOfThread<Shape> drawn;
  in_one_branch(place, [&](const Place<Shape>& place) {
    own = load_packet(x, place);
    if constexpr (HAS_RESIDUAL) kept = load_packet(residual, place);
    drawn = draws.of_thread(place);
  });
  float sums[kEach], lost[kEach];
  unpack<X, Shape>(own, sums);
  if constexpr (HAS_RESIDUAL) {
    unpack(kept, residual.dtype, lost);
#pragma unroll
    for (int i = 0; i < kEach; ++i) sums[i] = sums[i] + lost[i];
  }
  const auto row_of = [&] { return rows.row(not_kept(place.begin) >> shift); };
  const BlockScale scale =
      scale_of_group<Format>(sums, place, shift, scales + row_of() * rows.scale_gap);
  float decoded[kEach];
  encode_and_store<Format>(
      sums, scale, draws.stochastic, drawn, [&] { return codes + row_of() * rows.code_gap; }, place,
      decoded);
  if constexpr (HAS_RESIDUAL) {
    if (Format::kFitsScale) {
      fit_scale(sums, scale, place, shift, scales + row_of() * rows.scale_gap, decoded);
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
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
  const Rows rows(codes, scales, bits, block_size);
  with_format(bits, format, [&](auto kind) {
    using Format = decltype(kind);
    with_float_type(x.scalar_type(), [&](auto own) {
      using X = decltype(own);
      const X* source = x.const_data_ptr<X>();
      launch(residual ? quantize_kernel<Format, X, true> : quantize_kernel<Format, X, false>,
             residual ? num_blocks<QuantizeTile<X, true>>(x.numel())
                      : num_blocks<QuantizeTile<X, false>>(x.numel()),
             kThreads, current_stream(x), source, lost, x.numel(), shift_of(block_size), draws,
             target, scales.mutable_data_ptr<float>(), rows,
             is_aligned(source) && is_aligned(lost.data) && are_aligned(target, rows));
    });
  });
}

template <typename Format, bool ACCUMULATE>
__global__ void __launch_bounds__(kThreads, 2)
    dequantize_kernel(const uint8_t* codes, const float* scales, Rows rows, int64_t numel,
                      int shift, Stream out, int64_t* corrupt, bool aligned) {
  const Place<> place = place_of_thread(numel, aligned);
  const int64_t block = place.begin >> shift, row = rows.row(block);
  codes += row * rows.code_gap;
  const bool has_scale = Format::kHasScales && place.rest > 0;
  const float scale = has_scale ? scales[block + row * rows.scale_gap] : 1.0f;
  Packet<> old{};
  Codes<Format> loaded;
  in_one_branch(place, [&](const Place<>& place) {
    loaded = load_codes<Format>(codes, place);
    if (ACCUMULATE) old = load_packet(out, place);
  });
  float result[kPerThread] = {};
  if (ACCUMULATE) unpack(old, out.dtype, result);
  int found = 0;
  decode_codes<1>(&loaded, &scale, place, found,
                  [&](int i, float entry) { result[i] = ACCUMULATE ? result[i] + entry : entry; });
  store_values(result, out, place);
  count_corrupt(corrupt, found);
}

void dequantize_cuda(Tensor codes, Tensor scales, int64_t bits, FormatName format,
                     int64_t block_size, bool accumulate, Tensor out, Tensor corrupt) {
  check_dequantize_arguments(codes, scales, bits, format, block_size, out, corrupt);
  if (out.numel() == 0) return;
  const DeviceGuard guard(out.get_device_index());
  const uint8_t* source = static_cast<const uint8_t*>(codes.const_data_ptr());
  const Stream target(out);
  const Rows rows(codes, scales, bits, block_size);
  with_format(bits, format, [&](auto kind) {
    using Format = decltype(kind);
    launch(accumulate ? dequantize_kernel<Format, true> : dequantize_kernel<Format, false>,
           num_blocks(out.numel()), kThreads, current_stream(out), source,
           scales.const_data_ptr<float>(), rows, out.numel(), shift_of(block_size), target,
           corrupt.mutable_data_ptr<int64_t>(),
           are_aligned(source, rows) && is_aligned(target.data));
  });
}

struct Messages {
  const uint8_t* codes;
  const float* scales;
  int64_t code_stride, scale_stride;
  int count;
};

// 1 / divisor if that is exact, so that products with it are the quotients; else 0.
float exact_inverse(float divisor) {
  int exponent;
  return std::frexp(divisor, &exponent) == 0.5f && exponent > -125 ? 1.0f / divisor : 0.0f;
}

// Several messages are loaded before the first is used. Those past the last are zeros, which change
// no sum: none is -0.
template <typename Format>
__global__ void __launch_bounds__(kThreads, 2)
    dequantize_sum_kernel(Messages messages, int64_t numel, int shift, float divisor, float inverse,
                          Stream out, int64_t* corrupt, bool aligned) {
  constexpr int kBatch = 4;
  const Place<> place = place_of_thread(numel, aligned);
  const uint8_t* codes = messages.codes + place.begin / (8 / Format::kBits);
  const float* factors = messages.scales + (place.begin >> shift);
  float sums[kPerThread] = {};
  int found = 0, left = messages.count;
  do {
    Codes<Format> loaded[kBatch] = {};
    float scales[kBatch] = {};
    const auto load = [&](int j, const Place<>& place) {
      loaded[j] = load_codes<Format>(codes, place);
      if (!Format::kHasScales) {
        scales[j] = 1.0f;
      } else if (place.exists(0)) {
        scales[j] = *factors;
      }
      codes += messages.code_stride;
      factors += messages.scale_stride;
    };
    if (left >= kBatch && place.whole) {
#pragma unroll
      for (int j = 0; j < kBatch; ++j) load(j, {0, kPerThread, true});
    } else {
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (j < left) load(j, {0, place.rest, place.whole});
      }
    }
    decode_codes<kBatch>(loaded, scales, place, found,
                         [&](int i, float entry) { sums[i] = sums[i] + entry; });
    left -= kBatch;
  } while (left > 0);
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    sums[i] = inverse != 0 ? sums[i] * inverse : sums[i] / divisor;
  }
  store_values(sums, out, place);
  count_corrupt(corrupt, found);
}

void dequantize_sum_cuda(Tensor codes, Tensor scales, int64_t bits, FormatName format,
                         int64_t block_size, double divisor, Tensor out, Tensor corrupt) {
  check_dequantize_sum_arguments(codes, scales, bits, format, block_size, divisor, out, corrupt);
  if (out.numel() == 0) return;
  const DeviceGuard guard(out.get_device_index());
  const Messages messages{static_cast<const uint8_t*>(codes.const_data_ptr()),
                          scales.const_data_ptr<float>(), codes.stride(0), scales.stride(0),
                          static_cast<int>(codes.size(0))};
  const Stream target(out);
  const bool aligned = is_aligned(messages.codes) && is_aligned(target.data) &&
                       (messages.count == 1 || messages.code_stride % 16 == 0);
  const float number = static_cast<float>(divisor), inverse = exact_inverse(number);
  with_format(bits, format, [&](auto kind) {
    launch(dequantize_sum_kernel<decltype(kind)>, num_blocks(out.numel()), kThreads,
           current_stream(out), messages, out.numel(), shift_of(block_size), number, inverse,
           target, corrupt.mutable_data_ptr<int64_t>(), aligned);
  });
}

}  // namespace
}  // namespace pyparallel::cuda

STABLE_TORCH_LIBRARY_IMPL(pyparallel, CUDA, library) {
  library.impl("quantize", TORCH_BOX(&pyparallel::cuda::quantize_cuda));
  library.impl("dequantize", TORCH_BOX(&pyparallel::cuda::dequantize_cuda));
  library.impl("dequantize_sum", TORCH_BOX(&pyparallel::cuda::dequantize_sum_cuda));
}
