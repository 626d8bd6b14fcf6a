// Checks the emulator against CUDA's documentation; with any argument: a barrier not all reach.
#include <cstdio>

#include "cuda/intrinsics.h"

namespace {

constexpr int kThreads = 80;  // two and a half warps

void expect(bool holds, const char* what) {
  if (holds) return;
  std::printf("%s, thread %u\n", what, threadIdx.x);
  std::exit(1);
}

void check_kernel() {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int lanes = thread < 64 ? 32 : 16;
  expect(__shfl_sync(~0u, thread, 3) == thread - lane + 3, "shfl");
  expect(__shfl_xor_sync(~0u, thread, 5) == (thread ^ 5), "shfl_xor");
  expect(__shfl_up_sync(~0u, thread, 2) == (lane < 2 ? thread : thread - 2), "shfl_up");
  expect(__shfl_up_sync(~0u, thread, 2, 8) == (lane % 8 < 2 ? thread : thread - 2), "width");
  if (lanes == 32) {
    const int down = __shfl_down_sync(~0u, thread, 30);
    expect(down == (lane >= 2 ? thread : thread + 30), "shfl_down");
  }
  expect(__ballot_sync(~0u, lane % 2) == (lanes == 32 ? 0xaaaaaaaau : 0xaaaau), "ballot");
  expect(__reduce_max_sync(~0u, lane) == static_cast<unsigned>(lanes - 1), "reduce_max");
  expect(__any_sync(~0u, thread == 33) == (thread / 32 == 1), "any");
  expect(__all_sync(~0u, thread != 33) == (thread / 32 != 1), "all");

  expect(__byte_perm(0x33221100u, 0x77665544u, 0x3106u) == 0x33110066u, "byte_perm");

  __shared__ int total;
  if (thread == 0) total = 0;
  __syncthreads();
  atomicAdd(&total, thread);
  __syncthreads();
  expect(total == kThreads * (kThreads - 1) / 2, "shared memory and barriers");
  if (thread >= 40) return;  // barriers do not wait for returned threads
  __syncthreads();
}

void stuck_kernel() {
  if (threadIdx.x < 32) __syncthreads();
  if (threadIdx.x == 40) __syncwarp();
  if (threadIdx.x >= 32) __syncthreads();
  if (threadIdx.x < 8) __syncwarp();
  if (threadIdx.x >= 8) __syncthreads();
}

}  // namespace

int main(int num_arguments, char**) {
  const auto kernel = num_arguments > 1 ? stuck_kernel : check_kernel;
  emulator::Block::current().run(kThreads, kernel);
  std::printf("right\n");
}
