// The work on activations in lanes, for registers of WIDTH floats. Included once per instruction set; see engine.cpp.
//
// An activation is float[rows][channels][columns][16]: sixteen lanes side by side, which are tiles of one image or the
// same tile of several. Every tap of a convolution, whatever its shift or stride, is then one aligned load of a lane
// vector, and a weight that is zero is simply not in the list.

namespace {
namespace SUFFIX {

typedef float Register __attribute__((vector_size(4 * WIDTH)));
typedef int32_t IntRegister __attribute__((vector_size(4 * WIDTH)));
constexpr int kRegisters = kLanes / WIDTH;

struct Vec {
  Register part[kRegisters];
};

#define EACH_PART for (int k = 0; k < kRegisters; ++k)

// Register by register: all at once, gcc copies in halves and through memory.
inline Vec load(const float* from) {
  Vec v;
  EACH_PART std::memcpy(&v.part[k], __builtin_assume_aligned(from + k * WIDTH, 4 * WIDTH), sizeof v.part[k]);
  return v;
}

inline void store(float* to, const Vec& v) {
  EACH_PART std::memcpy(__builtin_assume_aligned(to + k * WIDTH, 4 * WIDTH), &v.part[k], sizeof v.part[k]);
}

inline Vec broadcast(float x) {
  Vec v;
  EACH_PART v.part[k] = x - Register{};
  return v;
}

inline void add(Vec& to, const Vec& v) { EACH_PART to.part[k] += v.part[k]; }

inline void multiply_add(Vec& to, const Vec& weight, const float* from) {
  const Register* at = static_cast<const Register*>(__builtin_assume_aligned(from, 64));
  EACH_PART to.part[k] += weight.part[k] * at[k];
}

#include "activations.h"

inline void keep_valid(Vec& v, uint16_t valid) {
#if WIDTH == 16
  const __m512 kept = _mm512_maskz_mov_ps(valid, reinterpret_cast<const __m512&>(v.part[0]));
  std::memcpy(&v, &kept, sizeof v);
#else
  if (valid == 0xFFFF) return;
  float lanes[kLanes];
  std::memcpy(lanes, &v, sizeof lanes);
  for (int lane = 0; lane < kLanes; ++lane)
    if (!(valid >> lane & 1)) lanes[lane] = 0.0f;
  std::memcpy(&v, lanes, sizeof lanes);
#endif
}

// The least number there is in lanes whose bit is clear.
inline void least_unless(Vec& v, uint16_t existing) {
#if WIDTH == 16
  const __m512 kept = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), existing, reinterpret_cast<const __m512&>(v.part[0]));
  std::memcpy(&v, &kept, sizeof v);
#else
  if (existing == 0xFFFF) return;
  float lanes[kLanes];
  std::memcpy(lanes, &v, sizeof lanes);
  for (int lane = 0; lane < kLanes; ++lane)
    if (!(existing >> lane & 1)) lanes[lane] = -INFINITY;
  std::memcpy(&v, lanes, sizeof lanes);
#endif
}

// A lane vector whose lanes come from those of another; `existing` has a bit per lane that is not to be zero.
inline Vec permuted(const float* from, const int32_t* lanes, uint16_t existing) {
  Vec v;
#if WIDTH == 16
  const __m512 moved = _mm512_maskz_permutexvar_ps(existing, _mm512_load_si512(lanes), _mm512_load_ps(from));
  std::memcpy(&v, &moved, sizeof v);
#else
  float moved[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) moved[lane] = existing >> lane & 1 ? from[lanes[lane]] : 0.0f;
  std::memcpy(&v, moved, sizeof v);
#endif
  return v;
}

