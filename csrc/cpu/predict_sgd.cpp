#include "predict_sgd.h"

#include <torch/csrc/stable/library.h>

#include "cpu/map.h"
#include "float_types.h"
#include "step_arguments.h"

namespace pyparallel::cpu {
namespace {

void predict_sgd_cpu(Tensor param, Tensor momentum_buffer, Tensor lr, Tensor horizon, Tensor out) {
  check_predict_sgd_arguments(param, momentum_buffer, lr, horizon, out);
  const float scale =
      predict_sgd_scale(*lr.const_data_ptr<double>(), *horizon.const_data_ptr<double>());
  const auto element = [scale](Lanes own, Lanes momentum) {
    return predict_sgd(own, momentum, scale);
  };
  with_float_types(
      [&](auto own, auto state, auto result) {
        map_buffers(param.numel(), element, out.mutable_data_ptr<decltype(result)>(),
                    param.const_data_ptr<decltype(own)>(),
                    momentum_buffer.const_data_ptr<decltype(state)>());
      },
      param, momentum_buffer, out);
}

}  // namespace
}  // namespace pyparallel::cpu

STABLE_TORCH_LIBRARY_IMPL(pyparallel, CPU, library) {
  library.impl("predict_sgd", TORCH_BOX(&pyparallel::cpu::predict_sgd_cpu));
}
