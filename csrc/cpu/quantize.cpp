#include "quantize.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>
#include <string>

#include "cpu/codes.h"
#include "cpu/map.h"
#include "cpu/philox_lanes.h"
#include "float_types.h"
#include "message_arguments.h"

namespace pyparallel::cpu {
namespace {

constexpr int kVectors = 4;
constexpr int64_t kChunk = kVectors * kLanes;      // one store of codes
constexpr int64_t kDraw = kPhiloxGroups * kLanes;  // one draw of random bits
constexpr int64_t kMaxBlock = 4096;
constexpr int64_t kTile = 1024;  // or one block: the sums and the other inputs fit the L1 cache

// Two passes over a tile. Between them its sums stay in the L1 cache, followed by zeros; they are
// overwritten by the rounding errors. Many blocks per pass: the scale of one is ready long before
// its codes need it.
struct Tile {
  alignas(sizeof(Lanes)) float sums[kMaxBlock];
  BlockScale scales[kTile / 32];
};

// First pass: computes a block's sums, and returns its largest magnitude as a bit pattern.
template <typename Load, typename LoadSome>
uint32_t add_up(int64_t count, float* sums, const Load& load, const LoadSome& load_some) {
  typedef int32_t Signed __attribute__((vector_size(32)));  // same order of magnitudes, faster
  Signed largest = {};
  const auto take = [&](int64_t i, Lanes sum) {
    store_lanes(sum, sums + i);
    const Signed magnitude = reinterpret_cast<Signed>(sum) & static_cast<int>(kMagnitudeMask);
    largest = magnitude > largest ? magnitude : largest;
  };
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) take(i, load(i));
  if (i < count) {
    take(i, load_some(i, count - i));
    i += kLanes;
  }
  for (; i % kChunk != 0; i += kLanes) store_lanes(Lanes{}, sums + i);
  int32_t result = 0;
  for (int64_t j = 0; j < kLanes; ++j) result = std::max(result, largest[j]);
  return static_cast<uint32_t>(result);
}

template <typename X>
uint32_t add_up_alone(const void* x, const void* /*residual*/, int64_t begin, int64_t count,
                      float* sums) {
  const X* source = static_cast<const X*>(x) + begin;
  return add_up(
      count, sums, [=](int64_t i) { return load_lanes(source + i); },
      [=](int64_t i, int64_t rest) { return load_some_lanes(source + i, rest); });
}

template <typename X, typename Residual>
uint32_t add_up_both(const void* x, const void* residual, int64_t begin, int64_t count,
                     float* sums) {
  const X* source = static_cast<const X*>(x) + begin;
  const Residual* lost = static_cast<const Residual*>(residual) + begin;
  return add_up(
      count, sums, [=](int64_t i) { return load_lanes(source + i) + load_lanes(lost + i); },
      [=](int64_t i, int64_t rest) {
        return load_some_lanes(source + i, rest) + load_some_lanes(lost + i, rest);
      });
}

template <typename Residual>
void keep_rest(void* residual, int64_t begin, int64_t count, const float* sums) {
  Residual* target = static_cast<Residual*>(residual) + begin;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store_lanes(load_lanes(sums + i), target + i);
  if (i < count) store_some_lanes(load_lanes(sums + i), target + i, count - i);
}

// The loops over buffers of these dtypes, composed with the formats, not compiled for each pair.
struct Buffers {
  const void* x;
  void* residual;
  float* floats;  // the residual, if it is float32
  int64_t x_size, residual_size;
  uint32_t (*add_up)(const void* x, const void* residual, int64_t begin, int64_t count,
                     float* sums);
  void (*keep_rest)(void* residual, int64_t begin, int64_t count, const float* sums);
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

// 32 codes as stored in memory: 32 or 16 bytes.
template <typename Format>
Bytes pack_codes(const LaneBits (&codes)[kVectors]) {
#ifdef __AVX2__
  const auto wide = [&](int i) { return reinterpret_cast<__m256i>(codes[i]); };
  const __m256i front = _mm256_packus_epi32(wide(0), wide(1));
  const __m256i back = _mm256_packus_epi32(wide(2), wide(3));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packing is by halves
  __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(front, back), order);
  if constexpr (Format::kBits == 4) {
    const __m256i pairs = _mm256_maddubs_epi16(bytes, _mm256_set1_epi16(16 << 8 | 1));
    bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(pairs, pairs), 0b1000);
  }
  return reinterpret_cast<Bytes>(bytes);
#else
  Bytes bytes = {};
  for (int64_t i = 0; i < kChunk; ++i) {
    const uint32_t code = codes[i / kLanes][i % kLanes];
    bytes[i * Format::kBits / 8] |= static_cast<uint8_t>(code << (i * Format::kBits % 8));
  }
  return bytes;
#endif
}

