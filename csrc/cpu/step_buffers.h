#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "cpu/lanes.h"
#include "cpu/map.h"
#include "cpu/mix_range.h"
#include "float_types.h"
#include "step_arguments.h"

// What an optimizer step reads and writes beside the parameters and states, block by block.
namespace pyparallel::cpu {

// A gradient and the elements [begin, end) of the flat buffers that it covers.
struct Gradient {
  const void* data;
  int64_t begin, end;
};

inline std::vector<Gradient> gradients_of(const StepTensors& step) {
  std::vector<Gradient> gradients;
  gradients.reserve(step.grads.size());
  for (size_t i = 0; i < step.grads.size(); ++i) {
    const int64_t begin = step.offsets[i];
    gradients.push_back({step.grads[i].const_data_ptr(), begin, begin + step.grads[i].numel()});
  }
  return gradients;
}

struct StepMessages {
  Messages at;
  ScalarType dtype = ScalarType::Float;
  std::vector<float> coefficients;

  // Adds the messages' masses to the rank's own.
  explicit StepMessages(const StepTensors& step) : at(pointers_to(step.messages)) {
    if (at.empty()) return;
    dtype = step.messages[0].scalar_type();
    coefficients = take_masses(step.mass.mutable_data_ptr<double>(),
                               step.masses.const_data_ptr<double>(), at.size());
  }

  // `z` points to the block, which is [begin, end) of the messages.
  void mix_into(float* z, int64_t begin, int64_t end) const {
    if (at.empty()) return;
    with_float_type(dtype,
                    [&](auto kind) { mix_range<decltype(kind)>(z, at, coefficients, begin, end); });
  }
};

struct StepOutput {
  void* data = nullptr;  // null: not requested
  ScalarType dtype = ScalarType::Float;
  bool stream = false;

  explicit StepOutput(const std::optional<Tensor>& tensor) {
    if (!tensor) return;
    data = tensor->mutable_data_ptr();
    dtype = tensor->scalar_type();
    with_float_type(dtype, [&](auto kind) {
      stream = is_streamed(static_cast<decltype(kind)*>(data), tensor->numel());
    });
  }

  // Writes a block of values to [begin, end).
  template <typename T>
  void write(int64_t begin, int64_t end, const T* values) const {
    if (!data) return;
    with_float_type(dtype, [&](auto kind) {
      const auto same = [](Lanes lanes) { return lanes; };
      map_range(0, end - begin, stream, same, static_cast<decltype(kind)*>(data) + begin, values);
    });
  }
};

}  // namespace pyparallel::cpu
