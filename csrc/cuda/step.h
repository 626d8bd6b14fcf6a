#pragma once

#include <torch/csrc/stable/ops.h>

#include <type_traits>

#include "cuda/mix_cuda.h"
#include "cuda/scalar.h"
#include "cuda/step_kernel.h"
#include "mix.h"
#include "step_arguments.h"
#include "step_scalars.h"

// The launches of an optimizer step.
namespace pyparallel::cuda {

// The scalars that all steps have.
struct StepInputs {
  Scalar<double> lr, horizon, mass;
  Scalar<float> grad_scale, found_inf;
  bool mix_after;

  StepInputs(const StepTensors& tensors, const Tensor& lr, const Tensor& horizon)
      : lr(lr),
        horizon(horizon),
        mass(tensors.mass),
        grad_scale(tensors.grad_scale, 1.0f),
        found_inf(tensors.found_inf, 0.0f),
        mix_after(tensors.mix_after) {}

  bool any_on_device() const {
    return lr.on_device || horizon.on_device || mass.on_device || grad_scale.on_device ||
           found_inf.on_device;
  }

  PYPARALLEL_HOST_DEVICE StepScalars scalars(double before, double after) const {
    return {lr.get(), horizon.get(),    mix_after ? before : after,
            after,    grad_scale.get(), found_inf.get() != 0};
  }
};

// `MakeRule` makes the rule from the scalars, by a whole warp: divisions and powers of doubles take
// a thread long. The messages' masses are added to the rank's own.
template <typename MakeRule, typename Rule>
__global__ void step_numbers_kernel(StepInputs inputs, MakeRule make_rule, double* mass_after,
                                    const double* masses, int count, StepNumbers<Rule>* numbers) {
  const int lane = threadIdx.x;
  const double before = inputs.mass.get();
  double total = before;
#pragma unroll 1
  for (int j = 0; j < count; ++j) total += masses[j];
#pragma unroll 1
  for (int j = lane; j < count; j += kWarp) {
    numbers->coefficients[j] = mix_coefficient(masses[j], total);
  }
  const StepScalars scalars = inputs.scalars(before, total);
  const Rule rule = make_rule.on_warp(scalars);
  __syncwarp();  // the mass is read by all lanes before it is written
  if (lane > 0) return;
  numbers->rule = rule;
  numbers->skipped = scalars.skipped;
  if (count > 0) *mass_after = total;
}

template <typename Rule>
StepStreams<Rule> step_streams(const StepTensors& tensors, int first_message) {
  StepStreams<Rule> streams{};
  const auto add = [&](const Tensor& tensor) {
    streams.aligned = streams.aligned && is_aligned(tensor.data_ptr());
    return Stream(tensor);
  };
  streams.param = add(tensors.param);
  for (size_t k = 0; k < tensors.states.size(); ++k) {
    streams.states[k] = add(tensors.states[k]);
  }
  if (tensors.prediction) streams.prediction = add(*tensors.prediction);
  if (tensors.message) streams.message = add(*tensors.message);
  if (tensors.nonfinite) streams.nonfinite = tensors.nonfinite->mutable_data_ptr<double>();
  for (size_t j = first_message; j < tensors.messages.size(); ++j) {
    const Stream message = add(tensors.messages[j]);
    streams.messages[streams.num_messages++] = message.data;
    streams.messages_dtype = message.dtype;
  }
  streams.mix_after = tensors.mix_after;
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

// A launch for each table of gradients (most often one), preceded by one of a single warp if a
// scalar is on the device.
template <typename Rule, typename MakeRule>
void launch_step(const StepTensors& tensors, const StepInputs& inputs, const MakeRule& make_rule) {
  constexpr size_t kOthers = sizeof(StepStreams<Rule>) + sizeof(Rule) + sizeof(void*);
  static_assert(kOthers + sizeof(GradRanges<kMostRanges>) <= 32764,
                "the kernel's arguments fit in what CUDA takes from version 12.1 on");
  const cudaStream_t stream = current_stream(tensors.param);
  const int first = tensors.mix_after ? 0 : mix_earlier_messages(tensors);
  auto streams = step_streams<Rule>(tensors, first);
  Rule on_host{};
  StepNumbers<Rule>* on_device = nullptr;
  Tensor scratch;  // freed at the end, for later work of this stream alone
  if (streams.num_messages > 0 || inputs.any_on_device() || make_rule.any_on_device()) {
    scratch = torch::stable::new_empty(tensors.param, {int64_t{sizeof(StepNumbers<Rule>)}},
                                       ScalarType::Byte);
    on_device = static_cast<StepNumbers<Rule>*>(scratch.mutable_data_ptr());
    launch(step_numbers_kernel<MakeRule, Rule>, 1, kWarp, stream, inputs, make_rule,
           tensors.mass.mutable_data_ptr<double>(), tensors.masses.const_data_ptr<double>() + first,
           streams.num_messages, on_device);
  } else if constexpr (std::is_invocable_v<MakeRule, StepScalars>) {
    on_host = make_rule(inputs.scalars(inputs.mass.value, inputs.mass.value));
  }
  GradTable(tensors).for_each_launch([&](const auto& ranges, int64_t begin, int64_t end) {
    using Ranges = std::decay_t<decltype(ranges)>;
    streams.begin = begin;
    streams.end = end;
    const auto kernel = streams.num_messages > 0 ? step_kernel<StepTile, Rule, Ranges, true>
                                                 : step_kernel<StepTile, Rule, Ranges, false>;
    launch(kernel, num_blocks<StepTile>(end - begin), StepTile::kThreads, stream, streams, ranges,
           on_host, on_device);
  });
}

// More messages than fit in a launch's arguments are mixed in between two: the step's, and one
// without gradients for what follows from the mixed parameters.
template <typename Rule, typename MakeRule>
void step_then_mix(const StepTensors& tensors, const StepInputs& inputs,
                   const MakeRule& make_rule) {
  StepTensors before = tensors, after = tensors;
  if (tensors.states.empty()) {  // the prediction needs the gradient, which takes its place
    after.states = {
        torch::stable::new_zeros(tensors.param, {tensors.param.numel()}, ScalarType::Float)};
    before.states = after.states;
  }
  before.messages.clear();
  before.prediction.reset();
  launch_step<Rule>(before, inputs, make_rule);
  mix_cuda(tensors.param, tensors.mass, tensors.messages, tensors.masses);
  after.grads.clear();
  after.nonfinite.reset();
  after.messages.clear();
  after.message.reset();
  launch_step<Rule>(after, inputs, make_rule);
}

template <typename Rule, typename MakeRule>
void step_on_cuda(StepTensors tensors, const Tensor& lr, const Tensor& horizon,
                  const MakeRule& make_rule) {
  const DeviceGuard guard(tensors.param.get_device_index());
  const StepInputs inputs(tensors, lr, horizon);
  if (!inputs.found_inf.on_device && inputs.found_inf.value != 0) tensors.grads.clear();
  if (tensors.mix_after && tensors.messages.size() > kMaxStepMessages) {
    step_then_mix<Rule>(tensors, inputs, make_rule);
  } else {
    launch_step<Rule>(tensors, inputs, make_rule);
  }
}

}  // namespace pyparallel::cuda
