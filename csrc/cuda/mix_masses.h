#pragma once

#include <cstdint>

#include "cuda/device.h"
#include "mix.h"

// What kernels that mix messages do with the masses.
namespace pyparallel::cuda {

// One thread works out one coefficient; then every thread of the block may read them all.
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

// Adds the masses to the weight, in a launch of its own: every block of a kernel that mixes reads
// the weight from before.
void add_masses(double* weight, const double* masses, int count, cudaStream_t stream);

}  // namespace pyparallel::cuda
