#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>

#include "cpu/lanes.h"

// Ops that write one buffer as a function of others, element by element.
namespace pyparallel::cpu {

// From this size on a result leaves the caches before it is read: non-temporal stores save the read
// of the target.
constexpr int64_t kStreamBytes = 8 << 20;
constexpr int64_t kStreamed = 2 * kLanes;  // elements at once: 32 bytes of the narrowest type

inline void stream_lanes(Lanes low, Lanes high, float* target) {
#ifdef __AVX2__
  _mm256_stream_ps(target, low);
  _mm256_stream_ps(target + kLanes, high);
#else
  store_lanes(low, high, target);
#endif
}

template <typename T>
void stream_lanes(Lanes low, Lanes high, T* target) {
#ifdef __AVX2__
  const __m256i words = reinterpret_cast<__m256i>(to_words(low, high, T{}));
  _mm256_stream_si256(reinterpret_cast<__m256i*>(target), words);
#else
  store_lanes(low, high, target);
#endif
}

inline void end_streaming() {
#ifdef __AVX2__
  _mm_sfence();
#endif
}

// out[i] onward = at(i), in full lanes, and rest(i, count) for the fewer than kLanes at the end.
// With `stream`, the caller must call end_streaming().
template <typename Out, typename At, typename Rest>
void write_range(int64_t begin, int64_t end, bool stream, Out* out, const At& at,
                 const Rest& rest) {
  int64_t i = begin;
  if (stream) {
    for (; i + kStreamed <= end; i += kStreamed) stream_lanes(at(i), at(i + kLanes), out + i);
  }
  for (; i + kStreamed <= end; i += kStreamed) store_lanes(at(i), at(i + kLanes), out + i);
  for (; i + kLanes <= end; i += kLanes) store_lanes(at(i), out + i);
  if (i < end) store_some_lanes(rest(i, end - i), out + i, end - i);
}

template <typename Function, typename Out, typename... In>
void map_range(int64_t begin, int64_t end, bool stream, const Function& function, Out* out,
               const In*... in) {
  write_range(
      begin, end, stream, out, [&](int64_t i) { return function(load_lanes(in + i)...); },
      [&](int64_t i, int64_t count) { return function(load_some_lanes(in + i, count)...); });
}

// Whether a buffer is written by non-temporal stores, in ranges that start with full vectors.
template <typename Out>
bool is_streamed(const Out* out, int64_t numel) {
  return reinterpret_cast<uintptr_t>(out) % sizeof(Lanes) == 0 &&
         numel * static_cast<int64_t>(sizeof(Out)) >= kStreamBytes;
}

// out[i] = function(in[i]...). An output that is also an input is written in place.
template <typename Function, typename Out, typename... In>
void map_buffers(int64_t numel, const Function& function, Out* out, const In*... in) {
  const bool in_place = ((static_cast<const void*>(in) == static_cast<const void*>(out)) || ...);
  torch::stable::parallel_for(0, numel, kGrain, [&](int64_t begin, int64_t end) {
    const bool stream = is_streamed(out, numel) && !in_place && begin % kStreamed == 0;
    map_range(begin, end, stream, function, out, in...);
    if (stream) end_streaming();
  });
}

}  // namespace pyparallel::cpu
