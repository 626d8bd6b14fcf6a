#pragma once

#include "cuda/launch.h"
#include "top_k.h"

// Sources from which `top_k` reads acc: kPerThread neighbors at a time, or one.
namespace pyparallel::cuda {

// acc is in a buffer.
template <typename T>
struct Plain {
  const T* buffer;

  bool aligned() const { return is_aligned(buffer); }

  __device__ void load(int64_t begin, bool whole, int count, float* acc) const {
    load_floats(buffer + begin, whole, count, acc);
  }

  __device__ float at(int64_t i) const { return static_cast<float>(buffer[i]); }
};

// acc = x + residual; the residual is unchanged.
template <typename X, typename Kept>
struct Sum {
  const X* x;
  const Kept* residual;

  bool aligned() const { return is_aligned(x) && is_aligned(residual); }

  __device__ void load(int64_t begin, bool whole, int count, float* acc) const {
    float kept[kPerThread];
    load_floats(x + begin, residual + begin, whole, count, acc, kept);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) acc[i] = acc[i] + kept[i];
  }

  __device__ float at(int64_t i) const {
    return static_cast<float>(x[i]) + static_cast<float>(residual[i]);
  }
};

// acc = x + residual; the residual becomes acc, so every element may be read only once, and by all
// threads of a block together.
template <typename X, typename Kept>
struct Accumulate {
  const X* x;
  Kept* residual;

  bool aligned() const { return is_aligned(x) && is_aligned(residual); }

  __device__ void load(int64_t begin, bool whole, int count, float* acc) const {
    Sum<X, Kept>{x, residual}.load(begin, whole, count, acc);
    float values[kPerThread];
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) values[i] = acc[i];
    store_together(pack<Kept, DefaultTile>(values), residual + begin, Place<>{0, count, whole});
  }
};

}  // namespace pyparallel::cuda
