// Compares the kernels of benchmarks/tiles/variants.h with the library's division of the elements.
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "cuda/device.h"
#include "tiles/variants.h"

using namespace pyparallel::tiles;

namespace {

// Whole blocks of each kind and a tail; what follows it must stay as it is.
constexpr int64_t kNumel = 2 * 4096 + 1029, kWords = kNumel + 64;

using Memory = std::vector<std::vector<uint32_t>>;

// Aligned like memory of the device.
struct alignas(16) Part {
  uint32_t words[4];
};

template <typename Shape, typename Kernel>
Memory run(Kernel) {
  std::vector<std::vector<Part>> memory(5, std::vector<Part>(kWords / 4 + 1));
  double masses[2] = {0.25, 0.5};
  Buffers buffers{};
  buffers.mass = masses;
  buffers.numel = kNumel;
  uint32_t state = 1;
  for (int i = 0; i < 5; ++i) {
    buffers.at[i] = memory[i].data();
    for (Part& part : memory[i]) {
      for (uint32_t& word : part.words) {
        state = state * 1664525u + 1013904223u;  // pairs of bfloat16 near one, of either sign
        const uint32_t signs = i < 2 ? 0x80008000u : 0;
        word = 0x3f003f00u | (state >> 8 & (0x00ff00ffu | signs));
      }
    }
  }
  Kernel::run(buffers, [&](auto function, const auto&... arguments) {
    launch(function, num_blocks<Shape>(kNumel), Shape::kThreads, nullptr, arguments...);
  });
  Memory result;
  for (const auto& buffer : memory) {
    const auto* words = reinterpret_cast<const uint32_t*>(buffer.data());
    result.emplace_back(words, words + kWords);
  }
  return result;
}

}  // namespace

int main() {
  std::map<std::string, Memory> expected;
  int compared = 0, wrong = 0;
  for_each_tile([&](auto tile) {
    using Shape = decltype(tile);
    for_each_kernel<Shape>([&](const char* op, const char* name, auto kernel) {
      const std::string key = std::string(op) + ", " + name;
      const Memory result = run<Shape>(kernel);
      const auto known = expected.emplace(key, result);
      ++compared;
      if (known.first->second == result) return;
      ++wrong;
      std::printf("%s: %d threads, %d elements in runs of %d\n", key.c_str(), Shape::kThreads,
                  Shape::kEach, Shape::kRun);
    });
  });
  std::printf("%d results, %d wrong\n", compared, wrong);
}
