#include "random_k.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <vector>

#include "cpu/map.h"
#include "cpu/radix_sort.h"
#include "float_types.h"
#include "sparse_arguments.h"

namespace pyparallel::cpu {
namespace {

constexpr int64_t kDrawGrain = 2048;  // a draw costs as much as about twenty elements
constexpr int64_t kTile = 4096;       // elements whose sent entries are kept aside at once

template <typename Index>
void fill_indices(int64_t numel, int64_t run_length, const RandomKKey* keys, int64_t k,
                  Index* indices) {
  const RandomKRuns runs = random_k_runs(numel, run_length);
  const int64_t num_drawn = k / run_length + (k % run_length != 0);
  std::vector<Index> drawn(static_cast<size_t>(num_drawn));
  torch::stable::parallel_for(0, num_drawn, kDrawGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      drawn[static_cast<size_t>(i)] = static_cast<Index>(random_k_run(i, keys, runs));
    }
  });
  radix_sort(drawn, runs.count);
  const RandomKEntries entries{k, numel, run_length, random_k_rotation(keys, numel)};
  const int64_t first_of_front = random_k_first_of_front(entries, drawn.data(), num_drawn);
  torch::stable::parallel_for(0, k, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t entry = begin; entry < end; ++entry) {
      entries.write(entry, drawn[static_cast<size_t>(entry / run_length)], first_of_front, indices);
    }
  });
}

void random_k_indices_cpu(int64_t numel, int64_t seed, Tensor offset, int64_t run_length,
                          Tensor indices) {
  check_random_k_indices_arguments(numel, offset, run_length, indices);
  if (indices.numel() == 0) return;
  RandomKKey keys[kRandomKKeys];
  for (uint32_t i = 0; i < kRandomKKeys; ++i) {
    keys[i] = random_k_key(static_cast<uint64_t>(seed),
                           static_cast<uint64_t>(*offset.const_data_ptr<int64_t>()), i);
  }
  with_index_type(indices.scalar_type(), [&](auto index) {
    using Index = decltype(index);
    fill_indices(numel, run_length, keys, indices.numel(), indices.mutable_data_ptr<Index>());
  });
}

template <typename Index>
void check_ascending(const Index* indices, int64_t k, int64_t numel) {
  for (int64_t j = 0; j < k; ++j) {
    STD_TORCH_CHECK((j == 0 ? 0 : indices[j - 1] + int64_t{1}) <= indices[j] && indices[j] < numel,
                    "indices must ascend within [0, ", numel, "), got ", indices[j], " at ", j);
  }
}

template <typename X, typename Index>
void gather(const X* x, const Index* indices, int64_t k, X* values) {
  torch::stable::parallel_for(0, k, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t j = begin; j < end; ++j) values[j] = x[indices[j]];
  });
}

// For elements begin to end, with entries first to last: the entries' residuals are kept aside
// until the pass over all elements is done.
template <typename X, typename Residual, typename Index>
void send_tile(const X* x, Residual* residual, const Index* indices, X* values, int64_t begin,
               int64_t end, int64_t first, int64_t last) {
  float remains[kTile];
  for (int64_t j = first; j < last; ++j) {
    const float accumulated = random_k_accumulate(static_cast<float>(x[indices[j]]),
                                                  static_cast<float>(residual[indices[j]]));
    values[j] = static_cast<X>(accumulated);
    remains[j - first] = random_k_remain(accumulated, static_cast<float>(values[j]));
  }
  const auto accumulate = [](Lanes element, Lanes old) {
    return random_k_accumulate(element, old);
  };
  map_range(begin, end, false, accumulate, residual, x, static_cast<const Residual*>(residual));
  for (int64_t j = first; j < last; ++j) {
    residual[indices[j]] = static_cast<Residual>(remains[j - first]);
  }
}

template <typename X, typename Residual, typename Index>
void send(int64_t numel, const X* x, Residual* residual, const Index* indices, int64_t k,
          X* values) {
  torch::stable::parallel_for(0, numel, kGrain, [&](int64_t begin, int64_t end) {
    int64_t first = std::lower_bound(indices, indices + k, begin) - indices;
    for (int64_t i = begin; i < end; i += kTile) {
      const int64_t stop = std::min(i + kTile, end);
      int64_t last = first;
      while (last < k && indices[last] < stop) ++last;
      send_tile(x, residual, indices, values, i, stop, first, last);
      first = last;
    }
  });
}

void random_k_cpu(Tensor x, Tensor indices, std::optional<Tensor> residual, Tensor values) {
  check_random_k_arguments(x, indices, residual, values);
  const int64_t k = indices.numel();
  with_index_type(indices.scalar_type(), [&](auto index) {
    const auto* at = indices.const_data_ptr<decltype(index)>();
    check_ascending(at, k, x.numel());
    with_float_type(x.scalar_type(), [&](auto type) {
      using X = decltype(type);
      const X* own = x.const_data_ptr<X>();
      X* sent = values.mutable_data_ptr<X>();
      if (!residual) return gather(own, at, k, sent);
      with_float_type(residual->scalar_type(), [&](auto kept) {
        send(x.numel(), own, residual->mutable_data_ptr<decltype(kept)>(), at, k, sent);
      });
    });
  });
}

}  // namespace
}  // namespace pyparallel::cpu

STABLE_TORCH_LIBRARY_IMPL(pyparallel, CPU, library) {
  library.impl("random_k_indices", TORCH_BOX(&pyparallel::cpu::random_k_indices_cpu));
  library.impl("random_k", TORCH_BOX(&pyparallel::cpu::random_k_cpu));
}
