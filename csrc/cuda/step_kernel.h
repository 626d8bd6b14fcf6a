#pragma once

#include "cuda/grad_ranges.h"
#include "cuda/packet.h"
#include "mix.h"

// One pass of an optimizer step over all its buffers. `Rule` is the arithmetic of csrc/X.h for one
// element; messages are mixed in before or after it, then a prediction is written.
namespace pyparallel::cuda {

constexpr int kMaxStepMessages = 128;  // their pointers are passed in the kernel's arguments

struct SquareRoot {
  __device__ float operator()(float value) const { return __fsqrt_rn(value); }
};

// The buffers, of which a launch processes the elements from `begin` to `end`.
template <typename Rule>
struct StepStreams {
  Stream param, states[Rule::kNumStates], prediction, message;
  const void* messages[kMaxStepMessages];
  ScalarType messages_dtype = ScalarType::Float;
  int num_messages = 0;
  bool mix_after = false;
  bool aligned = true;
  unsigned long long* nonfinite = nullptr;  // null: not counted
  int64_t begin = 0, end = 0;
};

// Values computed from scalars that may be on the device.
template <typename Rule>
struct StepNumbers {
  Rule rule;
  bool skipped;
  float coefficients[kMaxStepMessages];
};

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

// One addition per warp, and only for values that are not finite.
__device__ __forceinline__ void count_nonfinite(const float (&values)[kPerThread], int count,
                                                unsigned long long* counter) {
  constexpr unsigned kExponent = 0x7f800000;
  unsigned found = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    found += i < count && (__float_as_uint(values[i]) & kExponent) == kExponent;
  }
  found = __reduce_add_sync(~0u, found);
  if (found > 0 && threadIdx.x % warpSize == 0) {
    atomicAdd(counter, static_cast<unsigned long long>(found));
  }
}

// All loads are issued before the first use, those of messages apart: with them at once, too many
// registers would be taken, and two batches of loads keep the memory busy.
template <typename Rule>
__global__ void __launch_bounds__(kThreads, 2)
    step_kernel(const __grid_constant__ StepStreams<Rule> streams,
                const __grid_constant__ GradRanges grads, Rule on_host,
                const StepNumbers<Rule>* on_device) {
  constexpr int kNumStates = Rule::kNumStates;
  Place place = place_of_thread(streams.end - streams.begin, streams.aligned);
  place.begin += streams.begin;
  const bool mixes = streams.num_messages > 0;
  const bool mixes_before = mixes && !streams.mix_after;
  const Packet own = load_packet(streams.param, place);
  float param[kPerThread], grad[kPerThread], states[kNumStates][kPerThread];
  if (mixes_before) {
    const Packet first = load_packet(streams.messages[0], streams.messages_dtype, place);
    unpack(own, streams.param.dtype, param);
    mix_messages(streams, place, first, on_device->coefficients, param);
  }
  Packet kept[kNumStates];
#pragma unroll
  for (int k = 0; k < kNumStates; ++k) kept[k] = load_packet(streams.states[k], place);
  const Gradient gradient = load_gradient(grads, place);
  if (!mixes_before) unpack(own, streams.param.dtype, param);
#pragma unroll
  for (int k = 0; k < kNumStates; ++k) unpack(kept[k], streams.states[k].dtype, states[k]);
  unpack(gradient.packet, grads.dtype, grad);

  const Rule rule = on_device ? on_device->rule : on_host;
  const unsigned stepped = on_device && on_device->skipped ? 0 : gradient.exists;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    if ((stepped >> i & 1) == 0) continue;
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
  if (streams.mix_after) {
    if (streams.message.data) {
      store_packet(pack(param, streams.message.dtype), streams.message, place);
    }
    if (mixes) {
      const Packet first = load_packet(streams.messages[0], streams.messages_dtype, place);
      mix_messages(streams, place, first, on_device->coefficients, param);
    }
  }
  store_and_round(param, streams.param, place);
  if (streams.message.data && !streams.mix_after) {
    store_packet(pack(param, streams.message.dtype), streams.message, place);
  }
  if (streams.nonfinite) count_nonfinite(param, place.count, streams.nonfinite);
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

}  // namespace pyparallel::cuda
