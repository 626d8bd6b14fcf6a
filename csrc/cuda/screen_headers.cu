#include "screen_headers.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>

#include "cuda/launch.h"

namespace pyparallel::cuda {
namespace {

// What is expected of a warp's rows, passed in the kernel's arguments: nothing is copied before.
struct Expected {
  double rows[kWarp][kColumns];
};

__global__ void screen_headers_kernel(const double* rows, const __grid_constant__ Expected expected,
                                      int count, double* masses, int64_t* counter) {
  const int i = static_cast<int>(threadIdx.x);
  if (i >= count) return;
  int64_t found = 0;
  masses[i] = screen_row(rows + i * kColumns, expected.rows[i], found);
  add_to_counter(counter, found);
}

void screen_headers_cuda(Tensor rows, Tensor expected, Tensor masses, Tensor counter) {
  check_screen_headers_arguments(rows, expected, masses, counter);
  if (rows.size(0) == 0) return;
  const DeviceGuard guard(rows.get_device_index());
  const double *row = rows.const_data_ptr<double>(), *wanted = expected.const_data_ptr<double>();
  for (int64_t first = 0; first < rows.size(0); first += kWarp) {
    const int count = static_cast<int>(std::min<int64_t>(kWarp, rows.size(0) - first));
    Expected some;
    std::memcpy(some.rows, wanted + first * kColumns, count * sizeof some.rows[0]);
    launch(screen_headers_kernel, 1, kWarp, current_stream(rows), row + first * kColumns, some,
           count, masses.mutable_data_ptr<double>() + first, counter.mutable_data_ptr<int64_t>());
  }
}

}  // namespace
}  // namespace pyparallel::cuda

STABLE_TORCH_LIBRARY_IMPL(pyparallel, CUDA, library) {
  library.impl("screen_headers", TORCH_BOX(&pyparallel::cuda::screen_headers_cuda));
}
