#pragma once

#include <cstdint>

#include "cuda/device.h"
#include "host_device.h"

// Launches on the GPU: short blocks of one fixed size (never a persistent grid, which would lock
// NCCL's blocks out), each thread processing kPerThread elements with 16-byte accesses.
namespace pyparallel::cuda {

constexpr int kWarp = 32;
constexpr int kThreads = 512;
constexpr int kPerThread = 8;
constexpr int64_t kPerBlock = int64_t{kThreads} * kPerThread;

// The most threads that a multiprocessor holds: ptxas refuses launch bounds that ask for more.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 900 || \
    __CUDA_ARCH__ == 1000 || __CUDA_ARCH__ == 1030
constexpr int kMaxResidentThreads = 2048;
#else
constexpr int kMaxResidentThreads = 1536;  // of sm_86, sm_89 and sm_120
#endif

// How a block's elements are divided among its threads: each processes EACH of them, in runs of RUN
// neighbors, and the first runs of all threads come before the second. With runs of 16 bytes the
// accesses of a warp adjoin; with RUN = EACH a thread has neighbors alone.
template <int THREADS, int EACH, int RUN>
struct Tile {
  static_assert(EACH % RUN == 0 && RUN % 4 == 0, "an access is of 8 or 16 bytes");
  static constexpr int kThreads = THREADS, kEach = EACH, kRun = RUN, kRuns = EACH / RUN;
  static constexpr int64_t kPerBlock = int64_t{THREADS} * EACH;

  // From the first of the thread's elements to its i-th.
  static constexpr PYPARALLEL_HOST_DEVICE int offset(int i) {
    return i / RUN * (THREADS * RUN) + i % RUN;
  }
};

// What all kernels use but the steps. Of eight divisions that were compared on an H200 none was
// more than 4 % faster.
using DefaultTile = Tile<kThreads, kPerThread, kPerThread>;
// Of steps, which take most registers: of an H200's bandwidth they reached 0.96 in blocks of 256
// threads and 0.91 in blocks of 512.
using StepTile = Tile<256, kPerThread, kPerThread>;

// Of encoders that read 16-bit elements alone: what they compute once a thread costs half as much.
using WideTile = Tile<kThreads, 2 * kPerThread, 2 * kPerThread>;

template <typename Shape = DefaultTile>
int64_t num_blocks(int64_t numel) {
  return (numel + Shape::kPerBlock - 1) / Shape::kPerBlock;
}

inline bool is_aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

// A thread's elements: the first, how many of the buffer follow in the thread's block, and whether
// they all exist and are accessed 16 bytes (8 in shorter runs) at a time.
template <typename Shape = DefaultTile>
struct Place {
  int64_t begin;
  int rest;
  bool whole;

  __device__ bool exists(int i) const { return Shape::offset(i) < rest; }

