#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cpu/lanes.h"
#include "cpu/map.h"
#include "cpu/mix_range.h"
#include "float_types.h"
#include "step_arguments.h"

// One pass of an optimizer step over all its buffers, in blocks that fit the L1 cache: there the
// messages are mixed in, `Rule` (the arithmetic of csrc/X.h for one element) steps, and the results
// are converted for the next message and the prediction. Each loop is then short, and the memory is
// as busy as with the step alone.
namespace pyparallel::cpu {

constexpr int64_t kStepBlock = 512;

struct StepMessages {
  Messages at;
  ScalarType dtype = ScalarType::Float;
  std::vector<float> coefficients;

  explicit StepMessages(const StepTensors& step) : at(pointers_to(step.messages)) {
    if (at.empty()) return;
    dtype = step.messages[0].scalar_type();
    coefficients = take_masses(step.mass.mutable_data_ptr<double>(),
                               step.masses.const_data_ptr<double>(), at.size());
  }

  template <typename Z>
  void mix_into(Z* z, int64_t begin, int64_t end) const {
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

// The elements of one block: [begin, end) of the buffers, with pointers already at begin.
template <int NUM_STATES, typename Param, typename Grad, typename State>
struct StepBlock {
  int64_t begin, end;
  Param* param;
  const Grad* grad;
  State* states[NUM_STATES];
  float* prediction;  // null: not requested
};

template <typename Access, typename Rule, typename Source, typename Block>
void step_lanes(const Access& access, const Rule& rule, const Source* source, const Block& block,
                int64_t i) {
  Lanes param = access.load(source + i), states[Rule::kNumStates];
  for (int k = 0; k < Rule::kNumStates; ++k) states[k] = access.load(block.states[k] + i);
  rule.step(param, access.load(block.grad + i), states, SquareRoot{});
  access.store(param, block.param + i);
  for (int k = 0; k < Rule::kNumStates; ++k) access.store(states[k], block.states[k] + i);
  if (!block.prediction) return;
  param = round_lanes(param, block.param);
  for (int k = 0; k < Rule::kNumStates; ++k) states[k] = round_lanes(states[k], block.states[k]);
  access.store(rule.predict(param, states, SquareRoot{}), block.prediction + i);
}

// `source` is the rule's input: the parameters, or the result of mixing.
template <typename Rule, typename Source, typename Block>
void step_block(const Rule rule, const Source* source, const Block block) {
  const int64_t count = block.end - block.begin;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) step_lanes(WholeLanes{}, rule, source, block, i);
  if (i < count) step_lanes(SomeLanes{count - i}, rule, source, block, i);
}

template <typename Rule, typename Grad, typename State>
void mix_and_step(const Rule& rule, const StepMessages& messages,
                  const StepBlock<Rule::kNumStates, float, Grad, State>& block) {
  if (!messages.at.empty()) messages.mix_into(block.param, block.begin, block.end);
  step_block(rule, block.param, block);
}

// Between mixing and stepping, 16-bit parameters are not rounded.
template <typename Rule, typename Param, typename Grad, typename State>
void mix_and_step(const Rule& rule, const StepMessages& messages,
                  const StepBlock<Rule::kNumStates, Param, Grad, State>& block) {
  if (messages.at.empty()) return step_block(rule, block.param, block);
  const auto same = [](Lanes lanes) { return lanes; };
  alignas(sizeof(Lanes)) float mixed[kStepBlock];
  map_range(0, block.end - block.begin, false, same, mixed, block.param);
  messages.mix_into(mixed, block.begin, block.end);
  step_block(rule, mixed, block);
}

template <typename Rule, typename Param, typename Grad, typename State>
void step_range(const StepTensors& tensors, const StepMessages& messages, const Rule& rule,
                int64_t range_begin, int64_t range_end) {
  auto* param = tensors.param.mutable_data_ptr<Param>();
  const auto* grad = tensors.grad.const_data_ptr<Grad>();
  State* states[Rule::kNumStates] = {};
  for (size_t k = 0; k < tensors.states.size(); ++k) {
    states[k] = tensors.states[k].mutable_data_ptr<State>();
  }
  State unkept[kStepBlock];  // for a step without states: zero, as before the first step
  float predicted[kStepBlock];
  const StepOutput prediction(tensors.prediction), message(tensors.message);
  const bool alone =
      messages.at.empty() && !tensors.states.empty() && !prediction.data && !message.data;
  const int64_t length = alone ? range_end - range_begin : kStepBlock;
  for (int64_t begin = range_begin; begin < range_end; begin += length) {
    const int64_t end = std::min(begin + length, range_end);
    StepBlock<Rule::kNumStates, Param, Grad, State> block{
        begin, end, param + begin, grad + begin, {}, prediction.data ? predicted : nullptr};
    for (int k = 0; k < Rule::kNumStates; ++k) {
      if (!states[k]) std::fill_n(unkept, end - begin, State{});
      block.states[k] = states[k] ? states[k] + begin : unkept;
    }
    mix_and_step(rule, messages, block);
    message.write(begin, end, block.param);
    prediction.write(begin, end, predicted);
  }
  end_streaming();
}

// `make_rule(mass)` gives the rule for the mass after mixing.
template <typename MakeRule>
void step_on_cpu(const StepTensors& tensors, MakeRule&& make_rule) {
  const StepMessages messages(tensors);
  const auto rule = make_rule(*tensors.mass.const_data_ptr<double>());
  const auto walk = [&](auto param, auto grad, auto state) {
    using Rule = std::decay_t<decltype(rule)>;
    // Shares are multiples of a streamed store, so they are aligned if the buffer is.
    const int64_t numel = tensors.param.numel(), num_stores = (numel + kStreamed - 1) / kStreamed;
    torch::stable::parallel_for(0, num_stores, kGrain / kStreamed, [&](int64_t begin, int64_t end) {
      step_range<Rule, decltype(param), decltype(grad), decltype(state)>(
          tensors, messages, rule, begin * kStreamed, std::min(end * kStreamed, numel));
    });
  };
  if (tensors.states.empty()) {
    with_float_types([&](auto param, auto grad) { walk(param, grad, float{}); }, tensors.param,
                     tensors.grad);
  } else {
    with_float_types(walk, tensors.param, tensors.grad, tensors.states[0]);
  }
}

}  // namespace pyparallel::cpu
