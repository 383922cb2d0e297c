// What transformers do to tokens besides linear layers, for registers of WIDTH floats. Included by lanes.h.
//
// An activation is float[channels][vectors][16] with the tokens of one image in its lanes. A sum over channels is then
// a sum over planes, and a softmax over keys one over vectors with queries in the lanes: no lane ever needs another.

// Lane vectors of queries that are done together, and the keys or channels whose sums fit the registers beside them.
constexpr int kStrip = kRegisters == 1 ? 4 : 1;
template <int V>
constexpr int kTogether = (kRoom - V * kRegisters) / (V * kRegisters) < 8 ? (kRoom - V * kRegisters) / (V * kRegisters)
                                                                         : 8;

// Long sums are added up in parts of so many keys, which keeps them exact.
constexpr int64_t kKeys = 256;

// sums[n][v] = Σ_i across[i][n]·along[i][v], where `along` are lane vectors and `across` single numbers.
template <int V, int N>
inline __attribute__((always_inline)) void multiply_strip(const float* along, int64_t along_step, const float* across,
                                                          int64_t across_step, int64_t across_next, int64_t count,
                                                          Vec* sums) {
#pragma GCC unroll 32
  for (int i = 0; i < N * V; ++i) sums[i] = broadcast(0.0f);
  for (int64_t i = 0; i < count; ++i, along += along_step, across += across_step) {
    Vec values[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) values[v] = load(along + v * kLanes);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      const Vec one = broadcast(across[n * across_next]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) EACH_PART sums[n * V + v].part[k] += one.part[k] * values[v].part[k];
    }
  }
}

// The scores of keys 0 to `keys`, and of a few beyond that nobody reads: scores[key][v].
template <int V>
__attribute__((noinline)) void score_strip(const float* query, const float* key, int64_t depth, int64_t plane, int64_t keys, float* scores) {
  constexpr int N = kTogether<V>;
  for (int64_t block = 0; block < keys; block += N) {
    const int64_t first = std::min<int64_t>(block, plane - N);
    Vec sums[N * V];
    multiply_strip<V, N>(query, plane, key + first, plane, 1, depth, sums);
#pragma GCC unroll 32
    for (int i = 0; i < N * V; ++i) store(scores + (first * V + i) * kLanes, sums[i]);
  }
}

// Nobody attends to what comes later: the scores of keys after a lane's own token become the least there is.
template <int V>
void hide_later(int64_t first, int64_t keys, float* scores) {
  for (int64_t key = first; key < keys; ++key)
    for (int64_t lane = 0; lane < std::min<int64_t>(key - first, V * kLanes); ++lane)
      scores[key * V * kLanes + lane] = -3.0e38f;
}

// Turns scores into weights that add up to the numbers in `totals`.
template <int V>
__attribute__((noinline)) void soften_strip(int64_t keys, float scale, float* scores, Vec* totals) {
  const float base_two = scale * 1.44269504f;
  Vec most[V];
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) most[v] = load(scores + v * kLanes);
  for (int64_t key = 1; key < keys; ++key)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      const Vec one = load(scores + (key * V + v) * kLanes);
      EACH_PART most[v].part[k] = one.part[k] > most[v].part[k] ? one.part[k] : most[v].part[k];
    }
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) EACH_PART most[v].part[k] *= base_two;
  for (int v = 0; v < V; ++v) totals[v] = broadcast(0.0f);
  for (int64_t block = 0; block < keys; block += kKeys) {
    Vec part[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) part[v] = broadcast(0.0f);
    for (int64_t key = block; key < std::min(keys, block + kKeys); ++key) {
      float* at = scores + key * V * kLanes;
      Register x[V * kRegisters];
#pragma GCC unroll 8
      for (int i = 0; i < V * kRegisters; ++i) {
        std::memcpy(&x[i], at + i * WIDTH, sizeof x[i]);
        x[i] = x[i] * base_two - most[i / kRegisters].part[i % kRegisters];
      }
      power_of_two<V * kRegisters>(x);
#pragma GCC unroll 8
      for (int i = 0; i < V * kRegisters; ++i) {
        part[i / kRegisters].part[i % kRegisters] += x[i];
        std::memcpy(at + i * WIDTH, &x[i], sizeof x[i]);
      }
    }
    for (int v = 0; v < V; ++v) add(totals[v], part[v]);
  }
}

