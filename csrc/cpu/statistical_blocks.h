#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "cpu/bin_totals.h"
#include "cpu/codes.h"
#include "cpu/compress.h"
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

  // Of entries i to i + 7. Eight loads take less than a gather of 256 means.
  Lanes at(const uint8_t* codes, int64_t i) const {
    if constexpr (BITS < 8) return (*this)[load_codes<BinCodes<BITS>>(codes, i)];
    const uint8_t* own = codes + i;
    const float* table = table_;
    return Lanes{table[own[0]], table[own[1]], table[own[2]], table[own[3]],
                 table[own[4]], table[own[5]], table[own[6]], table[own[7]]};
  }

 private:
  const float* table_;
  Lanes low_{}, high_{};
};

template <int BITS>
class BinnedBlock {
  using Codes = BinCodes<BITS>;

 public:
  static constexpr int kBins = Codes::kBins;

  // Reads acc and writes codes and table. Returns whether the residual is to be written.
  template <typename Source>
  bool encode(const Source& source, int64_t begin, int64_t count, uint8_t* codes, float* table) {
    count_ = count;
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
      std::memset(codes, 0, static_cast<size_t>(num_code_bytes<Codes>(count)));
      std::fill(table, table + kBins, is_finite ? 0.0f : __builtin_nanf(""));
      return is_finite;
    }
    per_unit_ = kUnits / largest;
    find_statistics();
    write_codes(codes);
    write_means(largest / kUnits, table);
    return true;
  }

  // acc minus what the codes, which have been written, stand for.
  template <typename Kept>
  void keep_rest(const uint8_t* codes, const float* table, Kept* residual) const {
    const Table<BITS> values(table);
    const auto rest_of = [&](int64_t i, LaneBits own) {
      Lanes rest = load_lanes(acc_ + i);
      if (is_live_) rest -= values[own];
      return is_finite<LaneBits>(rest) ? rest : Lanes{};  // two large numbers of one bin
    };
    int64_t i = 0;
    for (; i + kLanes <= count_; i += kLanes) {
      store_lanes(rest_of(i, load_codes<Codes>(codes, i)), residual + i);
    }
    if (i == count_) return;
    const LaneBits last = load_some_codes<Codes>(codes, i, count_ - i);
    store_some_lanes(rest_of(i, last), residual + i, count_ - i);
  }

 private:
  typedef double Doubles __attribute__((vector_size(32)));

  LaneInts units_at(int64_t i) const { return round_to_ints(load_lanes(acc_ + i) * per_unit_); }

  void find_statistics() {
    LaneInts sum{};
    LongLanes squares{};
    for (int64_t i = 0; i < count_; i += kLanes) {
      const LaneInts units = units_at(i);
      sum += units;
      squares += squares_of(units);
    }
    int64_t total_of_squares = 0;
    total_ = 0;
    for (int64_t lane = 0; lane < kLanes; ++lane) total_ += sum[lane];
    for (int64_t lane = 0; lane < kLanes / 2; ++lane) total_of_squares += squares[lane];
    bins_ = find_bins(static_cast<double>(total_), static_cast<double>(total_of_squares), count_,
                      kBins);
  }

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

  // Writes the codes, and finds the sum and number of the entries of each bin.
  void write_codes(uint8_t* target) {
    constexpr int64_t kBytes = num_code_bytes<Codes>(kChunk);
    std::conditional_t<BITS == 2, FewBins<kBins>, ManyBins<kBins>> counter;
    LaneBits codes[kVectors];
    for (int64_t i = 0; i < count_; i += kChunk, target += kBytes) {
      LaneInts units[kVectors];
      for (int64_t v = 0; v < kVectors; ++v) {
        units[v] = units_at(i + v * kLanes);
        const Lanes place = round_down(place_in_bins(to_floats(units[v]), bins_, kBins));
        const Lanes within = at_least(at_most(place, kBins - 1.0f), 0.0f);
        codes[v] = reinterpret_cast<LaneBits>(round_to_ints(within));
      }
      counter.add(units, codes);
      const int64_t rest = std::min(kChunk, count_ - i);
      if (rest < kChunk) {
        counter.forget_zeros(kChunk - rest, codes[kVectors - 1][kLanes - 1]);
        for (int64_t j = rest; j < kChunk; ++j) codes[j / kLanes][j % kLanes] = 0;
      }
      const Bytes bytes = pack_codes<Codes>(codes);
      std::memcpy(target, &bytes, static_cast<size_t>(num_code_bytes<Codes>(rest)));
    }
    counter.finish(count_, total_, totals_);
  }

  // As mean_of_bin does, of four bins at a time.
  void write_means(float unit, float* table) const {
    const double width = bins_.per_width > 0.0f ? 1.0 / static_cast<double>(bins_.per_width) : 0.0;
    const Doubles least = Doubles{} - kUnits, most = Doubles{} + kUnits;
    Doubles places = Doubles{0, 1, 2, 3} - kBins / 2 + 0.5;
    for (int bin = 0; bin < kBins; bin += 4, places += 4.0) {
      LongLanes total;
      std::memcpy(&total, totals_ + bin, sizeof total);
      const LongLanes count = total & (kOne - 1);
      const Doubles mean = to_doubles(total - count) * (1.0 / kOne) / to_doubles(count);
      const Doubles center = static_cast<double>(bins_.middle) + places * width;
      const Doubles within = center < least ? least : center > most ? most : center;
      const Doubles found = count > 0 ? mean : within;
      for (int i = 0; i < 4; ++i) table[bin + i] = static_cast<float>(found[i]) * unit;
    }
  }

  // Of integers below 2^51.
  static Doubles to_doubles(LongLanes integers) {
    const Doubles offset = Doubles{} + 0x1.8p52;
    return reinterpret_cast<Doubles>(integers + reinterpret_cast<LongLanes>(offset)) - offset;
  }

  int64_t count_ = 0, total_ = 0;
  bool is_live_ = false;
  float per_unit_ = 0.0f;
  Bins bins_{};
  int64_t totals_[kBins];
  float acc_[kMaxBlock];
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
        if (residual != nullptr && keeps) block.keep_rest(target, table, residual + begin);
      });
}

// As is_corrupt_mean says, of all bins: if the means ascend, the outer ones tell.
inline bool is_corrupt_table(const float* table, int num_bins) {
  LaneInts ascending = LaneInts{} - 1;
  int bin = 0;
  for (; bin + kLanes < num_bins; bin += kLanes) {
    ascending &= load_lanes(table + bin) <= load_lanes(table + bin + 1);
  }
  bool all = mask_of(reinterpret_cast<LaneBits>(ascending)) == 0xff;
  for (; bin + 1 < num_bins; ++bin) all &= table[bin] <= table[bin + 1];
  bool any = is_corrupt_mean(table, 0, num_bins) || is_corrupt_mean(table, num_bins - 1, num_bins);
  for (bin = 0; !all && bin < num_bins; ++bin) any |= is_corrupt_mean(table, bin, num_bins);
  return any;
}

inline void refuse_corrupt_tables(const float* tables, int64_t count, int num_bins) {
  bool any = false;
  for (int64_t i = 0; i < count; i += num_bins) any |= is_corrupt_table(tables + i, num_bins);
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
              [&](int64_t i) { return combine(values.at(codes, i), out + i, kLanes); },
              [&](int64_t i, int64_t rest) {
                return combine(values[load_some_codes<Codes>(codes, i, rest)], out + i, rest);
              });
        }
        end_streaming();
      });
}

}  // namespace pyparallel::cpu
