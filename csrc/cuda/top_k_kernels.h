#pragma once

#include "cuda/scan.h"
#include "cuda/top_k_sources.h"

// The kernels of `top_k`. All are always launched, so that the host never synchronizes: the device
// finds whether the candidates are proven, and the kernels after that read these or, if not, all
// elements. They loop, with few blocks, because the candidates are few.
namespace pyparallel::cuda {

// An entry that may be among the k largest.
struct alignas(8) Candidate {
  uint32_t offset;  // from the start of its block's elements
  float acc;
};

// The candidates of one block of collect_kernel.
struct Segment {
  uint64_t first;  // index of its first candidate
  uint64_t size;   // number of its candidates
};

struct State {
  uint32_t lowest;              // the smallest key of a candidate
  uint32_t lowest_of_retry;     // plus 1 when it is known
  unsigned int num_retrying;    // blocks of retry_kernel that have started
  unsigned int num_done;        // blocks of histogram_kernel
  unsigned long long found[2];  // candidates of each attempt, whether or not they fit
  uint32_t prefix;              // the known digits of the k-th key
  uint64_t wanted;              // number of entries with these digits among the k
  unsigned long long histogram[kBins];
  Ranges ranges;
};

struct Problem {
  int64_t numel, k, max_candidates, num_segments;
  State* state;
  Candidate* candidates;
  Segment* segments;

  // Whether the k largest are among this many candidates, and these fit.
  __device__ bool proves(unsigned long long found) const {
    return k <= static_cast<int64_t>(found) && static_cast<int64_t>(found) <= max_candidates;
  }

  // The number of candidates that are proven to hold the k largest, or 0.
  __device__ int64_t num_proven() const {
    const unsigned long long first = state->found[0], second = state->found[1];
    return static_cast<int64_t>(proves(first) ? first : proves(second) ? second : 0);
  }
};

struct Choice {
  uint32_t bin;
  uint64_t wanted;
};

// The bin of the wanted-th largest entry, and its rank within the bin. Every thread of a block of
// kThreads takes part.
template <typename CountOf>
__device__ Choice choose_bin(const CountOf& count_of, uint64_t wanted) {
  constexpr int kEach = kBins / kThreads;
  __shared__ uint64_t totals[kWarps];
  __shared__ Choice choice;
  const int highest = kBins - 1 - static_cast<int>(threadIdx.x) * kEach;
  uint64_t counts[kEach], sum = 0, all;
#pragma unroll
  for (int i = 0; i < kEach; ++i) sum += counts[i] = count_of(highest - i);
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

__device__ inline void count_key(uint32_t key, const Digit& digit, uint32_t prefix,
                                 uint32_t* bins) {
  if (digit.follows(key, prefix)) atomicAdd(&bins[digit.bin(key)], 1u);
}

// Like guess_from_sample on the CPU, but at most the key of infinity: the residuals of all entries
// that are not finite become zero, so they are candidates. The candidates' memory holds the sample
// before it holds them; it is gathered with several loads of a thread on their way at a time.
__device__ inline uint32_t guess_from_sample(const AnySum& source, const Problem& problem) {
  constexpr int kLoads = 8;
  __shared__ uint32_t bins[kBins];
  const int64_t numel = problem.numel;
  const int num_samples = static_cast<int>(min(numel, kMaxSamples));
  const int64_t rank = top_k_sample_rank(problem.k, numel, num_samples);
  if (rank >= num_samples) return 0;
  const int64_t stride = numel / num_samples;
  auto* keys = reinterpret_cast<uint32_t*>(problem.candidates);
  for (int begin = static_cast<int>(threadIdx.x); begin < num_samples; begin += kLoads * kThreads) {
    AnySum::Bits bits[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int i = begin + j * kThreads;
      if (i < num_samples) bits[j] = source.bits_at(top_k_sample_index(i, stride));
    }
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int i = begin + j * kThreads;
      if (i < num_samples) keys[i] = top_k_key(source.value(bits[j]));
    }
  }
  uint32_t prefix = 0;
  uint64_t wanted = rank + 1;
  for (int position = 0; position < kNumDigits; ++position) {
    const Digit digit = Digit::at(position);
    clear_bins(bins);
#pragma unroll 8
    for (int i = static_cast<int>(threadIdx.x); i < num_samples; i += kThreads) {
      count_key(keys[i], digit, prefix, bins);
    }
    __syncthreads();
    const Choice choice = choose_bin([&](int bin) { return bins[bin]; }, wanted);
    prefix |= choice.bin << digit.shift;
    wanted = choice.wanted;
  }
  return min(prefix, kInfinityKey);
}

static __global__ void __launch_bounds__(kThreads, 2)
    begin_kernel(AnySum source, Problem problem, const float* threshold) {
  auto* words = reinterpret_cast<uint32_t*>(problem.state);
  for (int i = threadIdx.x; i < static_cast<int>(sizeof(State) / sizeof(uint32_t)); i += kThreads) {
    words[i] = 0;
  }
  __syncthreads();
  uint32_t guess = threshold ? top_k_guess(*threshold, problem.k) : 0;
  if (guess == 0) guess = guess_from_sample(source, problem);
  if (threadIdx.x > 0) return;
  problem.state->lowest = guess;
  problem.state->wanted = problem.k;
}

// Collects the candidates of a segment. Their position depends on the order in which blocks run,
// but they are in order within a segment, and all later kernels work by segment.
template <typename Source>
__device__ __forceinline__ void collect(const Source& source, const Problem& problem, bool aligned,
                                        int64_t segment, uint32_t lowest,
                                        unsigned long long* found) {
  const int64_t begin = segment * kPerBlock + threadIdx.x * kPerThread;
  const int present =
      static_cast<int>(max(int64_t{0}, min(int64_t{kPerThread}, problem.numel - begin)));
  float acc[kPerThread];
  source.load(begin, aligned && present == kPerThread, present, acc);
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
    first = count > 0 ? atomicAdd(found, static_cast<unsigned long long>(count)) : 0;
    problem.segments[segment] = {first, static_cast<uint64_t>(count)};
  }
  __syncthreads();
  if (first + count > static_cast<uint64_t>(problem.max_candidates)) return;
  Candidate* next = problem.candidates + first + before;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    if (chosen >> i & 1) *next++ = {threadIdx.x * kPerThread + i, acc[i]};
  }
}

