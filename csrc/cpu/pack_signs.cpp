#include "pack_signs.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "cpu/map.h"
#include "cpu/statistical_blocks.h"
#include "cpu/top_k_sources.h"
#include "float_types.h"
#include "message_arguments.h"

namespace pyparallel::cpu {
namespace {

static_assert(kLanes == kNeighbors && kLanes == 8, "a word is the signs of one vector");

typedef float Quad __attribute__((vector_size(16)));

template <typename T>
Lanes load_at_most(const T* source, int64_t count) {
  return count >= kLanes ? load_lanes(source) : load_some_lanes(source, count);
}

inline uint8_t to_word(Lanes lanes) {
#ifdef __AVX2__
  return static_cast<uint8_t>(
      _mm256_movemask_ps(_mm256_cmp_ps(lanes, _mm256_setzero_ps(), _CMP_GE_OQ)));
#else
  unsigned word = 0;
  for (int i = 0; i < kLanes; ++i) word |= static_cast<unsigned>(lanes[i] >= 0.0f) << i;
  return static_cast<uint8_t>(word);
#endif
}

inline Lanes magnitudes(Lanes lanes) {
  return reinterpret_cast<Lanes>(reinterpret_cast<LaneBits>(lanes) & 0x7fffffffu);
}

// The sums of four vectors, each as in pack_signs_add_neighbors.
inline Quad add_neighbors(const Lanes* vectors) {
#ifdef __AVX2__
  const __m256 low = _mm256_hadd_ps(vectors[0], vectors[1]);
  const __m256 high = _mm256_hadd_ps(vectors[2], vectors[3]);
  const __m256 halves = _mm256_hadd_ps(low, high);
  return _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
#else
  Quad sums;
  for (int i = 0; i < 4; ++i) {
    float elements[kLanes];
    store_lanes(vectors[i], elements);
    sums[i] = pack_signs_add_neighbors(elements);
  }
  return sums;
#endif
}

// The sum of 4, 8, 16 or 32 vectors.
inline float add_up(const Lanes* vectors, int64_t num_vectors) {
  Quad sums[kPartialSums / kNeighbors / 4];
  for (int64_t i = 0; i < num_vectors / 4; ++i) sums[i] = add_neighbors(vectors + 4 * i);
  for (int64_t half = num_vectors / 8; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) sums[i] = sums[i] + sums[i + half];
  }
  return (sums[0][0] + sums[0][2]) + (sums[0][1] + sums[0][3]);
}

// First pass over a block: writes its signs and returns the sum of its magnitudes. load(i, rest)
// returns the elements from the i-th on, of which there are `rest`.
template <typename Load>
float pack_block(int64_t count, int64_t block_size, uint8_t* words, Load load) {
  constexpr int64_t kVectors = kPartialSums / kLanes;
  Lanes partial[kVectors];
  const int64_t num_vectors = std::min(kVectors, block_size / kLanes);
  std::fill(partial, partial + num_vectors, Lanes{});
  int64_t i = 0;
  for (; i + kPartialSums <= count; i += kPartialSums) {
#pragma GCC unroll 8
    for (int64_t v = 0; v < kVectors; ++v) {
      const Lanes accumulated = load(i + v * kLanes, kLanes);
      words[i / kLanes + v] = to_word(accumulated);
      partial[v] += magnitudes(accumulated);
    }
  }
  for (; i + kLanes <= count; i += kLanes) {
    const Lanes accumulated = load(i, kLanes);
    words[i / kLanes] = to_word(accumulated);
    partial[i / kLanes % kVectors] += magnitudes(accumulated);
  }
  if (i < count) {
    const Lanes accumulated = load(i, count - i);
    words[i / kLanes] = to_word(accumulated) & ((1u << (count - i)) - 1);
    partial[i / kLanes % kVectors] += magnitudes(accumulated);
  }
  return add_up(partial, num_vectors);
}

// Second pass, while the block is in the L1 cache: the residual.
template <typename Residual, typename Load, typename Prefetch>
void keep_rest(int64_t count, float scale, Residual* residual, Load load, Prefetch prefetch) {
  const Lanes positive = Lanes{} + scale, negative = -positive;
  int64_t i = 0;
#pragma GCC unroll 4
  for (; i + kLanes <= count; i += kLanes) {
    prefetch(i);
    store_lanes(pack_signs_remain(load(i, kLanes), positive, negative), residual + i);
  }
  if (i == count) return;
  const Lanes rest = pack_signs_remain(load(i, count - i), positive, negative);
  store_some_lanes(rest, residual + i, count - i);
}

// pack(first element, elements, words) returns the scale of a block.
template <typename Pack>
void for_each_block(int64_t numel, int64_t block_size, uint8_t* words, float* scales,
                    const Pack& pack) {
  const int64_t grain = std::max(int64_t{1}, kGrain / block_size);
  torch::stable::parallel_for(
      0, num_scales(numel, block_size), grain, [&](int64_t first, int64_t last) {
        for (int64_t block = first; block < last; ++block) {
          const int64_t begin = block * block_size;
          scales[block] = pack(begin, std::min(block_size, numel - begin), words + begin / kLanes);
        }
      });
}

template <typename X>
void pack_buffer(const X* x, int64_t numel, int64_t block_size, uint8_t* words, float* scales) {
  const auto pack = [=](int64_t begin, int64_t count, uint8_t* target) {
    const auto load = [=](int64_t i, int64_t rest) { return load_at_most(x + begin + i, rest); };
    return pack_signs_scale(pack_block(count, block_size, target, load), count);
  };
  for_each_block(numel, block_size, words, scales, pack);
}

template <typename X, typename Residual>
void pack_buffers(const X* x, Residual* residual, int64_t numel, int64_t block_size, uint8_t* words,
                  float* scales) {
  const auto pack = [=](int64_t begin, int64_t count, uint8_t* target) {
    const auto load = [=](int64_t i, int64_t rest) {
      return load_at_most(x + begin + i, rest) + load_at_most(residual + begin + i, rest);
    };
    const auto prefetch = [=](int64_t i) {
      __builtin_prefetch(x + begin + block_size + i);
      __builtin_prefetch(residual + begin + block_size + i, 1);
    };
    const float sum = pack_block(count, block_size, target, load);
    const float scale = pack_signs_scale(sum, count);
    if (pack_signs_is_finite(sum)) keep_rest(count, scale, residual + begin, load, prefetch);
    return scale;
  };
  for_each_block(numel, block_size, words, scales, pack);
}

void pack_signs_cpu(Tensor x, int64_t block_size, std::optional<Tensor> residual, Tensor words,
                    Tensor scales) {
  check_pack_signs_arguments(x, block_size, residual, words, scales);
  uint8_t* word = words.mutable_data_ptr<uint8_t>();
  float* scale = scales.mutable_data_ptr<float>();
  with_float_type(x.scalar_type(), [&](auto type) {
    const auto* own = x.const_data_ptr<decltype(type)>();
    if (!residual) return pack_buffer(own, x.numel(), block_size, word, scale);
    with_float_type(residual->scalar_type(), [&](auto kept) {
      pack_buffers(own, residual->mutable_data_ptr<decltype(kept)>(), x.numel(), block_size, word,
                   scale);
    });
  });
}

// Plus or minus the scale, by the bits of a word.
inline Lanes to_values(uint8_t word, LaneBits scale) {
  constexpr LaneBits kPlaces = {31, 30, 29, 28, 27, 26, 25, 24};
  const LaneBits clear = LaneBits{} + static_cast<uint32_t>(static_cast<uint8_t>(~word));
  return reinterpret_cast<Lanes>(scale ^ (clear << kPlaces & 0x80000000u));
}

// out[i] = combine(entry i, out + i, number of elements from i on) for one block.
template <typename Out, typename Combine>
void unpack_block(const uint8_t* words, float scale, Out* out, int64_t count, bool stream,
                  const Combine& combine) {
  const LaneBits bits = reinterpret_cast<LaneBits>(Lanes{} + scale);
  const auto some = [&](int64_t i, int64_t count) {
    return combine(to_values(words[i / kLanes], bits), out + i, count);
  };
  write_range(0, count, stream, out, [&](int64_t i) { return some(i, kLanes); }, some);
}

template <typename Out, typename Combine>
void unpack_buffer(const uint8_t* words, const float* scales, int64_t block_size, Out* out,
                   int64_t numel, bool stream, const Combine& combine) {
  const int64_t grain = std::max(int64_t{1}, kGrain / block_size);
  torch::stable::parallel_for(
      0, num_scales(numel, block_size), grain, [&](int64_t first, int64_t last) {
        for (int64_t block = first; block < last; ++block) {
          const int64_t begin = block * block_size, count = std::min(block_size, numel - begin);
          unpack_block(words + begin / kLanes, scales[block], out + begin, count, stream, combine);
        }
        end_streaming();
      });
}

void refuse_corrupt(const float* scales, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    STD_TORCH_CHECK(!is_corrupt_sign_scale(scales[i]), "scales must be what pack_signs emits, got ",
                    scales[i], " at ", i);
  }
}

