#include "mix.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <vector>

#include "cpu/mix_range.h"
#include "float_types.h"
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

}  // namespace
}  // namespace pyparallel::cpu

STABLE_TORCH_LIBRARY_IMPL(pyparallel, CPU, library) {
  library.impl("mix_", TORCH_BOX(&pyparallel::cpu::mix_cpu));
}