// The pass over the buffer.
template <typename Source>
__global__ void __launch_bounds__(kThreads, 2)
    collect_kernel(Source source, Problem problem, bool aligned) {
  State& state = *problem.state;
  collect(source, problem, aligned, blockIdx.x, state.lowest, state.found);
}

// A second pass where the threshold's candidates are not proven, as when the k-th has shrunk by
// more than the slack: with the sample's guess, which the first block to start makes for all.
// Mostly it is over at once, so it loops, with few blocks.
static __global__ void __launch_bounds__(kThreads, 2)
    retry_kernel(AnySum source, Problem problem, bool aligned, const float* threshold) {
  __shared__ uint32_t lowest;
  State& state = *problem.state;
  if (problem.proves(state.found[0]) || top_k_guess(*threshold, problem.k) == 0) return;
  if (take_turn(state.num_retrying) == 0) {
    const uint32_t guess = guess_from_sample(source, problem);
    __threadfence();  // the candidates of other blocks come after the sample in this memory
    __syncthreads();
    if (threadIdx.x == 0) atomicExch(&state.lowest_of_retry, guess + 1);
  }
  if (threadIdx.x == 0) {
    const volatile uint32_t* place = &state.lowest_of_retry;
    uint32_t word = *place;
    while (word == 0) word = *place;
    lowest = word - 1;
  }
  __syncthreads();
  for (int64_t segment = blockIdx.x; segment < problem.num_segments; segment += gridDim.x) {
    collect(source, problem, aligned, segment, lowest, state.found + 1);
  }
}

