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
void dequantize_buffers(const uint8_t* codes, const float* scales, const Rows& rows,
                        int64_t block_size, Out* out, int64_t numel, bool stream,
                        const Combine& combine) {
  const int64_t grain = std::max(int64_t{1}, kGrain / block_size);
  torch::stable::parallel_for(
      0, num_blocks(numel, block_size), grain, [&](int64_t first, int64_t last) {
        for (int64_t block = first; block < last; ++block) {
          const int64_t begin = block * block_size, end = std::min(begin + block_size, numel);
          const int64_t row = rows.row(block);
          const float scale = Format::kHasScales ? scales[block + row * rows.scale_gap] : 1.0f;
          decode_block<Format>(codes + row * rows.code_gap, scale, out, begin, end, stream,
                               combine);
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
  const Rows rows(codes, scales, bits, block_size);
  const int64_t in_row = rows.blocks > 0 ? rows.blocks * block_size : numel;
  with_format(bits, format, [&](auto kind) {
    using Format = decltype(kind);
    for (int64_t row = 0, begin = 0; begin < numel; ++row, begin += in_row) {
      refuse_corrupt<Format>(code + num_code_bytes<Format>(begin) + row * rows.code_gap,
                             scale + row * (rows.blocks + rows.scale_gap),
                             std::min(in_row, numel - begin), block_size);
    }
    with_float_type(out.scalar_type(), [&](auto type) {
      using Out = decltype(type);
      Out* target = out.mutable_data_ptr<Out>();
      const bool stream = is_streamed(target, numel);
      if (accumulate) {
        const auto add = [](Lanes entries, const Out* old, int64_t count) {
          return (count == kLanes ? load_lanes(old) : load_some_lanes(old, count)) + entries;
        };
        dequantize_buffers<Format>(code, scale, rows, block_size, target, numel, false, add);
      } else {
        const auto overwrite = [](Lanes entries, const Out*, int64_t) { return entries; };
        dequantize_buffers<Format>(code, scale, rows, block_size, target, numel, stream, overwrite);
      }
    });
  });
}

// Messages of the same entries, one after the other.
struct Messages {
  const uint8_t* codes;
  const float* scales;
  int64_t count, code_stride, scale_stride;

  Messages(const Tensor& codes, const Tensor& scales)
      : codes(static_cast<const uint8_t*>(codes.const_data_ptr())),
        scales(scales.const_data_ptr<float>()),
        count(codes.size(0)),
        code_stride(codes.stride(0)),
        scale_stride(scales.stride(0)) {}

  // The sums of VECTORS vectors of entries of a block from entry i on, of which load(codes, i)
  // returns the codes: several at a time, so that their additions do not wait for each other.
  template <typename Format, int VECTORS, typename Load>
  void add_up(int64_t block, int64_t i, float* sums, const Load& load) const {
    Lanes totals[VECTORS] = {};
    for (int64_t j = 0; j < count; ++j) {
      const float scale = Format::kHasScales ? scales[j * scale_stride + block] : 1.0f;
      const uint8_t* own = codes + j * code_stride;
      for (int v = 0; v < VECTORS; ++v) {
        const LaneBits bits = load(own, i + v * kLanes);
        totals[v] = totals[v] + Format::template decode<Lanes>(bits) * scale;
      }
    }
    for (int v = 0; v < VECTORS; ++v) store_lanes(totals[v], sums + v * kLanes);
  }
};

template <typename Format, typename Out>
void sum_messages(const Messages& messages, int64_t block_size, float divisor, Out* out,
                  int64_t numel) {
  const bool stream = is_streamed(out, numel);
  const int64_t grain = std::max(int64_t{1}, kGrain / block_size / messages.count);
  torch::stable::parallel_for(
      0, num_blocks(numel, block_size), grain, [&](int64_t first, int64_t last) {
        alignas(sizeof(Lanes)) float sums[kMaxBlock];
        for (int64_t block = first; block < last; ++block) {
          const int64_t begin = block * block_size, end = std::min(begin + block_size, numel);
          int64_t i = begin;
          for (; i + kChunk <= end; i += kChunk) {
            messages.add_up<Format, kVectors>(block, i, sums + (i - begin), load_codes<Format>);
          }
          for (; i < end; i += kLanes) {
            messages.add_up<Format, 1>(
                block, i, sums + (i - begin), [end](const uint8_t* codes, int64_t i) {
                  return i + kLanes <= end ? load_codes<Format>(codes, i)
                                           : load_some_codes<Format>(codes, i, end - i);
                });
          }
          const auto at = [&](int64_t i) { return load_lanes(sums + (i - begin)) / divisor; };
          write_range(begin, end, stream, out, at, [&](int64_t i, int64_t) { return at(i); });
        }
        end_streaming();
      });
}

void dequantize_sum_cpu(Tensor codes, Tensor scales, int64_t bits, FormatName format,
                        int64_t block_size, double divisor, Tensor out, Tensor corrupt) {
  check_dequantize_sum_arguments(codes, scales, bits, format, block_size, divisor, out, corrupt);
  const Messages messages(codes, scales);
  with_format(bits, format, [&](auto kind) {
    using Format = decltype(kind);
    for (int64_t j = 0; j < messages.count; ++j) {
      refuse_corrupt<Format>(messages.codes + j * messages.code_stride,
                             messages.scales + j * messages.scale_stride, out.numel(), block_size);
    }
    with_float_type(out.scalar_type(), [&](auto type) {
      sum_messages<Format>(messages, block_size, static_cast<float>(divisor),
                           out.mutable_data_ptr<decltype(type)>(), out.numel());
    });
  });
}

}  // namespace
}  // namespace pyparallel::cpu

STABLE_TORCH_LIBRARY_IMPL(pyparallel, CPU, library) {
  library.impl("quantize", TORCH_BOX(&pyparallel::cpu::quantize_cpu));
  library.impl("dequantize", TORCH_BOX(&pyparallel::cpu::dequantize_cpu));
  library.impl("dequantize_sum", TORCH_BOX(&pyparallel::cpu::dequantize_sum_cpu));
}
