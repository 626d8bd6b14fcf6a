#include "pack_signs.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <optional>

#include "cuda/launch.h"
#include "cuda/statistical_kernels.h"
#include "float_types.h"
#include "message_arguments.h"

namespace pyparallel::cuda {
namespace {

constexpr int kWarps = kThreads / kWarp;
static_assert(kPartialSums == kWarp * kPerThread, "a thread keeps eight of the partial sums");
static_assert(kNeighbors == kPerThread, "a word is the signs of a thread's neighbors");

// A thread's share: kPerThread neighbors, which share a word, of every chunk of kPartialSums
// elements of a warp's span. Offsets within it are small, which saves registers.
template <typename X, typename Residual>
struct Share {
  const X* x;
  Residual* residual;
  uint8_t* words;
  int rest;  // elements from the start of the share to the end of the buffer or of the span
  bool aligned;

  __device__ Place<> place(int c) const {
    const int left = max(0, rest - c * kPartialSums);
    return {c * kPartialSums, left, aligned && left >= kPerThread};
  }

  __device__ Packet<> load_own(int c, bool whole) const {
    return load_packet(x, Place<>{c * kPartialSums, place(c).rest, whole});
  }

  __device__ Packet<> load_residual(int c, bool whole) const {
    if (!residual) return {};
    return load_packet(residual, Place<>{c * kPartialSums, place(c).rest, whole});
  }

  __device__ void load_sum(int c, float (&values)[kPerThread]) const {
    Packet<> own, kept;
    in_one_branch(place(c), [&](const Place<>& place) {
      own = load_own(c, place.whole);
      kept = load_residual(c, place.whole);
    });
    add(own, kept, values);
  }

  __device__ void add(const Packet<>& own, const Packet<>& kept,
                      float (&values)[kPerThread]) const {
    unpack<X, DefaultTile>(own, values);
    if (!residual) return;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) values[i] += kept.get<Residual>(i);
  }

  __device__ void store_word(int c, const float (&values)[kPerThread]) const {
    const int present = place(c).count();
    unsigned word = 0;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) word |= (values[i] >= 0.0f ? 1u : 0u) << i;
    word &= (1u << present) - 1;
    if (present > 0) words[c * kWarp] = static_cast<uint8_t>(word);
  }

  __device__ void store_rest(int c, float (&values)[kPerThread], float scale) const {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) values[i] = pack_signs_remain(values[i], scale, -scale);
    store_values(values, residual, place(c));
  }
};

__device__ void add_magnitudes(const float* values, float* partial) {
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) partial[i] += fabsf(values[i]);
}

// Block sizes are powers of two: a shift finds an element's block; a division would double the
// cost.
int find_block_bits(int64_t block_size) {
  int bits = 0;
  while (int64_t{1} << bits < block_size) ++bits;
  return bits;
}

// The sum of the block that the thread's elements belong to, on each of its threads.
__device__ float add_up(const float* partial, int64_t block_size) {
  float sum = pack_signs_add_neighbors(partial);
  const int num_threads = static_cast<int>(min(int64_t{kWarp}, block_size / kPerThread));
  for (int stride = num_threads / 2; stride > 0; stride /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, stride);
  }
  return sum;
}

