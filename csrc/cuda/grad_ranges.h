#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cuda/packet.h"
#include "step_arguments.h"

// Gradients in tensors of their own, each of which covers a range of the flat buffers.
namespace pyparallel::cuda {

// Of one launch: they are passed in the kernel's arguments, all of which are copied at each launch.
constexpr int kFewRanges = 128, kMostRanges = 1900;

// Adjacent ranges: j has the elements from begins[j] to begins[j + 1], and a gradient unless
// data[j] is null.
template <int CAPACITY>
struct GradRanges {
  static constexpr int kCapacity = CAPACITY;

  const void* data[CAPACITY];
  int64_t begins[CAPACITY + 1];
  int count = 0;
  ScalarType dtype = ScalarType::Float;
};

// A thread's gradients, zero where there is none, and a bit for each that exists.
template <typename Shape>
struct Gradient {
  Packet<Shape> packet{};
  unsigned exists = 0;
};

// The range of an element: bisection finds that of the block's first, the same for all threads,
// from which it is little further.
template <typename Ranges>
__device__ __forceinline__ int find_range(const Ranges& ranges, int64_t block_begin) {
  int low = 0, high = ranges.count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (ranges.begins[middle] <= block_begin) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

template <typename Ranges>
__device__ __forceinline__ int find_range_after(const Ranges& ranges, int range, int64_t element) {
  while (range + 1 < ranges.count && ranges.begins[range + 1] <= element) ++range;
  return range;
}

// Neighbors from several ranges, one by one.
template <typename Run, typename Ranges>
__device__ __forceinline__ Gradient<Run> gather_gradient(const Ranges& ranges, int range,
                                                         const Place<Run>& place) {
  Gradient<Run> gradient;
#pragma unroll
  for (int i = 0; i < Run::kEach; ++i) {
    const int64_t element = place.begin + i;
    if (place.exists(i) && ranges.begins[range + 1] <= element) ++range;
    const void* data = place.exists(i) ? ranges.data[range] : nullptr;
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

template <typename Run, typename Ranges>
__device__ __forceinline__ Gradient<Run> load_run(const Ranges& ranges, int range,
                                                  const Place<Run>& place) {
  if (ranges.begins[range + 1] < place.begin + place.count()) {
    return gather_gradient(ranges, range, place);
  }
  const void* data = ranges.data[range];
  const int64_t index = place.begin - ranges.begins[range];
  const int size = ranges.dtype == ScalarType::Float ? 4 : 2;
  const bool aligned =
      (reinterpret_cast<uintptr_t>(data) + index * size) % min(16, Run::kEach * size) == 0;
  const Place<Run> there{index, place.rest, aligned && place.count() == Run::kEach};
  return {load_packet(data, ranges.dtype, there), data == nullptr ? 0 : ~0u};
}

template <typename Shape, typename Ranges>
__device__ __forceinline__ Gradient<Shape> load_gradient(const Ranges& ranges,
                                                         const Place<Shape>& place) {
  using Run = Tile<Shape::kThreads, Shape::kRun, Shape::kRun>;
  Gradient<Shape> gradient;
  int range = find_range(ranges, place.begin - threadIdx.x * Shape::kRun);
#pragma unroll
  for (int r = 0; r < Shape::kRuns; ++r) {
    const int first = Shape::offset(r * Shape::kRun);
    const Place<Run> part{place.begin + first, max(0, place.rest - first), place.whole};
    range = find_range_after(ranges, range, part.begin);
    const Gradient<Run> loaded = load_run(ranges, range, part);
#pragma unroll
    for (int i = 0; i < Shape::kRun; ++i) {
      gradient.packet.words[r * Shape::kRun + i] = loaded.packet.words[i];
    }
    gradient.exists |= (loaded.exists & ((1u << Shape::kRun) - 1)) << (r * Shape::kRun);
  }
  return gradient;
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
    for (int64_t begin = 0; begin < numel_;) {
      begin = ranges_.size() - first <= kFewRanges ? launch_part<kFewRanges>(launch, begin, first)
                                                   : launch_part<kMostRanges>(launch, begin, first);
    }
  }

 private:
  struct Range {
    const void* data;
    int64_t begin;
  };

  // Launches for the elements from `begin` on, in the ranges from `first` on, which becomes that of
  // the next part; returns where this one ends.
  template <int CAPACITY, typename Launch>
  int64_t launch_part(const Launch& launch, int64_t begin, size_t& first) const {
    const size_t last = std::min(first + CAPACITY, ranges_.size());
    GradRanges<CAPACITY> part{};
    part.dtype = dtype_;
    part.count = static_cast<int>(last - first);
    for (size_t j = first; j < last; ++j) {
      part.data[j - first] = ranges_[j].data;
      part.begins[j - first] = ranges_[j].begin;
    }
    part.begins[part.count] = last < ranges_.size() ? ranges_[last].begin : numel_;
    const int64_t end =
        last < ranges_.size() ? ranges_[last].begin / kPerThread * kPerThread : numel_;
    launch(part, begin, end);
    for (first = last - 1; ranges_[first].begin > end;) --first;
    return end;
  }

  int64_t numel_;
  ScalarType dtype_ = ScalarType::Float;
  std::vector<Range> ranges_;
};

}  // namespace pyparallel::cuda
