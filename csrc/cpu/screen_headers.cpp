#include "screen_headers.h"

#include <torch/csrc/stable/library.h>

namespace pyparallel::cpu {
namespace {

void screen_headers_cpu(Tensor rows, Tensor expected, Tensor masses, Tensor counter) {
  check_screen_headers_arguments(rows, expected, masses, counter);
  const double *row = rows.const_data_ptr<double>(), *wanted = expected.const_data_ptr<double>();
  double* result = masses.mutable_data_ptr<double>();
  int64_t* found = counter.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < rows.size(0); ++i) {
    result[i] = screen_row(row + i * kColumns, wanted + i * kColumns, *found);
  }
}

}  // namespace
}  // namespace pyparallel::cpu

STABLE_TORCH_LIBRARY_IMPL(pyparallel, CPU, library) {
  library.impl("screen_headers", TORCH_BOX(&pyparallel::cpu::screen_headers_cpu));
}
