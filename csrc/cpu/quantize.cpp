#include "quantize.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>
#include <string>

#include "cpu/codes.h"
#include "cpu/encode.h"
#include "cpu/map.h"
#include "float_types.h"
#include "message_arguments.h"

namespace pyparallel::cpu {
namespace {

template <typename X>
uint32_t add_up_alone(const void* x, const void* /*residual*/, int64_t begin, int64_t count,
                      float* sums) {
  const X* source = static_cast<const X*>(x) + begin;
  return store_values(
      count, sums, [=](int64_t i) { return load_lanes(source + i); },
      [=](int64_t i, int64_t rest) { return load_some_lanes(source + i, rest); });
}

template <typename X, typename Residual>
uint32_t add_up_both(const void* x, const void* residual, int64_t begin, int64_t count,
                     float* sums) {
  const X* source = static_cast<const X*>(x) + begin;
  const Residual* lost = static_cast<const Residual*>(residual) + begin;
  return store_values(
      count, sums, [=](int64_t i) { return load_lanes(source + i) + load_lanes(lost + i); },
      [=](int64_t i, int64_t rest) {
        return load_some_lanes(source + i, rest) + load_some_lanes(lost + i, rest);
      });
}

template <typename Residual>
void keep_rest(void* residual, int64_t begin, int64_t count, bool all, const float* sums) {
  Residual* target = static_cast<Residual*>(residual) + begin;
  const auto keep = [all](const auto& access, const float* rest, Residual* old) {
    Lanes error = load_lanes(rest);
    if (!all) error = is_finite<LaneBits>(error) ? error : access.load(old);
    access.store(error, old);
  };
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) keep(WholeLanes{}, sums + i, target + i);
  if (i < count) keep(SomeLanes{count - i}, sums + i, target + i);
}

struct Buffers {
  const void* x;
  void* residual;
  float* floats;  // the residual, if it is float32
  int64_t x_size, residual_size;
  uint32_t (*add_up)(const void* x, const void* residual, int64_t begin, int64_t count,
                     float* sums);
  void (*keep_rest)(void* residual, int64_t begin, int64_t count, bool all, const float* sums);

  uint32_t load(int64_t begin, int64_t count, float* sums) const {
    return add_up(x, residual, begin, count, sums);
  }

  void prefetch(int64_t begin, int64_t end) const {
    cpu::prefetch(x, x_size, begin, end);
    if (residual) cpu::prefetch(residual, residual_size, begin, end);
  }

