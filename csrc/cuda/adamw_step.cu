#include "adamw_step.h"

#include <torch/csrc/stable/library.h>

#include "cuda/scalar.h"
#include "cuda/step.h"
#include "step_arguments.h"

namespace pyparallel::cuda {
namespace {

struct AdamwStepInputs {
  Scalar<double> lr, step, horizon;
  AdamwOptions options;

  bool any_on_device() const { return lr.on_device || step.on_device || horizon.on_device; }

  PYPARALLEL_HOST_DEVICE AdamwStep rule(double mass) const {
    return make_adamw_step(options, lr.get(), step.get(), horizon.get(), mass);
  }
};

void adamw_step_cuda(Tensor param, Tensor grad, Tensor exp_avg, Tensor exp_avg_sq, Tensor lr,
                     double beta1, double beta2, double eps, double weight_decay, Tensor step,
                     bool maximize, Tensor mass, std::vector<Tensor> messages, Tensor masses,
                     Tensor horizon, std::optional<Tensor> prediction,
                     std::optional<Tensor> message) {
  const StepTensors tensors{param,      grad,   {exp_avg, exp_avg_sq}, mass, messages, masses,
                            prediction, message};
  check_adamw_step_arguments(tensors, lr, step, horizon);
  const AdamwOptions options{beta1, beta2, eps, weight_decay, maximize};
  step_on_cuda(tensors, AdamwStepInputs{Scalar<double>(lr), Scalar<double>(step),
                                        Scalar<double>(horizon), options});
}

}  // namespace
}  // namespace pyparallel::cuda

STABLE_TORCH_LIBRARY_IMPL(pyparallel, CUDA, library) {
  library.impl("adamw_step_", TORCH_BOX(&pyparallel::cuda::adamw_step_cuda));
}
