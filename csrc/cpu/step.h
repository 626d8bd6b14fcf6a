#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "cpu/step_buffers.h"
#include "cpu/step_elements.h"
#include "step_scalars.h"

// One pass of an optimizer step over all its buffers, in blocks that fit the L1 cache: there
// messages are mixed in before or after `Rule` (the arithmetic of csrc/X.h for one element) steps,
// and the results are converted for the next message and the prediction. Each loop is then short,
// and the memory is as busy as with the step alone.
namespace pyparallel::cpu {

constexpr int64_t kStepBlock = 512;

template <typename Rule, typename Param, typename Grad, typename State>
class StepPass {
 public:
  StepPass(const StepTensors& tensors, const StepMessages& messages,
           const std::vector<Gradient>& gradients, const Rule& rule)
      : rule_(rule),
        messages_(messages),
        gradients_(gradients),
        param_(tensors.param.mutable_data_ptr<Param>()),
        states_{},
        mix_after_(tensors.mix_after && (!tensors.messages.empty() || tensors.message)),
        counts_(tensors.nonfinite),
        prediction_(tensors.prediction),
        message_(tensors.message) {
    for (size_t k = 0; k < tensors.states.size(); ++k) {
      states_.at[k] = tensors.states[k].mutable_data_ptr<State>();
    }
  }

  // Steps [begin, end); returns how many elements are not stepped as their gradient is not finite.
  int64_t run(int64_t begin, int64_t end) const {
    const bool alone = messages_.at.empty() && states_.at[0] && !prediction_.data && !message_.data;
    const int64_t length = alone ? end - begin : kStepBlock;
    const auto is_before = [=](const Gradient& gradient) { return gradient.end <= begin; };
    auto next = std::partition_point(gradients_.begin(), gradients_.end(), is_before);
    int64_t nonfinite = 0;
    for (int64_t i = begin; i < end; i += length) {
      nonfinite += run_block(i, std::min(i + length, end), next);
    }
    end_streaming();
    return nonfinite;
  }

 private:
  using Next = std::vector<Gradient>::const_iterator;
  using MyStates = States<Rule::kNumStates, State>;

  struct Block {
    int64_t begin, end;
    MyStates states;   // at begin
    float* predicted;  // at begin; null: not requested
  };

  int64_t run_block(int64_t begin, int64_t end, Next& next) const {
    State unkept[kStepBlock];  // for a step without states: zero, as before the first step
    if (!states_.at[0]) std::fill_n(unkept, end - begin, State{});
    float predicted[kStepBlock];
    const Block block{begin, end, states_.at[0] ? states_ + begin : MyStates{{unkept}},
                      prediction_.data ? predicted : nullptr};
    Param* param = param_ + begin;
    int64_t nonfinite;
    if constexpr (std::is_same_v<Param, float>) {
      nonfinite = mix_and_step(param, block, next);
    } else if (messages_.at.empty() && !mix_after_) {
      nonfinite = step(param, block, next);
    } else {  // between mixing and stepping, 16-bit parameters are not rounded
      const auto same = [](Lanes lanes) { return lanes; };
      alignas(sizeof(Lanes)) float wide[kStepBlock];
      map_range(0, end - begin, false, same, wide, param);
      nonfinite = mix_and_step(wide, block, next);
      map_range(0, end - begin, false, same, param, wide);
    }
    if (!mix_after_) message_.write(begin, end, param);
    prediction_.write(begin, end, predicted);
    return nonfinite;
  }

  int64_t mix_and_step(float* z, const Block& block, Next& next) const {
    if (!mix_after_) {
      messages_.mix_into(z, block.begin, block.end);
      return step(z, block, next);
    }
    const int64_t nonfinite = step(z, {block.begin, block.end, block.states, nullptr}, next);
    message_.write(block.begin, block.end, z);
    messages_.mix_into(z, block.begin, block.end);
    predict(z, block, block.begin, block.end);
    return nonfinite;
  }