// What happens to a tile of sums on its way to memory.
template <int H, int W>
inline __attribute__((always_inline)) void finish(const Conv& conv, const Arena& arena, int64_t channel, int64_t row,
                                                  int64_t column, Vec* sums) {
  if (conv.residual >= 0) {
    const float* residual =
        arena.at(conv.residual) + (channel * conv.residual_plane + row * conv.residual_row + column) * kLanes;
#pragma GCC unroll 8
    for (int h = 0; h < H; ++h)
#pragma GCC unroll 16
      for (int w = 0; w < W; ++w) add(sums[h * W + w], load(residual + (h * conv.residual_row + w) * kLanes));
  }
  if (conv.activation == kRelu) {
#pragma GCC unroll 32
    for (int i = 0; i < H * W; ++i) relu(sums[i]);
  } else if (conv.activation != kNone) {
    // Not where they are going: tiles overlap, and another thread may be writing there.
    alignas(64) float values[H * W * kLanes];
#pragma GCC unroll 32
    for (int i = 0; i < H * W; ++i) store(values + i * kLanes, sums[i]);
    activate_all(values, H * W, conv.activation, conv.slope);
#pragma GCC unroll 32
    for (int i = 0; i < H * W; ++i) sums[i] = load(values + i * kLanes);
  }
  if (conv.valid != nullptr) {
    const uint16_t* valid = conv.valid + row * conv.width + column;
#pragma GCC unroll 8
    for (int h = 0; h < H; ++h)
#pragma GCC unroll 16
      for (int w = 0; w < W; ++w) keep_valid(sums[h * W + w], valid[h * conv.width + w]);
  }
  float* out = arena.at(conv.out) + (channel * conv.out_plane + row * conv.out_row + column) * kLanes;
#pragma GCC unroll 8
  for (int h = 0; h < H; ++h)
#pragma GCC unroll 16
    for (int w = 0; w < W; ++w) store(out + (h * conv.out_row + w) * kLanes, sums[h * W + w]);
}

// Sums that do not fit the registers would go through memory with every weight.
#if WIDTH == 16 || defined(__aarch64__)
constexpr int kRoom = 28;
#else
constexpr int kRoom = 14;
#endif

// How far ahead of its use a list is brought into the cache; the processor's own prefetching stops at every page.
constexpr int kAhead = 1024;

inline void prefetch(const void* at) { __builtin_prefetch(at); }

// Four weights of one output, each in all lanes.
struct FourWeights {
#if WIDTH == 16
  __m512 values;
  explicit FourWeights(const char* from)
      : values(_mm512_broadcast_f32x4(_mm_loadu_ps(reinterpret_cast<const float*>(from)))) {}
  Vec operator[](int i) const {  // not from memory: loads are what there are most of
    const __m512 same = i == 0   ? _mm512_permute_ps(values, 0x00)
                        : i == 1 ? _mm512_permute_ps(values, 0x55)
                        : i == 2 ? _mm512_permute_ps(values, 0xAA)
                                 : _mm512_permute_ps(values, 0xFF);
    Vec v;
    std::memcpy(&v, &same, sizeof v);
    return v;
  }
#else
  float values[4];
  explicit FourWeights(const char* from) { std::memcpy(values, from, sizeof values); }
  Vec operator[](int i) const { return broadcast(values[i]); }
#endif
};

template <int H, int W>
inline __attribute__((always_inline)) void accumulate_one(const Vec& weight, const char* row, int64_t row_bytes,
                                                          int64_t column_bytes, Vec* sums) {
#pragma GCC unroll 8
  for (int h = 0; h < H; ++h, row += row_bytes)
#pragma GCC unroll 16
    for (int w = 0; w < W; ++w)
      multiply_add(sums[h * W + w], weight, reinterpret_cast<const float*>(row + w * column_bytes));
}