  // How many of a thread's neighbors exist.
  __device__ int count() const {
    static_assert(Shape::kRuns == 1, "the elements are neighbors");
    return min(rest, Shape::kEach);
  }
};

// In a block of elements: that of the thread's own block, unless a kernel loops over several.
template <typename Shape = DefaultTile>
__device__ __forceinline__ Place<Shape> place_of_thread(int64_t numel, bool aligned,
                                                        int64_t block = blockIdx.x) {
  const int64_t begin = block * Shape::kPerBlock + threadIdx.x * Shape::kRun;
  const int rest = static_cast<int>(max(int64_t{0}, min(Shape::kPerBlock, numel - begin)));
  return {begin, rest, aligned && Shape::offset(Shape::kEach - 1) < rest};
}

// A counter is of the host's memory, for it to read: it is accessed only if there is something.
__device__ __forceinline__ void add_to_counter(int64_t* counter, int64_t found) {
  if (found) {
    atomicAdd(reinterpret_cast<unsigned long long*>(counter),
              static_cast<unsigned long long>(found));
  }
}

// Calls function(place) in a branch for whole accesses and one for others, so that several loads of
// it are issued together.
template <typename Shape, typename Function>
__device__ __forceinline__ void in_one_branch(const Place<Shape>& place, const Function& function) {
  if (place.whole) {
    function(Place<Shape>{place.begin, place.rest, true});
  } else {
    function(Place<Shape>{place.begin, place.rest, false});
  }
}

// BYTES of one buffer, evict-first: each is used once.
template <int BYTES>
__device__ __forceinline__ void load_words(const void* source, uint32_t* words) {
  if constexpr (BYTES % 16 == 0) {
#pragma unroll
    for (int i = 0; i < BYTES / 16; ++i) {
      const int4 part = __ldcs(static_cast<const int4*>(source) + i);
      reinterpret_cast<int4*>(words)[i] = part;
    }
  } else if constexpr (BYTES == 8) {
    *reinterpret_cast<uint2*>(words) = __ldcs(static_cast<const uint2*>(source));
  } else if constexpr (BYTES == 4) {
    *words = __ldcs(static_cast<const uint32_t*>(source));
  } else {
    static_assert(BYTES == 2);
    *words = __ldcs(static_cast<const uint16_t*>(source));
  }
}

template <int BYTES>
__device__ __forceinline__ void store_words(void* target, const uint32_t* words) {
  if constexpr (BYTES % 16 == 0) {
#pragma unroll
    for (int i = 0; i < BYTES / 16; ++i) {
      __stcs(static_cast<int4*>(target) + i, reinterpret_cast<const int4*>(words)[i]);
    }
  } else if constexpr (BYTES == 8) {
    __stcs(static_cast<uint2*>(target), *reinterpret_cast<const uint2*>(words));
  } else if constexpr (BYTES == 4) {
    __stcs(static_cast<uint32_t*>(target), *words);
  } else {
    static_assert(BYTES == 2);
    __stcs(static_cast<uint16_t*>(target), static_cast<uint16_t>(*words));
  }
}

// The bits of a thread's elements as they were loaded: a run has kRun words, of which elements of
// 16 bits fill half. Converting them waits for the memory: kernels load all their buffers first, in
// one branch.
template <typename Shape = DefaultTile>
struct alignas(16) Packet {
  uint32_t words[Shape::kEach];

  template <typename T>
  __device__ __forceinline__ float get(int i) const {
    return static_cast<float>(run<T>(i / Shape::kRun)[i % Shape::kRun]);
  }

  template <typename T>
  __device__ __forceinline__ void set(int i, float value) {
    run<T>(i / Shape::kRun)[i % Shape::kRun] = static_cast<T>(value);
  }

  template <typename T>
  __device__ __forceinline__ T* run(int r) {
    return reinterpret_cast<T*>(words + r * Shape::kRun);
  }

