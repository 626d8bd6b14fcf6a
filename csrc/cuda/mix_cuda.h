#pragma once

#include <vector>

#include "tensor_checks.h"

// For ops that mix in more messages than fit in one launch's arguments.
namespace pyparallel::cuda {

void mix_cuda(Tensor z, Tensor weight, std::vector<Tensor> messages, Tensor masses);

}  // namespace pyparallel::cuda
