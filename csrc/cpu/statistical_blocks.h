#pragma once

#include <algorithm>

#include "cpu/codes.h"
#include "cpu/encode.h"
#include "cpu/map.h"
#include "statistical.h"

// One block of `quantize_statistical`, which fits the L1 cache, and the way back.
namespace pyparallel::cpu {

inline Lanes to_floats(LaneInts numbers) {
#ifdef __AVX2__
  return _mm256_cvtepi32_ps(reinterpret_cast<__m256i>(numbers));
#else
  return __builtin_convertvector(numbers, Lanes);
#endif
}

// Ties to even.
inline LaneInts round_to_ints(Lanes lanes) {
#ifdef __AVX2__
  return reinterpret_cast<LaneInts>(_mm256_cvtps_epi32(lanes));
#else
  LaneInts numbers;
  for (int64_t i = 0; i < kLanes; ++i) numbers[i] = static_cast<int32_t>(std::nearbyint(lanes[i]));
  return numbers;
#endif
}

// table[code] for every lane.
template <int BITS>
class Table {
 public:
  explicit Table(const float* table) : table_(table) {
    for (int64_t i = 0; i < kLanes && i < BinCodes<BITS>::kBins; ++i) low_[i] = table[i];
    if constexpr (BITS == 4) high_ = load_lanes(table + kLanes);
  }

  Lanes operator[](LaneBits codes) const {
#ifdef __AVX2__
    const __m256i places = reinterpret_cast<__m256i>(codes);
    if constexpr (BITS == 2) return _mm256_permutevar8x32_ps(low_, places);
    if constexpr (BITS == 4) {
      const __m256 is_high =
          _mm256_castsi256_ps(_mm256_slli_epi32(places, 28));  // bit 3, as a sign
      return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low_, places),
                              _mm256_permutevar8x32_ps(high_, places), is_high);
    }
    return _mm256_i32gather_ps(table_, places, 4);
#else
    Lanes values;
    for (int64_t i = 0; i < kLanes; ++i) values[i] = table_[codes[i]];
    return values;
#endif
  }

 private:
  const float* table_;
  Lanes low_{}, high_{};
};

template <int BITS>
class BinnedBlock {
 public:
  static constexpr int kBins = BinCodes<BITS>::kBins;

  // Reads acc and writes codes and table. Returns whether the residual is to be written.
  template <typename Source>
  bool encode(const Source& source, int64_t begin, int64_t count, uint8_t* codes, float* table) {
    count_ = count;
    num_vectors_ = (count + kLanes - 1) / kLanes;
    const float largest = same_bits<float>(store_values(
        count, acc_, [&](int64_t i) { return source.load(begin + i); },
        [&](int64_t i, int64_t rest) {
          Lanes lanes{};
          for (int64_t lane = 0; lane < rest; ++lane) lanes[lane] = source.at(begin + i + lane);
          return lanes;
        }));
    const bool is_finite = largest < __builtin_inff();
    is_live_ = is_finite && largest >= kSmallestMagnitude;
    if (!is_live_) {
      std::memset(codes, 0, static_cast<size_t>(num_code_bytes<BinCodes<BITS>>(count)));
      std::fill(table, table + kBins, is_finite ? 0.0f : __builtin_nanf(""));
      return is_finite;
    }
    find_codes(find_statistics(kUnits / largest));
    write_codes(codes);
    for (int bin = 0; bin < kBins; ++bin) {
      table[bin] = mean_of_bin(sums_[bin], counts_[bin], bin, kBins, bins_, largest / kUnits);
    }
    return true;
  }

  // acc minus what the codes stand for.
  template <typename Kept>
  void keep_rest(const float* table, Kept* residual) const {
    const Table<BITS> values(table);
    for (int64_t v = 0; v < num_vectors_; ++v) {
      const int64_t i = v * kLanes;
      Lanes rest = load_lanes(acc_ + i);
      if (is_live_) rest -= values[codes_[v]];
      rest = is_finite<LaneBits>(rest) ? rest : Lanes{};  // two large numbers of one bin
      if (count_ - i >= kLanes) {
        store_lanes(rest, residual + i);
      } else {
        store_some_lanes(rest, residual + i, count_ - i);
      }
    }
  }

