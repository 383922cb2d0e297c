// Lists of the non-zeros of a layer, as lower/weights.py describes them: in the order of the kernels, in fours.

// A convolution's weights, and where their taps are in bytes from the first input vector of a tile.
struct Packing {
  const float* weight;     // [outputs][each], where `each` are inputs of a group times taps
  const int32_t* offsets;  // [groups][each]
  int64_t outputs, each, groups;
  int64_t taps, block;  // of one input channel; input channels, of all groups, that are read at a time
};

// Calls `found(i)` for every weight from `first` to `last` that is not zero.
template <typename Found>
inline void each_nonzero(const float* weight, int64_t first, int64_t last, Found found) {
  int64_t i = first;
#if defined(__SSE2__) && defined(__GNUC__)
  const __m128 zero = _mm_setzero_ps();
  for (; i + 16 <= last; i += 16) {
    uint32_t mask = 0;
    for (int part = 0; part < 4; ++part)
      mask |= static_cast<uint32_t>(_mm_movemask_ps(_mm_cmpneq_ps(_mm_loadu_ps(weight + i + 4 * part), zero)))
              << (4 * part);
    for (; mask != 0; mask &= mask - 1) found(i + __builtin_ctz(mask));
  }
#endif
  for (; i < last; ++i)
    if (weight[i] != 0.0f) found(i);
}

// Writes the non-zeros to `pairs`, two numbers each, and where each block's output channels begin among them to `rows`,
// [blocks][outputs + 1]. It is done in two calls: the first without
// `pairs`, with `rows` all zero, says where channels begin and returns how many non-zeros there are.
inline int64_t pack_nonzeros(const Packing& what, int32_t* rows, int32_t* pairs) {
  const int64_t channels = what.each / what.taps, of_group = what.outputs / what.groups, step = what.outputs + 1;
  for (int64_t out = 0; out < what.outputs; ++out) {
    const float* weight = what.weight + out * what.each;
    const int64_t group = out / of_group, before = group * channels;
    const int32_t* offsets = what.offsets + group * what.each;
    for (int64_t channel = 0; channel < channels;) {
      const int64_t number = (before + channel) / what.block;
      const int64_t next = std::min(channels, (number + 1) * what.block - before);
      int32_t* row = rows + number * step;
      if (pairs == nullptr) {
        int32_t count = 0;
        each_nonzero(weight, channel * what.taps, next * what.taps, [&](int64_t) { ++count; });
        row[out + 1] += count;
      } else {
        const int64_t begin = row[out], in_fours = (row[out + 1] - begin) / 4 * 4;
        int64_t i = 0;
        each_nonzero(weight, channel * what.taps, next * what.taps, [&](int64_t at) {
          const bool four = i < in_fours;
          int32_t* place = pairs + 2 * (begin + (four ? i / 4 * 4 : i)) + (four ? i % 4 : 0);
          place[0] = offsets[at];
          std::memcpy(place + (four ? 4 : 1), weight + at, sizeof(float));
          ++i;
        });
      }
      channel = next;
    }
  }
  if (pairs != nullptr) return 0;
  const int64_t blocks = (what.groups * channels + what.block - 1) / what.block;
  int32_t total = 0;
  for (int64_t number = 0; number < blocks; ++number) {
    rows[number * step] = total;
    for (int64_t out = 1; out <= what.outputs; ++out) total = rows[number * step + out] += total;
  }
  return total;
}

// A linear layer's weights, to be listed for many rows, see lower/linear_many_rows.py.
struct RowPacking {
  const float* weight;  // [outputs][inputs]
  int64_t outputs, inputs;
  int64_t part, block;  // outputs and inputs at a time
  int64_t place;        // from an input to the next, in the lists' units
};

// Counts the non-zeros of each output in each block of inputs, [outputs][blocks], and returns how many there are.
inline int64_t count_rows(const RowPacking& what, int32_t* counts) {
  const int64_t blocks = (what.inputs + what.block - 1) / what.block;
  int64_t total = 0;
  for (int64_t out = 0; out < what.outputs; ++out)
    for (int64_t number = 0; number < blocks; ++number) {
      int32_t count = 0;
      const int64_t first = number * what.block, last = std::min(what.inputs, first + what.block);
      each_nonzero(what.weight + out * what.inputs, first, last, [&](int64_t) { ++count; });
      counts[out * blocks + number] = count;
      total += count;
    }
  return total;
}

// Writes, part by part and block by block, an entry for each output in order of their counts: its number within the part
// and the count. `bounds` says where each block's entries begin, `begins` where the weights of each output and block do
// in the list. Outputs without weights are left out of all blocks but the first and the last. Returns the entries.
inline int64_t order_rows(const RowPacking& what, const int32_t* counts, uint16_t* entries, int64_t* bounds,
                          int64_t* begins) {
  const int64_t blocks = (what.inputs + what.block - 1) / what.block;
  std::vector<int64_t> order(what.part);
  int64_t entry = 0, weights = 0, bound = 0;
  bounds[bound++] = 0;
  for (int64_t first = 0; first < what.outputs; first += what.part)
    for (int64_t number = 0; number < blocks; ++number) {
      const auto count = [&](int64_t i) { return counts[(first + i) * blocks + number]; };
      const bool all = number == 0 || number == blocks - 1;
      int64_t some = 0;
      for (int64_t i = 0; i < std::min(what.part, what.outputs - first); ++i)
        if (all || count(i) > 0) order[some++] = i;
      std::stable_sort(order.begin(), order.begin() + some, [&](int64_t a, int64_t b) { return count(a) < count(b); });
      for (int64_t i = 0; i < some; ++i, ++entry) {
        entries[2 * entry] = static_cast<uint16_t>(order[i]);
        entries[2 * entry + 1] = static_cast<uint16_t>(count(order[i]));
        begins[(first + order[i]) * blocks + number] = weights;
        weights += count(order[i]);
      }
      bounds[bound++] = entry;
    }
  return entry;
}

// Writes the weights to `list`, three numbers of sixteen bits each: in fours the places before the values, then pairs.
inline void list_rows(const RowPacking& what, const int32_t* counts, const int64_t* begins, int16_t* list) {
  const int64_t blocks = (what.inputs + what.block - 1) / what.block;
  for (int64_t out = 0; out < what.outputs; ++out)
    for (int64_t number = 0; number < blocks; ++number) {
      if (counts[out * blocks + number] == 0) continue;  // which may be left out, and begins nowhere
      const float* weight = what.weight + out * what.inputs;
      const int64_t first = number * what.block, last = std::min(what.inputs, first + what.block);
      const int64_t in_fours = counts[out * blocks + number] / 4 * 4;
      int16_t* to = list + 3 * begins[out * blocks + number];
      int64_t i = 0;
      each_nonzero(weight, first, last, [&](int64_t at) {
        const uint16_t place = static_cast<uint16_t>((at - first) * what.place);
        const bool four = i < in_fours;
        std::memcpy(four ? to + i / 4 * 12 + i % 4 : to + 3 * i, &place, sizeof place);
        std::memcpy(four ? to + i / 4 * 12 + 4 + i % 4 * 2 : to + 3 * i + 1, weight + at, sizeof(float));
        ++i;
      });
    }
}
