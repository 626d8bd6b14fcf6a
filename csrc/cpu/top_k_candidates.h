#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/compress.h"
#include "cpu/top_k_sources.h"

// The candidates for the k largest entries, in order, in chunks from one pool of bounded size. They
// use memory in proportion to their number, wherever in the buffer they are.
namespace pyparallel::cpu {

struct Chunk {
  static constexpr int64_t kSize = 4096;

  uint32_t offsets[kSize];  // from the start of the part of the buffer
  float accs[kSize];
};

class ChunkPool {
 public:
  // Room for this many candidates in this many parts, in chunks filled except for one group.
  ChunkPool(int64_t num_candidates, int64_t num_parts)
      : num_chunks_(num_candidates / (Chunk::kSize - kGroup) + num_parts),
        chunks_(new Chunk[num_chunks_]) {}

  // nullptr when none is left.
  Chunk* take() {
    const int64_t taken = num_taken_.fetch_add(1, std::memory_order_relaxed);
    return taken < num_chunks_ ? chunks_.get() + taken : nullptr;
  }

  void take_all_back() { num_taken_ = 0; }

 private:
  int64_t num_chunks_;
  std::unique_ptr<Chunk[]> chunks_;  // untouched pages are not mapped
  std::atomic<int64_t> num_taken_{0};
};

// The candidates of one range of the buffer.
class Candidates {
 public:
  struct Filled {
    Chunk* chunk;
    int64_t size;
  };

  // False if the pool had no room for them; there are none then.
  template <typename Source>
  bool collect(const Source& source, int64_t begin, int64_t end, uint32_t lowest, ChunkPool& pool) {
    constexpr LaneBits kFirst = {0, 1, 2, 3, 4, 5, 6, 7};
    Chunk spare;  // receives the candidates without room
    Chunk* chunk = &spare;
    int64_t size = Chunk::kSize;
    bool fits = true;
    filled_.clear();
    const auto make_room = [&] {
      if (size <= Chunk::kSize - kGroup) return;
      if (chunk != &spare) filled_.push_back({chunk, size});
      chunk = fits ? pool.take() : nullptr;
      fits = chunk != nullptr;
      if (!fits) chunk = &spare;
      size = 0;
    };
    int64_t i = begin;
    for (; i + kGroup <= end; i += kGroup) {
      make_room();
      for (int64_t j = i; j < i + kGroup; j += kLanes) {
        const Lanes acc = source.load(j);
        size +=
            compress_lanes(acc, kFirst + static_cast<uint32_t>(j - begin),
                           lanes_at_least(acc, lowest), chunk->accs + size, chunk->offsets + size);
      }
    }
    make_room();
    for (; i < end; ++i) {
      const float acc = source.at(i);
      chunk->accs[size] = acc;
      chunk->offsets[size] = static_cast<uint32_t>(i - begin);
      size += (float_bits(acc) & 0x7fffffff) >= lowest;
    }
    if (chunk != &spare) filled_.push_back({chunk, size});
    if (!fits) filled_.clear();
    return fits;
  }

  const std::vector<Filled>& filled() const { return filled_; }

  int64_t size() const {
    int64_t total = 0;
    for (const Filled& part : filled_) total += part.size;
    return total;
  }

 private:
  std::vector<Filled> filled_;
};

inline LaneBits keys_of(Lanes acc) {
  const LaneBits bits = reinterpret_cast<LaneBits>(acc) & 0x7fffffffu;
  return bits > kInfinityKey ? LaneBits{} + kNanKey : bits;
}

// Moves the winners of a chunk to its front and returns their number: keys above the k-th, and the
// first `ties` of those equal to it; `ties` is reduced by the ones taken.
inline int64_t sort_out_winners(Candidates::Filled filled, uint32_t kth, int64_t& ties) {
  auto& [chunk, size] = filled;
  int64_t winners = 0;
  for (int64_t i = 0; i < size; i += kLanes) {
    const Lanes acc = load_lanes(chunk->accs + i);
    LaneBits offsets;
    std::memcpy(&offsets, chunk->offsets + i, sizeof offsets);
    const uint32_t present = size - i < kLanes ? (1u << (size - i)) - 1 : 0xff;
    const LaneBits keys = keys_of(acc);
    uint32_t wins = mask_of(keys > kth) & present;
    for (uint32_t equal = mask_of(keys == kth) & present; equal != 0 && ties > 0; --ties) {
      wins |= equal & -equal;
      equal &= equal - 1;
    }
    winners += compress_lanes(acc, offsets, wins, chunk->accs + winners, chunk->offsets + winners);
  }
  return winners;
}

}  // namespace pyparallel::cpu