template <int H, int W, int S>
inline __attribute__((always_inline)) void accumulate(const Nonzero* from, const Nonzero* to, const char* input,
                                                      int64_t row_bytes, int64_t step, Vec* sums) {
  const int64_t column_bytes = (S > 0 ? S : step) * kLanes * 4;
  // A sum can take a product every four cycles. A small tile has several sums per position to keep both units busy.
  constexpr int wanted = H * W >= 8 ? 1 : H * W > 2 ? 8 / (H * W) : 4, fitting = kRoom / (H * W * kRegisters);
  constexpr int copies = wanted < fitting ? wanted : fitting > 1 ? fitting : 1;
  Vec more[copies > 1 ? copies - 1 : 1][H * W] = {};
  for (; from + 4 <= to; from += 4) {
    if constexpr (H * W <= 4) prefetch(reinterpret_cast<const char*>(from) + kAhead);  // others read lists more slowly
    int32_t offsets[4];
    std::memcpy(offsets, from, sizeof offsets);
    const FourWeights weights(reinterpret_cast<const char*>(from) + sizeof offsets);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
      accumulate_one<H, W>(weights[i], input + offsets[i], row_bytes, column_bytes,
                           i % copies == 0 ? sums : more[i % copies - 1]);
  }
  for (; from < to; ++from)
    accumulate_one<H, W>(broadcast(from->value), input + from->offset, row_bytes, column_bytes, sums);
  if constexpr (copies > 1) {
#pragma GCC unroll 8
    for (int i = 1; i < copies; ++i)
#pragma GCC unroll 16
      for (int j = 0; j < H * W; ++j) add(sums[j], more[i - 1][j]);
  }
}

// One tile of positions for the output channels [first, last). Input channels come in blocks, so that what a block's
// weights read stays in the first-level cache; between blocks the sums wait in `waiting`. Nothing may take the address
// of the sums, or the compiler keeps them in memory as well as in registers.
template <int H, int W, int S>
void sparse_tile(const Conv& conv, const Arena& arena, int64_t row, int64_t column, int64_t first, int64_t last,
                 float* waiting) {
  const char* input = reinterpret_cast<const char*>(
      arena.at(conv.in) + (row * conv.stride * conv.in_row + column * conv.stride) * kLanes);
  const int64_t row_bytes = conv.stride * conv.in_row * kLanes * 4;
  for (int64_t block = 0; block < conv.blocks; ++block) {
    const int32_t* rows = conv.rows + block * (conv.channels + 1);
    float* kept = waiting;
    for (int64_t channel = first; channel < last; ++channel, kept += H * W * kLanes) {
      Vec sums[H * W];
      if (block == 0) {
        const Vec bias = broadcast(conv.bias[channel]);
#pragma GCC unroll 32
        for (int i = 0; i < H * W; ++i) sums[i] = bias;
      } else {
#pragma GCC unroll 32
        for (int i = 0; i < H * W; ++i) sums[i] = load(kept + i * kLanes);
      }
      accumulate<H, W, S>(conv.nonzeros + rows[channel], conv.nonzeros + rows[channel + 1], input, row_bytes,
                          conv.stride, sums);
      if (block + 1 == conv.blocks) {
        finish<H, W>(conv, arena, channel, row, column, sums);
      } else {
#pragma GCC unroll 32
        for (int i = 0; i < H * W; ++i) store(kept + i * kLanes, sums[i]);
      }
    }
  }
}

// Numbers that are added one after another lose digits with their number: sums of so many taps are added to totals.
constexpr int64_t kTapsTogether = 512;

