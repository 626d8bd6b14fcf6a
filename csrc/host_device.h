#pragma once

// The arithmetic of an element is defined once, for g++ and nvcc.
#ifdef __CUDACC__
#define PYPARALLEL_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define PYPARALLEL_HOST_DEVICE inline
#endif