void unpack_signs_cpu(Tensor words, Tensor scales, int64_t block_size, bool accumulate, Tensor out,
                      Tensor corrupt) {
  check_unpack_signs_arguments(words, scales, block_size, out, corrupt);
  const uint8_t* word = words.const_data_ptr<uint8_t>();
  const float* scale = scales.const_data_ptr<float>();
  refuse_corrupt(scale, scales.numel());
  const int64_t numel = out.numel();
  with_float_type(out.scalar_type(), [&](auto type) {
    using Out = decltype(type);
    Out* target = out.mutable_data_ptr<Out>();
    if (accumulate) {
      const auto add = [](Lanes entries, const Out* old, int64_t count) {
        return load_at_most(old, count) + entries;
      };
      return unpack_buffer(word, scale, block_size, target, numel, false, add);
    }
    const bool stream = is_streamed(target, numel);
    const auto overwrite = [](Lanes entries, const Out*, int64_t) { return entries; };
    unpack_buffer(word, scale, block_size, target, numel, stream, overwrite);
  });
}

void quantize_statistical_cpu(Tensor x, int64_t bits, int64_t block_size,
                              std::optional<Tensor> residual, Tensor codes, Tensor tables) {
  check_quantize_statistical_arguments(x, bits, block_size, residual, codes, tables);
  uint8_t* code = codes.mutable_data_ptr<uint8_t>();
  float* table = tables.mutable_data_ptr<float>();
  with_bin_codes(bits, [&](auto kind) {
    constexpr int kBits = decltype(kind)::kBits;
    with_float_type(x.scalar_type(), [&](auto type) {
      using X = decltype(type);
      const X* own = x.const_data_ptr<X>();
      if (!residual) {
        return quantize_blocks<kBits>(Plain<X>{own}, x.numel(), block_size,
                                      static_cast<float*>(nullptr), code, table);
      }
      with_float_type(residual->scalar_type(), [&](auto kept) {
        auto* target = residual->mutable_data_ptr<decltype(kept)>();
        quantize_blocks<kBits>(Sum<X, decltype(kept)>{own, target}, x.numel(), block_size, target,
                               code, table);
      });
    });
  });
}