// Counts a digit of this block's share of the entries whose higher digits equal those of the k-th.
template <typename Load>
__device__ void count_digit(int64_t size, const Digit& digit, uint32_t prefix, uint32_t* bins,
                            const Load& load) {
  for (int64_t tile = blockIdx.x; tile * kPerBlock < size; tile += gridDim.x) {
    const int64_t begin = tile * kPerBlock + threadIdx.x * kPerThread;
    const int present = static_cast<int>(max(int64_t{0}, min(int64_t{kPerThread}, size - begin)));
    float acc[kPerThread];
    load(begin, present, acc);
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (i < present) count_key(top_k_key(acc[i]), digit, prefix, bins);
    }
  }
}

// Finds one more digit of the k-th key: the last block to be done chooses it from the histogram.
static __global__ void __launch_bounds__(kThreads, 2)
    histogram_kernel(AnySum source, Problem problem, int position, bool aligned, float* threshold) {
  __shared__ uint32_t bins[kBins];
  __shared__ bool is_last;
  State& state = *problem.state;
  const Digit digit = Digit::at(position);
  const uint32_t prefix = state.prefix;
  const int64_t num_proven = problem.num_proven();
  const int64_t size = num_proven > 0 ? num_proven : problem.numel;
  if (blockIdx.x * kPerBlock < size) {
    clear_bins(bins);
    if (num_proven > 0) {
      const Candidate* candidates = problem.candidates;
      count_digit(size, digit, prefix, bins, [=](int64_t begin, int present, float* acc) {
#pragma unroll
        for (int i = 0; i < kPerThread; ++i)
          acc[i] = i < present ? candidates[begin + i].acc : 0.0f;
      });
    } else {
      count_digit(size, digit, prefix, bins, [&](int64_t begin, int present, float* acc) {
        source.load(begin, aligned && present == kPerThread, present, acc);
      });
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kBins; i += kThreads) {
      if (bins[i] > 0) {
        atomicAdd(&state.histogram[i], static_cast<unsigned long long>(bins[i]));
      }
    }
  }
  __threadfence();  // this block's counts are visible before it counts as done
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(&state.num_done, 1u) == gridDim.x - 1;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  const Choice choice =
      choose_bin([&](int bin) { return __ldcg(state.histogram + bin); }, state.wanted);
  for (int i = threadIdx.x; i < kBins; i += kThreads) state.histogram[i] = 0;
  if (threadIdx.x > 0) return;
  state.num_done = 0;
  state.prefix = prefix | choice.bin << digit.shift;
  state.wanted = choice.wanted;
  if (threshold && position == kNumDigits - 1) *threshold = float_of_bits(state.prefix);
}

// The entries of a segment that may be among the k largest: its candidates, ...
struct Candidates {
  const Candidate* first;
  int size;

  __device__ Candidates(const Problem& problem, int64_t segment)
      : first(problem.candidates + problem.segments[segment].first),
        size(static_cast<int>(problem.segments[segment].size)) {}

  __device__ Candidate at(int i) const { return first[i]; }
};

// ... or all of its elements.
struct Elements {
  AnySum source;
  int64_t begin;
  int size;

  __device__ Elements(const AnySum& source, const Problem& problem, int64_t segment)
      : source(source),
        begin(segment * kPerBlock),
        size(static_cast<int>(min(kPerBlock, problem.numel - begin))) {}

  __device__ Candidate at(int i) const {
    return {static_cast<uint32_t>(i), source.value(source.bits_at(begin + i))};
  }
};

// Visits a segment's entries in order, a warp at a time, with several loads of a lane on their way.
template <typename Entries, typename Visitor>
__device__ void visit_entries(const Entries& entries, const Visitor& visit) {
  constexpr int kLoads = 4;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int begin = lane; begin - lane < entries.size; begin += kLoads * kWarp) {
    Candidate loaded[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int i = begin + j * kWarp;
      loaded[j] = i < entries.size ? entries.at(i) : Candidate{0, 0.0f};
    }
#pragma unroll
    for (int j = 0; j < kLoads; ++j) visit(loaded[j], begin + j * kWarp < entries.size);
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
    if (wins || !is_finite(acc)) residual[i] = wins ? top_k_remainder<Kept>(acc, sent) : Kept(0.0f);
  }
};

