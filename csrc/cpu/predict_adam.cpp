#include "predict_adam.h"

#include <torch/csrc/stable/library.h>

#include "cpu/map.h"
#include "float_types.h"
#include "step_arguments.h"

namespace pyparallel::cpu {
namespace {

void predict_adam_cpu(Tensor param, Tensor exp_avg, Tensor exp_avg_sq, Tensor lr, double beta1,
                      double beta2, double eps, Tensor step, Tensor horizon, Tensor out) {
  check_predict_adam_arguments(param, exp_avg, exp_avg_sq, lr, step, horizon, out);
  const auto scalars =
      predict_adam_scalars(*lr.const_data_ptr<double>(), eps,
                           adam_corrections(beta1, beta2, *step.const_data_ptr<double>()),
                           *horizon.const_data_ptr<double>());
  const auto element = [&scalars](Lanes own, Lanes mean, Lanes square) {
    return predict_adam(own, mean, square, scalars, SquareRoot{});
  };
  with_float_types(
      [&](auto own, auto state, auto result) {
        map_buffers(param.numel(), element, out.mutable_data_ptr<decltype(result)>(),
                    param.const_data_ptr<decltype(own)>(),
                    exp_avg.const_data_ptr<decltype(state)>(),
                    exp_avg_sq.const_data_ptr<decltype(state)>());
      },
      param, exp_avg, out);
}

}  // namespace
}  // namespace pyparallel::cpu

STABLE_TORCH_LIBRARY_IMPL(pyparallel, CPU, library) {
  library.impl("predict_adam", TORCH_BOX(&pyparallel::cpu::predict_adam_cpu));
}
