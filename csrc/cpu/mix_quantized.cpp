#include "mix_quantized.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <string>
#include <type_traits>
#include <vector>

#include "cpu/codes.h"
#include "cpu/lanes.h"
#include "cpu/map.h"
#include "float_types.h"
#include "message_arguments.h"

namespace pyparallel::cpu {
namespace {

struct Message {
  const uint8_t* codes;
  const float* scales;
  float coefficient;
  void* replica;
};

// Entries i onward. COUNT messages known at compile time; COUNT = 0 means any number. Replica is
// void without replicas.
template <typename Format, int COUNT, typename Replica, typename Access, typename Load>
Lanes mix_lanes(const Access& access, Lanes own, const std::vector<Message>& messages,
                int64_t block, int64_t i, Load load) {
  const size_t num_messages = COUNT ? COUNT : messages.size();
  Lanes delta = {};
  for (size_t j = 0; j < num_messages; ++j) {
    const Message& message = messages[j];
    const LaneBits codes = load(message.codes);
    const float scale = message.scales[block];
    if constexpr (std::is_void_v<Replica>) {
      delta = mix_add_code<Format>(delta, own, codes, scale, message.coefficient);
    } else {
      Replica* replica = static_cast<Replica*>(message.replica) + i;
      const Lanes sum =
          round_lanes(add_code<Format>(access.load(replica), codes, scale), Replica{});
      access.store(sum, replica);
      delta = mix_add_message(delta, own, sum, message.coefficient);
    }
  }
  return mix_apply(own, delta);
}

template <typename Format, int COUNT, typename Z, typename Replica>
void mix_block(Z* z, const std::vector<Message>& messages, int64_t block, int64_t begin,
               int64_t end) {
  write_range(
      begin, end, false, z,
      [&](int64_t i) {
        return mix_lanes<Format, COUNT, Replica>(
            WholeLanes{}, load_lanes(z + i), messages, block, i,
            [i](const uint8_t* codes) { return load_codes<Format>(codes, i); });
      },
      [&](int64_t i, int64_t count) {
        return mix_lanes<Format, COUNT, Replica>(
            SomeLanes{count}, load_some_lanes(z + i, count), messages, block, i,
            [=](const uint8_t* codes) { return load_some_codes<Format>(codes, i, count); });
      });
}

template <typename Format, typename Replica, typename Z>
void mix_buffers(Z* z, int64_t numel, const std::vector<Message>& messages, int64_t block_size) {
  const auto walk = messages.size() == 1   ? mix_block<Format, 1, Z, Replica>
                    : messages.size() == 2 ? mix_block<Format, 2, Z, Replica>
                                           : mix_block<Format, 0, Z, Replica>;
  const int64_t grain = std::max(int64_t{1}, kGrain / block_size);
  torch::stable::parallel_for(
      0, num_blocks(numel, block_size), grain, [&](int64_t first, int64_t last) {
        for (int64_t block = first; block < last; ++block) {
          const int64_t begin = block * block_size;
          walk(z, messages, block, begin, std::min(begin + block_size, numel));
        }
      });
}

void mix_quantized_cpu(Tensor z, Tensor weight, std::vector<Tensor> codes,
                       std::vector<Tensor> scales, Tensor masses, int64_t bits, FormatName format,
                       int64_t block_size, std::vector<Tensor> replicas, Tensor corrupt) {
  check_mix_quantized_arguments(z, weight, codes, scales, masses, bits, format, block_size,
                                replicas, corrupt);
  if (codes.empty()) return;
  const double* mass = masses.const_data_ptr<double>();
  double total = *weight.const_data_ptr<double>();
  for (size_t j = 0; j < codes.size(); ++j) total += mass[j];
  std::vector<Message> messages;
  for (size_t j = 0; j < codes.size(); ++j) {
    messages.push_back({static_cast<const uint8_t*>(codes[j].const_data_ptr()),
                        scales[j].const_data_ptr<float>(), mix_coefficient(mass[j], total),
                        replicas.empty() ? nullptr : replicas[j].mutable_data_ptr()});
  }
  with_format_of_differences(bits, format, [&](auto kind) {
    using Format = decltype(kind);
    for (const Message& message : messages) {
      refuse_corrupt<Format>(message.codes, message.scales, z.numel(), block_size);
    }
    with_float_type(z.scalar_type(), [&](auto type) {
      using Z = decltype(type);
      const auto mix = replicas.empty() ? mix_buffers<Format, void, Z> : mix_buffers<Format, Z, Z>;
      mix(z.mutable_data_ptr<Z>(), z.numel(), messages, block_size);
    });
  });
  *weight.mutable_data_ptr<double>() = total;
}

}  // namespace
}  // namespace pyparallel::cpu

STABLE_TORCH_LIBRARY_IMPL(pyparallel, CPU, library) {
  library.impl("mix_quantized_", TORCH_BOX(&pyparallel::cpu::mix_quantized_cpu));
}
