#include "random_k.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <array>

#include "cuda/packet.h"
#include "cuda/scalar.h"
#include "cuda/scan.h"
#include "float_types.h"
#include "sparse_arguments.h"

namespace pyparallel::cuda {
namespace {

int64_t blocks_of_threads(int64_t count) { return (count + kThreads - 1) / kThreads; }

__device__ int64_t global_thread() { return int64_t{blockIdx.x} * kThreads + threadIdx.x; }

struct RandomKDraw {
  uint64_t seed;
  Scalar<int64_t> offset;  // index of the draw
};

// Once per block: every block derives the keys itself, which saves a launch.
__device__ void share_keys(const RandomKDraw& draw, RandomKKey* keys) {
  if (threadIdx.x < kRandomKKeys) {
    keys[threadIdx.x] = random_k_key(draw.seed, draw.offset.get(), threadIdx.x);
  }
  __syncthreads();
}

// A bitmap of the drawn runs, read in order, replaces a sort. If it has more than kMostBits per
// drawn run, and does not stay in the GPU's cache, sorting moves fewer bytes.
struct DrawnRuns {
  Ranges ranges;
  unsigned long long num_before_front;  // of the drawn runs
  // then the words of the bitmap

  __device__ uint32_t* words() { return reinterpret_cast<uint32_t*>(this + 1); }
};

constexpr int kBits = 32;                        // of a word
constexpr int kWindow = kWarp * kBits;           // runs of which each lane of a warp has a word
constexpr uint64_t kMostBits = 256;              // per drawn run
constexpr uint64_t kCached = uint64_t{1} << 25;  // bits

// The bits of a window, one word per lane.
__device__ uint32_t load_word(const uint32_t* words, int64_t window, int64_t end) {
  return window < end ? words[window * kWarp + threadIdx.x % kWarp] : 0;
}

__global__ void __launch_bounds__(kThreads)
    mark_runs_kernel(RandomKDraw draw, RandomKRuns runs, int64_t num_drawn, RandomKEntries entries,
                     DrawnRuns* drawn) {
  __shared__ RandomKKey keys[kRandomKKeys];
  __shared__ int64_t front;
  __shared__ unsigned int num_before;
  share_keys(draw, keys);
  if (threadIdx.x == 0) {
    const int64_t rotation = random_k_rotation(keys, entries.numel);
    front = RandomKFront(rotation, entries.numel, entries.run_length).run;
    num_before = 0;
  }
  __syncthreads();
  const int64_t i = global_thread();
  bool is_before = false;
  if (i < num_drawn) {
    const int64_t run = random_k_run(i, keys, runs);
    atomicOr(drawn->words() + run / kBits, 1u << (run % kBits));
    is_before = run < front;
  }
  const uint32_t lanes = __ballot_sync(~0u, is_before);
  if (threadIdx.x % kWarp == 0) atomicAdd(&num_before, static_cast<unsigned int>(__popc(lanes)));
  __syncthreads();
  if (threadIdx.x == 0 && num_before > 0) {
    atomicAdd(&drawn->num_before_front, static_cast<unsigned long long>(num_before));
  }
}

// Each warp counts the drawn runs of consecutive windows, then writes their entries after those of
// all earlier warps and blocks.
template <typename Index>
__global__ void __launch_bounds__(kThreads)
    expand_bitmap_kernel(RandomKDraw draw, RandomKRuns runs, RandomKEntries entries,
                         int64_t num_windows, DrawnRuns* drawn, Index* indices) {
  __shared__ RandomKKey keys[kRandomKKeys];
  __shared__ int64_t shared_rotation, first_of_front;
  __shared__ uint64_t totals[kWarps];
  __shared__ uint16_t offsets[kWarps][kWindow];  // of a window's drawn runs
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const uint32_t* words = drawn->words();
  share_keys(draw, keys);
  if (threadIdx.x == 0) {
    shared_rotation = entries.rotation = random_k_rotation(keys, entries.numel);
    const int64_t front = RandomKFront(entries.rotation, entries.numel, entries.run_length).run;
    const bool is_drawn = front < static_cast<int64_t>(runs.count) &&
                          (words[front / kBits] >> (front % kBits) & 1) != 0;
    first_of_front =
        entries.first_of_front(static_cast<int64_t>(drawn->num_before_front), is_drawn);
  }
  const int range = take_turn(drawn->ranges.num_started);
  entries.rotation = shared_rotation;

  const int64_t num_warps = int64_t{gridDim.x} * kWarps;
  const int64_t each = (num_windows + num_warps - 1) / num_warps;
  const int64_t begin = min((int64_t{range} * kWarps + warp) * each, num_windows);
  const int64_t end = min(begin + each, num_windows);
  uint32_t count = 0;
#pragma unroll 4
  for (int64_t window = begin; window < end; ++window) {
    count += __popc(load_word(words, window, end));
  }
  uint64_t all;
  uint64_t rank = sum_of_earlier_warps(count, totals, all);
  rank += count_before(drawn->ranges.counts[0], range, all);

  uint32_t next = load_word(words, begin, end);
  for (int64_t window = begin; window < end; ++window) {
    uint32_t word = next;
    next = load_word(words, window + 1, end);
    int before = __popc(word);
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const int other = __shfl_up_sync(~0u, before, distance);
      if (lane >= distance) before += other;
    }
    const int num_runs = __shfl_sync(~0u, before, kWarp - 1);
    before -= __popc(word);
    for (; word != 0; word &= word - 1) {
      offsets[warp][before++] =
          static_cast<uint16_t>(lane * kBits + __ffs(static_cast<int>(word)) - 1);
    }
    __syncwarp();
    const int64_t first = static_cast<int64_t>(rank) * entries.run_length;
    const int64_t last = min(first + num_runs * entries.run_length, entries.k);
    for (int64_t entry = first + lane; entry < last; entry += kWarp) {
      const int64_t which = entry / entries.run_length - static_cast<int64_t>(rank);
      entries.write(entry, window * kWindow + offsets[warp][which], first_of_front, indices);
    }
    __syncwarp();  // before the offsets are written again
    rank += num_runs;
  }
}

template <typename Index>
void fill_from_bitmap(const RandomKDraw& draw, const RandomKRuns& runs, int64_t num_drawn,
                      const RandomKEntries& entries, const Tensor& indices) {
  const cudaStream_t stream = current_stream(indices);
  const int64_t num_windows = (static_cast<int64_t>(runs.count) + kWindow - 1) / kWindow;
  const int64_t num_bytes = sizeof(DrawnRuns) + num_windows * (kWindow / 8);
  const Tensor scratch = torch::stable::new_empty(indices, {num_bytes}, ScalarType::Byte);
  auto* drawn = static_cast<DrawnRuns*>(scratch.mutable_data_ptr());
  set_to_zero(drawn, num_bytes, stream);
  launch(mark_runs_kernel, blocks_of_threads(num_drawn), kThreads, stream, draw, runs, num_drawn,
         entries, drawn);
  const int64_t most = (num_windows + kWarps - 1) / kWarps;
  launch(expand_bitmap_kernel<Index>, Ranges::limited(loop_blocks(most)), kThreads, stream, draw,
         runs, entries, num_windows, drawn, indices.mutable_data_ptr<Index>());
}

template <typename Index>
__global__ void __launch_bounds__(kThreads)
    draw_runs_kernel(RandomKDraw draw, RandomKRuns runs, int64_t num_drawn, Index* drawn) {
  __shared__ RandomKKey keys[kRandomKKeys];
  share_keys(draw, keys);
  const int64_t i = global_thread();
  if (i < num_drawn) drawn[i] = static_cast<Index>(random_k_run(i, keys, runs));
}

template <typename Index>
__global__ void __launch_bounds__(kThreads)
    expand_runs_kernel(RandomKDraw draw, RandomKEntries entries, const Index* sorted_runs,
                       int64_t num_drawn, Index* indices) {
  __shared__ RandomKKey keys[kRandomKKeys];
  __shared__ int64_t first_of_front;
  share_keys(draw, keys);
  entries.rotation = random_k_rotation(keys, entries.numel);
  if (threadIdx.x == 0) first_of_front = random_k_first_of_front(entries, sorted_runs, num_drawn);
  __syncthreads();
  const int64_t entry = global_thread();
  if (entry >= entries.k) return;
  entries.write(entry, sorted_runs[entry / entries.run_length], first_of_front, indices);
}

Tensor sort_ascending(const Tensor& tensor) {
  std::array<StableIValue, 3> stack{torch::stable::detail::from(tensor),
                                    torch::stable::detail::from(int64_t{0}),
                                    torch::stable::detail::from(false)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::sort", "", stack.data(), TORCH_ABI_VERSION));
  torch::stable::detail::to<Tensor>(stack[1]);  // the order: takes ownership, so that it is freed
  return torch::stable::detail::to<Tensor>(stack[0]);
}

template <typename Index>
void fill_from_sorted(const RandomKDraw& draw, const RandomKRuns& runs, int64_t num_drawn,
                      const RandomKEntries& entries, const Tensor& indices) {
  const cudaStream_t stream = current_stream(indices);
  const Tensor drawn = torch::stable::new_empty(indices, {num_drawn});
  launch(draw_runs_kernel<Index>, blocks_of_threads(num_drawn), kThreads, stream, draw, runs,
         num_drawn, drawn.mutable_data_ptr<Index>());
  const Tensor sorted = sort_ascending(drawn);
  launch(expand_runs_kernel<Index>, blocks_of_threads(entries.k), kThreads, stream, draw, entries,
         sorted.const_data_ptr<Index>(), num_drawn, indices.mutable_data_ptr<Index>());
}

template <typename Index>
void fill_indices(const RandomKDraw& draw, int64_t numel, int64_t run_length,
                  const Tensor& indices) {
  const int64_t k = indices.numel();
  const int64_t num_drawn = k / run_length + (k % run_length != 0);
  const RandomKRuns runs = random_k_runs(numel, run_length);
  const RandomKEntries entries{k, numel, run_length, 0};
  const bool is_dense =
      runs.count <= kCached || runs.count / kMostBits <= static_cast<uint64_t>(num_drawn);
  const auto fill = is_dense ? fill_from_bitmap<Index> : fill_from_sorted<Index>;
  fill(draw, runs, num_drawn, entries, indices);
}

void random_k_indices_cuda(int64_t numel, int64_t seed, Tensor offset, int64_t run_length,
                           Tensor indices) {
  check_random_k_indices_arguments(numel, offset, run_length, indices);
  if (indices.numel() == 0) return;
  const DeviceGuard guard(indices.get_device_index());
  const RandomKDraw draw{static_cast<uint64_t>(seed), Scalar<int64_t>(offset)};
  with_index_type(indices.scalar_type(), [&](auto index) {
    fill_indices<decltype(index)>(draw, numel, run_length, indices);
  });
}

// An index out of range gets value zero.
template <typename X, typename Index>
__global__ void __launch_bounds__(kThreads)
    gather_kernel(const X* x, int64_t numel, const Index* indices, int64_t k, X* values) {
  const int64_t j = global_thread();
  if (j >= k) return;
  const int64_t at = indices[j];
  values[j] = 0 <= at && at < numel ? x[at] : static_cast<X>(0.0f);
}

// The entries of each block of send_kernel: from first_entries[block] to that of the next block.
template <typename Index>
__global__ void __launch_bounds__(kThreads)
    find_entries_kernel(const Index* indices, int64_t k, int64_t num_bounds,
                        int64_t* first_entries) {
  const int64_t block = global_thread();
  if (block >= num_bounds) return;
  int64_t low = 0, high = k;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (indices[middle] < block * kPerBlock) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  first_entries[block] = low;
}

// The entries' residuals are kept aside until the pass over all elements is done. Entries that do
// not ascend may be in the wrong block and are skipped.
// By default ptxas aims at three resident blocks, and spills.
template <typename X, typename Index>
__global__ void __launch_bounds__(kThreads, 2)
    send_kernel(const X* x, Stream residual, int64_t numel, bool aligned, const Index* indices,
                const int64_t* first_entries, X* values) {
  const int64_t block_begin = blockIdx.x * kPerBlock;
  const Place<> place = place_of_thread(numel, aligned);
  Packet<> own_packet, kept_packet;
  in_one_branch(place, [&](const Place<>& place) {
    own_packet = load_packet(x, place);
    kept_packet = load_packet(residual, place);
  });
  float own[kPerThread], kept[kPerThread];
  unpack<X, DefaultTile>(own_packet, own);
  unpack(kept_packet, residual.dtype, kept);

  __shared__ float remains[kPerBlock];
  const int64_t block_end = min(block_begin + kPerBlock, numel);
  const int64_t first = first_entries[blockIdx.x];
  const int count = static_cast<int>(
      max(int64_t{0}, min(int64_t{kPerBlock}, first_entries[blockIdx.x + 1] - first)));
  for (int j = threadIdx.x; j < count; j += kThreads) {
    const int64_t at = indices[first + j];
    if (at < block_begin || at >= block_end) continue;
    const float accumulated =
        random_k_accumulate(static_cast<float>(x[at]), read_element(residual, at));
    const X value = static_cast<X>(accumulated);
    values[first + j] = value;
    remains[j] = random_k_remain(accumulated, static_cast<float>(value));
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) kept[i] = random_k_accumulate(own[i], kept[i]);
  store_together(pack<DefaultTile>(kept, residual.dtype), residual, place);
  __syncthreads();
  for (int j = threadIdx.x; j < count; j += kThreads) {
    const int64_t at = indices[first + j];
    if (at < block_begin || at >= block_end) continue;
    write_element(remains[j], residual, at);
  }
}

template <typename X, typename Index>
void send(const Tensor& x, const Tensor& residual, const Tensor& indices, const Tensor& values) {
  if (x.numel() == 0) return;
  const cudaStream_t stream = current_stream(x);
  const X* own = x.const_data_ptr<X>();
  const Stream kept(residual);
  const Index* at = indices.const_data_ptr<Index>();
  const int64_t num_bounds = num_blocks(x.numel()) + 1;
  const Tensor first_entries = torch::stable::new_empty(indices, {num_bounds}, ScalarType::Long);
  launch(find_entries_kernel<Index>, blocks_of_threads(num_bounds), kThreads, stream, at,
         indices.numel(), num_bounds, first_entries.mutable_data_ptr<int64_t>());
  launch(send_kernel<X, Index>, num_blocks(x.numel()), kThreads, stream, own, kept, x.numel(),
         is_aligned(own) && is_aligned(kept.data), at, first_entries.const_data_ptr<int64_t>(),
         values.mutable_data_ptr<X>());
}

template <typename X, typename Index>
void gather(const Tensor& x, const Tensor& indices, const Tensor& values) {
  if (indices.numel() == 0) return;
  launch(gather_kernel<X, Index>, blocks_of_threads(indices.numel()), kThreads, current_stream(x),
         x.const_data_ptr<X>(), x.numel(), indices.const_data_ptr<Index>(), indices.numel(),
         values.mutable_data_ptr<X>());
}

void random_k_cuda(Tensor x, Tensor indices, std::optional<Tensor> residual, Tensor values) {
  check_random_k_arguments(x, indices, residual, values);
  const DeviceGuard guard(x.get_device_index());
  with_index_type(indices.scalar_type(), [&](auto index) {
    using Index = decltype(index);
    with_float_type(x.scalar_type(), [&](auto type) {
      using X = decltype(type);
      if (!residual) return gather<X, Index>(x, indices, values);
      send<X, Index>(x, *residual, indices, values);
    });
  });
}

}  // namespace
}  // namespace pyparallel::cuda

STABLE_TORCH_LIBRARY_IMPL(pyparallel, CUDA, library) {
  library.impl("random_k_indices", TORCH_BOX(&pyparallel::cuda::random_k_indices_cuda));
  library.impl("random_k", TORCH_BOX(&pyparallel::cuda::random_k_cuda));
}
