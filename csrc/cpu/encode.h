#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "cpu/codes.h"
#include "cpu/map.h"
#include "cpu/philox_lanes.h"
#include "message_arguments.h"
#include "quantize.h"

// Encoding of buffers as codes and scales, for ops that differ in what they encode and keep.
namespace pyparallel::cpu {

constexpr int kVectors = 4;
constexpr int64_t kChunk = kVectors * kLanes;      // one store of codes
constexpr int64_t kDraw = kPhiloxGroups * kLanes;  // one draw of random bits
constexpr int64_t kMaxBlock = 4096;
constexpr int64_t kTile = 1024;  // or one block: the sums and the other inputs fit the L1 cache

// Two passes over a tile. Between them its values stay in the L1 cache, followed by zeros. Many
// blocks per pass: the scale of one is ready long before its codes need it.
struct Tile {
  alignas(sizeof(Lanes)) float values[kMaxBlock];
  BlockScale scales[kTile / 32];
};

// First pass: stores a block's values, and returns its largest magnitude as a bit pattern.
template <typename Load, typename LoadSome>
uint32_t store_values(int64_t count, float* values, const Load& load, const LoadSome& load_some) {
  typedef int32_t Signed __attribute__((vector_size(32)));  // same order of magnitudes, faster
  Signed largest = {};
  const auto take = [&](int64_t i, Lanes value) {
    store_lanes(value, values + i);
    const Signed magnitude = reinterpret_cast<Signed>(value) & static_cast<int>(kMagnitudeMask);
    largest = magnitude > largest ? magnitude : largest;
  };
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) take(i, load(i));
  if (i < count) {
    take(i, load_some(i, count - i));
    i += kLanes;
  }
  for (; i % kChunk != 0; i += kLanes) store_lanes(Lanes{}, values + i);
  int32_t result = 0;
  for (int64_t j = 0; j < kLanes; ++j) result = std::max(result, largest[j]);
  return static_cast<uint32_t>(result);
}

// 32 codes as stored in memory: 32, 16 or 8 bytes.
template <typename Format>
Bytes pack_codes(const LaneBits (&codes)[kVectors]) {
#ifdef __AVX2__
  const auto wide = [&](int i) { return reinterpret_cast<__m256i>(codes[i]); };
  const __m256i front = _mm256_packus_epi32(wide(0), wide(1));
  const __m256i back = _mm256_packus_epi32(wide(2), wide(3));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packing is by halves
  __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(front, back), order);
  if constexpr (Format::kBits == 2) {
    const __m256i pairs = _mm256_maddubs_epi16(bytes, _mm256_set1_epi16(4 << 8 | 1));
    const __m256i quads = _mm256_madd_epi16(pairs, _mm256_set1_epi32(16 << 16 | 1));
    const __m256i words = _mm256_packus_epi32(quads, quads);
    bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(words, words), order);
  } else if constexpr (Format::kBits == 4) {
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
  } else if constexpr (Format::kBits == 2) {
    std::memcpy(target, &bytes, num_code_bytes<Format>(kChunk));  // read again if there is more
  } else {
    _mm_stream_si128(reinterpret_cast<__m128i*>(target), _mm256_castsi256_si128(whole));
  }
#else
  std::memcpy(target, &bytes, num_code_bytes<Format>(kChunk));
#endif
}

// What the second pass keeps of the values besides their codes.
enum class Kept { kNothing, kErrors, kDecoded };