 private:
  Bins find_statistics(float per_unit) {
    LaneInts sum{};
    LongLanes squares{};
    for (int64_t v = 0; v < num_vectors_; ++v) {
      const LaneInts units = round_to_ints(load_lanes(acc_ + v * kLanes) * per_unit);
      units_[v] = units;
      sum += units;
      squares += squares_of(units);
    }
    int64_t total = 0, total_of_squares = 0;
    for (int64_t lane = 0; lane < kLanes; ++lane) total += sum[lane];
    for (int64_t lane = 0; lane < kLanes / 2; ++lane) total_of_squares += squares[lane];
    return find_bins(static_cast<double>(total), static_cast<double>(total_of_squares), count_,
                     kBins);
  }

  typedef int64_t LongLanes __attribute__((vector_size(32)));

  // Of four pairs of lanes.
  static LongLanes squares_of(LaneInts numbers) {
#ifdef __AVX2__
    const __m256i even = reinterpret_cast<__m256i>(numbers), odd = _mm256_srli_epi64(even, 32);
    return reinterpret_cast<LongLanes>(
        _mm256_add_epi64(_mm256_mul_epi32(even, even), _mm256_mul_epi32(odd, odd)));
#else
    LongLanes squares{};
    for (int64_t i = 0; i < kLanes; ++i) squares[i / 2] += int64_t{numbers[i]} * numbers[i];
    return squares;
#endif
  }

  // The codes, and the sum and number of the entries of each bin.
  void find_codes(const Bins& bins) {
    bins_ = bins;
    const auto code_of = [&](LaneInts units) {
      const Lanes place = round_down(place_in_bins(to_floats(units), bins, kBins));
      return reinterpret_cast<LaneBits>(
          round_to_ints(at_least(at_most(place, kBins - 1.0f), 0.0f)));
    };
    if constexpr (BITS == 2) {
      LaneInts sums[kBins]{}, counts[kBins]{};
      for (int64_t v = 0; v < num_vectors_; ++v) {
        codes_[v] = code_of(units_[v]);
        for (int bin = 0; bin < kBins; ++bin) {
          const LaneInts is_in = codes_[v] == static_cast<uint32_t>(bin);
          sums[bin] += units_[v] & is_in;
          counts[bin] -= is_in;
        }
      }
      for (int bin = 0; bin < kBins; ++bin) {
        sums_[bin] = counts_[bin] = 0;
        for (int64_t lane = 0; lane < kLanes; ++lane) {
          sums_[bin] += sums[bin][lane];
          counts_[bin] += counts[bin][lane];
        }
      }
    } else {
      // A sum of units and, in its low bits, the number; several, as an addition takes cycles.
      constexpr int kCopies = 4, kCountBits = 13;
      int64_t totals[kCopies][kBins] = {};
      for (int64_t v = 0; v < num_vectors_; ++v) {
        codes_[v] = code_of(units_[v]);
        for (int64_t lane = 0; lane < kLanes; ++lane) {
          totals[lane % kCopies][codes_[v][lane]] +=
              int64_t{units_[v][lane]} * (int64_t{1} << kCountBits) + 1;
        }
      }
      for (int bin = 0; bin < kBins; ++bin) {
        int64_t total = 0;
        for (int copy = 0; copy < kCopies; ++copy) total += totals[copy][bin];
        sums_[bin] = total >> kCountBits;
        counts_[bin] = total & ((1 << kCountBits) - 1);
      }
    }
    if (count_ % kLanes == 0) return;
    const int64_t missing = kLanes - count_ % kLanes;  // zeros, at the end
    counts_[codes_[num_vectors_ - 1][kLanes - 1]] -= missing;
    for (int64_t lane = kLanes - missing; lane < kLanes; ++lane) codes_[num_vectors_ - 1][lane] = 0;
  }

