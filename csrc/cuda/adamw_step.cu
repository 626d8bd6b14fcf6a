#include "adamw_step.h"

#include <torch/csrc/stable/library.h>

#include "cuda/scalar.h"
#include "cuda/step.h"
#include "step_arguments.h"

namespace pyparallel::cuda {
namespace {

struct MakeAdamwStep {
  AdamwOptions options;
  Scalar<double> step;

  bool any_on_device() const { return step.on_device; }

  PYPARALLEL_HOST_DEVICE AdamwStep operator()(const StepScalars& scalars) const {
    return make_adamw_step(options, scalars, step.get());
  }
};

void adamw_step_cuda(Tensor param, std::vector<Tensor> grads, std::vector<int64_t> offsets,
                     Tensor exp_avg, Tensor exp_avg_sq, Tensor lr, double beta1, double beta2,
                     double eps, double weight_decay, Tensor step, bool decoupled, bool maximize,
                     Tensor mass, std::vector<Tensor> messages, Tensor masses, bool mix_after,
                     std::optional<Tensor> grad_scale, std::optional<Tensor> found_inf,
                     std::optional<Tensor> nonfinite, Tensor horizon,
                     std::optional<Tensor> prediction, std::optional<Tensor> message) {
  const StepTensors tensors{param,      grads,     offsets,   {exp_avg, exp_avg_sq},
                            mass,       messages,  masses,    mix_after,
                            grad_scale, found_inf, nonfinite, prediction,
                            message};
  check_adamw_step_arguments(tensors, lr, step, horizon);
  const AdamwOptions options{beta1, beta2, eps, weight_decay, decoupled, maximize};
  step_on_cuda(tensors, lr, horizon, MakeAdamwStep{options, Scalar<double>(step)});
}

}  // namespace
}  // namespace pyparallel::cuda

STABLE_TORCH_LIBRARY_IMPL(pyparallel, CUDA, library) {
  library.impl("adamw_step_", TORCH_BOX(&pyparallel::cuda::adamw_step_cuda));
}
