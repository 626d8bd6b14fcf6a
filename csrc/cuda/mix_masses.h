#pragma once

#include <cstdint>

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

// Adds the masses to the weight, in a separate launch: every block of a mixing kernel reads the old
// weight.
void add_masses(double* weight, const double* masses, int count, cudaStream_t stream);

}  // namespace pyparallel::cuda
