#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>

#include "cpu/compress.h"
#include "cpu/top_k_sources.h"
#include "top_k.h"
#include "top_k_chunks.h"

// The largest entries of one chunk, which fits the L1 cache.
namespace pyparallel::cpu {

inline LaneInts magnitude_of(Lanes acc) { return reinterpret_cast<LaneInts>(acc) & 0x7fffffff; }

inline LaneInts largest_of(LaneInts a, LaneInts b) { return a > b ? a : b; }

// The largest number that at least `wanted` of the keys reach; found bit by bit, and any such
// number if exactly as many reach it. No key is negative.
inline int32_t find_key(const LaneInts* keys, int64_t num_vectors, int64_t wanted) {
  LaneInts high = keys[0], low = keys[0];
  for (int64_t v = 1; v < num_vectors; ++v) {
    high = largest_of(high, keys[v]);
    low = keys[v] < low ? keys[v] : low;
  }
  int32_t most = high[0], differing = 0;
  for (int64_t lane = 1; lane < kLanes; ++lane) most = std::max<int32_t>(most, high[lane]);
  for (int64_t lane = 0; lane < kLanes; ++lane) differing |= most ^ low[lane];
  const int first = 32 - (differing == 0 ? 32 : __builtin_clz(differing));
  int32_t found = most & static_cast<int32_t>(~uint32_t{0} << first);
  for (int bit = first - 1; bit >= 0; --bit) {
    const int32_t tried = found | int32_t{1} << bit;
    LaneInts counts{};
    for (int64_t v = 0; v < num_vectors; ++v) counts -= keys[v] >= tried;
    int64_t count = 0;
    for (int64_t lane = 0; lane < kLanes; ++lane) count += counts[lane];
    if (count >= wanted) found = tried;
    if (count == wanted) break;
  }
  return found;
}

class ChunkSelector {
 public:
  explicit ChunkSelector(const Chunks& chunks) : chunks_(chunks) {}

  // Reads a chunk and finds its entries to send, in order.
  template <typename Source>
  void select(const Source& source, int64_t c) {
    begin_ = c * chunks_.chunk;
    length_ = chunks_.length(c);
    num_sent_ = chunks_.num_sent(c);
    int64_t count = collect(lowest_candidate(source));
    store_lanes(Lanes{}, entries_ + count);  // the last vector is whole, with the smallest
    const int64_t num_vectors = (count + kLanes - 1) / kLanes;
    LaneInts most{};
    for (int64_t v = 0; v < num_vectors; ++v) {
      const LaneInts magnitude = magnitude_of(load_lanes(entries_ + v * kLanes));
      keys_[v] = magnitude > static_cast<int32_t>(kInfinityKey)
                     ? LaneInts{} + static_cast<int32_t>(kNanKey)
                     : magnitude;
      most = largest_of(most, keys_[v]);
    }
    has_nonfinite_ =
        mask_of(reinterpret_cast<LaneBits>(most >= static_cast<int32_t>(kInfinityKey))) != 0;
    keep(find_key(keys_, num_vectors, num_sent_), num_vectors);
  }

  int64_t num_sent() const { return num_sent_; }
  bool has_nonfinite() const { return has_nonfinite_; }
  float acc(int64_t i) const { return acc_[i]; }
  float entry(int64_t i) const { return entries_[i]; }
  uint32_t index(int64_t i) const { return tags_[i]; }

 private:
  // Reads acc. At least num_sent entries have magnitudes of at least the result: those that are
  // the largest of as many of twice as many groups. A group has equally distant entries, so that
  // neighbors that are large are in different ones.
  template <typename Source>
  uint32_t lowest_candidate(const Source& source) {
    const int64_t num_vectors = (num_sent_ + kLanes - 1) / kLanes * 2;
    const int64_t stride = num_vectors * kLanes;
    std::fill(keys_, keys_ + num_vectors, LaneInts{});
    int64_t i = 0;
    for (; i + stride <= length_; i += stride) {
      for (int64_t v = 0; v < num_vectors; ++v) {
        const Lanes acc = source.load(begin_ + i + v * kLanes);
        store_lanes(acc, acc_ + i + v * kLanes);
        keys_[v] = largest_of(keys_[v], magnitude_of(acc));
      }
    }
    for (; i + kLanes <= length_; i += kLanes) store_lanes(source.load(begin_ + i), acc_ + i);
    for (; i < length_; ++i) acc_[i] = source.at(begin_ + i);
    return lowest_bits(static_cast<uint32_t>(find_key(keys_, num_vectors, num_sent_)));
  }