// The residual does not hold acc yet.
template <typename Kept>
struct KeepAll {
  Kept* residual;

  __device__ void operator()(int64_t i, float acc, float sent, bool wins) const {
    residual[i] =
        wins ? top_k_remainder<Kept>(acc, sent) : static_cast<Kept>(is_finite(acc) ? acc : 0.0f);
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

// Writes the winners of this block's range of segments, in order: each warp counts those of
// consecutive segments, then writes them after those of all earlier warps and blocks.
template <typename X, typename EntriesOf, typename Keep>
__device__ void write_range(const Problem& problem, const EntriesOf& entries_of,
                            const Output<X>& output, const Keep& keep) {
  __shared__ uint64_t above_totals[kWarps], equal_totals[kWarps];
  State& state = *problem.state;
  const uint32_t kth = state.prefix;
  const int range = take_turn(state.ranges.num_started);
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t num_warps = int64_t{gridDim.x} * kWarps;
  const int64_t each = (problem.num_segments + num_warps - 1) / num_warps;
  const int64_t begin = min((int64_t{range} * kWarps + warp) * each, problem.num_segments);
  const int64_t end = min(begin + each, problem.num_segments);

  uint32_t num_above = 0, num_equal = 0;
  for (int64_t segment = begin; segment < end; ++segment) {
    visit_entries(entries_of(segment), [&](const Candidate& entry, bool present) {
      const uint32_t key = top_k_key(entry.acc);
      num_above += present && key > kth;
      num_equal += present && key == kth;
    });
  }
  uint64_t all_above, all_equal;
  uint64_t above = sum_of_earlier_warps(num_above, above_totals, all_above);
  uint64_t equal = sum_of_earlier_warps(num_equal, equal_totals, all_equal);
  above += count_before(state.ranges.counts[0], range, all_above);
  equal += count_before(state.ranges.counts[1], range, all_equal);

  const uint32_t lower_lanes = (1u << (threadIdx.x % kWarp)) - 1;
  const uint64_t ties = state.wanted;
  for (int64_t segment = begin; segment < end; ++segment) {
    visit_entries(entries_of(segment), [&](const Candidate& entry, bool present) {
      const uint32_t key = top_k_key(entry.acc);
      const uint32_t above_lanes = __ballot_sync(~0u, present && key > kth);
      const uint32_t equal_lanes = __ballot_sync(~0u, present && key == kth);
      const uint64_t equal_here = equal + __popc(equal_lanes & lower_lanes);
      if (present) {
        const int64_t index = segment * kPerBlock + entry.offset;
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
    });
  }
}

template <typename X, typename KeepProven, typename Keep>
__global__ void __launch_bounds__(kThreads, 2)
    write_kernel(AnySum source, Problem problem, Output<X> output, KeepProven keep_proven,
                 Keep keep) {
  if (problem.num_proven() > 0) {
    const auto candidates_of = [&](int64_t segment) { return Candidates(problem, segment); };
    write_range(problem, candidates_of, output, keep_proven);
  } else {
    const auto elements_of = [&](int64_t segment) { return Elements(source, problem, segment); };
    write_range(problem, elements_of, output, keep);
  }
}

// Writes acc to the residual if the candidates are proven, or without a state.
template <typename X, typename Kept>
__global__ void __launch_bounds__(kThreads, 2)
    accumulate_kernel(Accumulate<X, Kept> source, Problem problem, bool aligned) {
  if (problem.state && problem.num_proven() == 0) return;
  const int64_t begin = blockIdx.x * kPerBlock + threadIdx.x * kPerThread;
  const int present =
      static_cast<int>(max(int64_t{0}, min(int64_t{kPerThread}, problem.numel - begin)));
  float acc[kPerThread];
  source.load(begin, aligned && present == kPerThread, present, acc);
}

}  // namespace pyparallel::cuda
