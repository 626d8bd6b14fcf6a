#include "sgd_step.h"

#include <torch/csrc/stable/library.h>

#include "cuda/scalar.h"
#include "cuda/step.h"
#include "step_arguments.h"

namespace pyparallel::cuda {
namespace {

struct MakeSgdStep {
  SgdOptions options;

  bool any_on_device() const { return false; }

  PYPARALLEL_HOST_DEVICE SgdStep operator()(const StepScalars& scalars) const {
    return make_sgd_step(options, scalars);
  }

  __device__ SgdStep on_warp(const StepScalars& scalars) const { return (*this)(scalars); }
};

void sgd_step_cuda(Tensor param, std::vector<Tensor> grads, std::vector<int64_t> offsets,
                   std::optional<Tensor> momentum_buffer, Tensor lr, double momentum,
                   double dampening, double weight_decay, bool nesterov, bool maximize, Tensor mass,
                   std::vector<Tensor> messages, Tensor masses, bool mix_after,
                   std::optional<Tensor> grad_scale, std::optional<Tensor> found_inf,
                   std::optional<Tensor> nonfinite, Tensor horizon,
                   std::optional<Tensor> prediction, std::optional<Tensor> message) {
  StepTensors tensors{param,     grads,      offsets,   {},        mass,       messages, masses,
                      mix_after, grad_scale, found_inf, nonfinite, prediction, message};
  if (momentum_buffer) tensors.states.push_back(*momentum_buffer);
  check_sgd_step_arguments(tensors, momentum, lr, horizon);
  step_on_cuda<SgdStep>(tensors, lr, horizon,
                        MakeSgdStep{{momentum, dampening, weight_decay, nesterov, maximize}});
}

}  // namespace
}  // namespace pyparallel::cuda

STABLE_TORCH_LIBRARY_IMPL(pyparallel, CUDA, library) {
  library.impl("sgd_step_", TORCH_BOX(&pyparallel::cuda::sgd_step_cuda));
}