  // Copies the entries with magnitudes of at least `lowest`, and returns their number.
  int64_t collect(uint32_t lowest) {
    constexpr LaneBits kPlaces = {0, 1, 2, 3, 4, 5, 6, 7};
    int64_t count = 0, i = 0;
    for (; i + kLanes <= length_; i += kLanes) {
      const Lanes acc = load_lanes(acc_ + i);
      const uint32_t large = lanes_at_least(acc, lowest);
      if (large == 0) continue;
      count += compress_lanes(acc, kPlaces + static_cast<uint32_t>(i), large, entries_ + count,
                              tags_ + count);
    }
    for (; i < length_; ++i) {
      entries_[count] = acc_[i];
      tags_[count] = static_cast<uint32_t>(i);
      count += (float_bits(acc_[i]) & 0x7fffffff) >= lowest;
    }
    return count;
  }

  // Keeps the entries with at least the last key that is sent; of those equal to it, the first.
  void keep(int32_t last, int64_t num_vectors) {
    int64_t count = 0;
    for (int64_t v = 0; v < num_vectors; ++v) {
      LaneBits tags;
      std::memcpy(&tags, tags_ + v * kLanes, sizeof tags);
      const uint32_t mask = mask_of(reinterpret_cast<LaneBits>(keys_[v] >= last));
      count += compress_lanes(load_lanes(entries_ + v * kLanes), tags, mask, entries_ + count,
                              tags_ + count);
    }
    if (count == num_sent_) return;
    const auto is_above = [=](float entry) {
      return top_k_key(entry) > static_cast<uint32_t>(last);
    };
    int64_t ties = num_sent_ - std::count_if(entries_, entries_ + count, is_above), position = 0;
    for (int64_t i = 0; position < num_sent_; ++i) {
      const bool above = is_above(entries_[i]);
      entries_[position] = entries_[i];
      tags_[position] = tags_[i];
      position += above || ties > 0;
      ties -= !above;
    }
  }

  const Chunks chunks_;
  int64_t begin_ = 0, length_ = 0, num_sent_ = 0;
  bool has_nonfinite_ = false;
  float acc_[kMaxChunk];
  LaneInts keys_[2 * kMaxChunk / kLanes];  // of groups, then of candidates
  float entries_[kMaxChunk + kLanes];      // the candidates, then those that are sent
  uint32_t tags_[kMaxChunk + kLanes];      // and where they are in the chunk
};

// function(c) for all chunks, each thread with a state of its own.
template <typename Function>
void for_each_chunk(const Chunks& chunks, const Function& function) {
  const int64_t grain = std::max(int64_t{1}, kGrain / chunks.chunk);
  torch::stable::parallel_for(0, chunks.count(), grain, [&](int64_t first, int64_t last) {
    ChunkSelector selector(chunks);
    for (int64_t c = first; c < last; ++c) function(selector, c);
  });
}

template <typename X>
void write_message(const ChunkSelector& selector, X* values, uint8_t* indices) {
  const int64_t count = selector.num_sent();
  for (int64_t i = 0; i < count; ++i) values[i] = static_cast<X>(selector.entry(i));
  for (int64_t i = 0; i < count; i += 2) {
    const bool has_second = i + 1 < count;
    store_index_pair(indices, i, selector.index(i), has_second ? selector.index(i + 1) : 0,
                     has_second);
  }
}

template <typename X>
void send_chunks(const Chunks& chunks, const X* x, X* values, uint8_t* indices) {
  for_each_chunk(chunks, [=](ChunkSelector& selector, int64_t c) {
    selector.select(Plain<X>{x}, c);
    write_message(selector, values + c * chunks.k, indices + c * num_index_bytes(chunks.k));
  });
}

template <typename X, typename Kept>
void send_chunks(const Chunks& chunks, const X* x, X* values, uint8_t* indices, Kept* residual) {
  for_each_chunk(chunks, [=](ChunkSelector& selector, int64_t c) {
    X* sent = values + c * chunks.k;
    Kept* kept = residual + c * chunks.chunk;
    selector.select(Accumulate<X, Kept>{x, residual}, c);
    write_message(selector, sent, indices + c * num_index_bytes(chunks.k));
    if (selector.has_nonfinite()) {
      for (int64_t i = 0; i < chunks.length(c); ++i) {
        if (!is_finite(selector.acc(i))) kept[i] = static_cast<Kept>(0.0f);
      }
    }
    for (int64_t i = 0; i < selector.num_sent(); ++i) {
      kept[selector.index(i)] =
          top_k_remainder<Kept>(selector.entry(i), static_cast<float>(sent[i]));
    }
  });
}

}  // namespace pyparallel::cpu