  template <typename T>
  __device__ __forceinline__ const T* run(int r) const {
    return reinterpret_cast<const T*>(words + r * Shape::kRun);
  }
};

// Elements of a buffer, zero where none exists.
template <typename T, typename Shape>
__device__ __forceinline__ Packet<Shape> load_packet(const T* buffer, const Place<Shape>& place) {
  constexpr int kRunBytes = Shape::kRun * sizeof(T);
  const T* source = buffer + place.begin;
  Packet<Shape> packet{};
  if (place.whole) {
#pragma unroll
    for (int r = 0; r < Shape::kRuns; ++r) {
      load_words<kRunBytes>(source + Shape::offset(r * Shape::kRun),
                            packet.template run<uint32_t>(r));
    }
  } else {
#pragma unroll
    for (int i = 0; i < Shape::kEach; ++i) {
      packet.template run<T>(i / Shape::kRun)[i % Shape::kRun] =
          place.exists(i) ? source[Shape::offset(i)] : static_cast<T>(0);
    }
  }
  return packet;
}

template <typename T, typename Shape>
__device__ __forceinline__ void store_packet(const Packet<Shape>& packet, T* buffer,
                                             const Place<Shape>& place) {
  constexpr int kRunBytes = Shape::kRun * sizeof(T);
  T* target = buffer + place.begin;
  if (place.whole) {
#pragma unroll
    for (int r = 0; r < Shape::kRuns; ++r) {
      store_words<kRunBytes>(target + Shape::offset(r * Shape::kRun),
                             packet.template run<uint32_t>(r));
    }
  } else {
#pragma unroll
    for (int i = 0; i < Shape::kEach; ++i) {
      if (place.exists(i)) {
        target[Shape::offset(i)] = packet.template run<T>(i / Shape::kRun)[i % Shape::kRun];
      }
    }
  }
}

// As store_packet; all lanes of a warp that has elements must call it together. Neighbors of four
// bytes lie 32 bytes apart in a warp's accesses of 16, each of which would write half a sector:
// pairs of lanes exchange halves, and write whole sectors (twice as fast on an H200 where nothing
// is read).
template <typename T, typename Shape>
__device__ __forceinline__ void store_together(const Packet<Shape>& packet, T* buffer,
                                               const Place<Shape>& place) {
  if constexpr (sizeof(T) == 4 && Shape::kRun == 8 && Shape::kRuns == 1) {
    if (__all_sync(~0u, place.whole)) {
      const bool odd = threadIdx.x % 2 != 0;
      uint32_t first[4], second[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t low = packet.words[i], high = packet.words[4 + i];
        const uint32_t other = __shfl_xor_sync(~0u, odd ? low : high, 1);
        first[i] = odd ? other : low;
        second[i] = odd ? high : other;
      }
      T* target = buffer + place.begin - (odd ? 4 : 0);  // of an odd lane: 4 after the even one's
      store_words<16>(target, first);
      store_words<16>(target + 8, second);
    } else {
      store_packet(packet, buffer, Place<Shape>{place.begin, place.rest, false});
    }
  } else {
    store_packet(packet, buffer, place);
  }
}

template <typename T, typename Shape>
__device__ __forceinline__ void unpack(const Packet<Shape>& packet, float (&values)[Shape::kEach]) {
#pragma unroll
  for (int i = 0; i < Shape::kEach; ++i) values[i] = packet.template get<T>(i);
}

template <typename T, typename Shape>
__device__ __forceinline__ Packet<Shape> pack(const float (&values)[Shape::kEach]) {
  Packet<Shape> packet{};
#pragma unroll
  for (int i = 0; i < Shape::kEach; ++i) packet.template set<T>(i, values[i]);
  return packet;
}

template <typename T, typename Shape>
__device__ __forceinline__ void store_values(const float (&values)[Shape::kEach], T* buffer,
                                             const Place<Shape>& place) {
  store_packet(pack<T, Shape>(values), buffer, place);
}

// For one buffer: kPerThread neighbors as floats, of which `count` exist; all if the access is
// whole.
template <typename T>
__device__ __forceinline__ void load_floats(const T* source, bool whole, int count, float* values) {
  if (whole) {
    constexpr int kAccesses = kPerThread * sizeof(T) / 16;
    int4 raw[kAccesses];
#pragma unroll
    for (int i = 0; i < kAccesses; ++i) raw[i] = __ldcs(reinterpret_cast<const int4*>(source) + i);
    const T* typed = reinterpret_cast<const T*>(raw);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) values[i] = static_cast<float>(typed[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      values[i] = i < count ? static_cast<float>(source[i]) : 0.0f;
    }
  }
}

// The same for two buffers, both loaded before the first is converted.
template <typename T, typename U>
__device__ __forceinline__ void load_floats(const T* source, const U* other, bool whole, int count,
                                            float* values, float* others) {
  Packet<> packet, packet_of_other;
  in_one_branch(Place<>{0, count, whole}, [&](const Place<>& place) {
    packet = load_packet(source, place);
    packet_of_other = load_packet(other, place);
  });
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    values[i] = packet.get<T>(i);
    others[i] = packet_of_other.get<U>(i);
  }
}

template <typename T>
__device__ __forceinline__ void store_floats(T* target, bool whole, int count,
                                             const float* values) {
  Packet<> packet{};
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) packet.set<T>(i, values[i]);
  store_packet(packet, target, Place<>{0, count, whole});
}

}  // namespace pyparallel::cuda
