#include "mix.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <vector>

#include "cpu/tiles.h"
#include "float_types.h"
#include "mix_arguments.h"

namespace pyparallel::cpu {
namespace {

template <typename Message>
using Messages = std::vector<const Message*>;

// COUNT messages known at compile time: one loop, nothing stored in between.
template <int COUNT, typename Message>
void mix_few(float* own, const Messages<Message>& messages, int64_t begin,
             const std::vector<float>& coefficients, int64_t size) {
  alignas(64) float scratch[COUNT][kTile];
  const float* message[COUNT];
  for (int j = 0; j < COUNT; ++j) message[j] = read_tile(messages[j] + begin, scratch[j], size);
#pragma GCC ivdep
  for (int64_t i = 0; i < size; ++i) {
    float delta = 0.0f;
    for (int j = 0; j < COUNT; ++j) {
      delta = mix_add_message(delta, own[i], message[j][i], coefficients[j]);
    }
    own[i] = mix_apply(own[i], delta);
  }
}

template <typename Message>
void mix_many(float* own, const Messages<Message>& messages, int64_t begin,
              const std::vector<float>& coefficients, int64_t size) {
  alignas(64) float scratch[kTile], delta[kTile];
  std::fill_n(delta, size, 0.0f);
  for (size_t j = 0; j < messages.size(); ++j) {
    const float* message = read_tile(messages[j] + begin, scratch, size);
    for (int64_t i = 0; i < size; ++i) {
      delta[i] = mix_add_message(delta[i], own[i], message[i], coefficients[j]);
    }
  }
  for (int64_t i = 0; i < size; ++i) own[i] = mix_apply(own[i], delta[i]);
}

template <typename Z, typename Message>
void mix_tile(Z* z, const Messages<Message>& messages, int64_t begin,
              const std::vector<float>& coefficients, int64_t size) {
  alignas(64) float scratch[kTile];
  float* own = read_tile_to_update(z + begin, scratch, size);
  const auto mix = messages.size() == 1   ? mix_few<1, Message>
                   : messages.size() == 2 ? mix_few<2, Message>
                                          : mix_many<Message>;
  mix(own, messages, begin, coefficients, size);
  write_tile(own, z + begin, size);
}

template <typename Z, typename Message>
void mix_buffers(const Tensor& z, const std::vector<Tensor>& messages,
                 const std::vector<float>& coefficients) {
  Z* own = z.mutable_data_ptr<Z>();
  Messages<Message> incoming;
  for (const Tensor& message : messages) incoming.push_back(message.const_data_ptr<Message>());
  torch::stable::parallel_for(0, z.numel(), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t tile = begin; tile < end; tile += kTile) {
      mix_tile(own, incoming, tile, coefficients, std::min(kTile, end - tile));
    }
  });
}

void mix_cpu(Tensor z, Tensor weight, std::vector<Tensor> messages, Tensor masses) {
  check_mix_arguments(z, weight, messages, masses);
  if (messages.empty()) return;
  const double* mass = masses.const_data_ptr<double>();
  double total = *weight.const_data_ptr<double>();
  for (size_t j = 0; j < messages.size(); ++j) total += mass[j];
  std::vector<float> coefficients;
  for (size_t j = 0; j < messages.size(); ++j) {
    coefficients.push_back(mix_coefficient(mass[j], total));
  }
  with_float_type(z.scalar_type(), [&](auto own_type) {
    with_float_type(messages[0].scalar_type(), [&](auto message_type) {
      mix_buffers<decltype(own_type), decltype(message_type)>(z, messages, coefficients);
    });
  });
  *weight.mutable_data_ptr<double>() = total;
}

}  // namespace
}  // namespace pyparallel::cpu

STABLE_TORCH_LIBRARY_IMPL(pyparallel, CPU, library) {
  library.impl("mix_", TORCH_BOX(&pyparallel::cpu::mix_cpu));
}
