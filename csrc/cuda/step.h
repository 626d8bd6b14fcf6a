#pragma once

#include <torch/csrc/stable/ops.h>

#include <optional>
#include <vector>

#include "cuda/mix_cuda.h"
#include "cuda/packet.h"
#include "cuda/scalar.h"
#include "mix.h"
#include "step_arguments.h"

// One pass of an optimizer step over all its buffers. `Rule` is the arithmetic of csrc/X.h for one
// element; messages are mixed in before, a prediction and the next message are written after.
namespace pyparallel::cuda {

constexpr int kMaxStepMessages = 128;  // their pointers are passed in the kernel's arguments

struct SquareRoot {
  __device__ float operator()(float value) const { return __fsqrt_rn(value); }
};

template <typename Rule>
struct StepStreams {
  Stream param, grad, states[Rule::kNumStates], prediction, message;
  const void* messages[kMaxStepMessages];
  ScalarType messages_dtype = ScalarType::Float;
  int num_messages = 0;
  int64_t numel = 0;
  bool aligned = true;
};

// Values computed from scalars that may be on the device.
template <typename Rule>
struct StepNumbers {
  Rule rule;
  float coefficients[kMaxStepMessages];
};

// `Inputs` gives the rule for a mass. The messages' masses are added to the rank's own.
template <typename Inputs, typename Rule>
__global__ void step_numbers_kernel(Inputs inputs, Scalar<double> mass, double* mass_after,
                                    const double* masses, int count, StepNumbers<Rule>* numbers) {
  double total = mass.get();
  for (int j = 0; j < count; ++j) total += masses[j];
  for (int j = 0; j < count; ++j) numbers->coefficients[j] = mix_coefficient(masses[j], total);
  numbers->rule = inputs.rule(total);
  if (count > 0) *mass_after = total;
}

// The first message is loaded with the parameters, the others one at a time.
template <typename Rule>
__device__ __forceinline__ void mix_messages(const StepStreams<Rule>& streams, const Place& place,
                                             Packet packet, const float* coefficients,
                                             float (&own)[kPerThread]) {
  float delta[kPerThread] = {};
#pragma unroll 1  // unrolled, the loads of several messages would take registers
  for (int j = 0; j < streams.num_messages; ++j) {
    if (j > 0) packet = load_packet(streams.messages[j], streams.messages_dtype, place);
    float message[kPerThread];
    unpack(packet, streams.messages_dtype, message);
    const float coefficient = coefficients[j];
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      delta[i] = mix_add_message(delta[i], own[i], message[i], coefficient);
    }
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) own[i] = mix_apply(own[i], delta[i]);
}

// Without messages all loads are issued before the first use. With messages the states are loaded
// after mixing: all loads at once would take too many registers, and two batches of loads keep the
// memory busy.
template <typename Rule>
__global__ void __launch_bounds__(kThreads, 2)
    step_kernel(const __grid_constant__ StepStreams<Rule> streams, Rule on_host,
                const StepNumbers<Rule>* on_device) {
  constexpr int kNumStates = Rule::kNumStates;
  const Place place = place_of_thread(streams.numel, streams.aligned);
  const bool mixes = streams.num_messages > 0;
  const Packet own = load_packet(streams.param, place);
  const Packet slope = load_packet(streams.grad, place);
  float param[kPerThread], grad[kPerThread], states[kNumStates][kPerThread];
  if (mixes) {
    const Packet first = load_packet(streams.messages[0], streams.messages_dtype, place);
    unpack(own, streams.param.dtype, param);
    mix_messages(streams, place, first, on_device->coefficients, param);
  }
  Packet kept[kNumStates];
#pragma unroll
  for (int k = 0; k < kNumStates; ++k) kept[k] = load_packet(streams.states[k], place);
  if (!mixes) unpack(own, streams.param.dtype, param);
  unpack(slope, streams.grad.dtype, grad);
#pragma unroll
  for (int k = 0; k < kNumStates; ++k) unpack(kept[k], streams.states[k].dtype, states[k]);

  const Rule rule = on_device ? on_device->rule : on_host;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    float mine[kNumStates];
#pragma unroll
    for (int k = 0; k < kNumStates; ++k) mine[k] = states[k][i];
    rule.step(param[i], grad[i], mine, SquareRoot{});
#pragma unroll
    for (int k = 0; k < kNumStates; ++k) states[k][i] = mine[k];
  }