  // `next` is the first gradient that ends after the block begins, and then after it ends.
  template <typename Z>
  int64_t step(Z* z, const Block& block, Next& next) const {
    int64_t done = block.begin, nonfinite = 0;
    for (; next != gradients_.end() && next->begin < block.end; ++next) {
      const int64_t from = std::max(block.begin, next->begin), to = std::min(block.end, next->end);
      predict(z, block, done, from);
      const int64_t i = from - block.begin;
      const auto* grad = static_cast<const Grad*>(next->data) + (from - next->begin);
      float* predicted = block.predicted ? block.predicted + i : nullptr;
      const auto walk = counts_ ? step_elements<Param, true, Rule, Z, Grad, State>
                                : step_elements<Param, false, Rule, Z, Grad, State>;
      nonfinite += walk(rule_, z + i, grad, block.states + i, to - from, predicted);
      done = to;
      if (next->end > block.end) break;
    }
    predict(z, block, done, block.end);
    return nonfinite;
  }

  // Predicts [begin, end) of the block: what is not stepped, or all after mixing.
  template <typename Z>
  void predict(const Z* z, const Block& block, int64_t begin, int64_t end) const {
    const int64_t i = begin - block.begin;
    if (!block.predicted || begin >= end) return;
    predict_elements<Param>(rule_, z + i, block.states + i, end - begin, block.predicted + i);
  }

  const Rule rule_;
  const StepMessages& messages_;
  const std::vector<Gradient>& gradients_;
  Param* param_;
  MyStates states_;  // null: not kept
  bool mix_after_;   // false if there is nothing to do between stepping and mixing
  bool counts_;
  StepOutput prediction_, message_;
};

// `make_rule(scalars)` gives the rule.
template <typename MakeRule>
void step_on_cpu(const StepTensors& tensors, const Tensor& lr, const Tensor& horizon,
                 MakeRule&& make_rule) {
  const auto* mass = tensors.mass.const_data_ptr<double>();
  const double mass_before = *mass;
  const StepMessages messages(tensors);
  const auto read = [](const std::optional<Tensor>& tensor, float otherwise) {
    return tensor ? *tensor->const_data_ptr<float>() : otherwise;
  };
  const bool skipped = read(tensors.found_inf, 0) != 0;
  const auto rule = make_rule(StepScalars{
      *lr.const_data_ptr<double>(), *horizon.const_data_ptr<double>(),
      tensors.mix_after ? mass_before : *mass, *mass, read(tensors.grad_scale, 1), skipped});
  const std::vector<Gradient> gradients = skipped ? std::vector<Gradient>{} : gradients_of(tensors);
  std::atomic<int64_t> nonfinite = 0;
  const auto walk = [&](auto param, auto grad, auto state) {
    using Rule = std::decay_t<decltype(rule)>;
    const StepPass<Rule, decltype(param), decltype(grad), decltype(state)> pass(tensors, messages,
                                                                                gradients, rule);
    // Shares are multiples of a streamed store, so they are aligned if the buffer is.
    const int64_t numel = tensors.param.numel(), num_stores = (numel + kStreamed - 1) / kStreamed;
    torch::stable::parallel_for(0, num_stores, kGrain / kStreamed, [&](int64_t begin, int64_t end) {
      nonfinite += pass.run(begin * kStreamed, std::min(end * kStreamed, numel));
    });
  };
  const ScalarType grad_dtype =
      tensors.grads.empty() ? ScalarType::Float : tensors.grads[0].scalar_type();
  with_float_type(tensors.param.scalar_type(), [&](auto param) {
    with_float_type(grad_dtype, [&](auto grad) {
      if (tensors.states.empty()) return walk(param, grad, float{});
      with_float_type(tensors.states[0].scalar_type(),
                      [&](auto state) { walk(param, grad, state); });
    });
  });
  if (tensors.nonfinite) *tensors.nonfinite->mutable_data_ptr<double>() += nonfinite;
}

}  // namespace pyparallel::cpu
