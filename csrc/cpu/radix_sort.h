#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace pyparallel::cpu {

// Sorts keys in [0, limit), digit by digit from the lowest.
template <typename Key>
void radix_sort(std::vector<Key>& keys, uint64_t limit) {
  constexpr int kDigitBits = 11;  // a digit's counts fit the L1 cache
  constexpr size_t kDigits = size_t{1} << kDigitBits;
  std::vector<Key> sorted(keys.size());
  for (int shift = 0; shift < 64 && limit >> shift > 0; shift += kDigitBits) {
    const auto digit = [shift](Key key) {
      return static_cast<uint64_t>(key) >> shift & (kDigits - 1);
    };
    std::array<size_t, kDigits + 1> begin{};
    for (const Key key : keys) ++begin[digit(key) + 1];
    for (size_t i = 1; i < kDigits; ++i) begin[i] += begin[i - 1];
    for (const Key key : keys) sorted[begin[digit(key)]++] = key;
    keys.swap(sorted);
  }
}

}  // namespace pyparallel::cpu
