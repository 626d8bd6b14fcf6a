#pragma once

#include "tensor_checks.h"

// Argument checks of the compiled `predict_sgd`.
namespace pyparallel {

inline void check_predict_sgd_arguments(const Tensor& param, const Tensor& momentum_buffer,
                                        const Tensor& lr, const Tensor& horizon,
                                        const Tensor& out) {
  check_buffer("param", param);
  check_like("momentum_buffer", momentum_buffer, "param", param);
  check_scalar("lr", lr, param);
  check_scalar("horizon", horizon, param);
  check_like("out", out, "param", param);
}

}  // namespace pyparallel
