#include "sgd_step.h"

#include <torch/csrc/stable/library.h>

#include "cuda/scalar.h"
#include "cuda/step.h"
#include "step_arguments.h"

namespace pyparallel::cuda {
namespace {

struct SgdStepInputs {
  Scalar<double> lr, horizon;
  SgdOptions options;

  bool any_on_device() const { return lr.on_device || horizon.on_device; }

  PYPARALLEL_HOST_DEVICE SgdStep rule(double mass) const {
    return make_sgd_step(options, lr.get(), horizon.get(), mass);
  }
};

void sgd_step_cuda(Tensor param, Tensor grad, std::optional<Tensor> momentum_buffer, Tensor lr,
                   double momentum, double dampening, double weight_decay, bool nesterov,
                   bool maximize, Tensor mass, std::vector<Tensor> messages, Tensor masses,
                   Tensor horizon, std::optional<Tensor> prediction,
                   std::optional<Tensor> message) {
  StepTensors tensors{param, grad, {}, mass, messages, masses, prediction, message};
  if (momentum_buffer) tensors.states.push_back(*momentum_buffer);
  check_sgd_step_arguments(tensors, momentum, lr, horizon);
  const SgdOptions options{momentum, dampening, weight_decay, nesterov, maximize};
  step_on_cuda(tensors, SgdStepInputs{Scalar<double>(lr), Scalar<double>(horizon), options});
}

}  // namespace
}  // namespace pyparallel::cuda

STABLE_TORCH_LIBRARY_IMPL(pyparallel, CUDA, library) {
  library.impl("sgd_step_", TORCH_BOX(&pyparallel::cuda::sgd_step_cuda));
}