// The same for C output channels at once with all weights, which lie side by side per tap.
template <int C, int W, int S>
void dense_tile(const Conv& conv, const Arena& arena, int64_t row, int64_t column, int64_t group) {
  const char* input = reinterpret_cast<const char*>(
      arena.at(conv.in) + (row * conv.stride * conv.in_row + column * conv.stride) * kLanes);
  const int64_t column_bytes = (S > 0 ? S : conv.stride) * kLanes * 4;
  const float* weights = conv.weights + group * conv.taps * C;
  Vec sums[C * W];
#pragma GCC unroll 16
  for (int c = 0; c < C; ++c) {
    const Vec bias = broadcast(conv.bias[group * C + c]);
#pragma GCC unroll 16
    for (int w = 0; w < W; ++w) sums[c * W + w] = bias;
  }
  Vec totals[C * W];
  if (conv.taps > kTapsTogether) {
#pragma GCC unroll 16
    for (int i = 0; i < C * W; ++i) totals[i] = Vec{};
  }
  for (int64_t first = 0; first < conv.taps; first += kTapsTogether) {
    if (first > 0) {
#pragma GCC unroll 16
      for (int i = 0; i < C * W; ++i) add(totals[i], sums[i]), sums[i] = Vec{};
    }
    const int64_t last = std::min(conv.taps, first + kTapsTogether);
    for (int64_t tap = first; tap < last; ++tap, weights += C) {
      const char* at = input + conv.offsets[tap];
      Vec values[W];
#pragma GCC unroll 16
      for (int w = 0; w < W; ++w) values[w] = load(reinterpret_cast<const float*>(at + w * column_bytes));
#pragma GCC unroll 16
      for (int c = 0; c < C; ++c) {
        const Vec weight = broadcast(weights[c]);
#pragma GCC unroll 16
        for (int w = 0; w < W; ++w) EACH_PART sums[c * W + w].part[k] += weight.part[k] * values[w].part[k];
      }
    }
  }
  if (conv.taps > kTapsTogether) {
#pragma GCC unroll 16
    for (int i = 0; i < C * W; ++i) add(sums[i], totals[i]);
  }
#pragma GCC unroll 16
  for (int c = 0; c < C; ++c) finish<1, W>(conv, arena, group * C + c, row, column, sums + c * W);
}

template <int H, int W, int S>
void sparse_item(const Conv& conv, const Arena& arena, const Slice& slice, int64_t item, float* waiting) {
  const int64_t across = (conv.width + W - 1) / W, chunks = (conv.channels + conv.chunk - 1) / conv.chunk;
  const int64_t tile = item / chunks, chunk = item % chunks;
  // The last tile of a row or column is moved back to fit, and writes some positions again.
  const int64_t row = std::min<int64_t>(slice.first + tile / across * H, slice.last - H);
  const int64_t column = std::min<int64_t>(tile % across * W, conv.width - W);
  sparse_tile<H, W, S>(conv, arena, row, column, chunk * conv.chunk,
                       std::min<int64_t>(conv.channels, (chunk + 1) * conv.chunk), waiting);
}

template <int C, int W, int S>
void dense_item(const Conv& conv, const Arena& arena, const Slice& slice, int64_t item, float*) {
  const int64_t across = (conv.width + W - 1) / W, groups = conv.channels / C;
  const int64_t tile = item / groups;
  const int64_t column = std::min<int64_t>(tile % across * W, conv.width - W);
  dense_tile<C, W, S>(conv, arena, slice.first + tile / across, column, item % groups);
}

// All shapes of tiles; the tuner chooses among those that fit.
#define SPARSE_SHAPES(X)                                                                                      \
  X(1, 1) X(1, 2) X(1, 4) X(1, 6) X(1, 7) X(1, 8) X(1, 12) X(1, 14) X(2, 1) X(2, 2) X(2, 4) X(2, 6) X(2, 7) X(2, 8) \
  X(3, 4) X(3, 7) X(4, 1) X(4, 2) X(4, 4) X(4, 6) X(4, 7) X(7, 1) X(7, 2) X(7, 3)
// Linear layers over rows have these besides: their activations are one row of lane vectors, of any length.
#define ROW_SHAPES(X) X(1, 3) X(1, 5) X(1, 9) X(1, 10) X(1, 11) X(1, 13)
#define DENSE_SHAPES(X) X(1, 1) X(1, 4) X(1, 8) X(2, 4) X(2, 8) X(4, 1) X(4, 2) X(4, 4) X(4, 6) X(4, 7) X(8, 1) X(8, 2) X(8, 3) X(16, 1)

template <int H, int W>
ConvItem sparse_shape(int32_t stride) {
  if constexpr (H * W * kRegisters <= kRoom || H * W <= 2)
    return stride == 1 ? sparse_item<H, W, 1> : stride == 2 ? sparse_item<H, W, 2> : sparse_item<H, W, 0>;
  return nullptr;
}