  void write_codes(uint8_t* target) {
    constexpr int64_t kBytes = num_code_bytes<BinCodes<BITS>>(kChunk);
    for (int64_t i = 0; i < count_; i += kChunk, target += kBytes) {
      LaneBits codes[kVectors];
      for (int64_t v = 0; v < kVectors; ++v) {
        codes[v] = i + v * kLanes < count_ ? codes_[i / kLanes + v] : LaneBits{};
      }
      const Bytes bytes = pack_codes<BinCodes<BITS>>(codes);
      const int64_t rest = num_code_bytes<BinCodes<BITS>>(count_ - i);
      std::memcpy(target, &bytes, static_cast<size_t>(std::min(kBytes, rest)));
    }
  }

  int64_t count_ = 0, num_vectors_ = 0;
  bool is_live_ = false;
  Bins bins_{};
  int64_t sums_[kBins], counts_[kBins];
  float acc_[kMaxBlock];
  LaneInts units_[kMaxBlock / kLanes];
  LaneBits codes_[kMaxBlock / kLanes];
};

// write(block, first element, elements) for all blocks, each thread with a block of its own.
template <int BITS, typename Write>
void for_each_binned_block(int64_t numel, int64_t block_size, const Write& write) {
  const int64_t grain = std::max(int64_t{1}, kGrain / block_size);
  torch::stable::parallel_for(
      0, num_blocks(numel, block_size), grain, [&](int64_t first, int64_t last) {
        BinnedBlock<BITS> block;
        for (int64_t b = first; b < last; ++b) {
          write(block, b * block_size, std::min(block_size, numel - b * block_size));
        }
      });
}

// residual is null, or updated.
template <int BITS, typename Source, typename Kept>
void quantize_blocks(const Source& source, int64_t numel, int64_t block_size, Kept* residual,
                     uint8_t* codes, float* tables) {
  for_each_binned_block<BITS>(
      numel, block_size, [=](BinnedBlock<BITS>& block, int64_t begin, int64_t count) {
        float* table = tables + begin / block_size * BinCodes<BITS>::kBins;
        uint8_t* target = codes + num_code_bytes<BinCodes<BITS>>(begin);
        const bool keeps = block.encode(source, begin, count, target, table);
        if (residual != nullptr && keeps) block.keep_rest(table, residual + begin);
      });
}

inline void refuse_corrupt_tables(const float* tables, int64_t count, int num_bins) {
  bool any = false;
  for (int64_t i = 0; i < count; ++i) {
    const int bin = static_cast<int>(i % num_bins);
    any |= is_corrupt_mean(tables + i - bin, bin, num_bins);
  }
  STD_TORCH_CHECK(!any, "tables must be what quantize_statistical emits, got a corrupt message");
}

// out[i] = combine(entry i, out + i, number of elements from i on).
template <int BITS, typename Out, typename Combine>
void look_up_blocks(const uint8_t* codes, const float* tables, int64_t numel, int64_t block_size,
                    Out* out, bool stream, const Combine& combine) {
  using Codes = BinCodes<BITS>;
  const int64_t grain = std::max(int64_t{1}, kGrain / block_size);
  torch::stable::parallel_for(
      0, num_blocks(numel, block_size), grain, [&](int64_t first, int64_t last) {
        for (int64_t b = first; b < last; ++b) {
          const Table<BITS> values(tables + b * Codes::kBins);
          const int64_t begin = b * block_size, end = std::min(numel, begin + block_size);
          write_range(
              begin, end, stream, out,
              [&](int64_t i) {
                return combine(values[load_codes<Codes>(codes, i)], out + i, kLanes);
              },
              [&](int64_t i, int64_t rest) {
                return combine(values[load_some_codes<Codes>(codes, i, rest)], out + i, rest);
              });
        }
        end_streaming();
      });
}

}  // namespace pyparallel::cpu
