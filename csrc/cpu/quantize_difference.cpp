#include "quantize_difference.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <optional>
#include <string>

#include "cpu/encode.h"
#include "cpu/lanes.h"
#include "float_types.h"
#include "message_arguments.h"

namespace pyparallel::cpu {
namespace {

template <typename Z>
uint32_t subtract(const void* z, const void* replica, int64_t begin, int64_t count,
                  float* differences) {
  const Z* own = static_cast<const Z*>(z) + begin;
  const Z* copy = static_cast<const Z*>(replica) + begin;
  return store_values(
      count, differences, [=](int64_t i) { return load_lanes(own + i) - load_lanes(copy + i); },
      [=](int64_t i, int64_t rest) {
        return load_some_lanes(own + i, rest) - load_some_lanes(copy + i, rest);
      });
}

template <typename Access, typename Z>
void update_lanes(const Access& access, float ratio, Lanes decoded, Z* z, Z* replica) {
  const Lanes own = access.load(z);
  const Lanes sum = round_lanes(access.load(replica) + decoded, Z{});
  access.store(sum, replica);
  access.store(retain_residual(own, sum, ratio), z);
}

template <typename Z>
void update(void* z, void* replica, int64_t begin, int64_t count, float ratio,
            const float* decoded) {
  Z* own = static_cast<Z*>(z) + begin;
  Z* copy = static_cast<Z*>(replica) + begin;
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    update_lanes(WholeLanes{}, ratio, load_lanes(decoded + i), own + i, copy + i);
  }
  if (i < count) {
    update_lanes(SomeLanes{count - i}, ratio, load_lanes(decoded + i), own + i, copy + i);
  }
}

struct Buffers {
  void *z, *replica;
  int64_t item_size;
  float ratio;
  uint32_t (*subtract)(const void* z, const void* replica, int64_t begin, int64_t count,
                       float* differences);
  void (*update)(void* z, void* replica, int64_t begin, int64_t count, float ratio,
                 const float* decoded);

  uint32_t load(int64_t begin, int64_t count, float* differences) const {
    return subtract(z, replica, begin, count, differences);
  }

  void prefetch(int64_t begin, int64_t end) const {
    cpu::prefetch(z, item_size, begin, end);
    cpu::prefetch(replica, item_size, begin, end);
  }

  template <typename Format>
  void encode(int64_t begin, int64_t count, BlockScale& scale,
              const std::optional<PhiloxLanes>& philox, float* differences, uint8_t* codes,
              bool stream) const {
    encode_block<Format, Kept::kDecoded>(begin, count, scale, philox, differences, differences,
                                         codes, stream);
    if (!scale.is_live) std::fill_n(differences, count, scale.scale);  // decoded: 0 or nan
    update(z, replica, begin, count, ratio, differences);
  }
};

void quantize_difference_cpu(Tensor z, Tensor replica, Tensor ratio, int64_t bits,
                             FormatName format, int64_t block_size, std::optional<int64_t> seed,
                             Tensor offset, Tensor codes, Tensor scales) {
  check_quantize_difference_arguments(z, replica, ratio, bits, format, block_size, offset, codes,
                                      scales);
  Buffers buffers{};
  buffers.z = z.mutable_data_ptr();
  buffers.replica = replica.mutable_data_ptr();
  buffers.item_size = z.element_size();
  buffers.ratio = static_cast<float>(*ratio.const_data_ptr<double>());
  with_float_type(z.scalar_type(), [&](auto type) {
    buffers.subtract = subtract<decltype(type)>;
    buffers.update = update<decltype(type)>;
  });
  with_format_of_differences(bits, format, [&](auto kind) {
    encode_message<decltype(kind)>(buffers, z.numel(), block_size, seed, offset, codes, scales);
  });
}

}  // namespace
}  // namespace pyparallel::cpu

STABLE_TORCH_LIBRARY_IMPL(pyparallel, CPU, library) {
  library.impl("quantize_difference_", TORCH_BOX(&pyparallel::cpu::quantize_difference_cpu));
}
