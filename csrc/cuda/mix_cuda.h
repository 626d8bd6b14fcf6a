#pragma once

#include <vector>

#include "tensor_checks.h"

// For ops that mix more messages in than one launch can point to.
namespace pyparallel::cuda {

void mix_cuda(Tensor z, Tensor weight, std::vector<Tensor> messages, Tensor masses);

}  // namespace pyparallel::cuda