// out[n] = (or +=, after the first keys) shares·Σ weights·value. Not inlined: the sums need all registers.
template <int V, int N>
__attribute__((noinline)) void mix_channels(const float* weights, const float* value, int64_t plane, int64_t keys,
                                            bool more, const Vec* shares, float* out) {
  Vec sums[N * V];
  multiply_strip<V, N>(weights, V * kLanes, value, 1, plane, keys, sums);
#pragma GCC unroll 8
  for (int n = 0; n < N; ++n)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      float* to = out + n * plane + v * kLanes;
      Vec sum = more ? load(to) : broadcast(0.0f);
      EACH_PART sum.part[k] += sums[n * V + v].part[k] * shares[v].part[k];
      store(to, sum);
    }
}

// A head's channels for some of the keys.
template <int V>
void mix_strip(const Attention& op, const float* weights, const float* value, int64_t keys, bool more,
               const Vec* shares, float* out) {
  constexpr int N = kTogether<V>, H = N > 2 ? N / 2 : 1;
  const int64_t plane = op.vectors * kLanes;
  int64_t c = 0;
  for (; c + N <= op.value_depth; c += N)
    mix_channels<V, N>(weights, value + c * plane, plane, keys, more, shares, out + c * plane);
  for (; c + H <= op.value_depth; c += H)
    mix_channels<V, H>(weights, value + c * plane, plane, keys, more, shares, out + c * plane);
  for (; c < op.value_depth; ++c)
    mix_channels<V, 1>(weights, value + c * plane, plane, keys, more, shares, out + c * plane);
}

template <int V>
void attend_strip(const Attention& op, const Arena& arena, int64_t head, int64_t first, float* scores) {
  const int64_t plane = op.vectors * kLanes, start = first * kLanes;
  const float* query = arena.at(op.query) + head * op.query_head * plane + start;
  const float* key = arena.at(op.key) + head * op.key_head * plane;
  const float* value = arena.at(op.value) + head * op.value_head * plane;
  float* out = arena.at(op.out) + head * op.value_depth * plane + start;
  const int64_t keys = op.causal ? std::min(op.tokens, start + V * kLanes) : op.tokens;
  score_strip<V>(query, key, op.depth, plane, keys, scores);
  if (op.causal) hide_later<V>(start, keys, scores);
  Vec shares[V];
  soften_strip<V>(keys, op.scale, scores, shares);
  for (int v = 0; v < V; ++v) EACH_PART shares[v].part[k] = 1.0f / shares[v].part[k];
  for (int64_t block = 0; block < keys; block += kKeys)
    mix_strip<V>(op, scores + block * V * kLanes, value + block, std::min(kKeys, keys - block), block > 0, shares, out);
}

// One head for one strip of queries; strips are of almost the same length.
inline void attention_item(const Attention& op, const Arena& arena, int64_t item, float* scores) {
  const int64_t strips = (op.vectors + kStrip - 1) / kStrip, head = item / strips, strip = item % strips;
  const int64_t first = strip * op.vectors / strips, last = (strip + 1) * op.vectors / strips;
  switch (last - first) {
    case 1: return attend_strip<1>(op, arena, head, first, scores);
    case 2: return attend_strip<std::min(2, kStrip)>(op, arena, head, first, scores);
    case 3: return attend_strip<std::min(3, kStrip)>(op, arena, head, first, scores);
    default: return attend_strip<kStrip>(op, arena, head, first, scores);
  }
}

// Means over channels of what `term` makes of V lane vectors of tokens. Even and odd channels have sums of their own, as
// each waits for its last addition.
template <int V, typename Term>
inline __attribute__((always_inline)) void mean_of(const float* in, int64_t plane, int64_t channels, const Term& term,
                                                   Vec* means) {
  Vec even[V], odd[V];
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) even[v] = odd[v] = broadcast(0.0f);
  int64_t c = 0;
  for (; c + 2 <= channels; c += 2, in += 2 * plane)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      add(even[v], term(load(in + v * kLanes), v));
      add(odd[v], term(load(in + plane + v * kLanes), v));
    }
  const float share = 1.0f / static_cast<float>(channels);
#pragma GCC unroll 4
  for (int v = 0; v < V; ++v) {
    if (c < channels) add(even[v], term(load(in + v * kLanes), v));
    EACH_PART means[v].part[k] = (even[v].part[k] + odd[v].part[k]) * share;
  }
}

