#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cuda/packet.h"
#include "step_arguments.h"

// Gradients in tensors of their own, each of which covers a range of the flat buffers.
namespace pyparallel::cuda {

constexpr int kMaxRanges = 128;  // of one launch: they are passed in the kernel's arguments

// Adjacent ranges: j has the elements from begins[j] to begins[j + 1], and a gradient unless
// data[j] is null.
struct GradRanges {
  const void* data[kMaxRanges];
  int64_t begins[kMaxRanges + 1];
  int count = 0;
  ScalarType dtype = ScalarType::Float;
};

// A thread's gradients, zero where there is none, and a bit for each that exists.
struct Gradient {
  Packet packet{};
  unsigned exists = 0;
};

// The range of the block's first element by bisection, the same for all of its threads; that of the
// thread's first is there or little further.
__device__ __forceinline__ int find_range(const GradRanges& ranges, int64_t begin) {
  const int64_t block_begin = begin - threadIdx.x * kPerThread;
  int low = 0, high = ranges.count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (ranges.begins[middle] <= block_begin) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  while (low + 1 < ranges.count && ranges.begins[low + 1] <= begin) ++low;
  return low;
}

// Neighbors from several ranges, one by one.
__device__ __forceinline__ Gradient gather_gradient(const GradRanges& ranges, int range,
                                                    const Place& place) {
  Gradient gradient;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int64_t element = place.begin + i;
    if (i < place.count && ranges.begins[range + 1] <= element) ++range;
    const void* data = i < place.count ? ranges.data[range] : nullptr;
    if (data == nullptr) continue;
    const int64_t index = element - ranges.begins[range];
    gradient.exists |= 1u << i;
    if (ranges.dtype == ScalarType::Float) {
      gradient.packet.words[i] = static_cast<const uint32_t*>(data)[index];
    } else {
      const uint32_t word = static_cast<const uint16_t*>(data)[index];
      gradient.packet.words[i / 2] |= word << (16 * (i % 2));
    }
  }
  return gradient;
}

__device__ __forceinline__ Gradient load_gradient(const GradRanges& ranges, const Place& place) {
  const int range = find_range(ranges, place.begin);
  if (ranges.begins[range + 1] < place.begin + place.count) {
    return gather_gradient(ranges, range, place);
  }
  const void* data = ranges.data[range];
  const int64_t index = place.begin - ranges.begins[range];
  const int64_t bytes = index * (ranges.dtype == ScalarType::Float ? 4 : 2);
  const bool aligned = (reinterpret_cast<uintptr_t>(data) + bytes) % 16 == 0;
  const Place there{index, place.count, aligned && place.count == kPerThread};
  return {load_packet(data, ranges.dtype, there), data == nullptr ? 0 : ~0u};
}

// The ranges of a whole buffer, however many, on the host.
class GradTable {
 public:
  explicit GradTable(const StepTensors& tensors) : numel_(tensors.param.numel()) {
    if (!tensors.grads.empty()) dtype_ = tensors.grads[0].scalar_type();
    int64_t end = 0;  // of the ranges so far
    for (size_t i = 0; i < tensors.grads.size(); ++i) {
      const Tensor& grad = tensors.grads[i];
      if (grad.numel() == 0) continue;
      if (tensors.offsets[i] > end) ranges_.push_back({nullptr, end});
      ranges_.push_back({grad.const_data_ptr(), tensors.offsets[i]});
      end = tensors.offsets[i] + grad.numel();
    }
    if (end < numel_) ranges_.push_back({nullptr, end});
  }

  // Calls launch(ranges, begin, end) for parts of the buffer, in order; each begins at a multiple
  // of kPerThread, so that 16-byte accesses stay possible.
  template <typename Launch>
  void for_each_launch(const Launch& launch) const {
    size_t first = 0;
    for (int64_t begin = 0, end = 0; begin < numel_; begin = end) {
      const size_t last = std::min(first + kMaxRanges, ranges_.size());
      GradRanges part{};
      part.dtype = dtype_;
      part.count = static_cast<int>(last - first);
      for (size_t j = first; j < last; ++j) {
        part.data[j - first] = ranges_[j].data;
        part.begins[j - first] = ranges_[j].begin;
      }
      part.begins[part.count] = last < ranges_.size() ? ranges_[last].begin : numel_;
      end = last < ranges_.size() ? ranges_[last].begin / kPerThread * kPerThread : numel_;
      launch(part, begin, end);
      for (first = last - 1; ranges_[first].begin > end;) --first;
    }
  }

 private:
  struct Range {
    const void* data;
    int64_t begin;
  };

  int64_t numel_;
  ScalarType dtype_ = ScalarType::Float;
  std::vector<Range> ranges_;
};

}  // namespace pyparallel::cuda