template <int H, int W>
ConvItem row_shape() {
  if constexpr (H * W * kRegisters <= kRoom) return sparse_item<H, W, 1>;
  return nullptr;
}

template <int C, int W>
ConvItem dense_shape(int32_t stride) {
  if constexpr ((C + 1) * W * kRegisters <= kRoom + 2 || C * W == 1)
    return stride == 1 ? dense_item<C, W, 1> : stride == 2 ? dense_item<C, W, 2> : dense_item<C, W, 0>;
  return nullptr;
}

inline ConvItem conv_of(const Conv& conv) {
#define SPARSE(h, w) \
  if (conv.tile_height == h && conv.tile_width == w) return sparse_shape<h, w>(conv.stride);
#define ROW(h, w) \
  if (conv.tile_height == h && conv.tile_width == w && conv.stride == 1) return row_shape<h, w>();
#define DENSE(c, w) \
  if (conv.tile_height == c && conv.tile_width == w) return dense_shape<c, w>(conv.stride);
  if (conv.weights == nullptr) {
    SPARSE_SHAPES(SPARSE)
    ROW_SHAPES(ROW)
  } else {
    DENSE_SHAPES(DENSE)
  }
#undef SPARSE
#undef ROW
#undef DENSE
  return nullptr;
}

// What a channel's lanes are multiplied by: a number for each image.
inline Vec gate_of(const Pointwise& op, const Arena& arena, int64_t channel) {
  alignas(64) float lanes[kLanes] = {};
  const float* gates = arena.at(op.gate) + channel;
  for (int64_t lane = 0; lane < op.images * op.tiles; ++lane) lanes[lane] = gates[lane / op.tiles * op.gates];
  return load(lanes);
}

// out = activation(of(in) + other) for a row of lane vectors, zero where no pixel is; `other` and `valid` may be missing.
template <typename Of>
inline __attribute__((always_inline)) void write_row(const float* in, float* out, const float* other,
                                                     const uint16_t* valid, int64_t width, int32_t activation,
                                                     float slope, const Of& of) {
  const bool at_once = activation == kNone || activation == kRelu;
  for (int64_t column = 0; column < width; ++column) {
    Vec v = load(in + column * kLanes);
    of(v);
    if (other != nullptr) add(v, load(other + column * kLanes));
    if (activation == kRelu) relu(v);
    if (at_once && valid != nullptr) keep_valid(v, valid[column]);
    store(out + column * kLanes, v);
  }
  if (at_once) return;
  activate_all(out, width, activation, slope);
  for (int64_t column = 0; valid != nullptr && column < width; ++column) {
    Vec v = load(out + column * kLanes);
    keep_valid(v, valid[column]);
    store(out + column * kLanes, v);
  }
}

// out = activation((in·scale + shift)·gate + other), plane by plane, where all but `in` may be missing.
inline void pointwise_plane(const Pointwise& op, const Arena& arena, const Slice& slice, int64_t item) {
  const int64_t from = op.picks == nullptr ? item : op.picks[2 * item];
  const int64_t channel = op.picks == nullptr ? item : op.picks[2 * item + 1];
  const bool scaled = op.scale != nullptr, gated = op.gate != -1;
  const Vec scale = broadcast(scaled ? op.scale[channel] : 1.0f);
  const Vec shift = broadcast(scaled ? op.shift[channel] : 0.0f);
  const Vec gate = gated ? gate_of(op, arena, channel) : scale;
  for (int64_t row = slice.first; row < slice.last; ++row) {
    const float* in = arena.at(op.in) + (from * op.in_plane + row * op.in_row) * kLanes;
    float* out = arena.at(op.out) + (channel * op.out_plane + row * op.out_row) * kLanes;
    const float* other =
        op.other < 0 ? nullptr : arena.at(op.other) + (channel * op.other_plane + row * op.other_row) * kLanes;
    const uint16_t* valid = op.valid == nullptr ? nullptr : op.valid + row * op.width;
    write_row(in, out, other, valid, op.width, op.activation, op.slope, [&](Vec& v) {
      if (scaled) EACH_PART v.part[k] = v.part[k] * scale.part[k] + shift.part[k];
      if (gated) EACH_PART v.part[k] *= gate.part[k];
    });
  }
}

