#pragma once

#include <cstdint>
#include <mutex>
#include <unordered_map>

#include "cuda/device.h"
#include "mix.h"

// Masses in kernels that mix messages.
namespace pyparallel::cuda {

// One thread computes one coefficient; afterwards every thread of the block may read all.
template <int MAX_MESSAGES>
__device__ __forceinline__ void share_coefficients(const double* weight, const double* masses,
                                                   int count, float (&coefficients)[MAX_MESSAGES]) {
  if (threadIdx.x < count) {
    double total = *weight;
    for (int j = 0; j < count; ++j) total += masses[j];
    coefficients[threadIdx.x] = mix_coefficient(masses[threadIdx.x], total);
  }
  __syncthreads();
}

__device__ __forceinline__ void add_masses(double* weight, const double* masses, int count) {
  double total = *weight;
  for (int j = 0; j < count; ++j) total += masses[j];
  *weight = total;
}

// How many blocks of a launch have read the weight: it is zero between launches.
static __device__ unsigned weight_readers[kMaxWeights];

// The weight's new value, which the last block to read the old one stores. A thread that has used
// what it loaded has loaded it: that a block counts itself after share_coefficients orders its
// loads before the store of another, without a fence.
class WeightUpdate {
 public:
  // `readers` is an index in weight_readers; if negative, the weight is left to another launch.
  __device__ __forceinline__ explicit WeightUpdate(int readers) : readers_(readers) {
    if (readers >= 0 && threadIdx.x == 0) before_ = atomicAdd(weight_readers + readers, 1u);
  }

  // Called late, so that no thread waits for the addition.
  __device__ __forceinline__ void finish(double* weight, const double* masses, int count) const {
    if (readers_ < 0 || threadIdx.x != 0 || before_ + 1 != gridDim.x) return;
    weight_readers[readers_] = 0;
    add_masses(weight, masses, count);
  }

 private:
  int readers_;
  unsigned before_ = 0;
};

// The weight's index in weight_readers, or -1 if they are all taken. Launches that share it are
// those of one address, which stream order separates, captured in graphs or not: kernels that
// update one weight at the same time would be a race of the caller anyway.
inline int readers_of(const double* weight) {
  static std::mutex mutex;
  static std::unordered_map<const double*, int> indices;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto known = indices.find(weight);
  if (known != indices.end()) return known->second;
  const int next = static_cast<int>(indices.size());
  if (next >= max_weights()) return -1;
  indices.emplace(weight, next);
  return next;
}

// Adds the masses to the weight in a launch of its own.
void launch_add_masses(double* weight, const double* masses, int count, cudaStream_t stream);

}  // namespace pyparallel::cuda
