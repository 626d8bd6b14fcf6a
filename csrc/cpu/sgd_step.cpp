#include "sgd_step.h"

#include <torch/csrc/stable/library.h>

#include <utility>

#include "cpu/step.h"
#include "step_arguments.h"

namespace pyparallel::cpu {
namespace {

void sgd_step_cpu(Tensor param, std::vector<Tensor> grads, std::vector<int64_t> offsets,
                  std::optional<Tensor> momentum_buffer, Tensor lr, double momentum,
                  double dampening, double weight_decay, bool nesterov, bool maximize, Tensor mass,
                  std::vector<Tensor> messages, Tensor masses, bool mix_after,
                  std::optional<Tensor> grad_scale, std::optional<Tensor> found_inf,
                  std::optional<Tensor> nonfinite, Tensor horizon, std::optional<Tensor> prediction,
                  std::optional<Tensor> message) {
  StepTensors tensors{
      param,  std::move(grads), std::move(offsets), {},        mass,      std::move(messages),
      masses, mix_after,        grad_scale,         found_inf, nonfinite, prediction,
      message};
  if (momentum_buffer) tensors.states.push_back(*momentum_buffer);
  check_sgd_step_arguments(tensors, momentum, lr, horizon);
  const SgdOptions options{momentum, dampening, weight_decay, nesterov, maximize};
  step_on_cpu(tensors, lr, horizon,
              [&](const StepScalars& scalars) { return make_sgd_step(options, scalars); });
}

}  // namespace
}  // namespace pyparallel::cpu

STABLE_TORCH_LIBRARY_IMPL(pyparallel, CPU, library) {
  library.impl("sgd_step_", TORCH_BOX(&pyparallel::cpu::sgd_step_cpu));
}
