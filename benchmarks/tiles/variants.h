#pragma once

#include "adamw_step.h"
#include "cuda/map.h"
#include "cuda/mix_kernel.h"
#include "cuda/step_kernel.h"
#include "float_types.h"
#include "predict_adam.h"

// Launches of three elementwise kernels with any division of the elements among the threads.
// sweep.cu times them; tests/csrc/emulator/tiles.cpp compares their results.
namespace pyparallel::tiles {

using namespace pyparallel::cuda;

// Calls function(Tile{}) for each that is compared, the kernels' own first.
template <typename Function>
void for_each_tile(const Function& function) {
  static_assert(std::is_same_v<DefaultTile, Tile<512, 8, 8>>);
  function(DefaultTile{});
  function(Tile<256, 8, 8>{});
  function(Tile<128, 8, 8>{});
  function(Tile<512, 8, 4>{});
  function(Tile<256, 8, 4>{});
  function(Tile<128, 8, 4>{});
  function(Tile<512, 4, 4>{});
  function(Tile<256, 4, 4>{});
}

// Five buffers of `numel` elements of 4 bytes, of which 16-bit dtypes use half.
struct Buffers {
  void* at[5];
  double* mass;  // followed by a message's
  int64_t numel;

  template <typename T>
  T* get(int i) const {
    return static_cast<T*>(at[i]);
  }
};

template <typename T>
Stream stream(const Buffers& buffers, int i) {
  Stream stream;
  stream.data = buffers.at[i];
  stream.dtype = sizeof(T) == 4 ? ScalarType::Float : ScalarType::BFloat16;
  return stream;
}

template <typename Shape, typename Z, typename Message>
struct Mix {
  static constexpr int kBytes = 2 * sizeof(Z) + sizeof(Message);

  template <typename Launch>
  static void run(const Buffers& buffers, const Launch& launch) {
    MessagePointers<Message> messages{};
    messages.at[0] = buffers.get<Message>(1);
    launch(mix_kernel<Shape, Z, Message, 1>, buffers.get<Z>(0), buffers.mass, messages,
           buffers.mass + 1, 1, -1, buffers.numel, true);
  }
};

struct AdamElement {
  template <int EACH>
  __device__ float operator()(const PredictAdamScalars& scalars, const float (&in)[3][EACH],
                              int i) const {
    return predict_adam(in[0][i], in[1][i], in[2][i], scalars, SquareRoot{});
  }
};

template <typename Shape, typename Param, typename State, typename Out>
struct PredictAdam {
  static constexpr int kBytes = sizeof(Param) + 2 * sizeof(State) + sizeof(Out);

  template <typename Launch>
  static void run(const Buffers& buffers, const Launch& launch) {
    const PredictAdamScalars scalars =
        predict_adam_scalars(1e-3, 1e-8, adam_corrections(0.9, 0.999, 10), 3);
    const MapStreams<3> streams{
        {stream<Param>(buffers, 0), stream<State>(buffers, 2), stream<State>(buffers, 3)},
        stream<Out>(buffers, 4)};
    launch(map_kernel<Shape, AdamElement, PredictAdamScalars, 3>, AdamElement{}, scalars,
           static_cast<const PredictAdamScalars*>(nullptr), buffers.numel, true, streams);
  }
};

// With a prediction; Rest is the gradients' and the prediction's type.
template <typename Shape, typename Own, typename Rest>
struct Step {
  static constexpr int kBytes = 6 * sizeof(Own) + 2 * sizeof(Rest);

  template <typename Launch>
  static void run(const Buffers& buffers, const Launch& launch) {
    StepStreams<AdamwStep> streams{};
    streams.param = stream<Own>(buffers, 0);
    streams.states[0] = stream<Own>(buffers, 2);
    streams.states[1] = stream<Own>(buffers, 3);
    streams.prediction = stream<Rest>(buffers, 4);
    streams.end = buffers.numel;
    GradRanges<kFewRanges> grads{};
    grads.data[0] = buffers.at[1];
    grads.begins[1] = buffers.numel;
    grads.count = 1;
    grads.dtype = stream<Rest>(buffers, 1).dtype;
    const AdamwOptions options{0.9, 0.999, 1e-8, 0.01, true, false};
    const AdamwStep rule = make_adamw_step(options, {1e-3, 3, 1, 1, 1, false}, 10);
    launch(step_kernel<Shape, AdamwStep, GradRanges<kFewRanges>, false>, streams, grads, rule,
           static_cast<const StepNumbers<AdamwStep>*>(nullptr));
  }
};

// Calls function(op, case, Kernel{}) for the kernels with one division.
template <typename Shape, typename Function>
void for_each_kernel(const Function& function) {
  function("mix", "float32 + 1 float32", Mix<Shape, float, float>{});
  function("mix", "float32 + 1 bfloat16", Mix<Shape, float, BFloat16>{});
  function("mix", "bfloat16 + 1 bfloat16", Mix<Shape, BFloat16, BFloat16>{});
  function("predict_adam", "float32", PredictAdam<Shape, float, float, float>{});
  function("predict_adam", "float32 to bfloat16", PredictAdam<Shape, float, float, BFloat16>{});
  function("predict_adam", "bfloat16", PredictAdam<Shape, BFloat16, BFloat16, BFloat16>{});
  function("adamw_step", "float32, prediction", Step<Shape, float, float>{});
  function("adamw_step", "float32, bfloat16 gradient and prediction",
           Step<Shape, float, BFloat16>{});
  function("adamw_step", "bfloat16, prediction", Step<Shape, BFloat16, BFloat16>{});
}

}  // namespace pyparallel::tiles
