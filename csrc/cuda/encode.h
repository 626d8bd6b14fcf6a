#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "cuda/codes.h"
#include "cuda/launch.h"
#include "cuda/scalar.h"
#include "philox.h"
#include "quantize.h"

// Encoding of a thread's neighbors as codes, with a scale for each block of neighboring threads.
namespace pyparallel::cuda {

// The random bits of a thread's elements.
template <typename Shape>
struct DrawsOfThread {
  PhiloxWords groups[Shape::kEach / 8];

  __device__ __forceinline__ uint32_t get(int i) const { return philox_bits(groups[i / 8], i % 8); }
};

struct Draws {
  bool stochastic;
  uint64_t seed;
  Scalar<int64_t> offset;  // index of the draw

  Draws(std::optional<int64_t> seed, const torch::stable::Tensor& offset)
      : stochastic(seed.has_value()),
        seed(static_cast<uint64_t>(seed.value_or(0))),
        offset(offset) {}

  // Of a thread; they depend on no buffer: a kernel draws them in the branch of its loads, while
  // these are in flight. Behind it, the compiler uses what was loaded before it draws.
  template <typename Shape>
  __device__ __forceinline__ DrawsOfThread<Shape> of_thread(const Place<Shape>& place) const {
    DrawsOfThread<Shape> drawn{};
    if (!stochastic) return drawn;
#pragma unroll
    for (int g = 0; g < Shape::kEach / 8; ++g) {
      drawn.groups[g] = philox_of_group(place.begin / 8 + g, offset.get(), seed);
    }
    return drawn;
  }
};

// The larger of two magnitudes as a float; nan if one is.
__device__ __forceinline__ float max_magnitude(float one, float other) {
#ifdef __CUDA_ARCH__
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(fabsf(one)), "f"(fabsf(other)));
  return result;
#else
  return same_bits<float>(
      max(same_bits<uint32_t>(one) & kMagnitudeMask, same_bits<uint32_t>(other) & kMagnitudeMask));
#endif
}

// The largest among the threads of a quantized block, `group` of them: 2 to 512, a power of two.
__device__ __forceinline__ uint32_t max_of_group(uint32_t value, int group) {
  // Without branches: beyond a group's threads, each looks at itself.
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    value = max(value, __shfl_xor_sync(0xffffffffu, value, distance & (group - 1)));
  }
  if (group <= kWarp) return value;
  __shared__ uint32_t largest[kThreads / kWarp];
  const int warp = threadIdx.x / kWarp, num_warps = group / kWarp;
  if (threadIdx.x % kWarp == 0) largest[warp] = value;
  __syncthreads();
  const int first = warp / num_warps * num_warps;
#pragma unroll 1
  for (int i = 0; i < num_warps; ++i) value = max(value, largest[first + i]);
  return value;
}

// Whether a thread is the first of its quantized block.
__device__ __forceinline__ bool is_first_of_group(int group) {
  return (threadIdx.x & (group - 1)) == 0;
}

// The scale of the thread's block, which one of its threads stores.
template <typename Format, typename Shape>
__device__ __forceinline__ BlockScale scale_of_group(const float (&values)[Shape::kEach],
                                                     const Place<Shape>& place, int shift,
                                                     float* scales) {
  if (!Format::kHasScales) return block_scale<Format>(0);
  float largest = fabsf(values[0]);
#pragma unroll
  for (int i = 1; i < Shape::kEach; ++i) largest = max_magnitude(largest, values[i]);
  const int group = (1 << shift) / Shape::kEach;
  const BlockScale scale = block_scale<Format>(max_of_group(same_bits<uint32_t>(largest), group));
  if (place.exists(0) && is_first_of_group(group)) scales[place.begin >> shift] = scale.scale;
  return scale;
}

// Stores the codes at `codes()`, and returns what they decode to. Zeros, as past the end, have the
// code zero.
template <typename Format, typename Shape, typename Target>
__device__ __forceinline__ void encode_and_store(const float (&values)[Shape::kEach],
                                                 const BlockScale& scale, bool stochastic,
                                                 const DrawsOfThread<Shape>& draws,
                                                 const Target& codes, const Place<Shape>& place,
                                                 float (&decoded)[Shape::kEach]) {
  constexpr int kEach = Shape::kEach;
  Codes<Format, kEach> packed{};
#pragma unroll
  for (int i = 0; i < kEach; ++i) decoded[i] = 0.0f;
  const auto encode_all = [&](const auto& encode) {
    uint32_t coded_values[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const Coded<float, uint32_t> coded = encode(values[i] * scale.inverse, i);
      coded_values[i] = coded.code;
      decoded[i] = coded.number;
    }
    packed = pack_codes<Format>(coded_values);
  };
  if (scale.is_live && stochastic) {
    const auto encode = [&](float scaled, int i) { return Format::encode(scaled, draws.get(i)); };
    if constexpr (std::is_same_v<Format, Int8> || std::is_same_v<Format, Int4>) {
      encode_all(
          [&](float scaled, int i) { return Format::encode_unclamped(scaled, draws.get(i)); });
      if (packed.corrupt_bits() != 0) encode_all(encode);
    } else {
      encode_all(encode);
    }
  } else if (scale.is_live) {
    encode_all([](float scaled, int) { return Format::template encode<uint32_t>(scaled); });
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) decoded[i] = decoded[i] * scale.scale;
  store_codes(packed, codes(), place);
}

// The sum over the threads of a quantized block.
__device__ __forceinline__ uint64_t sum_of_group(uint64_t value, int group) {
  for (int distance = min(group, kWarp) / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, distance);
  }
  if (group <= kWarp) return value;
  __shared__ uint64_t sums[kThreads / kWarp];
  const int warp = threadIdx.x / kWarp, num_warps = group / kWarp;
  if (threadIdx.x % kWarp == 0) sums[warp] = value;
  __syncthreads();
  const int first = warp / num_warps * num_warps;
  value = 0;
#pragma unroll 1
  for (int i = 0; i < num_warps; ++i) value += sums[first + i];
  return value;
}

// After the codes: fits the scale to what is sent of the block, and decodes with it.
__device__ __forceinline__ void fit_scale(const float (&values)[kPerThread],
                                          const BlockScale& scale, const Place<>& place, int shift,
                                          float* scales, float (&decoded)[kPerThread]) {
  uint64_t sent = 0;  // units in the lower half, their number in the upper
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const uint32_t code = decoded[i] != 0.0f;
    sent += uint64_t{code} << 32 | units_of(values[i] * scale.inverse, code);
  }
  const int group = (1 << shift) / kPerThread;
  sent = sum_of_group(sent, group);
  if (!scale.is_live) return;
  const float fitted =
      fitted_scale(scale.scale, static_cast<uint32_t>(sent), static_cast<uint32_t>(sent >> 32));
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    if (decoded[i] != 0.0f) decoded[i] = copysignf(fitted, decoded[i]);
  }
  if (place.exists(0) && is_first_of_group(group)) scales[place.begin >> shift] = fitted;
}

}  // namespace pyparallel::cuda
