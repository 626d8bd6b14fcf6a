#pragma once

#include "cuda/scan.h"
#include "cuda/top_k_sources.h"

// The kernels of `top_k`. All are always launched, so that the host never synchronizes: those for
// the case found on the device, `proven` or not, do their work, and the others return.
namespace pyparallel::cuda {

// An entry that may be among the k largest.
struct alignas(8) Candidate {
  uint32_t offset;  // from the start of its block's elements
  float acc;
};

// The candidates and winners of one block of collect_kernel.
struct Segment {
  uint64_t first;         // index of its first candidate
  uint64_t size;          // number of its candidates
  uint64_t above, equal;  // entries with keys above the k-th, and equal to it: in the segment,
                          // then in all segments before it
};

struct State {
  uint32_t lowest;                // the smallest key of a candidate
  unsigned long long candidates;  // their number, whether or not they fit
  uint32_t prefix;                // the known digits of the k-th key
  uint64_t wanted;                // number of entries with these digits among the k
  unsigned long long histogram[kBins];
};

struct Problem {
  int64_t numel, k, max_candidates;
  State* state;
  Candidate* candidates;
  Segment* segments;

  // Whether the k largest are among the candidates, and these fit.
  __device__ bool proven() const {
    const int64_t found = static_cast<int64_t>(state->candidates);
    return k <= found && found <= max_candidates;
  }
};

struct Choice {
  uint32_t bin;
  uint64_t wanted;
};

// The bin of the wanted-th largest entry, and its rank within the bin. Every thread of a block of
// kThreads takes part.
template <typename Count>
__device__ Choice choose_bin(const Count* bins, uint64_t wanted) {
  constexpr int kEach = kBins / kThreads;
  __shared__ uint64_t totals[kWarps];
  __shared__ Choice choice;
  const int highest = kBins - 1 - static_cast<int>(threadIdx.x) * kEach;
  uint64_t counts[kEach], sum = 0, all;
#pragma unroll
  for (int i = 0; i < kEach; ++i) sum += counts[i] = bins[highest - i];
  uint64_t before = scan_block(sum, totals, all);
  if (before < wanted && wanted <= before + sum) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (before < wanted && wanted <= before + counts[i]) {
        choice = {static_cast<uint32_t>(highest - i), wanted - before};
      }
      before += counts[i];
    }
  }
  __syncthreads();
  const Choice result = choice;
  __syncthreads();
  return result;
}

__device__ inline void clear_bins(uint32_t* bins) {
  for (int i = threadIdx.x; i < kBins; i += kThreads) bins[i] = 0;
  __syncthreads();
}

// Like guess_from_sample on the CPU.
template <typename Source>
__device__ uint32_t guess_from_sample(const Source& source, int64_t numel, int64_t k) {
  __shared__ uint32_t bins[kBins];
  const int64_t num_samples = min(numel, int64_t{32768});
  const int64_t rank = top_k_sample_rank(k, numel, num_samples);
  if (rank >= num_samples) return 0;
  const int64_t stride = numel / num_samples;
  uint32_t prefix = 0;
  uint64_t wanted = rank + 1;
  for (int position = 0; position < kNumDigits; ++position) {
    const Digit digit = Digit::at(position);
    clear_bins(bins);
    for (int64_t i = threadIdx.x; i < num_samples; i += kThreads) {
      const uint32_t key = top_k_key(source.at(top_k_sample_index(i, stride)));
      if (digit.follows(key, prefix)) atomicAdd(&bins[digit.bin(key)], 1u);
    }
    __syncthreads();
    const Choice choice = choose_bin(bins, wanted);
    prefix |= choice.bin << digit.shift;
    wanted = choice.wanted;
  }
  return prefix;
}

template <typename Source>
__global__ void __launch_bounds__(kThreads)
    begin_kernel(Source source, Problem problem, const float* threshold) {
  State& state = *problem.state;
  for (int i = threadIdx.x; i < kBins; i += kThreads) state.histogram[i] = 0;
  uint32_t guess = threshold ? top_k_guess(*threshold, problem.k) : 0;
  if (guess == 0) guess = guess_from_sample(source, problem.numel, problem.k);
  if (threadIdx.x == 0) {
    state.lowest = guess;
    state.candidates = 0;
    state.prefix = 0;
    state.wanted = problem.k;
  }
}

