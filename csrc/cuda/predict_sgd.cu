#include "predict_sgd.h"

#include <torch/csrc/stable/library.h>

#include "cuda/map.h"
#include "cuda/scalar.h"
#include "step_arguments.h"

namespace pyparallel::cuda {
namespace {

struct PredictSgdInputs {
  Scalar<double> lr, horizon;

  bool any_on_device() const { return lr.on_device || horizon.on_device; }

  PYPARALLEL_HOST_DEVICE float scalars() const {
    return predict_sgd_scale(lr.get(), horizon.get());
  }
};

struct PredictSgdElement {
  template <int EACH>
  __device__ float operator()(float scale, const float (&in)[2][EACH], int i) const {
    return predict_sgd(in[0][i], in[1][i], scale);
  }
};

void predict_sgd_cuda(Tensor param, Tensor momentum_buffer, Tensor lr, Tensor horizon, Tensor out) {
  check_predict_sgd_arguments(param, momentum_buffer, lr, horizon, out);
  const DeviceGuard guard(param.get_device_index());
  const PredictSgdInputs inputs{Scalar<double>(lr), Scalar<double>(horizon)};
  launch_map(PredictSgdElement{}, inputs, out, param, momentum_buffer);
}

}  // namespace
}  // namespace pyparallel::cuda

STABLE_TORCH_LIBRARY_IMPL(pyparallel, CUDA, library) {
  library.impl("predict_sgd", TORCH_BOX(&pyparallel::cuda::predict_sgd_cuda));
}
