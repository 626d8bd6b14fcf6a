#pragma once

#include "tensor_checks.h"

// Argument checks of the compiled `predict_adam`.
namespace pyparallel {

inline void check_predict_adam_arguments(const Tensor& param, const Tensor& exp_avg,
                                         const Tensor& exp_avg_sq, const Tensor& lr,
                                         const Tensor& step, const Tensor& horizon,
                                         const Tensor& out) {
  check_buffer("param", param);
  check_like("exp_avg", exp_avg, "param", param);
  check_like("exp_avg_sq", exp_avg_sq, "param", param);
  STD_TORCH_CHECK(exp_avg.scalar_type() == exp_avg_sq.scalar_type(),
                  "exp_avg and exp_avg_sq must have one dtype, got ",
                  dtype_name(exp_avg.scalar_type()), " and ", dtype_name(exp_avg_sq.scalar_type()));
  check_scalar("lr", lr, param);
  check_scalar("step", step, param);
  check_scalar("horizon", horizon, param);
  check_like("out", out, "param", param);
}

}  // namespace pyparallel
