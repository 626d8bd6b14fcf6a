#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>

#include "cuda/launch.h"
#include "tensor_checks.h"

// Packets of buffers whose dtype is known only at run time, so that one kernel supports every
// combination.
namespace pyparallel::cuda {

struct Stream {
  void* data = nullptr;  // null: reads as zero
  ScalarType dtype = ScalarType::Float;

  Stream() = default;
  explicit Stream(const Tensor& tensor)
      : data(tensor.mutable_data_ptr()), dtype(tensor.scalar_type()) {}
};

template <typename Shape>
__device__ __forceinline__ Packet<Shape> load_packet(const void* data, ScalarType dtype,
                                                     const Place<Shape>& place) {
  if (data == nullptr) return {};
  if (dtype == ScalarType::Float) return load_packet(static_cast<const uint32_t*>(data), place);
  return load_packet(static_cast<const uint16_t*>(data), place);
}

template <typename Shape>
__device__ __forceinline__ Packet<Shape> load_packet(const Stream& stream,
                                                     const Place<Shape>& place) {
  return load_packet(stream.data, stream.dtype, place);
}

template <typename Shape>
__device__ __forceinline__ void unpack(const Packet<Shape>& packet, ScalarType dtype,
                                       float (&values)[Shape::kEach]) {
  if (dtype == ScalarType::Float) {
    unpack<float, Shape>(packet, values);
  } else if (dtype == ScalarType::BFloat16) {
    unpack<torch::headeronly::BFloat16, Shape>(packet, values);
  } else {
    unpack<torch::headeronly::Half, Shape>(packet, values);
  }
}

template <typename Shape>
__device__ __forceinline__ Packet<Shape> pack(const float (&values)[Shape::kEach],
                                              ScalarType dtype) {
  if (dtype == ScalarType::Float) return pack<float, Shape>(values);
  if (dtype == ScalarType::BFloat16) return pack<torch::headeronly::BFloat16, Shape>(values);
  return pack<torch::headeronly::Half, Shape>(values);
}

template <typename Shape>
__device__ __forceinline__ void store_packet(const Packet<Shape>& packet, const Stream& stream,
                                             const Place<Shape>& place) {
  if (stream.dtype == ScalarType::Float) {
    store_packet(packet, static_cast<uint32_t*>(stream.data), place);
  } else {
    store_packet(packet, static_cast<uint16_t*>(stream.data), place);
  }
}

template <typename Shape>
__device__ __forceinline__ void store_together(const Packet<Shape>& packet, const Stream& stream,
                                               const Place<Shape>& place) {
  if (stream.dtype == ScalarType::Float) {
    store_together(packet, static_cast<uint32_t*>(stream.data), place);
  } else {
    store_packet(packet, static_cast<uint16_t*>(stream.data), place);
  }
}

// Rounds and stores the values.
template <typename Shape>
__device__ __forceinline__ void store_values(const float (&values)[Shape::kEach],
                                             const Stream& stream, const Place<Shape>& place) {
  if (stream.dtype == ScalarType::Float) {
    store_together(pack<float, Shape>(values), static_cast<uint32_t*>(stream.data), place);
  } else {
    store_packet(pack<Shape>(values, stream.dtype), static_cast<uint16_t*>(stream.data), place);
  }
}

// Stores the values, and replaces them by the rounded ones in the buffer.
template <typename Shape>
__device__ __forceinline__ void store_and_round(float (&values)[Shape::kEach], const Stream& stream,
                                                const Place<Shape>& place) {
  const Packet<Shape> packet = pack<Shape>(values, stream.dtype);
  store_together(packet, stream, place);
  if (stream.dtype != ScalarType::Float) unpack(packet, stream.dtype, values);
}

// One element, of a scattered access: its bits, and their value, which waits for the memory.
__device__ __forceinline__ uint32_t read_bits(const Stream& stream, int64_t i) {
  if (stream.dtype == ScalarType::Float) return static_cast<const uint32_t*>(stream.data)[i];
  return static_cast<const uint16_t*>(stream.data)[i];
}

__device__ __forceinline__ float value_of(uint32_t bits, ScalarType dtype) {
  using torch::headeronly::BFloat16;
  using torch::headeronly::Half;
  if (dtype == ScalarType::Float) return __uint_as_float(bits);
  const auto half = static_cast<uint16_t>(bits);
  if (dtype == ScalarType::BFloat16)
    return static_cast<float>(BFloat16(half, BFloat16::from_bits()));
  return static_cast<float>(Half(half, Half::from_bits()));
}

__device__ __forceinline__ float read_element(const Stream& stream, int64_t i) {
  return value_of(read_bits(stream, i), stream.dtype);
}

__device__ __forceinline__ void write_element(float value, const Stream& stream, int64_t i) {
  if (stream.dtype == ScalarType::Float) {
    static_cast<float*>(stream.data)[i] = value;
  } else if (stream.dtype == ScalarType::BFloat16) {
    using torch::headeronly::BFloat16;
    static_cast<BFloat16*>(stream.data)[i] = static_cast<BFloat16>(value);
  } else {
    using torch::headeronly::Half;
    static_cast<Half*>(stream.data)[i] = static_cast<Half>(value);
  }
}

}  // namespace pyparallel::cuda
