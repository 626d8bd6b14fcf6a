#include "mix.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <vector>

#include "cpu/lanes.h"
#include "float_types.h"
#include "mix_arguments.h"

namespace pyparallel::cpu {
namespace {

template <typename Message>
using Messages = std::vector<const Message*>;

// COUNT messages known at compile time; COUNT = 0 means as many as there are.
template <int COUNT, typename Message, typename Load>
Lanes mix_lanes(Lanes own, const Messages<Message>& messages, int64_t begin,
                const std::vector<float>& coefficients, Load load) {
  const size_t num_messages = COUNT ? COUNT : messages.size();
  Lanes delta = {};
  for (size_t j = 0; j < num_messages; ++j) {
    delta = mix_add_message(delta, own, load(messages[j] + begin), coefficients[j]);
  }
  return mix_apply(own, delta);
}

template <int COUNT, typename Z, typename Message>
void mix_range(Z* z, const Messages<Message>& messages, const std::vector<float>& coefficients,
               int64_t begin, int64_t end) {
  const auto whole = [](const Message* source) { return load_lanes(source); };
  const auto at = [&](int64_t i) {
    return mix_lanes<COUNT>(load_lanes(z + i), messages, i, coefficients, whole);
  };
  int64_t i = begin;
  for (; i + 2 * kLanes <= end; i += 2 * kLanes) store_lanes(at(i), at(i + kLanes), z + i);
  for (; i + kLanes <= end; i += kLanes) store_lanes(at(i), z + i);
  if (i == end) return;
  const int64_t rest = end - i;
  const auto some = [rest](const Message* source) { return load_some_lanes(source, rest); };
  const Lanes own = load_some_lanes(z + i, rest);
  store_some_lanes(mix_lanes<COUNT>(own, messages, i, coefficients, some), z + i, rest);
}

template <typename Z, typename Message>
void mix_buffers(const Tensor& z, const std::vector<Tensor>& messages,
                 const std::vector<float>& coefficients) {
  Z* own = z.mutable_data_ptr<Z>();
  Messages<Message> incoming;
  for (const Tensor& message : messages) incoming.push_back(message.const_data_ptr<Message>());
  const auto walk = messages.size() == 1   ? mix_range<1, Z, Message>
                    : messages.size() == 2 ? mix_range<2, Z, Message>
                                           : mix_range<0, Z, Message>;
  torch::stable::parallel_for(0, z.numel(), kGrain, [&](int64_t begin, int64_t end) {
    walk(own, incoming, coefficients, begin, end);
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
