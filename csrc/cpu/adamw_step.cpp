#include "adamw_step.h"

#include <torch/csrc/stable/library.h>

#include "cpu/step.h"
#include "step_arguments.h"

namespace pyparallel::cpu {
namespace {

void adamw_step_cpu(Tensor param, Tensor grad, Tensor exp_avg, Tensor exp_avg_sq, Tensor lr,
                    double beta1, double beta2, double eps, double weight_decay, Tensor step,
                    bool maximize, Tensor mass, std::vector<Tensor> messages, Tensor masses,
                    Tensor horizon, std::optional<Tensor> prediction,
                    std::optional<Tensor> message) {
  const StepTensors tensors{param,      grad,   {exp_avg, exp_avg_sq}, mass, messages, masses,
                            prediction, message};
  check_adamw_step_arguments(tensors, lr, step, horizon);
  const AdamwOptions options{beta1, beta2, eps, weight_decay, maximize};
  step_on_cpu(tensors, [&](double mass_after) {
    return make_adamw_step(options, *lr.const_data_ptr<double>(), *step.const_data_ptr<double>(),
                           *horizon.const_data_ptr<double>(), mass_after);
  });
}

}  // namespace
}  // namespace pyparallel::cpu

STABLE_TORCH_LIBRARY_IMPL(pyparallel, CPU, library) {
  library.impl("adamw_step_", TORCH_BOX(&pyparallel::cpu::adamw_step_cpu));
}
