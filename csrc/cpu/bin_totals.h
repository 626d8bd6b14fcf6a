#pragma once

#include "cpu/encode.h"

// The sums and numbers of the entries of the bins of `quantize_statistical`.
namespace pyparallel::cpu {

typedef int64_t LongLanes __attribute__((vector_size(32)));

// The sum of a bin's units and, in its low bits, the number of its entries.
constexpr int kCountBits = 13;
constexpr int64_t kOne = int64_t{1} << kCountBits;

// For few bins: by comparisons, of all but the last, which has the rest.
template <int BINS>
struct FewBins {
  LaneInts sums[BINS - 1]{}, counts[BINS - 1]{};
  int64_t zeros[BINS]{};

  void add(const LaneInts (&units)[kVectors], const LaneBits (&codes)[kVectors]) {
    for (int64_t v = 0; v < kVectors; ++v) {
      for (int bin = 0; bin < BINS - 1; ++bin) {
        const LaneInts is_in = codes[v] == static_cast<uint32_t>(bin);
        sums[bin] += units[v] & is_in;
        counts[bin] -= is_in;
      }
    }
  }

  void forget_zeros(int64_t number, uint32_t code) { zeros[code] = number; }

  void finish(int64_t count, int64_t total, int64_t* totals) const {
    int64_t last = total * kOne + count;
    for (int bin = 0; bin < BINS - 1; ++bin) {
      totals[bin] = -zeros[bin];
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        totals[bin] += sums[bin][lane] * kOne + counts[bin][lane];
      }
      last -= totals[bin];
    }
    totals[BINS - 1] = last;
  }
};

// For many: several copies, as an addition takes cycles. What is added goes through memory: the
// elements of vectors in registers are slow to get at.
template <int BINS>
struct ManyBins {
  static constexpr int kCopies = BINS == 16 ? 8 : 4;
  static constexpr int64_t kOffset = 1 << 21;  // makes units positive
  static constexpr int64_t kWaiting = 8 * kChunk;
  int64_t totals[kCopies][BINS] = {};
  int64_t num_waiting = 0;
  LongLanes addends[kWaiting / 4];
  uint32_t codes[kWaiting];

  void add(const LaneInts (&units)[kVectors], const LaneBits (&own)[kVectors]) {
    typedef uint64_t Pairs __attribute__((vector_size(32)));
    std::memcpy(codes + num_waiting, own, sizeof own);
    for (int64_t v = 0; v < kVectors; ++v) {
      const Pairs pairs = reinterpret_cast<Pairs>(units[v] + static_cast<int32_t>(kOffset));
      LongLanes* target = addends + num_waiting / 4 + 2 * v;
      target[0] = reinterpret_cast<LongLanes>((pairs & 0xffffffffu) << kCountBits) + 1;
      target[1] = reinterpret_cast<LongLanes>((pairs >> 32) << kCountBits) + 1;
    }
    num_waiting += kChunk;
    if (num_waiting == kWaiting) add_waiting();
  }

  void add_waiting() {
    const int64_t* own = reinterpret_cast<const int64_t*>(addends);
    for (int64_t i = 0; i < num_waiting; i += kLanes) {
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        totals[lane % kCopies][codes[i + lane]] += own[i + lane / 2 + lane % 2 * 4];
      }
    }
    num_waiting = 0;
  }

  void forget_zeros(int64_t number, uint32_t code) {
    totals[0][code] -= number * (kOffset * kOne + 1);
  }

  void finish(int64_t, int64_t, int64_t* sums) {
    add_waiting();
    for (int bin = 0; bin < BINS; ++bin) {
      int64_t total = 0;
      for (int copy = 0; copy < kCopies; ++copy) total += totals[copy][bin];
      sums[bin] = total - (total & (kOne - 1)) * kOffset * kOne;
    }
  }
};

}  // namespace pyparallel::cpu
