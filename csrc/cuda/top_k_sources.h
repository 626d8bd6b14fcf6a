#pragma once

#include "cuda/packet.h"
#include "top_k.h"

// Sources from which `top_k` reads acc: kPerThread neighbors at a time.
namespace pyparallel::cuda {

// acc is in a buffer.
template <typename T>
struct Plain {
  const T* buffer;

  bool aligned() const { return is_aligned(buffer); }

  __device__ void load(int64_t begin, bool whole, int count, float* acc) const {
    load_floats(buffer + begin, whole, count, acc);
  }
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

// acc = x + residual, or x where there is no residual, of any dtypes: for kernels that read few
// entries as a rule, which are then compiled once.
struct AnySum {
  Stream x, residual;

  bool aligned() const { return is_aligned(x.data) && is_aligned(residual.data); }

  __device__ void load(int64_t begin, bool whole, int count, float* acc) const {
    Packet<> own, kept;
    in_one_branch(Place<>{begin, count, whole}, [&](const Place<>& place) {
      own = load_packet(x, place);
      kept = load_packet(residual, place);
    });
    float entries[kPerThread], added[kPerThread];
    unpack(own, x.dtype, entries);
    unpack(kept, residual.dtype, added);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      acc[i] = residual.data ? entries[i] + added[i] : entries[i];
    }
  }

  struct Bits {
    uint32_t x, residual;
  };

  __device__ Bits bits_at(int64_t i) const {
    return {read_bits(x, i), residual.data ? read_bits(residual, i) : 0};
  }

  __device__ float value(const Bits& bits) const {
    const float own = value_of(bits.x, x.dtype);
    return residual.data ? own + value_of(bits.residual, residual.dtype) : own;
  }
};

}  // namespace pyparallel::cuda
