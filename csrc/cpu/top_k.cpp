#include "top_k.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "cpu/scatter_chunks.h"
#include "cpu/top_k_select.h"
#include "cpu/top_k_select_chunks.h"
#include "float_types.h"
#include "sparse_arguments.h"

namespace pyparallel::cpu {
namespace {

template <typename X, typename Index>
struct Call {
  int64_t numel, k;
  float* threshold;  // nullptr: not used
  X* values;
  Index* indices;
};

Parts split_buffer(int64_t numel) {
  constexpr int64_t kMost = int64_t{1} << 31;  // an offset in a part has 32 bits
  const int64_t num_threads = torch::stable::get_num_threads();
  const int64_t length = std::clamp((numel + num_threads - 1) / num_threads, kGrain, kMost);
  Parts parts;
  for (int64_t begin = 0; begin < numel; begin += length) {
    parts.emplace_back(begin, std::min(begin + length, numel));
  }
  return parts;
}

// A key of the sample that is very likely below the k-th of all; 0 if the sample is too small.
template <typename Source>
uint32_t guess_from_sample(const Source& source, int64_t numel, int64_t k) {
  const int64_t num_samples = std::min(numel, kMaxSamples);
  const int64_t rank = top_k_sample_rank(k, numel, num_samples);
  if (rank >= num_samples) return 0;
  std::vector<uint32_t> keys(num_samples);
  const int64_t stride = numel / num_samples;
  for (int64_t i = 0; i < num_samples; ++i) {
    keys[i] = top_k_key(source.at(top_k_sample_index(i, stride)));
  }
  std::nth_element(keys.begin(), keys.begin() + rank, keys.end(), std::greater<>());
  return keys[rank];
}

// True if the entries with keys of at least `lowest` contain the k largest and are few enough.
template <typename Source>
bool collect(const Source& source, uint32_t lowest, int64_t k, Parts& parts, ChunkPool& pool) {
  std::atomic<bool> all_fit{true};
  pool.take_all_back();
  for_each_part(parts, [&](Part& part) {
    const uint32_t bits = lowest_bits(lowest);
    if (!part.candidates.collect(source, part.begin, part.end, bits, pool)) all_fit = false;
  });
  int64_t total = 0;
  for (const Part& part : parts) total += part.candidates.size();
  return all_fit && total >= k;
}

// Knowledge before the k-th key is known: whether the candidates are proven to contain it, and the
// key from which on they are complete.
struct Found {
  bool proven;
  uint32_t lowest;
};

// Tries the last step's threshold, then a sample. `First` reads the buffer the first time,
// `Later` after that, and `Sample` reads before.
template <typename Call, typename Sample, typename First, typename Later>
Found find_candidates(const Call& call, Parts& parts, ChunkPool& pool, const Sample& sample,
                      const First& first, const Later& later) {
  const uint32_t hint = call.threshold ? top_k_guess(*call.threshold, call.k) : 0;
  if (hint == 0) {
    const uint32_t guess = guess_from_sample(sample, call.numel, call.k);
    return {collect(first, guess, call.k, parts, pool), guess};
  }
  if (collect(first, hint, call.k, parts, pool)) return {true, hint};
  const uint32_t guess = guess_from_sample(later, call.numel, call.k);
  return {collect(later, guess, call.k, parts, pool), guess};
}

// The k-th key: among the candidates if proven to contain it, otherwise in the whole buffer.
template <typename Call, typename Source>
uint32_t select(const Call& call, Parts& parts, const Found& found, const Source& source) {
  const auto in_candidates = [](const Part& part, uint32_t /*lowest*/, const auto& visit) {
    for (const auto& [chunk, size] : part.candidates.filled()) {
      for (int64_t i = 0; i < size; ++i) visit(chunk->accs[i]);
    }
  };
  const auto in_buffer = [&](const Part& part, uint32_t lowest, const auto& visit) {
    visit_large(source, part.begin, part.end, lowest_bits(lowest),
                [&](int64_t, float acc) { visit(acc); });
  };
  const uint32_t key = [&] {
    if (!found.proven) return select_key(parts, call.k, in_buffer);
    const auto near = select_key_above(parts, call.k, found.lowest, in_candidates);
    return near ? *near : select_key(parts, call.k, in_candidates);
  }();
  if (call.threshold) *call.threshold = float_of_bits(key);
  return key;
}

// Without a residual.
struct KeepNothing {
  void operator()(int64_t, float, float) const {}
  void clear(int64_t) const {}
};

// The residual holds acc where nothing was sent.
template <typename Kept>
struct KeepRemainders {
  Kept* residual;

  void operator()(int64_t i, float acc, float sent) const {
    residual[i] = top_k_remainder<Kept>(acc, sent);
  }

