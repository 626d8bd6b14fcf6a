#include "top_k.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <optional>

#include "cuda/packet.h"
#include "cuda/top_k_chunk_kernels.h"
#include "cuda/top_k_kernels.h"
#include "float_types.h"
#include "sparse_arguments.h"

namespace pyparallel::cuda {
namespace {

Tensor new_scratch(const Tensor& model, int64_t num_bytes) {
  return torch::stable::new_empty(model, {num_bytes}, ScalarType::Byte);
}

// A problem with its scratch memory, freed at the end, for later work of this stream only.
struct Call {
  cudaStream_t stream;
  AnySum acc;
  Problem problem;
  float* threshold;  // nullptr: not used
  Tensor state, candidates, segments;

  Call(const Tensor& x, const std::optional<Tensor>& residual, int64_t k,
       const std::optional<Tensor>& kept_threshold)
      : stream(current_stream(x)),
        acc{Stream(x), residual ? Stream(*residual) : Stream()},
        threshold(kept_threshold ? kept_threshold->mutable_data_ptr<float>() : nullptr) {
    const int64_t most = top_k_max_candidates(k, x.numel()), num_segments = num_blocks(x.numel());
    state = new_scratch(x, sizeof(State));
    candidates = new_scratch(x, most * sizeof(Candidate));
    segments = new_scratch(x, num_segments * sizeof(Segment));
    problem = {x.numel(),
               k,
               most,
               num_segments,
               static_cast<State*>(state.mutable_data_ptr()),
               static_cast<Candidate*>(candidates.mutable_data_ptr()),
               static_cast<Segment*>(segments.mutable_data_ptr())};
  }
};

// Computes the k-th key, in the state. `first` reads the buffer the first time, `later` after that.
template <typename First>
void select(const Call& call, const First& first, const AnySum& later) {
  const cudaStream_t stream = call.stream;
  const Problem& problem = call.problem;
  const int64_t blocks = loop_blocks(problem.num_segments);
  launch(begin_kernel, 1, kThreads, stream, call.acc, problem, call.threshold);
  launch(collect_kernel<First>, problem.num_segments, kThreads, stream, first, problem,
         first.aligned());
  if (call.threshold) {
    launch(retry_kernel, blocks, kThreads, stream, later, problem, later.aligned(), call.threshold);
  }
  for (int position = 0; position < kNumDigits; ++position) {
    launch(histogram_kernel, blocks, kThreads, stream, later, problem, position, later.aligned(),
           call.threshold);
  }
}

// `keep` updates the residual where an entry is read: of a candidate, or of any element.
template <typename X, typename KeepProven, typename Keep>
void write(const Call& call, const AnySum& source, const Output<X>& output,
           const KeepProven& keep_proven, const Keep& keep) {
  const int64_t most = (call.problem.num_segments + kWarps - 1) / kWarps;
  launch(write_kernel<X, KeepProven, Keep>, Ranges::limited(loop_blocks(most)), kThreads,
         call.stream, source, call.problem, output, keep_proven, keep);
}

template <typename X, typename Kept>
void accumulate(cudaStream_t stream, const Problem& problem, const Accumulate<X, Kept>& source) {
  launch(accumulate_kernel<X, Kept>, num_blocks(problem.numel), kThreads, stream, source, problem,
         source.aligned());
}

template <typename X>
void top_k_alone(const Call& call, const X* x, const Output<X>& output) {
  select(call, Plain<X>{x}, call.acc);
  write(call, call.acc, output, KeepNothing{}, KeepNothing{});
}

// The first pass stores acc in the residual.
template <typename X>
void top_k_with(const Call& call, const X* x, float* residual, const Output<X>& output) {
  const AnySum stored{call.acc.residual, Stream()};
  const KeepRemainders<float> keep{residual};
  select(call, Accumulate<X, float>{x, residual}, stored);
  write(call, stored, output, keep, keep);
}

// A residual of 16 bits cannot hold acc: it is written when the winners are known.
template <typename X, typename Kept>
void top_k_with(const Call& call, const X* x, Kept* residual, const Output<X>& output) {
  select(call, Sum<X, Kept>{x, residual}, call.acc);
  accumulate(call.stream, call.problem, Accumulate<X, Kept>{x, residual});
  write(call, call.acc, output, KeepRemainders<Kept>{residual}, KeepAll<Kept>{residual});
}

template <typename X, typename... Kept>
void top_k_buffers(const Tensor& x, const std::optional<Tensor>& residual,
                   const std::optional<Tensor>& threshold, const Tensor& values,
                   const Tensor& indices, Kept*... kept) {
  const X* entries = x.const_data_ptr<X>();
  if (values.numel() == 0) {
    const Problem problem{x.numel(), 0, 0, 0, nullptr, nullptr, nullptr};
    if (x.numel() > 0) {
      (accumulate(current_stream(x), problem, Accumulate<X, Kept>{entries, kept}), ...);
    }
    return;
  }
  const Call call(x, residual, values.numel(), threshold);
  const Output<X> output{values.mutable_data_ptr<X>(), indices.mutable_data_ptr(),
                         indices.scalar_type() == ScalarType::Long};
  if constexpr (sizeof...(Kept) == 0) {
    top_k_alone(call, entries, output);
  } else {
    top_k_with(call, entries, kept..., output);
  }
}

void top_k_cuda(Tensor x, std::optional<Tensor> residual, std::optional<Tensor> threshold,
                Tensor values, Tensor indices) {
  check_top_k_arguments(x, residual, threshold, values, indices);
  const DeviceGuard guard(x.get_device_index());
  with_float_type(x.scalar_type(), [&](auto type) {
    using X = decltype(type);
    if (!residual) return top_k_buffers<X>(x, residual, threshold, values, indices);
    with_float_type(residual->scalar_type(), [&](auto kept) {
      top_k_buffers<X>(x, residual, threshold, values, indices,
                       residual->mutable_data_ptr<decltype(kept)>());
    });
  });
}

template <typename T>
using WordOf = std::conditional_t<sizeof(T) == 4, unsigned int, unsigned short>;

// Corrupt indices can give two threads the same position: no counted addition may be lost. Atomic
// additions of floats flush denormals to zero, so this uses compare-and-swap.
template <typename Dense>
__device__ void add_atomically(Dense* target, float value) {
  using Word = WordOf<Dense>;
  Word* place = reinterpret_cast<Word*>(target);
  Word before = *place, expected;
  do {
    expected = before;
    const Dense sum = scatter_add(*reinterpret_cast<const Dense*>(&expected), value);
    before = atomicCAS(place, expected, *reinterpret_cast<const Word*>(&sum));
  } while (before != expected);
}

template <typename Dense, typename Index>
__global__ void __launch_bounds__(kThreads)
    scatter_add_kernel(Dense* dense, int64_t numel, Stream values, const Index* indices,
                       int64_t count, unsigned long long* corrupt) {
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (i >= count) return;
  const int64_t index = indices[i], previous = i > 0 ? indices[i - 1] : 0;
  if (is_corrupt_index(index, numel, i > 0, previous)) {
    atomicAdd(corrupt, 1ull);
  } else {
    add_atomically(dense + index, read_element(values, i));
  }
}

template <typename Index>
void scatter_add(const Tensor& dense, const Tensor& values, const Index* indices,
                 const Tensor& corrupt) {
  const int64_t count = values.numel();
  auto* counter = reinterpret_cast<unsigned long long*>(corrupt.mutable_data_ptr<int64_t>());
  with_float_type(dense.scalar_type(), [&](auto target) {
    using Dense = decltype(target);
    launch(scatter_add_kernel<Dense, Index>, (count + kThreads - 1) / kThreads, kThreads,
           current_stream(dense), dense.mutable_data_ptr<Dense>(), dense.numel(), Stream(values),
           indices, count, counter);
  });
}

void scatter_add_cuda(Tensor dense, Tensor values, Tensor indices, Tensor corrupt) {
  check_scatter_add_arguments(dense, values, indices, corrupt);
  if (values.numel() == 0) return;
  const DeviceGuard guard(dense.get_device_index());
  with_index_type(indices.scalar_type(), [&](auto index) {
    scatter_add(dense, values, indices.const_data_ptr<decltype(index)>(), corrupt);
  });
}

template <typename X, typename Kept>
void top_k_chunks(const Tensor& x, const Chunks& chunks, Kept* residual, const Tensor& values,
                  const Tensor& indices) {
  const X* own = x.const_data_ptr<X>();
  launch(top_k_chunks_kernel<X, Kept>, chunks.count(), kThreads, current_stream(x), own, residual,
         chunks, is_aligned(own) && is_aligned(residual), values.mutable_data_ptr<X>(),
         indices.mutable_data_ptr<uint8_t>());
}

void top_k_chunks_cuda(Tensor x, int64_t k, int64_t chunk, std::optional<Tensor> residual,
                       Tensor values, Tensor indices) {
  const Chunks chunks{x.numel(), k, chunk};
  check_top_k_chunks_arguments(x, chunks, residual, values, indices);
  if (x.numel() == 0) return;
  const DeviceGuard guard(x.get_device_index());
  with_float_type(x.scalar_type(), [&](auto type) {
    using X = decltype(type);
    if (!residual) {
      return top_k_chunks<X>(x, chunks, static_cast<float*>(nullptr), values, indices);
    }
    with_float_type(residual->scalar_type(), [&](auto kept) {
      top_k_chunks<X>(x, chunks, residual->mutable_data_ptr<decltype(kept)>(), values, indices);
    });
  });
}

void scatter_chunks_cuda(Tensor values, Tensor indices, int64_t k, int64_t chunk, bool accumulate,
                         Tensor out, Tensor corrupt) {
  const Chunks chunks{out.numel(), k, chunk};
  check_scatter_chunks_arguments(values, indices, chunks, out, corrupt);
  if (out.numel() == 0) return;
  const DeviceGuard guard(out.get_device_index());
  with_float_type(out.scalar_type(), [&](auto type) {
    using Out = decltype(type);
    Out* target = out.mutable_data_ptr<Out>();
    launch(scatter_chunks_kernel<Out>, chunks.count(), kThreads, current_stream(out),
           Stream(values), indices.const_data_ptr<uint8_t>(), num_messages(values), chunks,
           accumulate, target, is_aligned(target),
           reinterpret_cast<unsigned long long*>(corrupt.mutable_data_ptr<int64_t>()));
  });
}

}  // namespace
}  // namespace pyparallel::cuda

STABLE_TORCH_LIBRARY_IMPL(pyparallel, CUDA, library) {
  library.impl("top_k", TORCH_BOX(&pyparallel::cuda::top_k_cuda));
  library.impl("scatter_add_", TORCH_BOX(&pyparallel::cuda::scatter_add_cuda));
  library.impl("top_k_chunks", TORCH_BOX(&pyparallel::cuda::top_k_chunks_cuda));
  library.impl("scatter_chunks", TORCH_BOX(&pyparallel::cuda::scatter_chunks_cuda));
}
