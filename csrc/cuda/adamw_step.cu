#include "adamw_step.h"

#include <torch/csrc/stable/library.h>

#include "cuda/scalar.h"
#include "cuda/step.h"
#include "step_arguments.h"

namespace pyparallel::cuda {
namespace {

// Lane 0 computes what the step needs, lane 1 what the prediction does: divisions take long.
__device__ AdamwStep make_on_warp(const AdamwOptions& options, const StepScalars& scalars,
                                  const AdamCorrections& at_step, const AdamCorrections& at_taken) {
  const auto own = adamw_step_scalars(options, scalars, threadIdx.x % 2 == 1, at_step, at_taken);
  const auto of_lane = [&](int lane) {
    return PredictAdamScalars{__shfl_sync(~0u, own.step_size, lane),
                              __shfl_sync(~0u, own.eps, lane)};
  };
  const PredictAdamScalars next = of_lane(0), ahead = of_lane(1);
  return make_adamw_step(options, scalars, next, ahead);
}

// The step is on the host: so are its powers, in the bits of the host's pow.
struct MakeAdamwStep {
  AdamwOptions options;
  AdamCorrections at_step, at_taken;

  bool any_on_device() const { return false; }

  AdamwStep operator()(const StepScalars& scalars) const {
    return make_adamw_step(options, scalars, at_step, at_taken);
  }

  __device__ AdamwStep on_warp(const StepScalars& scalars) const {
    return make_on_warp(options, scalars, at_step, at_taken);
  }
};

// The step is on the device, where a power takes a thread long: each is that of another lane.
struct MakeAdamwStepOnDevice {
  AdamwOptions options;
  const double* step;

  bool any_on_device() const { return true; }

  __device__ AdamwStep on_warp(const StepScalars& scalars) const {
    const int lane = threadIdx.x % 4;
    const double power =
        pow(lane % 2 == 0 ? options.beta1 : options.beta2, lane < 2 ? *step : adam_taken(*step));
    const double own = lane % 2 == 0 ? 1 - power : sqrt(1 - power);
    const AdamCorrections at_step{__shfl_sync(~0u, own, 0), __shfl_sync(~0u, own, 1)};
    const AdamCorrections at_taken{__shfl_sync(~0u, own, 2), __shfl_sync(~0u, own, 3)};
    return make_on_warp(options, scalars, at_step, at_taken);
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
  const Scalar<double> number(step);
  if (number.on_device) {
    step_on_cuda<AdamwStep>(tensors, lr, horizon, MakeAdamwStepOnDevice{options, number.on_device});
  } else {
    const MakeAdamwStep make{options, adam_corrections(beta1, beta2, number.value),
                             adam_corrections(beta1, beta2, adam_taken(number.value))};
    step_on_cuda<AdamwStep>(tensors, lr, horizon, make);
  }
}

}  // namespace
}  // namespace pyparallel::cuda

STABLE_TORCH_LIBRARY_IMPL(pyparallel, CUDA, library) {
  library.impl("adamw_step_", TORCH_BOX(&pyparallel::cuda::adamw_step_cuda));
}
