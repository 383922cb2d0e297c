// Sparse linear layers, as lanes.h has them for any convolution but faster: a layer of them reads far more weights than
// activations, so their lists are read once, in order, and in six bytes per weight. Included by lanes.h.

// Where the inputs of four weights are, in units of eight bytes.
struct FourPlaces {
#if WIDTH == 16
  uint64_t places;
  explicit FourPlaces(const char* from) { std::memcpy(&places, from, sizeof places); }
  int64_t operator[](int i) const { return (places >> (16 * i)) & 0xFFFF; }
#else
  uint16_t places[4];
  explicit FourPlaces(const char* from) { std::memcpy(places, from, sizeof places); }
  int64_t operator[](int i) const { return places[i]; }
#endif
};

template <int W>
inline __attribute__((always_inline)) void multiply_row(Vec* sums, const Vec& weight, const char* input, int64_t place) {
  const char* at = input + place * 8;
#pragma GCC unroll 16
  for (int w = 0; w < W; ++w) multiply_add(sums[w], weight, reinterpret_cast<const float*>(at) + w * kLanes);
}

// A sum can take a product every four cycles: narrow tiles have several sums per position.
constexpr int copies_for(int width) {
  int copies = 4;
  while (copies > 1 && (copies * width > 8 || copies * width * kRegisters > kRoom)) copies /= 2;
  return copies;
}

// Adds the products of `count` weights, which lie at `list`: fours, then those left over. Returns where they end.
template <int W>
inline __attribute__((always_inline)) const char* multiply_listed(const char* list, int count, const char* input,
                                                                  Vec* sums) {
  constexpr int copies = copies_for(W);
  Vec more[copies > 1 ? (copies - 1) * W : 1] = {};
  for (int four = count / 4; four > 0; --four, list += 24) {
    prefetch(list + kAhead);
    const FourPlaces places(list);
    const FourWeights weights(list + 8);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      multiply_row<W>(i % copies == 0 ? sums : more + (i % copies - 1) * W, weights[i], input, places[i]);
  }
  for (int one = count % 4; one > 0; --one, list += 6) {
    uint16_t place;
    float weight;
    std::memcpy(&place, list, sizeof place);
    std::memcpy(&weight, list + 2, sizeof weight);
    multiply_row<W>(sums, broadcast(weight), input, place);
  }
  if constexpr (copies > 1) {
#pragma GCC unroll 16
    for (int i = 0; i < (copies - 1) * W; ++i) add(sums[i % W], more[i]);
  }
  return list;
}

// The outputs of one part, for W lane vectors of rows. Inputs come in blocks that stay in the first-level cache, and a
// block's outputs in order of their numbers of weights, so that the processor foresees where loops end. Between blocks
// the sums wait where the outputs will be.
template <int W>
void listed_tile(const LinearManyRows& op, const Arena& arena, int64_t part, int64_t column) {
  const char* input = reinterpret_cast<const char*>(arena.at(op.in) + column * kLanes);
  const int64_t first = part * op.part, row = op.vectors * kLanes;
  float* out = arena.at(op.out) + first * row + column * kLanes;
  const float* residual = op.residual == -1 ? nullptr : arena.at(op.residual) + first * row + column * kLanes;
  const char* list = op.list + op.lists[part];
  for (int64_t block = 0; block < op.blocks; ++block, input += op.block_bytes) {
    const int64_t* bounds = op.bounds + part * op.blocks + block;
    for (const uint16_t *entry = op.entries + 2 * bounds[0], *end = op.entries + 2 * bounds[1]; entry < end; entry += 2) {
      const float* soon = out + entry[4] * row;
#pragma GCC unroll 16
      for (int w = 0; w < W; ++w) prefetch(soon + w * kLanes);
      float* waiting = out + entry[0] * row;
      Vec sums[W] = {};  // of this block: to add few numbers to each other at a time also loses fewer digits
      list = multiply_listed<W>(list, entry[1], input, sums);
      const Vec bias = broadcast(block == 0 ? op.bias[first + entry[0]] : 0.0f);
#pragma GCC unroll 16
      for (int w = 0; w < W; ++w) add(sums[w], block == 0 ? bias : load(waiting + w * kLanes));
      if (block == 0 && residual != nullptr) {
#pragma GCC unroll 16
        for (int w = 0; w < W; ++w) add(sums[w], load(residual + entry[0] * row + w * kLanes));
      }
      if (block + 1 == op.blocks && op.activation == kRelu) {
#pragma GCC unroll 16
        for (int w = 0; w < W; ++w) relu(sums[w]);
      }
#pragma GCC unroll 16
      for (int w = 0; w < W; ++w) store(waiting + w * kLanes, sums[w]);
      if (block + 1 == op.blocks && op.activation > kRelu) activate_all(waiting, W, op.activation, 0.0f);
    }
  }
}

template <int W>
void listed_width(const LinearManyRows& op, const Arena& arena, int64_t part, int64_t column, int64_t width) {
  if constexpr (W > 0) {
    if (width == W)
      listed_tile<W>(op, arena, part, column);
    else
      listed_width<W - 1>(op, arena, part, column, width);
  }
}

constexpr int kWidest = kRoom / kRegisters < 14 ? kRoom / kRegisters : 14;

// Item: a part of the outputs for a tile of the rows.
inline void listed_item(const LinearManyRows& op, const Arena& arena, int64_t item) {
  const int64_t column = item / op.parts * op.tile;
  const int64_t width = std::min(op.tile, op.vectors - column);
  listed_width<kWidest>(op, arena, item % op.parts, column, width);
}