// The pass over the buffer. The position of a block's candidates depends on the order in which
// blocks run, but they are in order within a segment, and all later kernels work by segment.
template <typename Source>
__global__ void __launch_bounds__(kThreads, 2)
    collect_kernel(Source source, Problem problem, bool aligned) {
  const int64_t begin = blockIdx.x * kPerBlock + threadIdx.x * kPerThread;
  const int present =
      static_cast<int>(max(int64_t{0}, min(int64_t{kPerThread}, problem.numel - begin)));
  float acc[kPerThread];
  source.load(begin, aligned && present == kPerThread, present, acc);
  const uint32_t lowest = problem.state->lowest;
  uint32_t chosen = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    if (i < present && top_k_key(acc[i]) >= lowest) chosen |= 1u << i;
  }
  __shared__ int totals[kWarps];
  __shared__ uint64_t first;
  int count;
  const int before = scan_block(__popc(chosen), totals, count);
  if (threadIdx.x == 0) {
    first = count > 0
                ? atomicAdd(&problem.state->candidates, static_cast<unsigned long long>(count))
                : 0;
    Segment& segment = problem.segments[blockIdx.x];
    segment.first = first;
    segment.size = count;
  }
  __syncthreads();
  if (first + count > static_cast<uint64_t>(problem.max_candidates)) return;
  Candidate* next = problem.candidates + first + before;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    if (chosen >> i & 1) *next++ = {threadIdx.x * kPerThread + i, acc[i]};
  }
}

// The candidates as a buffer of accs.
struct InCandidates {
  const Candidate* candidates;

  __device__ void load(int64_t begin, bool /*whole*/, int count, float* acc) const {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) acc[i] = i < count ? candidates[begin + i].acc : 0.0f;
  }
};

// Histogram of a digit, over all entries whose higher digits equal those of the k-th.
template <bool IF_PROVEN, typename Source>
__global__ void __launch_bounds__(kThreads, 2)
    histogram_kernel(Source source, Problem problem, int position, bool aligned) {
  if (problem.proven() != IF_PROVEN) return;
  const int64_t size = IF_PROVEN ? problem.state->candidates : problem.numel;
  if (blockIdx.x * kPerBlock >= size) return;
  __shared__ uint32_t bins[kBins];
  clear_bins(bins);
  const int64_t begin = blockIdx.x * kPerBlock + threadIdx.x * kPerThread;
  const int present = static_cast<int>(max(int64_t{0}, min(int64_t{kPerThread}, size - begin)));
  float acc[kPerThread];
  source.load(begin, aligned && present == kPerThread, present, acc);
  const Digit digit = Digit::at(position);
  const uint32_t prefix = problem.state->prefix;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const uint32_t key = top_k_key(acc[i]);
    if (i < present && digit.follows(key, prefix)) atomicAdd(&bins[digit.bin(key)], 1u);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kBins; i += kThreads) {
    if (bins[i] > 0) {
      atomicAdd(&problem.state->histogram[i], static_cast<unsigned long long>(bins[i]));
    }
  }
}

// Finds one more digit of the k-th key.
__global__ void __launch_bounds__(kThreads)
    choose_digit_kernel(Problem problem, int position, float* threshold) {
  State& state = *problem.state;
  const Choice choice = choose_bin(state.histogram, state.wanted);
  for (int i = threadIdx.x; i < kBins; i += kThreads) state.histogram[i] = 0;
  if (threadIdx.x > 0) return;
  state.prefix |= choice.bin << Digit::at(position).shift;
  state.wanted = choice.wanted;
  if (threshold && position == kNumDigits - 1) *threshold = float_of_bits(state.prefix);
}

// The entries of a segment that may be among the k largest: its candidates, ...
struct Candidates {
  static constexpr bool kIfProven = true;

  __device__ int size(const Problem& problem, int64_t segment) const {
    return static_cast<int>(problem.segments[segment].size);
  }

  __device__ Candidate at(const Problem& problem, int64_t segment, int i) const {
    return problem.candidates[problem.segments[segment].first + i];
  }
};

// ... or all of its elements.
template <typename Source>
struct Elements {
  static constexpr bool kIfProven = false;

  Source source;

  __device__ int size(const Problem& problem, int64_t segment) const {
    return static_cast<int>(min(kPerBlock, problem.numel - segment * kPerBlock));
  }

  __device__ Candidate at(const Problem& /*problem*/, int64_t segment, int i) const {
    return {static_cast<uint32_t>(i), source.at(segment * kPerBlock + i)};
  }
};

// One warp per segment.
template <typename Entries>
__global__ void __launch_bounds__(kWarp) count_kernel(Entries entries, Problem problem) {
  if (problem.proven() != Entries::kIfProven) return;
  const uint32_t kth = problem.state->prefix;
  const int size = entries.size(problem, blockIdx.x);
  uint32_t above = 0, equal = 0;
  for (int i = threadIdx.x; i < size; i += kWarp) {
    const uint32_t key = top_k_key(entries.at(problem, blockIdx.x, i).acc);
    above += key > kth;
    equal += key == kth;
  }
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    above += __shfl_xor_sync(~0u, above, distance);
    equal += __shfl_xor_sync(~0u, equal, distance);
  }
  if (threadIdx.x > 0) return;
  problem.segments[blockIdx.x].above = above;
  problem.segments[blockIdx.x].equal = equal;
}

