#pragma once

#include <cstdint>

#include "host_device.h"
#include "philox.h"

// The arithmetic of `random_k`: the i-th run in a random order, without a table; the elements of a
// run; and the residual of a sent element.
//
// The order is a Feistel network over the next power of two, applied until it falls below the
// number of runs (cycle walking: still a permutation). Its round functions, the upper half of a * x
// + b with random a and b, are strongly universal.
namespace pyparallel {

constexpr int kRandomKRounds = 8;
constexpr int kRandomKKeys = kRandomKRounds + 1;  // the last one holds the rotation
// Few rounds over few numbers favor some orders: uniform with four bits per half, not with three.
constexpr int kRandomKMinHalfBits = 4;

struct RandomKKey {
  uint64_t multiplier, addend;
};

PYPARALLEL_HOST_DEVICE RandomKKey random_k_key(uint64_t seed, uint64_t offset, uint32_t index) {
  // No buffer element's counter has a full upper word: other ops draw different numbers.
  const PhiloxWords words = philox(
      {{index, 0xffffffffu, static_cast<uint32_t>(offset), static_cast<uint32_t>(offset >> 32)}},
      seed);
  return {words.at[0] | static_cast<uint64_t>(words.at[1]) << 32,
          words.at[2] | static_cast<uint64_t>(words.at[3]) << 32};
}

// The number of runs, and the two halves of a number below the next power of two.
struct RandomKRuns {
  uint64_t count;
  int low_bits;
  uint64_t low_mask, high_mask;
};

inline RandomKRuns random_k_runs(int64_t numel, int64_t run_length) {
  const uint64_t count = static_cast<uint64_t>(numel / run_length);
  int bits = 2 * kRandomKMinHalfBits;
  while (bits < 63 && (uint64_t{1} << bits) < count) ++bits;
  const int low_bits = (bits + 1) / 2, high_bits = bits / 2;
  return {count, low_bits, (uint64_t{1} << low_bits) - 1, (uint64_t{1} << high_bits) - 1};
}

PYPARALLEL_HOST_DEVICE uint64_t random_k_hash(uint64_t half, const RandomKKey& key) {
  return (half * key.multiplier + key.addend) >> 32;
}

PYPARALLEL_HOST_DEVICE uint64_t random_k_permute(uint64_t number, const RandomKKey* keys,
                                                 const RandomKRuns& runs) {
  uint64_t high = number >> runs.low_bits, low = number & runs.low_mask;
  for (int round = 0; round < kRandomKRounds; round += 2) {
    high ^= random_k_hash(low, keys[round]) & runs.high_mask;
    low ^= random_k_hash(high, keys[round + 1]) & runs.low_mask;
  }
  return high << runs.low_bits | low;
}

PYPARALLEL_HOST_DEVICE int64_t random_k_run(int64_t index, const RandomKKey* keys,
                                            const RandomKRuns& runs) {
  uint64_t number = random_k_permute(static_cast<uint64_t>(index), keys, runs);
  while (number >= runs.count) number = random_k_permute(number, keys, runs);
  return static_cast<int64_t>(number);
}

PYPARALLEL_HOST_DEVICE int64_t random_k_rotation(const RandomKKey* keys, int64_t numel) {
  return static_cast<int64_t>(keys[kRandomKRounds].multiplier >> 1) % numel;
}

// The element, before the rotation, from which on positions wrap around to the front.
struct RandomKFront {
  int64_t run, element;  // the run that it is in, and its place within the run

  PYPARALLEL_HOST_DEVICE RandomKFront(int64_t rotation, int64_t numel, int64_t run_length)
      : run((numel - rotation) / run_length), element((numel - rotation) % run_length) {}
};

// Positions of the entries: those of the drawn runs in sequence, plus the rotation. Positions of
// numel or more wrap around to the front, so the entries from the first of those come first.
struct RandomKEntries {
  int64_t k, numel, run_length, rotation;

  // The first entry that wraps around, given the number of drawn runs before that of the front, and
  // whether that one is drawn.
  PYPARALLEL_HOST_DEVICE int64_t first_of_front(int64_t num_before, bool is_drawn) const {
    const RandomKFront front(rotation, numel, run_length);
    const int64_t first = num_before * run_length + (is_drawn ? front.element : 0);
    return first < k ? first : k;
  }

  template <typename Index>
  PYPARALLEL_HOST_DEVICE void write(int64_t entry, int64_t run, int64_t first_of_front,
                                    Index* indices) const {
    const int64_t place = rotation + run_length * run + entry % run_length;
    const bool front = entry >= first_of_front;
    indices[front ? entry - first_of_front : entry + (k - first_of_front)] =
        static_cast<Index>(front ? place - numel : place);
  }
};

// The number of sorted runs before one.
template <typename Index>
PYPARALLEL_HOST_DEVICE int64_t random_k_lower_bound(const Index* sorted_runs, int64_t num_drawn,
                                                    int64_t run) {
  int64_t low = 0, high = num_drawn;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (sorted_runs[middle] < run) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

template <typename Index>
PYPARALLEL_HOST_DEVICE int64_t random_k_first_of_front(const RandomKEntries& entries,
                                                       const Index* sorted_runs,
                                                       int64_t num_drawn) {
  const RandomKFront front(entries.rotation, entries.numel, entries.run_length);
  const int64_t before = random_k_lower_bound(sorted_runs, num_drawn, front.run);
  return entries.first_of_front(before, before < num_drawn && sorted_runs[before] == front.run);
}

template <typename Float>
PYPARALLEL_HOST_DEVICE Float random_k_accumulate(Float element, Float residual) {
  return element + residual;
}

// A residual that is not finite would corrupt all later steps; the value was sent unchanged.
PYPARALLEL_HOST_DEVICE float random_k_remain(float accumulated, float sent) {
  const float rest = accumulated - sent;
  return rest - rest == 0 ? rest : 0.0f;
}

}  // namespace pyparallel