// Second pass: codes, and what is kept, which may overwrite the values.
template <typename Format, Kept KEPT, typename Encode>
void encode_chunk(int64_t count, float scale, const float* values, float* kept, uint8_t* target,
                  bool stream, const Encode& encode) {
  LaneBits codes[kVectors];
  for (int j = 0; j < kVectors; ++j) {
    const Lanes value = load_lanes(values + j * kLanes);
    const Coded<Lanes, LaneBits> coded = encode(j, value);
    const Lanes decoded = coded.number * scale;
    if (KEPT == Kept::kErrors) {
      Lanes error = value - decoded;
      if constexpr (!Format::kBounded) {
        const bool is_residual = kept != values;
        const Lanes old = load_lanes(kept + j * kLanes);
        if (is_residual) error = is_finite<LaneBits>(error) ? error : old;
      }
      store_lanes(error, kept + j * kLanes);
    }
    if (KEPT == Kept::kDecoded) store_lanes(decoded, kept + j * kLanes);
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

template <typename Format, Kept KEPT>
void encode_nearest(int64_t count, const BlockScale& scale, const float* values, float* kept,
                    uint8_t* codes, bool stream) {
  for (int64_t i = 0; i < count; i += kChunk) {
    encode_chunk<Format, KEPT>(
        count - i, scale.scale, values + i, kept + i, codes + num_code_bytes<Format>(i), stream,
        [&](int, Lanes value) { return Format::template encode<LaneBits>(value * scale.inverse); });
  }
}

template <typename Format, Kept KEPT>
void encode_stochastically(int64_t begin, int64_t count, const BlockScale& scale,
                           const PhiloxLanes& philox, const float* values, float* kept,
                           uint8_t* codes, bool stream) {
  for (int64_t first = 0; first < count; first += kDraw) {
    Words bits[kPhiloxGroups];
    philox.draw((begin + first) / kLanes, bits);
    for (int64_t i = first; i < std::min(first + kDraw, count); i += kChunk) {
      const Words* here = bits + (i - first) / kLanes;
      encode_chunk<Format, KEPT>(count - i, scale.scale, values + i, kept + i,
                                 codes + num_code_bytes<Format>(i), stream,
                                 [&](int j, Lanes value) {
                                   return Format::encode(value * scale.inverse, widen(here[j]));
                                 });
    }
  }
}

// What is sent of a ternary block.
struct Sent {
  LaneBits units = {}, count = {};

  void add(Lanes scaled, LaneBits code) {
    units += units_of(scaled, code);
    count -= reinterpret_cast<LaneBits>(code != 0u);
  }

  float fit(float scale) const {
    uint32_t all_units = 0, all = 0;
    for (int64_t i = 0; i < kLanes; ++i) {
      all_units += units[i];
      all += count[i];
    }
    return fitted_scale(scale, all_units, all);
  }
};

// After the codes: fits the scale to what is sent, and keeps what is not.
template <typename Format>
void fit_block(int64_t count, BlockScale& scale, const float* values, float* kept,
               const uint8_t* codes) {
  const auto load = [&](int64_t i) {
    return i + kLanes <= count ? load_codes<Format>(codes, i)
                               : load_some_codes<Format>(codes, i, count - i);
  };
  Sent sent;
  for (int64_t i = 0; i < count; i += kLanes) {
    sent.add(load_lanes(values + i) * scale.inverse, load(i));
  }
  scale.scale = sent.fit(scale.scale);
  for (int64_t i = 0; i < count; i += kLanes) {
    const Lanes decoded = Format::template decode<Lanes>(load(i)) * scale.scale;
    store_lanes(load_lanes(values + i) - decoded, kept + i);
  }
}

// Writes a block's codes: zeros if it is not live, and then nothing is kept.
template <typename Format, Kept KEPT>
void encode_block(int64_t begin, int64_t count, BlockScale& scale,
                  const std::optional<PhiloxLanes>& philox, const float* values, float* kept,
                  uint8_t* codes, bool stream) {
  uint8_t* target = codes + num_code_bytes<Format>(begin);
  if constexpr (!Format::kBounded) {
    if (scale.is_finite) {  // which most blocks are
      encode_block<typename Format::Bounded, KEPT>(begin, count, scale, philox, values, kept, codes,
                                                   stream);
      return;
    }
  }
  if (!scale.is_live) {
    std::memset(target, 0, num_code_bytes<Format>(count));
  } else if constexpr (Format::kFitsScale && KEPT == Kept::kErrors) {
    encode_block<Format, Kept::kNothing>(begin, count, scale, philox, values, kept, codes, stream);
    fit_block<Format>(count, scale, values, kept, target);
  } else if (philox) {
    encode_stochastically<Format, KEPT>(begin, count, scale, *philox, values, kept, target, stream);
  } else {
    encode_nearest<Format, KEPT>(count, scale, values, kept, target, stream);
  }
}

// Prefetches: the memory would idle while codes are computed.
inline void prefetch(const void* data, int64_t item_size, int64_t begin, int64_t end) {
  constexpr int64_t kLine = 64;
  const char* bytes = static_cast<const char*>(data);
  for (int64_t i = begin * item_size; i < end * item_size; i += kLine) {
    __builtin_prefetch(bytes + i);
  }
}

// `buffers` loads and encodes blocks, with pointers to dtypes composed with the formats, not
// compiled for each pair:
//   load(begin, count, values) -> bits    the first pass, by store_values
//   encode<Format>(begin, count, scale, philox, values, codes, stream)    the second, by
//   encode_block prefetch(begin, end)
template <typename Format, typename Buffers>
void encode_tile(const Buffers& buffers, int64_t begin, int64_t end, int64_t numel,
                 int64_t block_size, const std::optional<PhiloxLanes>& philox, uint8_t* codes,
                 const Rows& rows, bool stream, Tile& tile) {
  for (int64_t i = begin; i < end; i += block_size) {
    const int64_t count = std::min(block_size, end - i), place = i - begin;
    const uint32_t largest_bits = buffers.load(i, count, tile.values + place);
    tile.scales[place / block_size] = block_scale<Format>(largest_bits);
  }
  for (int64_t i = begin; i < end; i += block_size) {
    const int64_t count = std::min(block_size, end - i), place = i - begin;
    const int64_t next = i + end - begin;
    buffers.prefetch(next, std::min(next + count, numel));
    buffers.template encode<Format>(i, count, tile.scales[place / block_size], philox,
                                    tile.values + place,
                                    codes + rows.row(i / block_size) * rows.code_gap, stream);
  }
}

template <typename Format, typename Buffers>
void encode_buffers(const Buffers& buffers, int64_t numel, int64_t block_size,
                    const std::optional<PhiloxLanes>& philox, uint8_t* codes, float* scales,
                    const Rows& rows) {
  const bool stream = reinterpret_cast<uintptr_t>(codes) % sizeof(Bytes) == 0 &&
                      rows.code_gap % static_cast<int64_t>(sizeof(Bytes)) == 0 &&
                      num_code_bytes<Format>(numel) >= kStreamBytes;
  const int64_t size = std::max(kTile, block_size);
  torch::stable::parallel_for(
      0, num_blocks(numel, size), kGrain / size, [&](int64_t first, int64_t last) {
        Tile tile;
        for (int64_t begin = first * size; begin < std::min(last * size, numel); begin += size) {
          const int64_t end = std::min(begin + size, numel);
          encode_tile<Format>(buffers, begin, end, numel, block_size, philox, codes, rows, stream,
                              tile);
          if (!Format::kHasScales) continue;
          const int64_t block = begin / block_size;
          for (int64_t i = 0; i < num_blocks(end - begin, block_size); ++i) {
            scales[block + i + rows.row(block + i) * rows.scale_gap] = tile.scales[i].scale;
          }
        }
        end_streaming();
      });
}

// The message of `numel` entries.
template <typename Format, typename Buffers>
void encode_message(const Buffers& buffers, int64_t numel, int64_t block_size,
                    std::optional<int64_t> seed, const Tensor& offset, const Tensor& codes,
                    const Tensor& scales) {
  std::optional<PhiloxLanes> philox;
  if (seed) philox.emplace(*seed, *offset.const_data_ptr<int64_t>());
  encode_buffers<Format>(
      buffers, numel, block_size, philox, static_cast<uint8_t*>(codes.mutable_data_ptr()),
      scales.mutable_data_ptr<float>(), Rows(codes, scales, Format::kBits, block_size));
}

}  // namespace pyparallel::cpu
