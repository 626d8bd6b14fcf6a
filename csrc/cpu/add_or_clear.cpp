#include "add_or_clear.h"

#include <torch/csrc/stable/library.h>

#include <cstring>

#include "cpu/map.h"
#include "float_types.h"

namespace pyparallel::cpu {
namespace {

Lanes add_times(Lanes own, Lanes other, float times) {
#ifdef __FMA__
  return _mm256_fmadd_ps(other, _mm256_set1_ps(times), own);
#else
  for (int64_t i = 0; i < kLanes; ++i) own[i] = pyparallel::add_times(own[i], other[i], times);
  return own;
#endif
}

// What a buffer of type T makes of lanes.
template <typename T>
Lanes rounded(Lanes lanes) {
  T stored[kLanes];
  store_lanes(lanes, stored);
  return load_lanes(stored);
}

void add_or_clear_cpu(Tensor x, std::optional<Tensor> y, double times,
                      std::optional<Tensor> clear) {
  check_add_or_clear_arguments(x, y, clear);
  if (clear && *static_cast<const bool*>(clear->const_data_ptr())) {
    std::memset(x.mutable_data_ptr(), 0, static_cast<size_t>(x.numel() * x.element_size()));
    return;
  }
  if (!y) return;
  const float factor = static_cast<float>(times);
  with_float_types(
      [&](auto own, auto other) {
        using X = decltype(own);
        const auto element = [factor](Lanes own, Lanes other) {
          const Lanes sum = rounded<X>(add_times(own, other, factor));
          return is_finite<LaneBits>(sum) ? sum : own;
        };
        X* target = x.mutable_data_ptr<X>();
        map_buffers(x.numel(), element, target, target, y->const_data_ptr<decltype(other)>());
      },
      x, *y);
}

}  // namespace
}  // namespace pyparallel::cpu

STABLE_TORCH_LIBRARY_IMPL(pyparallel, CPU, library) {
  library.impl("add_or_clear_", TORCH_BOX(&pyparallel::cpu::add_or_clear_cpu));
}
