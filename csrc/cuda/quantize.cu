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
constexpr int kQuantizeBlocks = !HAS_RESIDUAL        ? kMaxResidentThreads / kThreads
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
__global__ void __launch_bounds__(kThreads, kQuantizeBlocks<Format, HAS_RESIDUAL>)
    quantize_kernel(const X* x, Stream residual, int64_t numel, int shift, Draws draws,
                    uint8_t* codes, float* scales, Rows rows, bool aligned) {
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
  const auto row_of = [&] { return rows.row(not_kept(place.begin) >> shift); };
  const BlockScale scale =
      scale_of_group<Format>(sums, place, shift, scales + row_of() * rows.scale_gap);
  float decoded[kPerThread];
  encode_and_store<Format>(
      sums, scale, draws.stochastic, words, [&] { return codes + row_of() * rows.code_gap; }, place,
      decoded);
  if constexpr (HAS_RESIDUAL) {
    if (Format::kFitsScale) {
      fit_scale(sums, scale, place, shift, scales + row_of() * rows.scale_gap, decoded);
    }
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
  const Rows rows(codes, scales, bits, block_size);
  with_format(bits, format, [&](auto kind) {
    using Format = decltype(kind);
    with_float_type(x.scalar_type(), [&](auto own) {
      using X = decltype(own);
      const X* source = x.const_data_ptr<X>();
      launch(residual ? quantize_kernel<Format, X, true> : quantize_kernel<Format, X, false>,
             num_blocks(x.numel()), kThreads, current_stream(x), source, lost, x.numel(),
             shift_of(block_size), draws, target, scales.mutable_data_ptr<float>(), rows,
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
  int64_t count, code_stride, scale_stride;
};

// Several messages are loaded before the first is used.
template <typename Format>
__global__ void __launch_bounds__(kThreads, 2)
    dequantize_sum_kernel(Messages messages, int64_t numel, int shift, float divisor, Stream out,
                          int64_t* corrupt, bool aligned) {
  constexpr int kBatch = 4;
  const Place<> place = place_of_thread(numel, aligned);
  float sums[kPerThread] = {};
  int found = 0;
  for (int64_t first = 0; first < messages.count; first += kBatch) {
    Codes<Format> loaded[kBatch];
    float scales[kBatch];
    in_one_branch(place, [&](const Place<>& place) {
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        if (first + j >= messages.count) break;
        const uint8_t* codes = messages.codes + (first + j) * messages.code_stride;
        loaded[j] = load_codes<Format>(codes, place);
        const float* factors = messages.scales + (first + j) * messages.scale_stride;
        const bool has_scale = Format::kHasScales && place.exists(0);
        scales[j] = has_scale ? factors[place.begin >> shift] : 1.0f;
      }
    });
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (first + j >= messages.count) break;
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        const uint32_t code = loaded[j].get(i);
        if (is_corrupt_scale(scales[j]) || is_corrupt_code<Format>(code)) {
          found += place.exists(i);
        } else {
          sums[i] = sums[i] + Format::template decode<float>(code) * scales[j];
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) sums[i] = sums[i] / divisor;
  store_together(pack<DefaultTile>(sums, out.dtype), out, place);
  count_corrupt(corrupt, found);
}

void dequantize_sum_cuda(Tensor codes, Tensor scales, int64_t bits, FormatName format,
                         int64_t block_size, double divisor, Tensor out, Tensor corrupt) {
  check_dequantize_sum_arguments(codes, scales, bits, format, block_size, divisor, out, corrupt);
  if (out.numel() == 0) return;
  const DeviceGuard guard(out.get_device_index());
  const Messages messages{static_cast<const uint8_t*>(codes.const_data_ptr()),
                          scales.const_data_ptr<float>(), codes.size(0), codes.stride(0),
                          scales.stride(0)};
  const Stream target(out);
  const bool aligned = is_aligned(messages.codes) && is_aligned(target.data) &&
                       (messages.count == 1 || messages.code_stride % 16 == 0);
  with_format(bits, format, [&](auto kind) {
    launch(dequantize_sum_kernel<decltype(kind)>, num_blocks(out.numel()), kThreads,
           current_stream(out), messages, out.numel(), shift_of(block_size),
           static_cast<float>(divisor), target, corrupt.mutable_data_ptr<int64_t>(), aligned);
  });
}

}  // namespace
}  // namespace pyparallel::cuda

STABLE_TORCH_LIBRARY_IMPL(pyparallel, CUDA, library) {
  library.impl("quantize", TORCH_BOX(&pyparallel::cuda::quantize_cuda));
  library.impl("dequantize", TORCH_BOX(&pyparallel::cuda::dequantize_cuda));
  library.impl("dequantize_sum", TORCH_BOX(&pyparallel::cuda::dequantize_sum_cuda));
}
