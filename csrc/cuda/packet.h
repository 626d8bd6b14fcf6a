#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>

#include "cuda/launch.h"
#include "tensor_checks.h"

// Buffers whose dtype is known only at run time, so that one kernel supports every combination. A
// packet holds the unconverted bits: a thread issues all its loads before it waits for the first,
// which a conversion would.
namespace pyparallel::cuda {

struct Stream {
  void* data = nullptr;  // null: reads as zero
  ScalarType dtype = ScalarType::Float;

  Stream() = default;
  explicit Stream(const Tensor& tensor)
      : data(tensor.mutable_data_ptr()), dtype(tensor.scalar_type()) {}
};

// The first of a thread's neighbors, how many exist, and whether 16-byte accesses are possible.
struct Place {
  int64_t begin;
  int count;
  bool whole;
};

__device__ __forceinline__ Place place_of_thread(int64_t numel, bool aligned) {
  const int64_t begin = blockIdx.x * kPerBlock + threadIdx.x * kPerThread;
  const int count = static_cast<int>(max(int64_t{0}, min(int64_t{kPerThread}, numel - begin)));
  return {begin, count, aligned && count == kPerThread};
}

struct alignas(16) Packet {
  uint32_t words[kPerThread];  // one element each, or two of 16 bits
};

__device__ __forceinline__ Packet load_packet(const void* data, ScalarType dtype,
                                              const Place& place) {
  Packet packet{};
  if (data == nullptr) return packet;
  int4* parts = reinterpret_cast<int4*>(packet.words);
  if (dtype == ScalarType::Float) {
    const uint32_t* source = static_cast<const uint32_t*>(data) + place.begin;
    if (place.whole) {
      parts[0] = __ldcs(reinterpret_cast<const int4*>(source));
      parts[1] = __ldcs(reinterpret_cast<const int4*>(source) + 1);
    } else {
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        if (i < place.count) packet.words[i] = source[i];
      }
    }
  } else {
    const uint16_t* source = static_cast<const uint16_t*>(data) + place.begin;
    if (place.whole) {
      parts[0] = __ldcs(reinterpret_cast<const int4*>(source));
    } else {
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        if (i < place.count) packet.words[i / 2] |= uint32_t{source[i]} << (16 * (i % 2));
      }
    }
  }
  return packet;
}

__device__ __forceinline__ Packet load_packet(const Stream& stream, const Place& place) {
  return load_packet(stream.data, stream.dtype, place);
}

__device__ __forceinline__ uint16_t half_word(const Packet& packet, int i) {
  return static_cast<uint16_t>(packet.words[i / 2] >> (16 * (i % 2)));
}

__device__ __forceinline__ void unpack(const Packet& packet, ScalarType dtype,
                                       float (&values)[kPerThread]) {
  using torch::headeronly::Half;
  if (dtype == ScalarType::Float) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) values[i] = __uint_as_float(packet.words[i]);
  } else if (dtype == ScalarType::BFloat16) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      values[i] = __uint_as_float(uint32_t{half_word(packet, i)} << 16);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      values[i] = static_cast<float>(Half(half_word(packet, i), Half::from_bits()));
    }
  }
}

__device__ __forceinline__ Packet pack(const float (&values)[kPerThread], ScalarType dtype) {
  using torch::headeronly::BFloat16;
  using torch::headeronly::Half;
  Packet packet{};
  if (dtype == ScalarType::Float) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) packet.words[i] = __float_as_uint(values[i]);
  } else {
    const bool is_half = dtype == ScalarType::Half;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const uint16_t bits =
          is_half ? static_cast<Half>(values[i]).x : static_cast<BFloat16>(values[i]).x;
      packet.words[i / 2] |= uint32_t{bits} << (16 * (i % 2));
    }
  }
  return packet;
}

__device__ __forceinline__ void store_packet(const Packet& packet, const Stream& stream,
                                             const Place& place) {
  const int4* parts = reinterpret_cast<const int4*>(packet.words);
  if (stream.dtype == ScalarType::Float) {
    uint32_t* target = static_cast<uint32_t*>(stream.data) + place.begin;
    if (place.whole) {
      __stcs(reinterpret_cast<int4*>(target), parts[0]);
      __stcs(reinterpret_cast<int4*>(target) + 1, parts[1]);
    } else {
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        if (i < place.count) target[i] = packet.words[i];
      }
    }
  } else {
    uint16_t* target = static_cast<uint16_t*>(stream.data) + place.begin;
    if (place.whole) {
      __stcs(reinterpret_cast<int4*>(target), parts[0]);
    } else {
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        if (i < place.count) target[i] = half_word(packet, i);
      }
    }
  }
}

// Stores the values, and replaces them by the rounded ones in the buffer.
__device__ __forceinline__ void store_and_round(float (&values)[kPerThread], const Stream& stream,
                                                const Place& place) {
  const Packet packet = pack(values, stream.dtype);
  store_packet(packet, stream, place);
  if (stream.dtype != ScalarType::Float) unpack(packet, stream.dtype, values);
}

}  // namespace pyparallel::cuda