// Fills the ring around a plane with what neighbouring lanes hold.
inline void halo_plane(const Halo& op, const Arena& arena, const Slice& slice, int64_t channel) {
  float* plane = arena.at(op.in) + channel * op.plane * kLanes;
  for (int64_t i = slice.first; i < slice.last; ++i) {
    const float* from = plane + static_cast<int64_t>(op.positions[2 * i + 1]) * kLanes;
    store(plane + static_cast<int64_t>(op.positions[2 * i]) * kLanes,
          permuted(from, op.lanes + i * kLanes, op.existing[i]));
  }
}

// Moves numbers to where another arrangement has them.
inline void gather_plane(const Gather& op, const Arena& arena, int64_t item) {
  const int64_t image = item / op.channels, channel = item % op.channels;
  const float* in = arena.at(op.in) + image * op.in_image + channel * op.in_channel;
  float* out = arena.at(op.out) + image * op.out_image + channel * op.out_channel;
  const int32_t* index = op.index + image * op.index_image;
  for (int64_t row = 0; row < op.rows; ++row, index += op.count, out += op.out_row) {
    int64_t i = 0;
#if WIDTH == 16
    for (; i + kLanes <= op.count; i += kLanes) {
      const __m512i from = _mm512_loadu_si512(index + i);
      const __mmask16 existing = _mm512_cmpge_epi32_mask(from, _mm512_setzero_si512());
      _mm512_storeu_ps(out + i, _mm512_mask_i32gather_ps(_mm512_setzero_ps(), existing, from, in, 4));
    }
#endif
    for (; i < op.count; ++i) out[i] = index[i] < 0 ? 0.0f : in[index[i]];
  }
}

// The largest of a window, or NaN if it holds one. Where positions may lie outside the image, `existing` says so.
inline Vec largest(const Pool& op, const float* in, const uint16_t* existing) {
  Vec most = broadcast(-INFINITY);
  for (int64_t h = 0; h < op.size; ++h)
    for (int64_t w = 0; w < op.size; ++w) {
      Vec v = load(in + (h * op.in_row + w) * kLanes);
      if (existing != nullptr) least_unless(v, existing[h * op.existing_row + w]);
      EACH_PART {
        const IntRegister taken = (v.part[k] > most.part[k]) | (v.part[k] != v.part[k]);
        most.part[k] = taken ? v.part[k] : most.part[k];
      }
    }
  return most;
}

// The sum of a window, whose halo holds zeros, times a factor for each position.
inline Vec mean_of_window(const Pool& op, const float* in, const float* factors) {
  Vec sum = broadcast(0.0f);
  for (int64_t h = 0; h < op.size; ++h)
    for (int64_t w = 0; w < op.size; ++w) add(sum, load(in + (h * op.in_row + w) * kLanes));
  const Vec factor = load(factors);
  EACH_PART sum.part[k] *= factor.part[k];
  return sum;
}

inline void pool_plane(const Pool& op, const Arena& arena, const Slice& slice, int64_t channel) {
  for (int64_t row = slice.first; row < slice.last; ++row)
    for (int64_t column = 0; column < op.width; ++column) {
      const float* in = arena.at(op.in) +
                        (channel * op.in_plane + row * op.stride * op.in_row + column * op.stride) * kLanes;
      const uint16_t* existing =
          op.existing == nullptr
              ? nullptr
              : op.existing + op.existing_first + row * op.stride * op.existing_row + column * op.stride;
      Vec v = op.factors == nullptr ? largest(op, in, existing)
                                    : mean_of_window(op, in, op.factors + (row * op.width + column) * kLanes);
      if (op.valid != nullptr) keep_valid(v, op.valid[row * op.width + column]);
      store(arena.at(op.out) + (channel * op.out_plane + row * op.out_row + column) * kLanes, v);
    }
}