// The mean first, then the squares of what is left; and as a mean far from zero is rounded, what is left has one as well.
template <int V>
void normalize_strip(const LayerNorm& op, const float* in, float* out) {
  const int64_t plane = op.vectors * kLanes;
  Vec mean[V], spread[V], rest[V];
  mean_of<V>(in, plane, op.channels, [](const Vec& x, int) { return x; }, mean);
  const auto off = [&mean](Vec x, int v) {
    EACH_PART x.part[k] -= mean[v].part[k];
    return x;
  };
  const auto square = [&off](Vec x, int v) {
    x = off(x, v);
    EACH_PART x.part[k] *= x.part[k];
    return x;
  };
  mean_of<V>(in, plane, op.channels, off, rest);
  mean_of<V>(in, plane, op.channels, square, spread);
  for (int v = 0; v < V; ++v) {
    EACH_PART spread[v].part[k] -= rest[v].part[k] * rest[v].part[k];
    add(mean[v], rest[v]);
  }
  for (int v = 0; v < V; ++v) {
    float lanes[kLanes];
    std::memcpy(lanes, &spread[v], sizeof lanes);
    for (float& lane : lanes) lane = 1.0f / std::sqrt(lane + op.eps);
    std::memcpy(&spread[v], lanes, sizeof lanes);
  }
  for (int64_t c = 0; c < op.channels; ++c, in += plane, out += plane) {
    const Vec scale = broadcast(op.scale[c]), shift = broadcast(op.shift[c]);
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      Vec x = load(in + v * kLanes);
      EACH_PART x.part[k] = (x.part[k] - mean[v].part[k]) * (spread[v].part[k] * scale.part[k]) + shift.part[k];
      store(out + v * kLanes, x);
    }
  }
}

inline void normalization_item(const LayerNorm& op, const Arena& arena, int64_t item) {
  const int64_t first = 2 * item;
  const float* in = arena.at(op.in) + first * kLanes;
  float* out = arena.at(op.out) + first * kLanes;
  if (first + 2 <= op.vectors)
    normalize_strip<2>(op, in, out);
  else
    normalize_strip<1>(op, in, out);
}

// Columns of an image in lanes: a few side by side, each a norm over its channels. What lies between them is there to
// be read: planes are so far apart.
template <int V>
inline void norm_columns(const ChannelNorm& op, const float* in, float* out, const uint16_t* valid) {
  const int64_t plane = op.in_plane * kLanes;
  Vec mean[V], spread[V], rest[V];
  mean_of<V>(in, plane, op.channels, [](Vec x, int) { return x; }, mean);
  const auto off = [&](Vec x, int v) {
    EACH_PART x.part[k] -= mean[v].part[k];
    return x;
  };
  const auto square = [&](Vec x, int v) {
    x = off(x, v);
    EACH_PART x.part[k] *= x.part[k];
    return x;
  };
  mean_of<V>(in, plane, op.channels, off, rest);
  mean_of<V>(in, plane, op.channels, square, spread);
  for (int v = 0; v < V; ++v) {
    EACH_PART spread[v].part[k] -= rest[v].part[k] * rest[v].part[k];
    add(mean[v], rest[v]);
    alignas(64) float lanes[kLanes];
    store(lanes, spread[v]);
    for (float& lane : lanes) lane = 1.0f / std::sqrt(lane + op.eps);
    spread[v] = load(lanes);
  }
  for (int64_t c = 0; c < op.channels; ++c, in += plane, out += op.out_plane * kLanes) {
    const Vec scale = broadcast(op.scale[c]), shift = broadcast(op.shift[c]);
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      Vec x = load(in + v * kLanes);
      EACH_PART x.part[k] = (x.part[k] - mean[v].part[k]) * (spread[v].part[k] * scale.part[k]) + shift.part[k];
      if (valid != nullptr) keep_valid(x, valid[v]);
      store(out + v * kLanes, x);
    }
  }
}

inline void channel_norm_row(const ChannelNorm& op, const Arena& arena, int64_t row) {
  const float* in = arena.at(op.in) + row * op.in_row * kLanes;
  float* out = arena.at(op.out) + row * op.out_row * kLanes;
  for (int64_t column = 0; column < op.width;) {
    const uint16_t* valid = op.valid == nullptr ? nullptr : op.valid + row * op.width + column;
    const bool two = column + 2 <= op.width;
    if (two)
      norm_columns<2>(op, in + column * kLanes, out + column * kLanes, valid);
    else
      norm_columns<1>(op, in + column * kLanes, out + column * kLanes, valid);
    column += two ? 2 : 1;
  }
}
