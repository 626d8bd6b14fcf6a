#pragma once

#include <cstdint>

#include "cpu/lanes.h"

// The loops of an optimizer step over elements that lie next to each other in all buffers.
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

// The lanes, rounded to a buffer's dtype.
inline Lanes round_lanes(Lanes lanes, float /*kind*/) { return lanes; }

template <typename T>
Lanes round_lanes(Lanes lanes, T kind) {
  return to_lanes(to_words(lanes, kind), kind);
}

// Inlined with all that it captures, so that the loops below keep the rule's numbers in registers.
// The rule is copied there: passed by value, it would be read from stores that wait behind the
// block's.
#define PYPARALLEL_INLINE __attribute__((always_inline))

// `predicted` is null if no prediction is wanted; it is computed from parameters of type Param.
template <typename Param, typename Rule, typename Z, typename Grad, typename State>
void step_elements(const Rule& shared, Z* z, const Grad* grad,
                   const States<Rule::kNumStates, State> states, int64_t count, float* predicted) {
  const Rule rule = shared;
  const auto step = [=](const auto& access, int64_t i) PYPARALLEL_INLINE {
    Lanes param = access.load(z + i), kept[Rule::kNumStates];
    states.load(access, i, kept);
    rule.step(param, access.load(grad + i), kept, SquareRoot{});
    access.store(param, z + i);
    for (int k = 0; k < Rule::kNumStates; ++k) access.store(kept[k], states.at[k] + i);
    if (!predicted) return;
    for (Lanes& lanes : kept) lanes = round_lanes(lanes, State{});
    access.store(rule.predict(round_lanes(param, Param{}), kept, SquareRoot{}), predicted + i);
  };
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) step(WholeLanes{}, i);
  if (i < count) step(SomeLanes{count - i}, i);
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