template <typename Format>
void stream_codes(Bytes bytes, uint8_t* target) {
#ifdef __AVX2__
  const __m256i whole = reinterpret_cast<__m256i>(bytes);
  if constexpr (Format::kBits == 8) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(target), whole);
  } else {
    _mm_stream_si128(reinterpret_cast<__m128i*>(target), _mm256_castsi256_si128(whole));
  }
#else
  std::memcpy(target, &bytes, num_code_bytes<Format>(kChunk));
#endif
}

// Second pass: codes, and rounding errors.
template <typename Format, bool KEEP, typename Encode>
void encode_chunk(int64_t count, float scale, const float* sums, float* rest, uint8_t* target,
                  bool stream, const Encode& encode) {
  LaneBits codes[kVectors];
  for (int j = 0; j < kVectors; ++j) {
    const Lanes sum = load_lanes(sums + j * kLanes);
    const Coded<Lanes, LaneBits> coded = encode(j, sum);
    if (KEEP) store_lanes(sum - coded.number * scale, rest + j * kLanes);
    codes[j] = coded.code;
  }
  const Bytes bytes = pack_codes<Format>(codes);
  if (count < kChunk) {
    std::memcpy(target, &bytes, num_code_bytes<Format>(count));
  } else if (stream) {
    stream_codes<Format>(bytes, target);
  } else {
    std::memcpy(target, &bytes, num_code_bytes<Format>(kChunk));
  }
}

template <typename Format, bool KEEP>
void encode_nearest(int64_t count, const BlockScale& scale, const float* sums, float* rest,
                    uint8_t* codes, bool stream) {
  for (int64_t i = 0; i < count; i += kChunk) {
    encode_chunk<Format, KEEP>(
        count - i, scale.scale, sums + i, rest + i, codes + num_code_bytes<Format>(i), stream,
        [&](int, Lanes sum) { return Format::template encode<LaneBits>(sum * scale.inverse); });
  }
}

template <typename Format, bool KEEP>
void encode_stochastically(int64_t begin, int64_t count, const BlockScale& scale,
                           const PhiloxLanes& philox, const float* sums, float* rest,
                           uint8_t* codes, bool stream) {
  for (int64_t first = 0; first < count; first += kDraw) {
    Words bits[kPhiloxGroups];
    philox.draw((begin + first) / kLanes, bits);
    for (int64_t i = first; i < std::min(first + kDraw, count); i += kChunk) {
      const Words* here = bits + (i - first) / kLanes;
      encode_chunk<Format, KEEP>(
          count - i, scale.scale, sums + i, rest + i, codes + num_code_bytes<Format>(i), stream,
          [&](int j, Lanes sum) { return Format::encode(sum * scale.inverse, widen(here[j])); });
    }
  }
}

// `rest` is null if not requested, and may be `sums`.
template <typename Format>
void encode_block(int64_t begin, int64_t count, const BlockScale& scale,
                  const std::optional<PhiloxLanes>& philox, const float* sums, float* rest,
                  uint8_t* codes, bool stream) {
  uint8_t* target = codes + num_code_bytes<Format>(begin);
  if (philox) {
    const auto encode =
        rest ? encode_stochastically<Format, true> : encode_stochastically<Format, false>;
    encode(begin, count, scale, *philox, sums, rest, target, stream);
  } else {
    const auto encode = rest ? encode_nearest<Format, true> : encode_nearest<Format, false>;
    encode(count, scale, sums, rest, target, stream);
  }
}