#pragma unroll
  for (int k = 0; k < kNumStates; ++k) {
    if (streams.states[k].data) store_and_round(states[k], streams.states[k], place);
  }
  store_and_round(param, streams.param, place);
  if (streams.message.data) {
    store_packet(pack(param, streams.message.dtype), streams.message, place);
  }
  if (!streams.prediction.data) return;
  // Read again: values that only the prediction needs would occupy registers since the step.
  const Rule later = on_device ? on_device->rule : on_host;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    float mine[kNumStates];
#pragma unroll
    for (int k = 0; k < kNumStates; ++k) mine[k] = states[k][i];
    param[i] = later.predict(param[i], mine, SquareRoot{});
  }
  store_packet(pack(param, streams.prediction.dtype), streams.prediction, place);
}

template <typename Rule>
StepStreams<Rule> step_streams(const StepTensors& tensors, int first_message) {
  StepStreams<Rule> streams{};
  const auto add = [&](const Tensor& tensor) {
    streams.aligned = streams.aligned && is_aligned(tensor.data_ptr());
    return Stream(tensor);
  };
  streams.numel = tensors.param.numel();
  streams.param = add(tensors.param);
  streams.grad = add(tensors.grad);
  for (size_t k = 0; k < tensors.states.size(); ++k) {
    streams.states[k] = add(tensors.states[k]);
  }
  if (tensors.prediction) streams.prediction = add(*tensors.prediction);
  if (tensors.message) streams.message = add(*tensors.message);
  for (size_t j = first_message; j < tensors.messages.size(); ++j) {
    const Stream message = add(tensors.messages[j]);
    streams.messages[streams.num_messages++] = message.data;
    streams.messages_dtype = message.dtype;
  }
  return streams;
}

// PushSum is associative: mixing in groups gives the average of all. The last group is mixed in the
// step; returns its first index.
inline int mix_earlier_messages(const StepTensors& tensors) {
  const int count = static_cast<int>(tensors.messages.size());
  if (count <= kMaxStepMessages) return 0;
  const int earlier = count - kMaxStepMessages;
  Tensor masses = tensors.masses;
  mix_cuda(tensors.param, tensors.mass,
           {tensors.messages.begin(), tensors.messages.begin() + earlier},
           torch::stable::narrow(masses, 0, 0, earlier));
  return earlier;
}

// One launch, preceded by one of a single thread if a scalar is on the device.
template <typename Inputs>
void step_on_cuda(const StepTensors& tensors, const Inputs& inputs) {
  using Rule = decltype(inputs.rule(1.0));
  const DeviceGuard guard(tensors.param.get_device_index());
  const cudaStream_t stream = current_stream(tensors.param);
  const int first = mix_earlier_messages(tensors);
  const auto streams = step_streams<Rule>(tensors, first);
  const Scalar<double> mass(tensors.mass);
  Rule on_host{};
  StepNumbers<Rule>* on_device = nullptr;
  torch::stable::Tensor scratch;  // freed at the end, for later work of this stream alone
  if (streams.num_messages > 0 || mass.on_device || inputs.any_on_device()) {
    scratch = torch::stable::new_empty(tensors.param, {int64_t{sizeof(StepNumbers<Rule>)}},
                                       torch::headeronly::ScalarType::Byte);
    on_device = static_cast<StepNumbers<Rule>*>(scratch.mutable_data_ptr());
    launch(step_numbers_kernel<Inputs, Rule>, 1, 1, stream, inputs, mass,
           tensors.mass.mutable_data_ptr<double>(), tensors.masses.const_data_ptr<double>() + first,
           streams.num_messages, on_device);
  } else {
    on_host = inputs.rule(mass.value);
  }
  if (streams.numel == 0) return;
  launch(step_kernel<Rule>, num_blocks(streams.numel), kThreads, stream, streams, on_host,
         on_device);
}

}  // namespace pyparallel::cuda
