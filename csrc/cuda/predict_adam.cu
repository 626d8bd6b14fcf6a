#include "predict_adam.h"

#include <torch/csrc/stable/library.h>

#include "cuda/map.h"
#include "cuda/scalar.h"
#include "step_arguments.h"

namespace pyparallel::cuda {
namespace {

struct SquareRoot {
  __device__ float operator()(float value) const { return __fsqrt_rn(value); }
};

struct PredictAdamInputs {
  Scalar<double> lr, step, horizon;
  double beta1, beta2, eps;

  bool any_on_device() const { return lr.on_device || step.on_device || horizon.on_device; }

  PYPARALLEL_HOST_DEVICE PredictAdamScalars scalars() const {
    return predict_adam_scalars(lr.get(), eps, adam_corrections(beta1, beta2, step.get()),
                                horizon.get());
  }
};

struct PredictAdamElement {
  template <int EACH>
  __device__ float operator()(const PredictAdamScalars& scalars, const float (&in)[3][EACH],
                              int i) const {
    return predict_adam(in[0][i], in[1][i], in[2][i], scalars, SquareRoot{});
  }
};

void predict_adam_cuda(Tensor param, Tensor exp_avg, Tensor exp_avg_sq, Tensor lr, double beta1,
                       double beta2, double eps, Tensor step, Tensor horizon, Tensor out) {
  check_predict_adam_arguments(param, exp_avg, exp_avg_sq, lr, step, horizon, out);
  const DeviceGuard guard(param.get_device_index());
  const PredictAdamInputs inputs{
      Scalar<double>(lr), Scalar<double>(step), Scalar<double>(horizon), beta1, beta2, eps};
  launch_map(PredictAdamElement{}, inputs, out, param, exp_avg, exp_avg_sq);
}

}  // namespace
}  // namespace pyparallel::cuda

STABLE_TORCH_LIBRARY_IMPL(pyparallel, CUDA, library) {
  library.impl("predict_adam", TORCH_BOX(&pyparallel::cuda::predict_adam_cuda));
}