#if WIDTH == 16

// Sums of one slice for `steps` steps. In a step a lane has a weight or none, and looks its input up among 32.
template <int R>
inline __attribute__((always_inline)) const float* look_up(const float* values, const uint8_t* picks,
                                                           const uint16_t* masks, int64_t steps, const __m512* low,
                                                           const __m512* high, float* waiting) {
  __m512 sums[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) sums[r] = _mm512_setzero_ps();
  for (int64_t i = 0; i < steps; ++i) {
    prefetch(reinterpret_cast<const char*>(values) + 2 * kAhead);
    const __m512 weights = _mm512_maskz_expand_ps(masks[i], _mm512_loadu_ps(values));
    const __m512i pick =
        _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(picks + i * kLanes)));
    values += __builtin_popcount(masks[i]);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
      sums[r] = _mm512_fmadd_ps(weights, _mm512_permutex2var_ps(low[r], pick, high[r]), sums[r]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
    _mm512_store_ps(waiting + r * kLanes, _mm512_add_ps(sums[r], _mm512_load_ps(waiting + r * kLanes)));
  return values;
}

inline __mmask16 first_lanes(int64_t number) { return number >= kLanes ? 0xFFFF : number <= 0 ? 0 : (1 << number) - 1; }

// Numbers that are added one after another lose digits with their number: sums of a few blocks are added to totals.
constexpr int64_t kBlocksTogether = 16;

inline void add_to_totals(float* waiting, float* totals, int64_t vectors) {
  for (int64_t i = 0; i < vectors; ++i) {
    const __m512 sum = _mm512_add_ps(_mm512_load_ps(totals + i * kLanes), _mm512_load_ps(waiting + i * kLanes));
    _mm512_store_ps(totals + i * kLanes, sum);
    _mm512_store_ps(waiting + i * kLanes, _mm512_setzero_ps());
  }
}

// A part of the outputs for R rows: sixteen outputs in lanes. A gather from memory would take as long as sixteen loads;
// 32 inputs are in two registers, among which every lane picks its own.
template <int R>
void lookup_rows(const LinearFewRows& op, const Arena& arena, int64_t part) {
  const int64_t slices = (op.outputs + kLanes - 1) / kLanes;
  const int64_t first = part * op.part, last = std::min(slices, first + op.part);
  float *waiting = arena.at(op.sums), *totals = waiting + slices * R * kLanes;  // [slices][R][16]
  for (int64_t slice = first; slice < last; ++slice)
    for (int64_t at = slice * R * kLanes; at < (slice + 1) * R * kLanes; at += kLanes) {
      _mm512_store_ps(waiting + at, _mm512_setzero_ps());
      _mm512_store_ps(totals + at, _mm512_load_ps(op.bias + slice * kLanes));
    }
  const float* values = op.values + op.starts[3 * part];
  const uint8_t* picks = op.picks + op.starts[3 * part + 1] * kLanes;
  const uint16_t* masks = op.masks + op.starts[3 * part + 1];
  const int32_t* slice_of = op.slices + op.starts[3 * part + 2];
  const int32_t* counts = op.counts + part * op.blocks * kPicked;
  for (int64_t block = 0; block < op.blocks; ++block, counts += kPicked) {
    const float* x = arena.at(op.in) + block * kPicked;
    const int64_t left = op.inputs - block * kPicked;
    __m512 low[R], high[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      low[r] = _mm512_maskz_loadu_ps(first_lanes(left), x + r * op.inputs);
      high[r] = _mm512_maskz_loadu_ps(first_lanes(left - kLanes), x + r * op.inputs + kLanes);
    }
    // Slices come in order of their numbers of steps, so that the processor foresees where the loop over them ends.
    for (int64_t steps = 1; steps <= kPicked; ++steps)
      for (int32_t i = 0; i < counts[steps - 1]; ++i) {
        for (int64_t line = 0; line < steps * kLanes; line += 64) prefetch(picks + kAhead + line);
        values = look_up<R>(values, picks, masks, steps, low, high, waiting + *slice_of++ * (R * kLanes));
        picks += steps * kLanes;
        masks += steps;
      }
    if ((block + 1) % kBlocksTogether == 0 || block + 1 == op.blocks)
      add_to_totals(waiting + first * R * kLanes, totals + first * R * kLanes, (last - first) * R);
  }
  for (int64_t slice = first; slice < last; ++slice)
    for (int r = 0; r < R; ++r) {
      Vec v = load(totals + (slice * R + r) * kLanes);
      activate(v, op.activation);
      float* out = arena.at(op.out) + r * op.outputs + slice * kLanes;
      _mm512_mask_storeu_ps(out, first_lanes(op.outputs - slice * kLanes), reinterpret_cast<const __m512&>(v.part[0]));
    }
}

inline void lookup_part(const LinearFewRows& op, const Arena& arena, int64_t part) {
  using Work = void (*)(const LinearFewRows&, const Arena&, int64_t);
  constexpr Work work[] = {lookup_rows<1>, lookup_rows<2>, lookup_rows<3>, lookup_rows<4>,
                           lookup_rows<5>, lookup_rows<6>, lookup_rows<7>, lookup_rows<8>};
  work[op.rows - 1](op, arena, part);
}

#else

constexpr void (*lookup_part)(const LinearFewRows&, const Arena&, int64_t) = nullptr;

#endif
