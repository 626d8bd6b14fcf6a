#include "adamw_step.h"

#include <torch/csrc/stable/library.h>

#include <utility>

#include "cpu/step.h"
#include "step_arguments.h"

namespace pyparallel::cpu {
namespace {

void adamw_step_cpu(Tensor param, std::vector<Tensor> grads, std::vector<int64_t> offsets,
                    Tensor exp_avg, Tensor exp_avg_sq, Tensor lr, double beta1, double beta2,
                    double eps, double weight_decay, Tensor step, bool decoupled, bool maximize,
                    Tensor mass, std::vector<Tensor> messages, Tensor masses, bool mix_after,
                    std::optional<Tensor> grad_scale, std::optional<Tensor> found_inf,
                    std::optional<Tensor> nonfinite, Tensor horizon,
                    std::optional<Tensor> prediction, std::optional<Tensor> message) {
  const StepTensors tensors{param,
                            std::move(grads),
                            std::move(offsets),
                            {exp_avg, exp_avg_sq},
                            mass,
                            std::move(messages),
                            masses,
                            mix_after,
                            grad_scale,
                            found_inf,
                            nonfinite,
                            prediction,
                            message};
  check_adamw_step_arguments(tensors, lr, step, horizon);
  const AdamwOptions options{beta1, beta2, eps, weight_decay, decoupled, maximize};
  step_on_cpu(tensors, lr, horizon, [&](const StepScalars& scalars) {
    return make_adamw_step(options, scalars, *step.const_data_ptr<double>());
  });
}

}  // namespace
}  // namespace pyparallel::cpu

STABLE_TORCH_LIBRARY_IMPL(pyparallel, CPU, library) {
  library.impl("adamw_step_", TORCH_BOX(&pyparallel::cpu::adamw_step_cpu));
}