  template <typename Format>
  void encode(int64_t begin, int64_t count, BlockScale& scale,
              const std::optional<PhiloxLanes>& philox, float* sums, uint8_t* codes,
              bool stream) const {
    // A float32 residual is written directly, except at the end of the buffer.
    float* rest = floats && count % kChunk == 0 ? floats + begin : sums;
    const auto encode =
        residual ? encode_block<Format, Kept::kErrors> : encode_block<Format, Kept::kNothing>;
    encode(begin, count, scale, philox, sums, rest, codes, stream);
    const bool is_kept = scale.is_live && rest != sums;
    if (residual && (scale.is_finite || !Format::kHasScales) && !is_kept) {
      keep_rest(residual, begin, count, scale.is_finite, sums);
    }
  }
};

Buffers make_buffers(const Tensor& x, const std::optional<Tensor>& residual) {
  Buffers buffers{};
  buffers.x = x.const_data_ptr();
  buffers.x_size = x.element_size();
  with_float_type(x.scalar_type(), [&](auto own) {
    if (!residual) {
      buffers.add_up = add_up_alone<decltype(own)>;
      return;
    }
    buffers.residual = residual->mutable_data_ptr();
    buffers.residual_size = residual->element_size();
    const bool of_floats = residual->scalar_type() == ScalarType::Float;
    buffers.floats = of_floats ? residual->mutable_data_ptr<float>() : nullptr;
    with_float_type(residual->scalar_type(), [&](auto lost) {
      buffers.add_up = add_up_both<decltype(own), decltype(lost)>;
      buffers.keep_rest = keep_rest<decltype(lost)>;
    });
  });
  return buffers;
}

void quantize_cpu(Tensor x, int64_t bits, FormatName format, int64_t block_size,
                  std::optional<Tensor> residual, std::optional<int64_t> seed, Tensor offset,
                  Tensor codes, Tensor scales) {
  check_quantize_arguments(x, bits, format, block_size, residual, offset, codes, scales);
  const Buffers buffers = make_buffers(x, residual);
  with_format(bits, format, [&](auto kind) {
    encode_message<decltype(kind)>(buffers, x.numel(), block_size, seed, offset, codes, scales);
  });
}

// out[i] = combine(entry i, out[i]) for one block.
template <typename Format, typename Out, typename Combine>
void decode_block(const uint8_t* codes, float scale, Out* out, int64_t begin, int64_t end,
                  bool stream, const Combine& combine) {
  const auto entries = [scale](LaneBits codes) {
    return Format::template decode<Lanes>(codes) * scale;
  };
  const auto at = [&](int64_t i) {
    return combine(entries(load_codes<Format>(codes, i)), out + i, kLanes);
  };
  const auto rest = [&](int64_t i, int64_t count) {
    return combine(entries(load_some_codes<Format>(codes, i, count)), out + i, count);
  };
  write_range(begin, end, stream, out, at, rest);
}

template <typename Format, typename Out, typename Combine>
void dequantize_buffers(const uint8_t* codes, const float* scales, int64_t block_size, Out* out,
                        int64_t numel, bool stream, const Combine& combine) {
  const int64_t grain = std::max(int64_t{1}, kGrain / block_size);
  torch::stable::parallel_for(
      0, num_blocks(numel, block_size), grain, [&](int64_t first, int64_t last) {
        for (int64_t block = first; block < last; ++block) {
          const int64_t begin = block * block_size, end = std::min(begin + block_size, numel);
          const float scale = Format::kHasScales ? scales[block] : 1.0f;
          decode_block<Format>(codes, scale, out, begin, end, stream, combine);
        }
        end_streaming();
      });
}

void dequantize_cpu(Tensor codes, Tensor scales, int64_t bits, FormatName format,
                    int64_t block_size, bool accumulate, Tensor out, Tensor corrupt) {
  check_dequantize_arguments(codes, scales, bits, format, block_size, out, corrupt);
  const uint8_t* code = static_cast<const uint8_t*>(codes.const_data_ptr());
  const float* scale = scales.const_data_ptr<float>();
  const int64_t numel = out.numel();
  with_format(bits, format, [&](auto kind) {
    using Format = decltype(kind);
    refuse_corrupt<Format>(code, scale, numel, block_size);
    with_float_type(out.scalar_type(), [&](auto type) {
      using Out = decltype(type);
      Out* target = out.mutable_data_ptr<Out>();
      const bool stream = is_streamed(target, numel);
      if (accumulate) {
        const auto add = [](Lanes entries, const Out* old, int64_t count) {
          return (count == kLanes ? load_lanes(old) : load_some_lanes(old, count)) + entries;
        };
        dequantize_buffers<Format>(code, scale, block_size, target, numel, false, add);
      } else {
        const auto overwrite = [](Lanes entries, const Out*, int64_t) { return entries; };
        dequantize_buffers<Format>(code, scale, block_size, target, numel, stream, overwrite);
      }
    });
  });
}

}  // namespace
}  // namespace pyparallel::cpu

STABLE_TORCH_LIBRARY_IMPL(pyparallel, CPU, library) {
  library.impl("quantize", TORCH_BOX(&pyparallel::cpu::quantize_cpu));
  library.impl("dequantize", TORCH_BOX(&pyparallel::cpu::dequantize_cpu));
}
