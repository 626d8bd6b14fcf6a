#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <vector>

#include "cpu/lanes.h"
#include "cpu/map.h"
#include "float_types.h"
#include "mix.h"
#include "step_arguments.h"

// One pass of an optimizer step over all its buffers. `Rule` is what csrc/X.h says of one element;
// around it messages are mixed in before, and a prediction and the next message are written after.
namespace pyparallel::cpu {

struct WholeLanes {
  template <typename T>
  Lanes load(const T* source) const {
    return load_lanes(source);
  }
  template <typename T>
  void store(Lanes lanes, T* target) const {
    store_lanes(lanes, target);
  }
};

struct SomeLanes {
  int64_t count;

  template <typename T>
  Lanes load(const T* source) const {
    return load_some_lanes(source, count);
  }
  template <typename T>
  void store(Lanes lanes, T* target) const {
    store_some_lanes(lanes, target, count);
  }
};

// What a buffer of a dtype holds once the lanes are stored there.
inline Lanes round_lanes(Lanes lanes, float /*kind*/) { return lanes; }

template <typename T>
Lanes round_lanes(Lanes lanes, T kind) {
  return to_lanes(to_words(lanes, kind), kind);
}

// Messages come, and results leave, in a dtype of their own: a branch that is always predicted.
struct StepMessages {
  std::vector<const void*> at;
  std::vector<float> coefficients;
  ScalarType dtype = ScalarType::Float;

  template <typename Access>
  Lanes mix_into(Lanes own, int64_t begin, const Access& access) const {
    Lanes delta = {};
    for (size_t j = 0; j < at.size(); ++j) {
      with_float_type(dtype, [&](auto kind) {
        const auto* message = static_cast<const decltype(kind)*>(at[j]) + begin;
        delta = mix_add_message(delta, own, access.load(message), coefficients[j]);
      });
    }
    return mix_apply(own, delta);
  }
};

struct StepOutput {
  void* data = nullptr;
  ScalarType dtype = ScalarType::Float;
  bool stream = false;  // around the caches

  explicit StepOutput(const std::optional<Tensor>& tensor) {
    if (!tensor) return;
    data = tensor->mutable_data_ptr();
    dtype = tensor->scalar_type();
    stream = tensor->numel() * static_cast<int64_t>(tensor->element_size()) >= kStreamBytes &&
             reinterpret_cast<uintptr_t>(data) % sizeof(Lanes) == 0;
  }

  void put(Lanes lanes, int64_t begin, const WholeLanes& access) const {
    with_float_type(dtype, [&](auto kind) {
      auto* target = static_cast<decltype(kind)*>(data) + begin;
      stream ? stream_lanes(lanes, target) : access.store(lanes, target);
    });
  }

  void put(Lanes lanes, int64_t begin, const SomeLanes& access) const {
    with_float_type(dtype, [&](auto kind) {
      access.store(lanes, static_cast<decltype(kind)*>(data) + begin);
    });
  }
};

template <int NUM_STATES, typename Param, typename Grad, typename State>
struct StepBuffers {
  Param* param;
  const Grad* grad;
  State* states[NUM_STATES];  // null: reads as zero, and is not kept
  StepMessages messages;
  StepOutput prediction, message;
};

template <typename Rule, typename Access, typename Buffers>
void step_lanes(const Rule& rule, const Access& access, const Buffers& buffers, int64_t i) {
  Lanes param = access.load(buffers.param + i), states[Rule::kNumStates];
  const Lanes grad = access.load(buffers.grad + i);
  for (int k = 0; k < Rule::kNumStates; ++k) {
    states[k] = buffers.states[k] ? access.load(buffers.states[k] + i) : Lanes{};
  }
  if (!buffers.messages.at.empty()) param = buffers.messages.mix_into(param, i, access);
  rule.step(param, grad, states, SquareRoot{});
  access.store(param, buffers.param + i);
  for (int k = 0; k < Rule::kNumStates; ++k) {
    if (!buffers.states[k]) continue;
    access.store(states[k], buffers.states[k] + i);
    states[k] = round_lanes(states[k], std::decay_t<decltype(*buffers.states[k])>{});
  }
  param = round_lanes(param, std::decay_t<decltype(*buffers.param)>{});
  if (buffers.message.data) buffers.message.put(param, i, access);
  if (buffers.prediction.data) {
    buffers.prediction.put(rule.predict(param, states, SquareRoot{}), i, access);
  }
}

template <typename Rule, typename Buffers>
void step_range(const Rule rule, const Buffers& buffers, int64_t begin, int64_t end) {
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) step_lanes(rule, WholeLanes{}, buffers, i);
  if (i < end) step_lanes(rule, SomeLanes{end - i}, buffers, i);
  end_streaming();
}

// Shares of whole vectors: where one begins, an aligned buffer still is.
template <typename Rule, typename Buffers>
void step_buffers(int64_t numel, const Rule& rule, const Buffers& buffers) {
  const int64_t num_vectors = (numel + kLanes - 1) / kLanes;
  torch::stable::parallel_for(0, num_vectors, kGrain / kLanes, [&](int64_t begin, int64_t end) {
    step_range(rule, buffers, begin * kLanes, std::min(end * kLanes, numel));
  });
}

// Adds the messages' masses to the own one; their coefficients in the average.
inline StepMessages take_messages(const StepTensors& tensors) {
  StepMessages messages;
  if (tensors.messages.empty()) return messages;
  const double* masses = tensors.masses.const_data_ptr<double>();
  double total = *tensors.mass.const_data_ptr<double>();
  for (size_t j = 0; j < tensors.messages.size(); ++j) total += masses[j];
  for (size_t j = 0; j < tensors.messages.size(); ++j) {
    messages.at.push_back(tensors.messages[j].const_data_ptr());
    messages.coefficients.push_back(mix_coefficient(masses[j], total));
  }
  messages.dtype = tensors.messages[0].scalar_type();
  *tensors.mass.mutable_data_ptr<double>() = total;
  return messages;
}

// `make_rule(mass)` gives the rule at the mass after mixing.
template <typename MakeRule>
void step_on_cpu(const StepTensors& tensors, MakeRule&& make_rule) {
  StepMessages messages = take_messages(tensors);
  const auto rule = make_rule(*tensors.mass.const_data_ptr<double>());
  constexpr int kNumStates = decltype(rule)::kNumStates;
  const Tensor& state = tensors.states.empty() ? tensors.param : tensors.states[0].second;
  with_float_types(
      [&](auto param, auto grad, auto kept) {
        StepBuffers<kNumStates, decltype(param), decltype(grad), decltype(kept)> buffers{
            tensors.param.mutable_data_ptr<decltype(param)>(),
            tensors.grad.const_data_ptr<decltype(grad)>(),
            {},
            messages,
            StepOutput(tensors.prediction),
            StepOutput(tensors.message)};
        for (size_t k = 0; k < tensors.states.size(); ++k) {
          buffers.states[k] = tensors.states[k].second.mutable_data_ptr<decltype(kept)>();
        }
        step_buffers(tensors.param.numel(), rule, buffers);
      },
      tensors.param, tensors.grad, state);
}

}  // namespace pyparallel::cpu