// Exclusive prefix sum of the segments' counts.
__global__ void __launch_bounds__(kThreads) scan_kernel(Problem problem, int64_t num_segments) {
  __shared__ uint64_t above_totals[kWarps], equal_totals[kWarps];
  uint64_t above_before = 0, equal_before = 0;
  for (int64_t begin = 0; begin < num_segments; begin += kThreads) {
    const bool present = begin + threadIdx.x < num_segments;
    Segment* segment = problem.segments + begin + threadIdx.x;
    uint64_t above, equal;
    const uint64_t above_here =
        scan_block(present ? segment->above : uint64_t{0}, above_totals, above);
    const uint64_t equal_here =
        scan_block(present ? segment->equal : uint64_t{0}, equal_totals, equal);
    if (present) {
      segment->above = above_before + above_here;
      segment->equal = equal_before + equal_here;
    }
    above_before += above;
    equal_before += equal;
    __syncthreads();
  }
}

// Without a residual.
struct KeepNothing {
  __device__ void operator()(int64_t, float, float, bool) const {}
};

// The residual already holds acc.
template <typename Kept>
struct KeepRemainders {
  Kept* residual;

  __device__ void operator()(int64_t i, float acc, float sent, bool wins) const {
    if (wins) residual[i] = top_k_remainder<Kept>(acc, sent);
  }
};

// The residual does not hold acc yet.
template <typename Kept>
struct KeepAll {
  Kept* residual;

  __device__ void operator()(int64_t i, float acc, float sent, bool wins) const {
    residual[i] = wins ? top_k_remainder<Kept>(acc, sent) : static_cast<Kept>(acc);
  }
};

template <typename X>
struct Output {
  X* values;
  void* indices;
  bool wide;  // whether indices are int64

  __device__ void write(uint64_t place, int64_t index, X value) const {
    values[place] = value;
    if (wide) {
      static_cast<int64_t*>(indices)[place] = index;
    } else {
      static_cast<int32_t*>(indices)[place] = static_cast<int32_t>(index);
    }
  }
};

// A warp writes a segment's winners, in order.
template <typename X, typename Entries, typename Keep>
__global__ void __launch_bounds__(kWarp)
    write_kernel(Entries entries, Problem problem, Output<X> output, Keep keep) {
  if (problem.proven() != Entries::kIfProven) return;
  const uint32_t kth = problem.state->prefix, lower_lanes = (1u << threadIdx.x) - 1;
  const uint64_t ties = problem.state->wanted;
  const int size = entries.size(problem, blockIdx.x);
  uint64_t above = problem.segments[blockIdx.x].above, equal = problem.segments[blockIdx.x].equal;
  for (int begin = 0; begin < size; begin += kWarp) {
    const int i = begin + static_cast<int>(threadIdx.x);
    const bool present = i < size;
    const Candidate entry = present ? entries.at(problem, blockIdx.x, i) : Candidate{0, 0.0f};
    const uint32_t key = top_k_key(entry.acc);
    const uint32_t above_lanes = __ballot_sync(~0u, present && key > kth);
    const uint32_t equal_lanes = __ballot_sync(~0u, present && key == kth);
    const uint64_t equal_here = equal + __popc(equal_lanes & lower_lanes);
    if (present) {
      const int64_t index = blockIdx.x * kPerBlock + entry.offset;
      const bool wins = key > kth || (key == kth && equal_here < ties);
      const X value = static_cast<X>(entry.acc);
      if (wins) {
        const uint64_t above_here = above + __popc(above_lanes & lower_lanes);
        output.write(above_here + min(equal_here, ties), index, value);
      }
      keep(index, entry.acc, static_cast<float>(value), wins);
    }
    above += __popc(above_lanes);
    equal += __popc(equal_lanes);
  }
}

// Writes acc to the residual if the candidates are proven, or without a state.
template <typename X, typename Kept>
__global__ void __launch_bounds__(kThreads, 2)
    accumulate_kernel(Accumulate<X, Kept> source, Problem problem, bool aligned) {
  if (problem.state && !problem.proven()) return;
  const int64_t begin = blockIdx.x * kPerBlock + threadIdx.x * kPerThread;
  const int present =
      static_cast<int>(max(int64_t{0}, min(int64_t{kPerThread}, problem.numel - begin)));
  float acc[kPerThread];
  source.load(begin, aligned && present == kPerThread, present, acc);
}

}  // namespace pyparallel::cuda