// Images made larger by a whole number: every position is a sum over the 3 × 3 positions around where it comes from, with
// weights for its row and its column, which differ between lanes at the edges of images.
inline void resample_plane(const Resample& op, const Arena& arena, const Slice& slice, int64_t channel) {
  for (int64_t row = slice.first; row < slice.last; ++row) {
    float* out = arena.at(op.out) + (channel * op.out_plane + row * op.out_row) * kLanes;
    for (int64_t column = 0; column < op.width; ++column, out += kLanes) {
      const float* in = arena.at(op.in) +
                        (channel * op.in_plane + row / op.scale * op.in_row + column / op.scale) * kLanes;
      Vec sum = broadcast(0.0f);
      for (int64_t h = 0; h < 3; ++h) {
        if (!(op.rows_used[row] >> h & 1)) continue;
        Vec line = broadcast(0.0f);
        for (int64_t w = 0; w < 3; ++w)
          if (op.columns_used[column] >> w & 1)
            multiply_add(line, load(op.across + (column * 3 + w) * kLanes),
                         in + ((h - 1) * op.in_row + w - 1) * kLanes);
        const Vec weight = load(op.down + (row * 3 + h) * kLanes);
        EACH_PART sum.part[k] += line.part[k] * weight.part[k];
      }
      if (op.valid != nullptr) keep_valid(sum, op.valid[row * op.width + column]);
      store(out, sum);
    }
  }
}

// Means over an image: out[image][channel].
inline void mean_plane(const GlobalMean& op, const Arena& arena, int64_t channel) {
  Vec sum = broadcast(0.0f);
  for (int64_t row = 0; row < op.height; ++row)
    for (int64_t column = 0; column < op.width; ++column)
      add(sum, load(arena.at(op.in) + (channel * op.in_plane + row * op.in_row + column) * kLanes));
  float lanes[kLanes];
  std::memcpy(lanes, &sum, sizeof lanes);
  for (int64_t image = 0; image < op.images; ++image) {
    float total = 0.0f;
    for (int64_t lane = 0; lane < op.tiles; ++lane) total += lanes[image * op.tiles + lane];
    arena.at(op.out)[image * op.channels + channel] = total * op.factor;
  }
}

// Takes the elements of two registers in turn: those of their first halves, or of their second ones.
inline Register interleaved(Register a, Register b, bool second) {
#if defined(__clang__)
  Register result;
  for (int i = 0; i < WIDTH; ++i) result[i] = (i % 2 ? b : a)[(second ? WIDTH / 2 : 0) + i / 2];
  return result;
#else
  IntRegister from;
  for (int i = 0; i < WIDTH; ++i) from[i] = (i % 2 ? WIDTH : 0) + (second ? WIDTH / 2 : 0) + i / 2;
  return __builtin_shuffle(a, b, from);
#endif
}

// A square of WIDTH × WIDTH numbers. Interleaving the first half of the rows with the second one moves the highest bit
// of a number's row below the lowest of its column; after as many rounds as there are bits, rows are columns. Of the
// square, the first `height` rows are read and the others zero, and the first `width` columns written.
inline __attribute__((always_inline)) void transpose_square(const float* in, int64_t in_row, float* out,
                                                            int64_t out_row, int64_t height, int64_t width) {
  Register rows[WIDTH] = {}, next[WIDTH];
#pragma GCC unroll 16
  for (int i = 0; i < WIDTH; ++i)
    if (i < height) std::memcpy(&rows[i], in + i * in_row, sizeof rows[i]);
#pragma GCC unroll 4
  for (int round = 1; round < WIDTH; round *= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < WIDTH / 2; ++i) {
      next[2 * i] = interleaved(rows[i], rows[i + WIDTH / 2], false);
      next[2 * i + 1] = interleaved(rows[i], rows[i + WIDTH / 2], true);
    }
#pragma GCC unroll 16
    for (int i = 0; i < WIDTH; ++i) rows[i] = next[i];
  }
