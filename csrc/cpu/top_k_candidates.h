#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "cpu/top_k_sources.h"

// The entries among which the k largest are sought, kept in order. They take as much memory as
// there are of them, in chunks from one pool of bounded size, wherever in the buffer they lie.
namespace pyparallel::cpu {

struct Candidate {
  uint32_t offset;  // from the begin of its part
  float acc;
};

constexpr int64_t kChunk = 4096;

class ChunkPool {
 public:
  explicit ChunkPool(int64_t num_chunks)
      : num_chunks_(num_chunks), memory_(new Candidate[num_chunks * kChunk]) {}

  // nullptr when none is left.
  Candidate* take() {
    const int64_t taken = num_taken_.fetch_add(1, std::memory_order_relaxed);
    return taken < num_chunks_ ? memory_.get() + taken * kChunk : nullptr;
  }

  void take_all_back() { num_taken_ = 0; }

 private:
  int64_t num_chunks_;
  std::unique_ptr<Candidate[]> memory_;  // what is not written is not paged in
  std::atomic<int64_t> num_taken_{0};
};

// The candidates of one range of the buffer.
class Candidates {
 public:
  // False if the pool had no room for them: then there are none.
  template <typename Source>
  bool collect(const Source& source, int64_t begin, int64_t end, uint32_t lowest, ChunkPool& pool) {
    chunks_.clear();
    uint32_t wanted = lowest;
    Candidate* next = nullptr;
    Candidate* chunk_end = nullptr;
    visit_large(source, begin, end, wanted, [&](int64_t i, float acc) {
      if (next == chunk_end) {
        next = pool.take();
        if (next == nullptr) {
          wanted = kNobody;
          chunk_end = nullptr;
          return;
        }
        chunk_end = next + kChunk;
        chunks_.push_back(next);
      }
      *next++ = {static_cast<uint32_t>(i - begin), acc};
    });
    in_last_chunk_ = kChunk - (chunk_end - next);
    if (wanted == kNobody) chunks_.clear();
    return wanted != kNobody;
  }

  int64_t size() const {
    const int64_t num_chunks = static_cast<int64_t>(chunks_.size());
    return num_chunks == 0 ? 0 : (num_chunks - 1) * kChunk + in_last_chunk_;
  }

  template <typename Visitor>
  void visit(Visitor&& visitor) const {
    for (size_t j = 0; j < chunks_.size(); ++j) {
      const int64_t count = j + 1 == chunks_.size() ? in_last_chunk_ : kChunk;
      for (int64_t i = 0; i < count; ++i) visitor(chunks_[j][i]);
    }
  }

 private:
  std::vector<Candidate*> chunks_;
  int64_t in_last_chunk_ = 0;
};

}  // namespace pyparallel::cpu
