#pragma once

#include "tensor_checks.h"

// Argument checks of messages with one scale for each block of neighbors.
namespace pyparallel {

inline void check_block_size(int64_t block_size) {
  STD_TORCH_CHECK(block_size >= 32 && block_size <= 4096 && (block_size & (block_size - 1)) == 0,
                  "block_size must be a power of two from 32 to 4096, got ", block_size);
}

}  // namespace pyparallel