#pragma GCC unroll 16
  for (int i = 0; i < WIDTH; ++i)
    if (i < width) std::memcpy(out + i * out_row, &rows[i], sizeof rows[i]);
}

// out[column][row] = in[row][column] for a strip of up to sixteen rows. Lanes without a row hold zeros: whatever else lay
// there could be slow to multiply.
inline void transpose_strip(const Transpose& op, const Arena& arena, int64_t strip) {
  const int64_t first = strip * kLanes, last = std::min(op.rows, first + kLanes);
  const int64_t end = std::min(first + kLanes, op.padded);
  for (int64_t column = 0; column < op.columns; column += WIDTH) {
    const int64_t width = std::min<int64_t>(WIDTH, op.columns - column);
    for (int64_t row = first; row < end; row += WIDTH) {
      const int64_t height = std::clamp<int64_t>(last - row, 0, WIDTH);
      const float* in = arena.at(op.in) + row * op.in_row + column;
      float* out = arena.at(op.out) + column * op.out_row + row;
      const bool fits = column + WIDTH <= op.in_row && row + WIDTH <= end;
      if (fits && height == WIDTH && width == WIDTH)
        transpose_square(in, op.in_row, out, op.out_row, WIDTH, WIDTH);
      else if (fits)
        transpose_square(in, op.in_row, out, op.out_row, height, width);
      else
        for (int64_t r = 0; r < std::min<int64_t>(WIDTH, end - row); ++r)
          for (int64_t c = 0; c < width; ++c) out[c * op.out_row + r] = r < height ? in[r * op.in_row + c] : 0.0f;
    }
  }
}

// y = activation(W·x + bias) for one x: sixteen outputs in lanes, each with its own columns.
inline void column_slice(const LinearOneRow& op, const Arena& arena, int64_t slice) {
  const float* x = arena.at(op.in);
  const float* value = op.values + op.starts[slice] * kLanes;
  const uint16_t* column = op.columns + op.starts[slice] * kLanes;
  const int64_t length = op.starts[slice + 1] - op.starts[slice];
  Vec sums[4] = {broadcast(0.0f), broadcast(0.0f), broadcast(0.0f), broadcast(0.0f)};
  int64_t i = 0;
  for (; i + 4 <= length; i += 4)
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      alignas(64) float gathered[kLanes];
      for (int lane = 0; lane < kLanes; ++lane) gathered[lane] = x[column[(i + j) * kLanes + lane]];
      multiply_add(sums[j], load(value + (i + j) * kLanes), gathered);
    }
  for (; i < length; ++i) {
    alignas(64) float gathered[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) gathered[lane] = x[column[i * kLanes + lane]];
    multiply_add(sums[0], load(value + i * kLanes), gathered);
  }
  for (int j = 1; j < 4; ++j) add(sums[0], sums[j]);
  add(sums[0], load(op.bias + slice * kLanes));
  activate(sums[0], op.activation);
  float lanes[kLanes];
  std::memcpy(lanes, &sums[0], sizeof lanes);
  for (int lane = 0; lane < kLanes; ++lane) {
    const int32_t to = op.order[slice * kLanes + lane];
    if (to >= 0) arena.at(op.out)[to] = lanes[lane];
  }
}

#include "attention.h"
#include "group_norm.h"
#include "linear.h"

#undef EACH_PART

const Kernels kernels = {conv_of,      pointwise_plane,    pool_plane,         mean_plane,     halo_plane,
                         gather_plane, column_slice,       transpose_strip,    listed_item,    lookup_part,
                         attention_item, normalization_item, channel_norm_row, resample_plane, group_moments,
                         group_normalize, kRoom / kRegisters, kStrip};

}  // namespace SUFFIX
}  // namespace
