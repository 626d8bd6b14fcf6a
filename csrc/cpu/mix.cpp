#include "mix.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cstring>
#include <vector>

#include "add_or_clear.h"
#include "cpu/map.h"
#include "cpu/mix_range.h"
#include "float_types.h"
#include "screen_headers.h"
#include "step_arguments.h"

namespace pyparallel::cpu {
namespace {

template <typename Z, typename Message>
void mix_buffers(const Tensor& z, const Messages& messages,
                 const std::vector<float>& coefficients) {
  Z* own = z.mutable_data_ptr<Z>();
  torch::stable::parallel_for(0, z.numel(), kGrain, [&](int64_t begin, int64_t end) {
    mix_range<Message>(own + begin, messages, coefficients, begin, end);
  });
}

void mix_cpu(Tensor z, Tensor weight, std::vector<Tensor> messages, Tensor masses) {
  check_mix_arguments(z, weight, messages, masses);
  if (messages.empty()) return;
  Messages incoming = pointers_to(messages);
  const auto coefficients =
      take_masses(weight.mutable_data_ptr<double>(), masses.const_data_ptr<double>(), incoming);
  if (incoming.empty()) return;
  with_float_type(z.scalar_type(), [&](auto own_type) {
    with_float_type(messages[0].scalar_type(), [&](auto message_type) {
      mix_buffers<decltype(own_type), decltype(message_type)>(z, incoming, coefficients);
    });
  });
}

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
  library.impl("mix_", TORCH_BOX(&pyparallel::cpu::mix_cpu));
  library.impl("add_or_clear_", TORCH_BOX(&pyparallel::cpu::add_or_clear_cpu));
  library.impl("screen_headers", TORCH_BOX(&pyparallel::cpu::screen_headers_cpu));
}
