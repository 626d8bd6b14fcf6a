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
  double* nonfinite = nullptr;  // null: not counted, and stepped
  int64_t begin = 0, end = 0;
};

// Values computed from scalars that may be on the device.
template <typename Rule>
struct StepNumbers {
  Rule rule;
  bool skipped;
  float coefficients[kMaxStepMessages];
};

// The first message has been loaded before, the others are one at a time.
template <typename Rule, typename Shape>
__device__ __forceinline__ void mix_messages(const StepStreams<Rule>& streams,
                                             const Place<Shape>& place, Packet<Shape> packet,
                                             const float* coefficients,
                                             float (&own)[Shape::kEach]) {
  float delta[Shape::kEach];
#pragma unroll
  for (int i = 0; i < Shape::kEach; ++i) delta[i] = mix_nothing<float>();
#pragma unroll 1  // unrolled, the loads of several messages would take registers
  for (int j = 0; j < streams.num_messages; ++j) {
    if (j > 0) packet = load_packet(streams.messages[j], streams.messages_dtype, place);
    float message[Shape::kEach];
    unpack(packet, streams.messages_dtype, message);
    const float coefficient = coefficients[j];
    if (coefficient == 0) continue;
#pragma unroll
    for (int i = 0; i < Shape::kEach; ++i) {
      delta[i] = mix_add_message(delta[i], own[i], message[i], coefficient);
    }
  }
#pragma unroll
  for (int i = 0; i < Shape::kEach; ++i) own[i] = mix_apply(own[i], delta[i]);
}

// Returns which of the elements with a gradient have a finite one, and counts the others: with one
// addition per warp, and only if there are any.
template <int EACH>
__device__ __forceinline__ unsigned leave_out_nonfinite(const float (&grad)[EACH], float factor,
                                                        unsigned exist, double* counter) {
  constexpr unsigned kExponent = 0x7f800000;
  unsigned found = 0;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const bool is_finite = (__float_as_uint(factor * grad[i]) & kExponent) != kExponent;
    if (!is_finite) found |= 1u << i;
  }
  found &= exist;
  const unsigned count = __reduce_add_sync(~0u, static_cast<unsigned>(__popc(found)));
  if (count > 0 && threadIdx.x % warpSize == 0) atomicAdd(counter, static_cast<double>(count));
  return exist & ~found;
}

// All loads are issued before the first use. Where MIXES, messages that are mixed in before are
// loaded with the parameters and used before the rest is loaded, and those that are mixed in after
// come last: with all at once, too many registers would be taken.
template <typename Shape, typename Rule, typename Ranges, bool MIXES>
__global__ void __launch_bounds__(Shape::kThreads, 1024 / Shape::kThreads)
    step_kernel(const __grid_constant__ StepStreams<Rule> streams,
                const __grid_constant__ Ranges grads, Rule on_host,
                const StepNumbers<Rule>* on_device) {
  constexpr int kNumStates = Rule::kNumStates, kEach = Shape::kEach;
  Place<Shape> place = place_of_thread<Shape>(streams.end - streams.begin, streams.aligned);
  place.begin += streams.begin;
  const bool mixes_before = MIXES && !streams.mix_after;
  float param[kEach], grad[kEach], states[kNumStates][kEach];
  Packet<Shape> own, kept[kNumStates];
  const auto load_states = [&](const Place<Shape>& place) {
#pragma unroll
    for (int k = 0; k < kNumStates; ++k) kept[k] = load_packet(streams.states[k], place);
  };
  const auto load_first = [&] {
    return load_packet(streams.messages[0], streams.messages_dtype, place);
  };
  if (mixes_before) {
    own = load_packet(streams.param, place);
    const Packet<Shape> first = load_first();
    unpack(own, streams.param.dtype, param);
    mix_messages(streams, place, first, on_device->coefficients, param);
    in_one_branch(place, load_states);
  } else {
    in_one_branch(place, [&](const Place<Shape>& place) {
      own = load_packet(streams.param, place);
      load_states(place);
    });
  }
  const Gradient<Shape> gradient = load_gradient(grads, place);
  if (!mixes_before) unpack(own, streams.param.dtype, param);
#pragma unroll
  for (int k = 0; k < kNumStates; ++k) unpack(kept[k], streams.states[k].dtype, states[k]);
  unpack(gradient.packet, grads.dtype, grad);

  const Rule rule = on_device ? on_device->rule : on_host;
  unsigned stepped = on_device && on_device->skipped ? 0 : gradient.exists;
  if (streams.nonfinite) {
    stepped = leave_out_nonfinite(grad, rule.factor, stepped, streams.nonfinite);
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
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
      store_together(pack<Shape>(param, streams.message.dtype), streams.message, place);
    }
    if (MIXES) mix_messages(streams, place, load_first(), on_device->coefficients, param);
  }
  store_and_round(param, streams.param, place);
  if (streams.message.data && !streams.mix_after) {
    store_together(pack<Shape>(param, streams.message.dtype), streams.message, place);
  }
  if (!streams.prediction.data) return;
  // Read again: values that only the prediction needs would occupy registers since the step.
  const Rule later = on_device ? on_device->rule : on_host;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    float mine[kNumStates];
#pragma unroll
    for (int k = 0; k < kNumStates; ++k) mine[k] = states[k][i];
    param[i] = later.predict(param[i], mine, SquareRoot{});
  }
  store_together(pack<Shape>(param, streams.prediction.dtype), streams.prediction, place);
}

}  // namespace pyparallel::cuda