void dequantize_statistical_cpu(Tensor codes, Tensor tables, int64_t bits, int64_t block_size,
                                bool accumulate, Tensor out, Tensor corrupt) {
  check_dequantize_statistical_arguments(codes, tables, bits, block_size, out, corrupt);
  const uint8_t* code = codes.const_data_ptr<uint8_t>();
  const float* table = tables.const_data_ptr<float>();
  refuse_corrupt_tables(table, tables.numel(), 1 << bits);
  const int64_t numel = out.numel();
  with_bin_codes(bits, [&](auto kind) {
    constexpr int kBits = decltype(kind)::kBits;
    with_float_type(out.scalar_type(), [&](auto type) {
      auto* target = out.mutable_data_ptr<decltype(type)>();
      if (accumulate) {
        return look_up_blocks<kBits>(code, table, numel, block_size, target, false,
                                     [](Lanes entries, const auto* old, int64_t count) {
                                       return load_at_most(old, count) + entries;
                                     });
      }
      look_up_blocks<kBits>(code, table, numel, block_size, target, is_streamed(target, numel),
                            [](Lanes entries, const auto*, int64_t) { return entries; });
    });
  });
}

}  // namespace
}  // namespace pyparallel::cpu

STABLE_TORCH_LIBRARY_IMPL(pyparallel, CPU, library) {
  library.impl("pack_signs", TORCH_BOX(&pyparallel::cpu::pack_signs_cpu));
  library.impl("unpack_signs", TORCH_BOX(&pyparallel::cpu::unpack_signs_cpu));
  library.impl("quantize_statistical", TORCH_BOX(&pyparallel::cpu::quantize_statistical_cpu));
  library.impl("dequantize_statistical", TORCH_BOX(&pyparallel::cpu::dequantize_statistical_cpu));
}
