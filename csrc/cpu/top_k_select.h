#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "cpu/top_k_candidates.h"

// The exact k-th key, digit by digit: histograms of each part of the buffer are summed; they also
// give the number of winners of each part, so that all parts can write in parallel.
namespace pyparallel::cpu {

struct Part {
  Part(int64_t begin, int64_t end) : begin(begin), end(end) {}

  int64_t begin, end;
  Candidates candidates;
  std::vector<uint32_t> histogram;
  int64_t above = 0, equal = 0;  // entries with keys above the k-th, and equal to it
  int64_t ties = 0, first = 0;   // number of equal ones that win, and position of the winners
};

using Parts = std::vector<Part>;

template <typename Function>
void for_each_part(Parts& parts, const Function& function) {
  torch::stable::parallel_for(0, static_cast<int64_t>(parts.size()), 1,
                              [&](int64_t begin, int64_t end) {
                                for (int64_t i = begin; i < end; ++i) function(parts[i]);
                              });
}

// The bin of the k-th largest; entries in higher bins are subtracted from k.
inline uint32_t find_bin(const Parts& parts, int64_t& k) {
  std::vector<int64_t> total(kBins);
  for (const Part& part : parts) {
    for (int bin = 0; bin < kBins; ++bin) total[bin] += part.histogram[bin];
  }
  uint32_t bin = kBins - 1;
  for (; total[bin] < k; --bin) k -= total[bin];
  return bin;
}

inline void split_at(Part& part, uint32_t bin) {
  for (int i = bin + 1; i < kBins; ++i) part.above += part.histogram[i];
  part.equal = part.histogram[bin];
}

// Counts each part's keys by bin_of(key); keys with bin kBins are left out.
// visit(part, lowest, visitor) calls visitor for all accs of a part with keys of at least `lowest`.
template <typename Visit, typename BinOf>
void count_bins(Parts& parts, const Visit& visit, uint32_t lowest, const BinOf& bin_of) {
  for_each_part(parts, [&](Part& part) {
    part.histogram.assign(kBins + 1, 0);
    uint32_t* histogram = part.histogram.data();
    visit(part, lowest, [&](float acc) { ++histogram[bin_of(top_k_key(acc))]; });
  });
}

// The position of each part's winners; of those equal to the k-th the first ones win.
inline void place_winners(Parts& parts, int64_t k) {
  int64_t first = 0;
  for (Part& part : parts) {
    part.ties = std::min(part.equal, k);
    k -= part.ties;
    part.first = first;
    first += part.above + part.ties;
  }
}

// Returns the k-th key.
template <typename Visit>
uint32_t select_key(Parts& parts, int64_t k, const Visit& visit) {
  uint32_t prefix = 0;
  for (int position = 0; position < kNumDigits; ++position) {
    const Digit digit = Digit::at(position);
    count_bins(parts, visit, prefix,
               [&](uint32_t key) { return digit.follows(key, prefix) ? digit.bin(key) : kBins; });
    const uint32_t bin = find_bin(parts, k);
    for (Part& part : parts) split_at(part, bin);
    prefix |= bin << digit.shift;
  }
  place_winners(parts, k);
  return prefix;
}

// The same if no key is below `lowest` and the k-th is expected slightly above it: the histogram of
// the highest digits, which would all be equal, is skipped. Nothing if the k-th is higher.
template <typename Visit>
std::optional<uint32_t> select_key_above(Parts& parts, int64_t k, uint32_t lowest,
                                         const Visit& visit) {
  constexpr uint32_t kWidth = kBins;  // of a bin, in keys
  count_bins(parts, visit, lowest,
             [&](uint32_t key) { return std::min<uint32_t>((key - lowest) / kWidth, kBins - 1); });
  const uint32_t bin = find_bin(parts, k);
  if (bin == kBins - 1) return std::nullopt;
  for (Part& part : parts) split_at(part, bin);
  const uint32_t base = lowest + bin * kWidth;
  count_bins(parts, visit, base,
             [&](uint32_t key) { return std::min<uint32_t>(key - base, kBins); });
  const uint32_t key = base + find_bin(parts, k);
  for (Part& part : parts) split_at(part, key - base);
  place_winners(parts, k);
  return key;
}

}  // namespace pyparallel::cpu
