#pragma once

// One definition of an op's element serves g++ and nvcc.
#ifdef __CUDACC__
#define PYPARALLEL_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define PYPARALLEL_HOST_DEVICE inline
#endif
