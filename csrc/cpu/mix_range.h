#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "cpu/lanes.h"
#include "mix.h"
#include "tensor_checks.h"

// Messages mixed into a range of floats of any dtype.
namespace pyparallel::cpu {

// Buffers of one dtype, the template argument of the functions below.
using Messages = std::vector<const void*>;

// COUNT messages known at compile time; COUNT = 0 means any number.
template <typename Message, int COUNT, typename Load>
Lanes mix_lanes(Lanes own, const Messages& messages, int64_t begin,
                const std::vector<float>& coefficients, Load load) {
  const size_t num_messages = COUNT ? COUNT : messages.size();
  Lanes delta = mix_nothing<Lanes>();
  for (size_t j = 0; j < num_messages; ++j) {
    const auto* message = static_cast<const Message*>(messages[j]) + begin;
    delta = mix_add_message(delta, own, load(message), coefficients[j]);
  }
  return mix_apply(own, delta);
}

// `z` points to the range, the messages to the start of the buffer.
template <typename Message, int COUNT, typename Z>
void mix_counted(Z* z, const Messages& messages, const std::vector<float>& coefficients,
                 int64_t begin, int64_t end) {
  const auto whole = [](const Message* source) { return load_lanes(source); };
  const auto at = [&](const Z* own, int64_t i) {
    return mix_lanes<Message, COUNT>(load_lanes(own), messages, i, coefficients, whole);
  };
  int64_t i = begin;
  for (; i + 2 * kLanes <= end; i += 2 * kLanes, z += 2 * kLanes) {
    store_lanes(at(z, i), at(z + kLanes, i + kLanes), z);
  }
  for (; i + kLanes <= end; i += kLanes, z += kLanes) store_lanes(at(z, i), z);
  if (i == end) return;
  const int64_t rest = end - i;
  const auto some = [rest](const Message* source) { return load_some_lanes(source, rest); };
  const Lanes own = load_some_lanes(z, rest);
  store_some_lanes(mix_lanes<Message, COUNT>(own, messages, i, coefficients, some), z, rest);
}

template <typename Message, typename Z>
void mix_range(Z* z, const Messages& messages, const std::vector<float>& coefficients,
               int64_t begin, int64_t end) {
  const auto walk = messages.size() == 1   ? mix_counted<Message, 1, Z>
                    : messages.size() == 2 ? mix_counted<Message, 2, Z>
                                           : mix_counted<Message, 0, Z>;
  walk(z, messages, coefficients, begin, end);
}

inline Messages pointers_to(const std::vector<Tensor>& tensors) {
  Messages messages;
  for (const Tensor& tensor : tensors) messages.push_back(tensor.const_data_ptr());
  return messages;
}

// Adds the messages' masses to the rank's own; returns each message's coefficient in the average.
// Messages with the coefficient 0 are erased.
inline std::vector<float> take_masses(double* own, const double* masses, Messages& messages) {
  for (size_t j = 0; j < messages.size(); ++j) *own += masses[j];
  std::vector<float> coefficients;
  Messages mixed;
  for (size_t j = 0; j < messages.size(); ++j) {
    const float coefficient = mix_coefficient(masses[j], *own);
    if (coefficient == 0) continue;
    coefficients.push_back(coefficient);
    mixed.push_back(messages[j]);
  }
  messages = std::move(mixed);
  return coefficients;
}

}  // namespace pyparallel::cpu
