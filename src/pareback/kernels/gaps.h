// Positions of non-zeros as a .pare file has them, see artifact/positions.py: decoded, and values put in their places.
// Nothing is believed: every bit is read within the code, every position is compared with the size before it is used.

enum GapsFault : int32_t { kSound, kMorePositions, kBeyondEnd, kFewerPositions, kMoreAfter };

inline int64_t lowest_bit(uint64_t word) {
#if defined(__GNUC__)
  return __builtin_ctzll(word);
#else
  int64_t at = 0;
  while (((word >> at) & 1) == 0) ++at;
  return at;
#endif
}

// Positions of a code of `low_bits` planes for `count` + 1 gaps, each plane of `plane` bytes, then `unary` bytes.
struct Gaps {
  const uint8_t* planes;
  const uint8_t* unary;
  int64_t plane, unary_bytes, count, size;
  int32_t low_bits;
};

// Calls `put(number, position)` for every position; returns what is wrong, after which some may have been put.
template <typename Put>
int32_t each_position(const Gaps& gaps, Put put) {
  const int64_t codes = gaps.count + 1;
  int64_t ones = 0;
  for (int64_t i = 0; i < gaps.unary_bytes; ++i)
    for (uint8_t byte = gaps.unary[i]; byte != 0; byte &= byte - 1) ++ones;
  if (ones > codes) return kMorePositions;
  int64_t seen = 0, zeros = 0, last = -1, last_one = -1;
  for (int64_t start = 0; start < gaps.unary_bytes; start += 8) {
    const int64_t bytes = std::min<int64_t>(8, gaps.unary_bytes - start);
    uint64_t word = 0;
    for (int64_t i = 0; i < bytes; ++i) word |= static_cast<uint64_t>(gaps.unary[start + i]) << (8 * i);
    int64_t at = 0;
    while (word != 0) {
      const int64_t skip = lowest_bit(word);
      int64_t gap = (zeros + skip) << gaps.low_bits;
      for (int32_t bit = 0; bit < gaps.low_bits; ++bit) {
        const uint8_t byte = gaps.planes[bit * gaps.plane + (seen >> 3)];
        gap |= static_cast<int64_t>((byte >> (seen & 7)) & 1) << bit;
      }
      last += gap + 1;
      ++seen;
      if (last > gaps.size || (last == gaps.size) != (seen == codes)) return kBeyondEnd;
      if (seen < codes) put(seen - 1, last);
      zeros = 0;
      at += skip + 1;
      last_one = 8 * start + at - 1;
      word = skip == 63 ? 0 : word >> (skip + 1);
    }
    zeros += 8 * bytes - at;
  }
  if (seen != codes) return kFewerPositions;
  return gaps.unary_bytes == last_one / 8 + 1 ? kSound : kMoreAfter;
}

template <typename Item>
int32_t put_values(const Gaps& gaps, const void* values, void* target) {
  const Item* from = static_cast<const Item*>(values);
  Item* to = static_cast<Item*>(target);
  return each_position(gaps, [&](int64_t number, int64_t position) { to[position] = from[number]; });
}

struct Pair {
  int64_t parts[2];
};
