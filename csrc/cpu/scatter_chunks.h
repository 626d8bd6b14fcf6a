#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>

#include "cpu/map.h"
#include "top_k.h"
#include "top_k_chunks.h"

// The inverse of `top_k_chunks`, of one message or of several, chunk by chunk.
namespace pyparallel::cpu {

// Sixteen indices, of 24 bytes.
inline void unpack_indices(const uint8_t* bytes, uint16_t* target) {
#ifdef __AVX2__
  const auto half = [=](int64_t i) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes + i));
  };
  const __m256i both = _mm256_set_m128i(half(8), half(0));
  const __m256i order = _mm256_setr_epi8(0, 1, 1, 2, 3, 4, 4, 5, 6, 7, 7, 8, 9, 10, 10, 11,  //
                                         4, 5, 5, 6, 7, 8, 8, 9, 10, 11, 11, 12, 13, 14, 14, 15);
  const __m256i words = _mm256_shuffle_epi8(both, order);
  const __m256i first = _mm256_and_si256(words, _mm256_set1_epi16(0xfff));
  const __m256i indices = _mm256_blend_epi16(first, _mm256_srli_epi16(words, 4), 0b10101010);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), indices);
#else
  for (int64_t i = 0; i < 16; ++i) target[i] = static_cast<uint16_t>(load_index(bytes, i));
#endif
}

// The indices of a chunk, unpacked.
class ChunkIndices {
 public:
  const uint16_t* unpack(const uint8_t* bytes, int64_t count) {
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) unpack_indices(bytes + i / 2 * 3, indices_ + i);
    for (; i < count; ++i) indices_[i] = static_cast<uint16_t>(load_index(bytes, i));
    return indices_;
  }

 private:
  uint16_t indices_[kMaxChunk];
};

inline bool ascends(const uint16_t* indices, int64_t count) {
  typedef int16_t Shorts __attribute__((vector_size(32)));  // indices are below 2^12
  Shorts found{};
  int64_t i = 0;
  for (; i + 17 <= count; i += 16) {
    Shorts own, next;
    std::memcpy(&own, indices + i, sizeof own);
    std::memcpy(&next, indices + i + 1, sizeof next);
    found |= own >= next;
  }
  int16_t any = 0;
  for (int64_t lane = 0; lane < 16; ++lane) any |= found[lane];
  for (; i + 1 < count; ++i) any |= indices[i] >= indices[i + 1];
  return any == 0;
}

// Messages of the same chunks, one after the other.
template <typename Value>
struct ChunkMessages {
  const Chunks chunks;
  const int64_t count;
  const Value* values;
  const uint8_t* bytes;

  const uint8_t* bytes_of(int64_t message, int64_t c) const {
    return bytes + message * chunks.num_bytes() + c * num_index_bytes(chunks.k);
  }

  const Value* values_of(int64_t message, int64_t c) const {
    return values + message * chunks.num_values() + c * chunks.k;
  }

  void refuse_corrupt() const {
    std::atomic<bool> corrupt{false};
    const int64_t grain = std::max(int64_t{1}, kGrain / chunks.k);
    torch::stable::parallel_for(0, count * chunks.count(), grain, [&](int64_t first, int64_t last) {
      ChunkIndices unpacked;
      bool found = false;
      for (int64_t i = first; i < last; ++i) {
        const int64_t c = i % chunks.count(), sent = chunks.num_sent(c);
        const uint16_t* indices = unpacked.unpack(bytes_of(i / chunks.count(), c), sent);
        found |= !ascends(indices, sent) || indices[sent - 1] >= chunks.length(c);
      }
      if (found) corrupt = true;
    });
    STD_TORCH_CHECK(!corrupt,
                    "indices must ascend strictly within each chunk, got a corrupt message");
  }

  // Adds one message's entries of a chunk.
  template <typename Out>
  void add(int64_t message, int64_t c, ChunkIndices& unpacked, Out* target) const {
    const int64_t sent = chunks.num_sent(c);
    const uint16_t* indices = unpacked.unpack(bytes_of(message, c), sent);
    const Value* own = values_of(message, c);
    for (int64_t i = 0; i < sent; ++i) {
      target[indices[i]] = scatter_add(target[indices[i]], static_cast<float>(own[i]));
    }
  }
};

inline void stream_bytes(const void* source, int64_t num_bytes, void* target) {
  int64_t i = 0;
#ifdef __AVX2__
  constexpr int64_t kVector = sizeof(__m256i);
  const __m256i* from = static_cast<const __m256i*>(source);
  __m256i* to = static_cast<__m256i*>(target);
  for (; i + kVector <= num_bytes; i += kVector) {
    _mm256_stream_si256(to++, _mm256_load_si256(from++));
  }
#endif
  std::memcpy(static_cast<char*>(target) + i, static_cast<const char*>(source) + i,
              static_cast<size_t>(num_bytes - i));
}

// With non-temporal stores a chunk is put together in the L1 cache, and each entry written once.
template <typename Value, typename Out>
void write_chunks(const ChunkMessages<Value>& messages, bool accumulate, Out* out) {
  const Chunks& chunks = messages.chunks;
  const bool stream = !accumulate && is_streamed(out, chunks.numel);
  const int64_t grain = std::max(int64_t{1}, kGrain / chunks.chunk);
  torch::stable::parallel_for(0, chunks.count(), grain, [&](int64_t first, int64_t last) {
    alignas(sizeof(Lanes)) Out parts[kMaxChunk];
    ChunkIndices unpacked;
    for (int64_t c = first; c < last; ++c) {
      Out *whole = out + c * chunks.chunk, *target = stream ? parts : whole;
      const int64_t num_bytes = chunks.length(c) * static_cast<int64_t>(sizeof(Out));
      if (!accumulate) std::memset(target, 0, static_cast<size_t>(num_bytes));
      for (int64_t j = 0; j < messages.count; ++j) messages.add(j, c, unpacked, target);
      if (stream) stream_bytes(parts, num_bytes, whole);
    }
    if (stream) end_streaming();
  });
}

}  // namespace pyparallel::cpu
