#include "random_k.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <array>

#include "cuda/launch.h"
#include "cuda/scalar.h"
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
    expand_runs_kernel(RandomKDraw draw, RandomKEntries<Index> entries, Index* indices) {
  __shared__ RandomKKey keys[kRandomKKeys];
  __shared__ int64_t first_of_front;
  share_keys(draw, keys);
  entries.rotation = random_k_rotation(keys, entries.numel);
  if (threadIdx.x == 0) first_of_front = entries.first_of_front();
  __syncthreads();
  const int64_t entry = global_thread();
  if (entry < entries.k) entries.write(entry, first_of_front, indices);
}

Tensor sort(const Tensor& tensor) {
  std::array<StableIValue, 3> stack{torch::stable::detail::from(tensor),
                                    torch::stable::detail::from(int64_t{0}),
                                    torch::stable::detail::from(false)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::sort", "", stack.data(), TORCH_ABI_VERSION));
  torch::stable::detail::to<Tensor>(stack[1]);  // the order: takes ownership, so that it is freed
  return torch::stable::detail::to<Tensor>(stack[0]);
}

template <typename Index>
void fill_indices(const RandomKDraw& draw, int64_t numel, int64_t run_length,
                  const Tensor& indices) {
  const cudaStream_t stream = current_stream(indices);
  const int64_t k = indices.numel();
  const int64_t num_drawn = k / run_length + (k % run_length != 0);
  const Tensor drawn = torch::stable::new_empty(indices, {num_drawn});
  launch(draw_runs_kernel<Index>, blocks_of_threads(num_drawn), kThreads, stream, draw,
         random_k_runs(numel, run_length), num_drawn, drawn.mutable_data_ptr<Index>());
  const Tensor sorted = sort(drawn);
  const RandomKEntries<Index> entries{sorted.const_data_ptr<Index>(), k, numel, run_length, 0};
  launch(expand_runs_kernel<Index>, blocks_of_threads(k), kThreads, stream, draw, entries,
         indices.mutable_data_ptr<Index>());
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
template <typename X, typename Residual, typename Index>
__global__ void __launch_bounds__(kThreads, 2)
    send_kernel(const X* x, Residual* residual, int64_t numel, bool aligned, const Index* indices,
                const int64_t* first_entries, X* values) {
  const int64_t block_begin = blockIdx.x * kPerBlock;
  const int64_t begin = block_begin + threadIdx.x * kPerThread;
  const int present = static_cast<int>(max(int64_t{0}, min(int64_t{kPerThread}, numel - begin)));
  const bool whole = aligned && present == kPerThread;
  float own[kPerThread], kept[kPerThread];
  load_floats(x + begin, residual + begin, whole, present, own, kept);

  __shared__ float remains[kPerBlock];
  const int64_t block_end = min(block_begin + kPerBlock, numel);
  const int64_t first = first_entries[blockIdx.x];
  const int count = static_cast<int>(
      max(int64_t{0}, min(int64_t{kPerBlock}, first_entries[blockIdx.x + 1] - first)));
  for (int j = threadIdx.x; j < count; j += kThreads) {
    const int64_t at = indices[first + j];
    if (at < block_begin || at >= block_end) continue;
    const float accumulated =
        random_k_accumulate(static_cast<float>(x[at]), static_cast<float>(residual[at]));
    const X value = static_cast<X>(accumulated);
    values[first + j] = value;
    remains[j] = random_k_remain(accumulated, static_cast<float>(value));
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) kept[i] = random_k_accumulate(own[i], kept[i]);
  store_floats(residual + begin, whole, present, kept);
  __syncthreads();
  for (int j = threadIdx.x; j < count; j += kThreads) {
    const int64_t at = indices[first + j];
    if (at < block_begin || at >= block_end) continue;
    residual[at] = static_cast<Residual>(remains[j]);
  }
}

template <typename X, typename Residual, typename Index>
void send(const Tensor& x, const Tensor& residual, const Tensor& indices, const Tensor& values) {
  if (x.numel() == 0) return;
  const cudaStream_t stream = current_stream(x);
  const X* own = x.const_data_ptr<X>();
  Residual* kept = residual.mutable_data_ptr<Residual>();
  const Index* at = indices.const_data_ptr<Index>();
  const int64_t num_bounds = num_blocks(x.numel()) + 1;
  const Tensor first_entries = torch::stable::new_empty(indices, {num_bounds}, ScalarType::Long);
  launch(find_entries_kernel<Index>, blocks_of_threads(num_bounds), kThreads, stream, at,
         indices.numel(), num_bounds, first_entries.mutable_data_ptr<int64_t>());
  launch(send_kernel<X, Residual, Index>, num_blocks(x.numel()), kThreads, stream, own, kept,
         x.numel(), is_aligned(own) && is_aligned(kept), at,
         first_entries.const_data_ptr<int64_t>(), values.mutable_data_ptr<X>());
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
      with_float_type(residual->scalar_type(), [&](auto kept) {
        send<X, decltype(kept), Index>(x, *residual, indices, values);
      });
    });
  });
}

}  // namespace
}  // namespace pyparallel::cuda

STABLE_TORCH_LIBRARY_IMPL(pyparallel, CUDA, library) {
  library.impl("random_k_indices", TORCH_BOX(&pyparallel::cuda::random_k_indices_cuda));
  library.impl("random_k", TORCH_BOX(&pyparallel::cuda::random_k_cuda));
}