// A warp per block, or per kPartialSums elements of smaller blocks. CHUNKS known at compile time
// are loaded before the first use and stay in registers, except that the residual of four chunks is
// loaded in parts: together they would spill. CHUNKS = 0 means as many as the block has, loaded one
// after the other, twice.
template <typename X, typename Residual, int CHUNKS>
__global__ void __launch_bounds__(kThreads, 2)
    pack_signs_kernel(const X* x, Residual* residual, int64_t numel, bool aligned, int block_bits,
                      uint8_t* words, float* scales) {
  constexpr int kKept = CHUNKS ? CHUNKS : 1;  // chunks in registers
  constexpr int kBatch = kKept == 1 || sizeof(X) + sizeof(Residual) == 8 ? 1 : 2;
  const int64_t block_size = int64_t{1} << block_bits;
  const int64_t warp = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
  const int64_t span = max(block_size, int64_t{kPartialSums});
  const int64_t begin = warp * span + threadIdx.x % kWarp * kPerThread;
  const int num_chunks = CHUNKS ? CHUNKS : static_cast<int>(span / kPartialSums);
  const Share<X, Residual> share{
      x + begin,
      residual ? residual + begin : nullptr,
      words + begin / kPerThread,
      static_cast<int>(max(int64_t{0}, min(span, numel - begin))),
      aligned,
  };

  float values[kKept][kPerThread];
  float partial[kPerThread] = {};
  const auto process = [&](int c, float (&sums)[kPerThread]) {
    share.store_word(c, sums);
    add_magnitudes(sums, partial);
  };
  if constexpr (CHUNKS > 0) {
    Packet<> own[CHUNKS], kept[kBatch];
#pragma unroll
    for (int first = 0; first < CHUNKS; first += kBatch) {
      in_one_branch(share.place(CHUNKS - 1), [&](const Place<>& last) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
          if (first == 0) own[c] = share.load_own(c, last.whole);
        }
#pragma unroll
        for (int c = 0; c < kBatch; ++c) kept[c] = share.load_residual(first + c, last.whole);
      });
#pragma unroll
      for (int c = 0; c < kBatch; ++c) {
        share.add(own[first + c], kept[c], values[first + c]);
        process(first + c, values[first + c]);
      }
    }
  } else {
    for (int c = 0; c < num_chunks; ++c) {
      share.load_sum(c, values[0]);
      process(c, values[0]);
    }
  }

  const float sum = add_up(partial, block_size);
  const int64_t block = begin >> block_bits;
  const int64_t count = min(block_size, numel - block * block_size);
  if (count <= 0) return;
  const float scale = pack_signs_scale(sum, count);
  if (begin == block << block_bits) scales[block] = scale;
  if (!residual || !pack_signs_is_finite(sum)) return;
#pragma unroll(CHUNKS ? CHUNKS : 1)
  for (int c = 0; c < num_chunks; ++c) {
    if (!CHUNKS) share.load_sum(c, values[0]);
    share.store_rest(c, values[CHUNKS ? c : 0], scale);
  }
}

template <typename X, typename Residual>
void pack(const Tensor& x, Residual* residual, int64_t block_size, const Tensor& words,
          const Tensor& scales) {
  if (x.numel() == 0) return;
  const X* own = x.const_data_ptr<X>();
  const int64_t span = std::max(block_size, int64_t{kPartialSums});
  const int64_t num_warps = num_scales(x.numel(), span);
  const auto kernel = span == kPartialSums       ? pack_signs_kernel<X, Residual, 1>
                      : span == 4 * kPartialSums ? pack_signs_kernel<X, Residual, 4>
                                                 : pack_signs_kernel<X, Residual, 0>;
  launch(kernel, num_scales(num_warps, kWarps), kThreads, current_stream(x), own, residual,
         x.numel(), is_aligned(own) && is_aligned(residual), find_block_bits(block_size),
         words.mutable_data_ptr<uint8_t>(), scales.mutable_data_ptr<float>());
}

void pack_signs_cuda(Tensor x, int64_t block_size, std::optional<Tensor> residual, Tensor words,
                     Tensor scales) {
  check_pack_signs_arguments(x, block_size, residual, words, scales);
  const DeviceGuard guard(x.get_device_index());
  with_float_type(x.scalar_type(), [&](auto own) {
    using X = decltype(own);
    if (!residual) return pack<X>(x, static_cast<float*>(nullptr), block_size, words, scales);
    with_float_type(residual->scalar_type(), [&](auto kept) {
      pack<X>(x, residual->mutable_data_ptr<decltype(kept)>(), block_size, words, scales);
    });
  });
}

