#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/lanes.h"

// The loops of an optimizer step over elements that lie next to each other in all buffers.
namespace pyparallel::cpu {

// Pointers to the states, advanced by some elements.
template <int NUM_STATES, typename State>
struct States {
  State* at[NUM_STATES];

  States operator+(int64_t offset) const {
    States moved = *this;
    for (State*& state : moved.at) state += offset;
    return moved;
  }

  template <typename Access>
  void load(const Access& access, int64_t i, Lanes (&lanes)[NUM_STATES]) const {
    for (int k = 0; k < NUM_STATES; ++k) lanes[k] = access.load(at[k] + i);
  }
};

// Inlined with all that it captures, so that the loops below keep the rule's numbers in registers.
// The rule is copied there: passed by value, it would be read from stores that wait behind the
// block's.
#define PYPARALLEL_INLINE __attribute__((always_inline))

// All bits of a lane that is infinite or nan, and none of the others.
inline LaneBits is_nonfinite(Lanes lanes) {
  constexpr uint32_t kExponent = 0x7f800000;
  return reinterpret_cast<LaneBits>((reinterpret_cast<LaneBits>(lanes) & kExponent) == kExponent);
}

// `predicted` is null if no prediction is wanted; it is computed from parameters of type Param.
// With COUNTS, elements with a gradient that is not finite are not stepped; returns their number.
template <typename Param, bool COUNTS, typename Rule, typename Z, typename Grad, typename State>
int64_t step_elements(const Rule& shared, Z* z, const Grad* grad,
                      const States<Rule::kNumStates, State> states, int64_t count,
                      float* predicted) {
  const Rule rule = shared;
  const auto step = [=](const auto& access, int64_t i) PYPARALLEL_INLINE {
    Lanes param = access.load(z + i), kept[Rule::kNumStates];
    states.load(access, i, kept);
    const Lanes gradient = access.load(grad + i);
    LaneBits skipped = {};
    if constexpr (COUNTS) {
      Lanes stepped = param, updated[Rule::kNumStates];
      std::copy(kept, kept + Rule::kNumStates, updated);
      rule.step(stepped, gradient, updated, SquareRoot{});
      skipped = is_nonfinite(rule.factor * gradient);
      param = skipped ? param : stepped;
      for (int k = 0; k < Rule::kNumStates; ++k) kept[k] = skipped ? kept[k] : updated[k];
    } else {
      rule.step(param, gradient, kept, SquareRoot{});
    }
    access.store(param, z + i);
    for (int k = 0; k < Rule::kNumStates; ++k) access.store(kept[k], states.at[k] + i);
    if (!predicted) return skipped;
    for (Lanes& lanes : kept) lanes = round_lanes(lanes, State{});
    access.store(rule.predict(round_lanes(param, Param{}), kept, SquareRoot{}), predicted + i);
    return skipped;
  };
  LaneBits counts = {};
  int64_t i = 0, sum = 0;
  for (; i + kLanes <= count; i += kLanes) counts -= step(WholeLanes{}, i);
  if (i < count) {
    const LaneBits skipped = step(SomeLanes{count - i}, i);
    for (int64_t lane = 0; lane < count - i; ++lane) sum += skipped[lane] & 1;
  }
  for (int64_t lane = 0; lane < kLanes; ++lane) sum += counts[lane];
  return sum;
}

template <typename Param, typename Rule, typename Z, typename State>
void predict_elements(const Rule& shared, const Z* z, const States<Rule::kNumStates, State> states,
                      int64_t count, float* predicted) {
  const Rule rule = shared;
  const auto predict = [=](const auto& access, int64_t i) PYPARALLEL_INLINE {
    Lanes kept[Rule::kNumStates];
    states.load(access, i, kept);
    const Lanes param = round_lanes(access.load(z + i), Param{});
    access.store(rule.predict(param, kept, SquareRoot{}), predicted + i);
  };
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) predict(WholeLanes{}, i);
  if (i < count) predict(SomeLanes{count - i}, i);
}

#undef PYPARALLEL_INLINE

}  // namespace pyparallel::cpu
