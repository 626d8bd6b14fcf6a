#pragma once

#include <type_traits>

#include "cuda/launch.h"
#include "cuda/mix_masses.h"

// One pass over z and the messages that are mixed into it.
namespace pyparallel::cuda {

constexpr int kMaxMessages = 128;  // pointers per launch, passed in the kernel's arguments

template <typename Message>
struct MessagePointers {
  const Message* at[kMaxMessages];
};

// The threads of a multiprocessor: as many as need no spills, for each has its loads in flight.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kMixThreadsOfFloat = 1024;  // its division of doubles takes more registers
#else
constexpr int kMixThreadsOfFloat = 1536;
#endif
template <typename Z, typename Message, int COUNT>
constexpr int kMixThreads = COUNT != 1                                     ? 1024
                            : sizeof(Z) == 2 && std::is_same_v<Z, Message> ? kMaxResidentThreads
                            : sizeof(Z) == 4                               ? kMixThreadsOfFloat
                                                                           : 1536;

// COUNT messages known at compile time are all loaded before the first use, like z; COUNT = 0 means
// `count`, loaded two at a time.
template <typename Shape, typename Z, typename Message, int COUNT>
__global__ void __launch_bounds__(Shape::kThreads, kMixThreads<Z, Message, COUNT> / Shape::kThreads)
    mix_kernel(Z* z, double* weight, const __grid_constant__ MessagePointers<Message> messages,
               const double* masses, int count, int readers, int64_t numel, bool aligned) {
  constexpr int kBatch = COUNT ? COUNT : 2;
  const int num_messages = COUNT ? COUNT : count;
  const Place<Shape> place = place_of_thread<Shape>(numel, aligned);

  Packet<Shape> own_packet, incoming[kBatch];
  const auto load_batch = [&](const Place<Shape>& place, int first) {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (COUNT || first + j < num_messages) {
        incoming[j] = load_packet(messages.at[first + j], place);
      }
    }
  };
  in_one_branch(place, [&](const Place<Shape>& place) {
    own_packet = load_packet(z, place);
    load_batch(place, 0);
  });

  __shared__ float coefficients[kMaxMessages];
  share_coefficients(weight, masses, num_messages, coefficients);
  const WeightUpdate update(readers);

  float own[Shape::kEach], delta[Shape::kEach];
  unpack<Z, Shape>(own_packet, own);
#pragma unroll
  for (int i = 0; i < Shape::kEach; ++i) delta[i] = mix_nothing<float>();
  for (int first = 0; first < num_messages; first += kBatch) {
    if (first > 0) {
      in_one_branch(place, [&](const Place<Shape>& place) { load_batch(place, first); });
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (!COUNT && first + j >= num_messages) break;
      const float coefficient = coefficients[first + j];
      if (coefficient == 0) continue;
#pragma unroll
      for (int i = 0; i < Shape::kEach; ++i) {
        const float message = incoming[j].template get<Message>(i);
        const float sum = mix_add_message(delta[i], own[i], message, coefficient);
        if constexpr (COUNT == 1) {
          own[i] = mix_apply(own[i], sum);  // now: two values of each would take more registers
        } else {
          delta[i] = sum;
        }
      }
    }
  }
  if constexpr (COUNT != 1) {
#pragma unroll
    for (int i = 0; i < Shape::kEach; ++i) own[i] = mix_apply(own[i], delta[i]);
  }
  store_together(pack<Z, Shape>(own), z, place);
  update.finish(weight, masses, num_messages);
}

}  // namespace pyparallel::cuda