  void clear(int64_t i) const { residual[i] = static_cast<Kept>(0.0f); }
};

// Writes an entry to the outputs, and calls keep(i, acc, sent).
template <typename X, typename Index, typename Keep>
void write_winner(const Call<X, Index>& call, int64_t place, int64_t i, float acc,
                  const Keep& keep) {
  call.values[place] = static_cast<X>(acc);
  call.indices[place] = static_cast<Index>(i);
  keep(i, acc, static_cast<float>(call.values[place]));
}

template <typename Call, typename Keep>
void write_from_candidates(const Call& call, Parts& parts, uint32_t kth, const Keep& keep) {
  for_each_part(parts, [&](Part& part) {
    int64_t place = part.first, ties = part.ties;
    for (const Candidates::Filled& filled : part.candidates.filled()) {
      const int64_t winners = sort_out_winners(filled, kth, ties);
      const Chunk& chunk = *filled.chunk;
      for (int64_t j = 0; j < winners; ++j) {
        write_winner(call, place++, part.begin + chunk.offsets[j], chunk.accs[j], keep);
      }
    }
  });
}

// If the k-th is not finite, further such entries may be left: their residuals become zero.
template <typename Call, typename Source, typename Keep>
void write_from_buffer(const Call& call, Parts& parts, uint32_t kth, const Source& source,
                       const Keep& keep) {
  for_each_part(parts, [&](Part& part) {
    int64_t place = part.first, ties = part.ties;
    const uint32_t lowest = std::min(kth, kInfinityKey);
    visit_large(source, part.begin, part.end, lowest, [&](int64_t i, float acc) {
      const uint32_t key = top_k_key(acc);
      if (key > kth || (key == kth && ties-- > 0)) {
        write_winner(call, place++, i, acc, keep);
      } else if (key >= kInfinityKey) {
        keep.clear(i);
      }
    });
  });
}

template <typename Call, typename X>
void top_k_alone(const Call& call, Parts& parts, ChunkPool& pool, const X* x) {
  const Plain<X> source{x};
  const KeepNothing nothing;
  const Found found = find_candidates(call, parts, pool, source, source, source);
  const uint32_t key = select(call, parts, found, source);
  if (found.proven) {
    write_from_candidates(call, parts, key, nothing);
  } else {
    write_from_buffer(call, parts, key, source, nothing);
  }
}

// The first pass stores acc in the residual.
template <typename Call, typename X>
void top_k_with(const Call& call, Parts& parts, ChunkPool& pool, const X* x, float* residual) {
  const Plain<float> acc{residual};
  const KeepRemainders<float> keep{residual};
  const Accumulate<X, float> accumulate{x, residual};
  const Found found =
      find_candidates(call, parts, pool, Sum<X, float>{x, residual}, accumulate, acc);
  const uint32_t key = select(call, parts, found, acc);
  if (found.proven && key < kInfinityKey) {
    write_from_candidates(call, parts, key, keep);
  } else {
    write_from_buffer(call, parts, key, acc, keep);
  }
}

// A residual of 16 bits cannot hold acc: it is written when the winners are known.
template <typename Call, typename X, typename Kept>
void top_k_with(const Call& call, Parts& parts, ChunkPool& pool, const X* x, Kept* residual) {
  const Sum<X, Kept> sum{x, residual};
  const Found found = find_candidates(call, parts, pool, sum, sum, sum);
  const uint32_t key = select(call, parts, found, sum);
  const KeepRemainders<Kept> keep{residual};
  write_from_buffer(call, parts, key, Accumulate<X, Kept>{x, residual}, keep);
}

// Nothing is sent, so the residual becomes acc.
template <typename X, typename Kept>
void keep_all(int64_t numel, const X* x, Kept* residual) {
  const Accumulate<X, Kept> source{x, residual};
  torch::stable::parallel_for(0, numel, kGrain, [&](int64_t begin, int64_t end) {
    visit_large(source, begin, end, kUnreachable, [](int64_t, float) {});
  });
}

template <typename X, typename... Kept>
void top_k_buffers(const Tensor& x, const std::optional<Tensor>& threshold, const Tensor& values,
                   const Tensor& indices, Kept*... residual) {
  const int64_t numel = x.numel(), k = values.numel();
  const X* entries = x.const_data_ptr<X>();
  if (k == 0) {
    (keep_all(numel, entries, residual), ...);
    return;
  }
  Parts parts = split_buffer(numel);
  ChunkPool pool(top_k_max_candidates(k, numel), static_cast<int64_t>(parts.size()));
  with_index_type(indices.scalar_type(), [&](auto index) {
    using Index = decltype(index);
    const Call<X, Index> call{numel, k, threshold ? threshold->mutable_data_ptr<float>() : nullptr,
                              values.mutable_data_ptr<X>(), indices.mutable_data_ptr<Index>()};
    if constexpr (sizeof...(Kept) == 0) {
      top_k_alone(call, parts, pool, entries);
    } else {
      top_k_with(call, parts, pool, entries, residual...);
    }
  });
}

void top_k_cpu(Tensor x, std::optional<Tensor> residual, std::optional<Tensor> threshold,
               Tensor values, Tensor indices) {
  check_top_k_arguments(x, residual, threshold, values, indices);
  with_float_type(x.scalar_type(), [&](auto type) {
    using X = decltype(type);
    if (!residual) return top_k_buffers<X>(x, threshold, values, indices);
    with_float_type(residual->scalar_type(), [&](auto kept) {
      top_k_buffers<X>(x, threshold, values, indices, residual->mutable_data_ptr<decltype(kept)>());
    });
  });
}

// The first position with a corrupt index, or `count`.
template <typename Index>
int64_t find_corrupt(const Index* indices, int64_t count, int64_t numel) {
  const auto is_corrupt = [=](int64_t i) {
    return is_corrupt_index(indices[i], numel, i > 0, i > 0 ? indices[i - 1] : 0);
  };
  std::atomic<bool> any{false};
  torch::stable::parallel_for(0, count, kGrain, [&](int64_t begin, int64_t end) {
    bool found = begin == 0 && is_corrupt(0);
    // Without branches, so that the loop is vectorized.
    for (int64_t i = std::max<int64_t>(begin, 1); i < end; ++i) {
      found |= is_corrupt_index(indices[i], numel, true, indices[i - 1]);
    }
    if (found) any = true;
  });
  int64_t position = any ? 0 : count;
  while (position < count && !is_corrupt(position)) ++position;
  return position;
}

template <typename Index>
void refuse_corrupt(const Index* indices, int64_t count, int64_t numel) {
  const int64_t position = find_corrupt(indices, count, numel);
  if (position == count) return;
  std::string got = std::to_string(indices[position]);
  if (position > 0) got += " after " + std::to_string(indices[position - 1]);
  STD_TORCH_CHECK(false, "indices must be strictly ascending and in [0, ", numel, "), got ", got,
                  " at position ", position);
}

void scatter_add_cpu(Tensor dense, Tensor values, Tensor indices, Tensor corrupt) {
  check_scatter_add_arguments(dense, values, indices, corrupt);
  const int64_t count = values.numel();
  with_index_type(indices.scalar_type(), [&](auto index) {
    const auto* places = indices.const_data_ptr<decltype(index)>();
    refuse_corrupt(places, count, dense.numel());
    with_float_types(
        [&](auto target, auto source) {
          auto* sum = dense.mutable_data_ptr<decltype(target)>();
          const auto* addend = values.const_data_ptr<decltype(source)>();
          // Strictly ascending indices: no two threads write to the same position.
          torch::stable::parallel_for(0, count, kGrain, [&](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) {
              sum[places[i]] = scatter_add(sum[places[i]], static_cast<float>(addend[i]));
            }
          });
        },
        dense, values);
  });
}

void top_k_chunks_cpu(Tensor x, int64_t k, int64_t chunk, std::optional<Tensor> residual,
                      Tensor values, Tensor indices) {
  const Chunks chunks{x.numel(), k, chunk};
  check_top_k_chunks_arguments(x, chunks, residual, values, indices);
  uint8_t* bytes = indices.mutable_data_ptr<uint8_t>();
  with_float_type(x.scalar_type(), [&](auto type) {
    using X = decltype(type);
    const X* own = x.const_data_ptr<X>();
    X* sent = values.mutable_data_ptr<X>();
    if (!residual) return send_chunks(chunks, own, sent, bytes);
    with_float_type(residual->scalar_type(), [&](auto kept) {
      send_chunks(chunks, own, sent, bytes, residual->mutable_data_ptr<decltype(kept)>());
    });
  });
}

void scatter_chunks_cpu(Tensor values, Tensor indices, int64_t k, int64_t chunk, bool accumulate,
                        Tensor out, Tensor corrupt) {
  const Chunks chunks{out.numel(), k, chunk};
  check_scatter_chunks_arguments(values, indices, chunks, out, corrupt);
  with_float_types(
      [&](auto source, auto target) {
        using Value = decltype(source);
        const ChunkMessages<Value> messages{chunks, num_messages(values),
                                            values.const_data_ptr<Value>(),
                                            indices.const_data_ptr<uint8_t>()};
        messages.refuse_corrupt();
        write_chunks(messages, accumulate, out.mutable_data_ptr<decltype(target)>());
      },
      values, out);
}

}  // namespace
}  // namespace pyparallel::cpu

STABLE_TORCH_LIBRARY_IMPL(pyparallel, CPU, library) {
  library.impl("top_k", TORCH_BOX(&pyparallel::cpu::top_k_cpu));
  library.impl("scatter_add_", TORCH_BOX(&pyparallel::cpu::scatter_add_cpu));
  library.impl("top_k_chunks", TORCH_BOX(&pyparallel::cpu::top_k_chunks_cpu));
  library.impl("scatter_chunks", TORCH_BOX(&pyparallel::cpu::scatter_chunks_cpu));
}