template <typename Format>
void quantize_block(const Buffers& buffers, int64_t begin, int64_t count, const BlockScale& scale,
                    const std::optional<PhiloxLanes>& philox, float* sums, uint8_t* codes,
                    bool stream) {
  // A float32 residual is written directly, except at the end of the buffer.
  float* rest = buffers.floats && count % kChunk == 0 ? buffers.floats + begin
                : buffers.residual                    ? sums
                                                      : nullptr;
  if (scale.is_live) {
    encode_block<Format>(begin, count, scale, philox, sums, rest, codes, stream);
  } else {
    std::memset(codes + num_code_bytes<Format>(begin), 0, num_code_bytes<Format>(count));
  }
  const bool is_kept = scale.is_live && rest != sums;
  if (buffers.residual && scale.is_finite && !is_kept) {
    buffers.keep_rest(buffers.residual, begin, count, sums);
  }
}

// Prefetches: the memory would idle while codes are computed.
void prefetch(const void* data, int64_t item_size, int64_t begin, int64_t end) {
  constexpr int64_t kLine = 64;
  const char* bytes = static_cast<const char*>(data);
  for (int64_t i = begin * item_size; i < end * item_size; i += kLine) {
    __builtin_prefetch(bytes + i);
  }
}

template <typename Format>
void quantize_tile(const Buffers& buffers, int64_t begin, int64_t end, int64_t numel,
                   int64_t block_size, const std::optional<PhiloxLanes>& philox, uint8_t* codes,
                   bool stream, Tile& tile) {
  for (int64_t i = begin; i < end; i += block_size) {
    const int64_t count = std::min(block_size, end - i), place = i - begin;
    tile.scales[place / block_size] = block_scale<Format>(
        buffers.add_up(buffers.x, buffers.residual, i, count, tile.sums + place));
  }
  for (int64_t i = begin; i < end; i += block_size) {
    const int64_t count = std::min(block_size, end - i), place = i - begin;
    const int64_t next = i + end - begin, next_end = std::min(next + count, numel);
    prefetch(buffers.x, buffers.x_size, next, next_end);
    if (buffers.residual) prefetch(buffers.residual, buffers.residual_size, next, next_end);
    quantize_block<Format>(buffers, i, count, tile.scales[place / block_size], philox,
                           tile.sums + place, codes, stream);
  }
}

template <typename Format>
void quantize_buffers(const Buffers& buffers, int64_t numel, int64_t block_size,
                      const std::optional<PhiloxLanes>& philox, uint8_t* codes, float* scales) {
  const bool stream = reinterpret_cast<uintptr_t>(codes) % sizeof(Bytes) == 0 &&
                      num_code_bytes<Format>(numel) >= kStreamBytes;
  const int64_t size = std::max(kTile, block_size);
  torch::stable::parallel_for(
      0, num_blocks(numel, size), kGrain / size, [&](int64_t first, int64_t last) {
        Tile tile;
        for (int64_t begin = first * size; begin < std::min(last * size, numel); begin += size) {
          const int64_t end = std::min(begin + size, numel);
          quantize_tile<Format>(buffers, begin, end, numel, block_size, philox, codes, stream,
                                tile);
          float* target = scales + begin / block_size;
          for (int64_t i = 0; i < num_blocks(end - begin, block_size); ++i) {
            target[i] = tile.scales[i].scale;
          }
        }
        end_streaming();
      });
}

void quantize_cpu(Tensor x, int64_t bits, std::string format, int64_t block_size,
                  std::optional<Tensor> residual, std::optional<int64_t> seed, Tensor offset,
                  Tensor codes, Tensor scales) {
  check_quantize_arguments(x, bits, format, block_size, residual, offset, codes, scales);
  const Buffers buffers = make_buffers(x, residual);
  std::optional<PhiloxLanes> philox;
  if (seed) philox.emplace(*seed, *offset.const_data_ptr<int64_t>());
  with_format(bits, format, [&](auto kind) {
    quantize_buffers<decltype(kind)>(buffers, x.numel(), block_size, philox,
                                     static_cast<uint8_t*>(codes.mutable_data_ptr()),
                                     scales.mutable_data_ptr<float>());
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
          decode_block<Format>(codes, scales[block], out, begin, end, stream, combine);
        }
        end_streaming();
      });
}

void dequantize_cpu(Tensor codes, Tensor scales, int64_t bits, std::string format,
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