// The entries of a block with a corrupt scale are zero, or add nothing, and are counted.
template <typename Out>
__global__ void __launch_bounds__(kThreads)
    unpack_signs_kernel(const uint8_t* words, const float* scales, int block_bits, bool accumulate,
                        Out* out, int64_t numel, bool aligned, unsigned long long* corrupt) {
  const Place<> place = place_of_thread(numel, aligned);
  const bool exists = place.rest > 0;
  const unsigned word = exists ? words[place.begin / kPerThread] : 0;
  const float scale = exists ? scales[place.begin >> block_bits] : 0.0f;
  Packet<> old{};
  if (accumulate) old = load_packet(out, place);
  const bool is_corrupt = is_corrupt_sign_scale(scale);
  if (is_corrupt) atomicAdd(corrupt, static_cast<unsigned long long>(place.count()));

  float values[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const float before = accumulate ? old.get<Out>(i) : 0.0f;
    const float value = word >> i & 1 ? scale : -scale;
    values[i] = is_corrupt ? before : accumulate ? before + value : value;
  }
  store_together(cuda::pack<Out, DefaultTile>(values), out, place);
}

void unpack_signs_cuda(Tensor words, Tensor scales, int64_t block_size, bool accumulate, Tensor out,
                       Tensor corrupt) {
  check_unpack_signs_arguments(words, scales, block_size, out, corrupt);
  if (out.numel() == 0) return;
  const DeviceGuard guard(out.get_device_index());
  with_float_type(out.scalar_type(), [&](auto type) {
    using Out = decltype(type);
    Out* target = out.mutable_data_ptr<Out>();
    launch(unpack_signs_kernel<Out>, num_blocks(out.numel()), kThreads, current_stream(out),
           words.const_data_ptr<uint8_t>(), scales.const_data_ptr<float>(),
           find_block_bits(block_size), accumulate, target, out.numel(), is_aligned(target),
           reinterpret_cast<unsigned long long*>(corrupt.mutable_data_ptr<int64_t>()));
  });
}

void quantize_statistical_cuda(Tensor x, int64_t bits, int64_t block_size,
                               std::optional<Tensor> residual, Tensor codes, Tensor tables) {
  check_quantize_statistical_arguments(x, bits, block_size, residual, codes, tables);
  if (x.numel() == 0) return;
  const DeviceGuard guard(x.get_device_index());
  const Stream own(x), kept = residual ? Stream(*residual) : Stream();
  uint8_t* code = codes.mutable_data_ptr<uint8_t>();
  const int threads = static_cast<int>(std::max(int64_t{kWarp}, block_size / kPerThread));
  with_bin_codes(bits, [&](auto kind) {
    launch(quantize_statistical_kernel<decltype(kind)::kBits>, num_scales(x.numel(), block_size),
           threads, current_stream(x), own, kept, x.numel(), block_size,
           is_aligned(own.data) && is_aligned(kept.data) && is_aligned(code), code,
           tables.mutable_data_ptr<float>());
  });
}

void dequantize_statistical_cuda(Tensor codes, Tensor tables, int64_t bits, int64_t block_size,
                                 bool accumulate, Tensor out, Tensor corrupt) {
  check_dequantize_statistical_arguments(codes, tables, bits, block_size, out, corrupt);
  if (out.numel() == 0) return;
  const DeviceGuard guard(out.get_device_index());
  with_bin_codes(bits, [&](auto kind) {
    with_float_type(out.scalar_type(), [&](auto type) {
      using Out = decltype(type);
      Out* target = out.mutable_data_ptr<Out>();
      const uint8_t* code = codes.const_data_ptr<uint8_t>();
      launch(dequantize_statistical_kernel<decltype(kind)::kBits, Out>, num_blocks(out.numel()),
             kThreads, current_stream(out), code, tables.const_data_ptr<float>(),
             find_block_bits(block_size), accumulate, target, out.numel(),
             is_aligned(target) && is_aligned(code),
             reinterpret_cast<unsigned long long*>(corrupt.mutable_data_ptr<int64_t>()));
    });
  });
}

}  // namespace
}  // namespace pyparallel::cuda

STABLE_TORCH_LIBRARY_IMPL(pyparallel, CUDA, library) {
  library.impl("pack_signs", TORCH_BOX(&pyparallel::cuda::pack_signs_cuda));
  library.impl("unpack_signs", TORCH_BOX(&pyparallel::cuda::unpack_signs_cuda));
  library.impl("quantize_statistical", TORCH_BOX(&pyparallel::cuda::quantize_statistical_cuda));
  library.impl("dequantize_statistical", TORCH_BOX(&pyparallel::cuda::dequantize_statistical_cuda));
}
