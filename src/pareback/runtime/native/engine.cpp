// Runs pruned networks on the CPU: a program of steps over one arena of memory, each step divided among a few threads.
//
// Built with the package and called through ctypes, so the interpreter's lock is free while it runs. The work is
// compiled for several instruction sets and chosen at run time; PAREBACK_ISA=avx2 or portable asks for a narrower one.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include "../../kernels/isa.h"
#include "../../kernels/pool.h"
#include "team.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(_WIN32)
#define EXPORT extern "C" __declspec(dllexport)
#else
#define EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace {

constexpr int kLanes = 16;

#include "packing.h"

enum Activation : int32_t {
  kNone, kRelu, kGelu, kRelu6, kSilu, kHardswish, kHardsigmoid, kSigmoid, kTanhGelu, kLeakyRelu
};
enum Kind : int32_t {
  kConv, kPointwise, kPool, kGlobalMean, kLinearOneRow, kHalo, kGather, kTranspose, kLinearManyRows,
  kLinearFewRows, kAttention, kLayerNorm, kChannelNorm, kResample, kGroupNorm
};

// Where a run keeps its activations. Steps name them by offset, so that several runs can go on at once; −2 and below
// are what the caller brought, its input and output.
struct Arena {
  float* base;
  float* const* brought;
  float* at(int64_t offset) const { return offset >= 0 ? base + offset : brought[-2 - offset]; }
};

// Weights of a sparse convolution lie in fours: the places of their inputs, in bytes from the first input vector of a
// tile, before their values. Those that are left over of an output channel follow one by one.
struct Nonzero {
  int32_t offset;
  float value;
};

// The structures below are mirrored by ctypes in bindings.py. Offsets count floats in the arena, −1 for none; planes and
// rows count lane vectors.
struct Conv {
  const Nonzero* nonzeros;  // in order of block and output channel
  const int32_t* rows;      // [blocks][channels + 1]
  const float* weights;     // dense: [channels / C][taps][C]; null for a sparse one
  const int32_t* offsets;   // dense: bytes per tap
  const float* bias;
  const uint16_t* valid;  // lanes that exist, by output position; null if all do
  int64_t in, out, residual;
  int64_t channels, height, width, blocks, taps, chunk;
  int64_t in_row, out_plane, out_row, residual_plane, residual_row;
  int32_t stride, activation, tile_height, tile_width;
  float slope;  // of a leaky ReLU below zero
};

struct Pointwise {
  const float *scale, *shift;
  const uint16_t* valid;
  const int32_t* picks;  // [channels][2]: a channel to read, and the one to write; null if they are the same
  int64_t in, out, other;
  int64_t gate;  // [images][gates]: a factor for every image and channel; −1 for none, as it may be the caller's
  int64_t channels, height, width;
  int64_t in_plane, in_row, out_plane, out_row, other_plane, other_row;
  int64_t images, tiles, gates;
  int32_t activation;
  float slope;
};

// The largest of each window, or the mean where there are factors.
struct Pool {
  const uint16_t* valid;
  const uint16_t* existing;  // lanes that exist, by position of the input with its halo; null if zeros never win
  const float* factors;      // [positions][16]: one by the size of the window; null for the largest
  int64_t in, out;
  int64_t channels, height, width;
  int64_t in_plane, in_row, out_plane, out_row, existing_first, existing_row;
  int32_t size, stride;
};

struct GlobalMean {
  int64_t in, out;
  int64_t channels, height, width, in_plane, in_row, images, tiles;
  float factor;
};

struct LinearOneRow {
  const float* values;
  const uint16_t* columns;
  const int64_t* starts;  // [slices + 1]
  const float* bias;      // [slices][16]
  const int32_t* order;   // [slices][16]: which output a lane is, −1 for none
  int64_t in, out, slices;
  int32_t activation;
};

// Fills the ring around every plane with what the neighbouring lanes hold, or zeros. A slice of it is a range of positions.
struct Halo {
  const int32_t* positions;  // [count][2]: position within a plane to write, and to read
  const int32_t* lanes;      // [count][16]: lane to read
  const uint16_t* existing;  // [count]: a bit per lane, clear where zero is written
  int64_t in, count, channels, plane;
};

// out[row][i] = in[index[row][i]], or zero where the index is negative, for every channel and image.
struct Gather {
  const int32_t* index;
  int64_t in, out, count, rows, out_row, channels, in_channel, out_channel, images, in_image, out_image, index_image;
};

// out[column][row] = in[row][column], with zeros in rows from `rows` to `padded`.
struct Transpose {
  int64_t in, out, rows, columns, in_row, out_row, padded;
};

// What of a step is done at once: rows of its output from `first` to before `last`.
struct Slice {
  int64_t first, last;
};

// A sparse matrix times rows in lanes. An entry is an output of its part and its number of weights in a block; the list
// holds them in fours, the places of their inputs (in units of eight bytes, from the block's first) before their values,
// and those that are left over one by one.
struct LinearManyRows {
  const char* list;
  const int64_t* lists;     // [parts + 1]: where each part's list begins
  const uint16_t* entries;  // [entries + 2][2]
  const int64_t* bounds;    // [parts × blocks + 1]: entries of each block of each part
  const float* bias;
  int64_t in, out, residual;
  int64_t vectors, tile, parts, part, blocks, block_bytes;
  int32_t activation;
};

constexpr int kPicked = 32;  // inputs in two registers

// A sparse matrix times one to eight rows, with sixteen outputs in lanes: a slice. Slices have steps, in each of which
// a lane has one weight or none.
struct LinearFewRows {
  const float* values;    // of the lanes that have one
  const uint8_t* picks;   // [steps][16]: which of a block's inputs
  const uint16_t* masks;  // [steps]: a bit per lane that has a weight
  const int32_t* slices;  // by part, block, and number of steps
  const int32_t* counts;  // [parts][blocks][32]: how many slices have 1, 2, … steps
  const int64_t* starts;  // [parts + 1][3]: first value, step and slice of each part
  const float* bias;      // [slices][16]
  int64_t in, out, sums;
  int64_t inputs, outputs, rows, blocks, parts, part;
  int32_t activation;
};

// softmax(scale·query·key)·value for every head, all in planes of `vectors` lane vectors. Heads of the result follow one
// another; those of what is read are so many planes apart.
struct Attention {
  int64_t query, key, value, out;
  int64_t query_head, key_head, value_head;
  int64_t heads, depth, value_depth, tokens, vectors;
  float scale;
  int32_t causal;
};

// (in − mean)/√(variance + eps)·scale + shift over the channels of every token.
struct LayerNorm {
  const float *scale, *shift;
  int64_t in, out, channels, vectors;
  float eps;
};

// The same over images in lanes, at every position.
struct ChannelNorm {
  const float *scale, *shift;
  const uint16_t* valid;
  int64_t in, out, channels, height, width, in_plane, in_row, out_plane, out_row;
  float eps;
};

// Images made `scale` times as large.
struct Resample {
  const float* down;            // [height][3][16]: weights of the rows above, at and below where a row comes from
  const float* across;          // [width][3][16]: likewise of columns
  const int32_t* rows_used;     // [height]: a bit for each of the three that has a weight
  const int32_t* columns_used;  // [width]
  const uint16_t* valid;
  int64_t in, out, channels, height, width, in_plane, in_row, out_plane, out_row, scale;
};

// The norm of every group of channels over each image, with a residual (−1 for none) and an activation after it.
struct GroupNorm {
  const float *scale, *shift;
  const uint16_t* valid;
  int64_t in, out, residual;
  int64_t moments;  // [channels + groups][images]: room for what is found out about them
  int64_t channels, height, width, in_plane, in_row, out_plane, out_row, residual_plane, residual_row;
  int64_t groups, images, tiles, pixels;
  float eps;
  int32_t activation;
  float slope;
};

// Of a channel: its mean, and the sum of squared distances to that. Of a group: the mean, and one by the deviation.
struct Moments {
  double mean, spread;
};

inline Moments moments_at(const GroupNorm& op, const Arena& arena, int64_t which) {
  Moments found;
  std::memcpy(&found, arena.at(op.moments) + which * sizeof found / sizeof(float), sizeof found);
  return found;
}

inline void put_moments(const GroupNorm& op, const Arena& arena, int64_t which, const Moments& found) {
  std::memcpy(arena.at(op.moments) + which * sizeof found / sizeof(float), &found, sizeof found);
}

inline double sum_of_image(const GroupNorm& op, const double* lanes, int64_t image) {
  if (op.tiles == kLanes) {  // in pairs, as a single sum would wait for each addition
    double pairs[kLanes / 2];
    for (int i = 0; i < 8; ++i) pairs[i] = lanes[i] + lanes[i + 8];
    for (int i = 0; i < 4; ++i) pairs[i] += pairs[i + 4];
    return (pairs[0] + pairs[2]) + (pairs[1] + pairs[3]);
  }
  double total = 0.0;
  for (int64_t tile = 0; tile < op.tiles; ++tile) total += lanes[image * op.tiles + tile];
  return total;
}

struct Step {
  int32_t kind;
  const void* what;
  Slice slice;  // all of it if `last` is negative
  // Here `strips` times `length` steps begin that different threads may do, each of them a strip from beginning to end.
  int64_t strips, length;
};

using ConvItem = void (*)(const Conv&, const Arena&, const Slice&, int64_t item, float* waiting);

struct Kernels {
  ConvItem (*conv_of)(const Conv&);
  void (*pointwise)(const Pointwise&, const Arena&, const Slice&, int64_t);
  void (*pool)(const Pool&, const Arena&, const Slice&, int64_t);
  void (*mean)(const GlobalMean&, const Arena&, int64_t);
  void (*halo)(const Halo&, const Arena&, const Slice&, int64_t);
  void (*gather)(const Gather&, const Arena&, int64_t);
  void (*columns)(const LinearOneRow&, const Arena&, int64_t);
  void (*transpose)(const Transpose&, const Arena&, int64_t);
  void (*listed)(const LinearManyRows&, const Arena&, int64_t);
  void (*lookup)(const LinearFewRows&, const Arena&, int64_t);  // null where registers are too narrow
  void (*attention)(const Attention&, const Arena&, int64_t, float* scores);
  void (*normalization)(const LayerNorm&, const Arena&, int64_t);
  void (*channel_norm)(const ChannelNorm&, const Arena&, int64_t);
  void (*resample)(const Resample&, const Arena&, const Slice&, int64_t);
  void (*group_moments)(const GroupNorm&, const Arena&, int64_t);
  void (*group_normalize)(const GroupNorm&, const Arena&, int64_t);
  int32_t positions;  // how many sums fit the registers
  int32_t strip;  // lane vectors of queries that attend together
};

}  // namespace

#define WIDTH 4
#define SUFFIX portable
#include "lanes.h"
#undef WIDTH
#undef SUFFIX

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define HAVE_X86 1
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#endif
#define WIDTH 8
#define SUFFIX avx2
#include "lanes.h"
#undef WIDTH
#undef SUFFIX
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")
#endif
#define WIDTH 16
#define SUFFIX avx512
#include "lanes.h"
#undef WIDTH
#undef SUFFIX
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

namespace {

const Kernels& best_kernels() {
#ifdef HAVE_X86
  const pareback::Isa isa = pareback::widest_isa();
  if (isa == pareback::Isa::avx512) return avx512::kernels;
  if (isa == pareback::Isa::avx2 && __builtin_cpu_supports("fma")) return avx2::kernels;
#endif
  return portable::kernels;
}

int64_t items_of(const Conv& conv, const Slice& slice) {
  const int64_t across = (conv.width + conv.tile_width - 1) / conv.tile_width, height = slice.last - slice.first;
  if (conv.weights != nullptr) return height * across * (conv.channels / conv.tile_height);
  const int64_t down = (height + conv.tile_height - 1) / conv.tile_height;
  return down * across * ((conv.channels + conv.chunk - 1) / conv.chunk);
}

// Divides `items` among a team, in portions; nobody else is there if it is null.
template <typename Work>
void divided(pareback::ThreadTeam* team, int64_t items, int64_t portion, double nanoseconds, const Work& work) {
  if (team != nullptr)
    team->divide(items, portion, nanoseconds, work);
  else
    work(0, items);
}

constexpr int64_t kPortions = 16;       // of a step over channels
constexpr double kStripsTime = 50'000;  // nanoseconds that strips are taken to need at least

template <typename Op>
void over_channels(pareback::ThreadTeam* team, const Op& op, const Arena& arena, int64_t items, double nanoseconds_each,
                   void (*work)(const Op&, const Arena&, int64_t)) {
  divided(team, items, std::max<int64_t>(1, items / kPortions), items * nanoseconds_each, [&](int64_t first, int64_t last) {
    for (int64_t item = first; item < last; ++item) work(op, arena, item);
  });
}

// The same where only some rows of every channel are wanted.
template <typename Op>
void over_channels(pareback::ThreadTeam* team, const Op& op, const Arena& arena, const Slice& rows, int64_t items,
                   double nanoseconds_per_row, void (*work)(const Op&, const Arena&, const Slice&, int64_t)) {
  const double nanoseconds = items * nanoseconds_per_row * (rows.last - rows.first);
  divided(team, items, std::max<int64_t>(1, items / kPortions), nanoseconds, [&](int64_t first, int64_t last) {
    for (int64_t item = first; item < last; ++item) work(op, arena, rows, item);
  });
}

// Memory of the calling thread alone, at a multiple of 64 bytes.
float* scratch(size_t floats) {
  thread_local std::vector<float> memory;
  if (memory.size() < floats + kLanes) memory.resize(floats + kLanes);
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) / 64 * 64);
}

bool run_conv(const Kernels& kernels, const Conv& conv, const Arena& arena, const Slice& slice,
              pareback::ThreadTeam* team) {
  const ConvItem item = kernels.conv_of(conv);
  if (item == nullptr) return false;
  const size_t waiting =
      conv.weights == nullptr && conv.blocks > 1 ? conv.chunk * conv.tile_height * conv.tile_width * kLanes : 0;
  const double products = conv.weights != nullptr ? 0.5 * conv.channels * conv.taps
                                                  : conv.rows[conv.blocks * (conv.channels + 1) - 1];
  const double nanoseconds = 0.5 * (slice.last - slice.first) * conv.width * (products + 2.0 * conv.channels);
  divided(team, items_of(conv, slice), 1, nanoseconds, [&](int64_t first, int64_t last) {
    float* sums = scratch(waiting);
    for (int64_t i = first; i < last; ++i) item(conv, arena, slice, i, sums);
  });
  return true;
}

void run_attention(const Kernels& kernels, const Attention& op, const Arena& arena, pareback::ThreadTeam* team) {
  const int64_t strips = (op.vectors + kernels.strip - 1) / kernels.strip, items = op.heads * strips;
  const double products = 1.0 * op.heads * op.vectors * op.tokens * (op.depth + op.value_depth + 16);
  divided(team, items, 1, 0.25 * products, [&](int64_t first, int64_t last) {
    float* scores = scratch(op.vectors * kLanes * kernels.strip * kLanes);
    for (int64_t item = first; item < last; ++item) kernels.attention(op, arena, item, scores);
  });
}

// From the moments of its channels to those of a group, in every image.
void settle_group(const GroupNorm& op, const Arena& arena, int64_t group) {
  const int64_t each = op.channels / op.groups;
  for (int64_t image = 0; image < op.images; ++image) {
    const auto of_channel = [&](int64_t i) { return moments_at(op, arena, (group * each + i) * op.images + image); };
    double sum = 0.0, spread = 0.0;
    for (int64_t i = 0; i < each; ++i) sum += of_channel(i).mean;
    const double mean = sum / each;
    for (int64_t i = 0; i < each; ++i) {
      const Moments found = of_channel(i);
      spread += found.spread + op.pixels * (found.mean - mean) * (found.mean - mean);
    }
    const double variance = spread / (static_cast<double>(each) * op.pixels);
    put_moments(op, arena, (op.channels + group) * op.images + image, {mean, 1.0 / std::sqrt(variance + op.eps)});
  }
}

void run_group_norm(const Kernels& kernels, const GroupNorm& op, const Arena& arena, pareback::ThreadTeam* team) {
  const int64_t each = op.channels / op.groups;
  const double nanoseconds = 1.0 * op.height * op.width + 50.0;  // for a channel, once to find out and once to write
  if (team != nullptr && op.groups < kPortions) {  // too few for all threads
    over_channels(team, op, arena, op.channels, nanoseconds, kernels.group_moments);
    for (int64_t group = 0; group < op.groups; ++group) settle_group(op, arena, group);
    over_channels(team, op, arena, op.channels, nanoseconds, kernels.group_normalize);
    return;
  }
  // Group by group: what was read for the moments is still in the cache.
  const int64_t portion = std::max<int64_t>(1, op.groups / kPortions);
  divided(team, op.groups, portion, 2.0 * nanoseconds * op.channels, [&](int64_t first, int64_t last) {
    for (int64_t group = first; group < last; ++group) {
      for (int64_t i = 0; i < each; ++i) kernels.group_moments(op, arena, group * each + i);
      settle_group(op, arena, group);
      for (int64_t i = 0; i < each; ++i) kernels.group_normalize(op, arena, group * each + i);
    }
  });
}

template <typename Op>
const Op& as(const Step& step) {
  return *static_cast<const Op*>(step.what);
}

Slice slice_of(const Step& step, int64_t whole) { return step.slice.last < 0 ? Slice{0, whole} : step.slice; }

// Returns −1, or the number of a step that this build does not know.
int64_t run_steps(const Step* steps, int64_t count, const Arena& arena, pareback::ThreadTeam* team) {
  static const Kernels& kernels = best_kernels();
  for (int64_t i = 0; i < count; ++i) {
    const Step& step = steps[i];
    if (team != nullptr && step.strips > 1) {
      std::atomic<int64_t> wrong{-1};
      team->divide(step.strips, 1, kStripsTime, [&](int64_t first, int64_t last) {
        const int64_t begin = i + first * step.length;
        const int64_t at = run_steps(steps + begin, (last - first) * step.length, arena, nullptr);
        if (at >= 0) wrong = begin + at;
      });
      if (wrong >= 0) return wrong;
      i += step.strips * step.length - 1;
      continue;
    }
    switch (step.kind) {
      case kConv:
        if (!run_conv(kernels, as<Conv>(step), arena, slice_of(step, as<Conv>(step).height), team)) return i;
        break;
      case kPointwise: {
        const Pointwise& op = as<Pointwise>(step);
        over_channels(team, op, arena, slice_of(step, op.height), op.channels, 1.0 * op.width, kernels.pointwise);
        break;
      }
      case kPool: {
        const Pool& op = as<Pool>(step);
        over_channels(team, op, arena, slice_of(step, op.height), op.channels, 0.5 * op.width * op.size * op.size,
                      kernels.pool);
        break;
      }
      case kGlobalMean: {
        const GlobalMean& op = as<GlobalMean>(step);
        over_channels(team, op, arena, op.channels, 0.5 * op.height * op.width + 5.0, kernels.mean);
        break;
      }
      case kLinearOneRow: {
        const LinearOneRow& op = as<LinearOneRow>(step);
        over_channels(team, op, arena, op.slices, 4.0 * op.starts[op.slices] / op.slices, kernels.columns);
        break;
      }
      case kHalo: {
        const Halo& op = as<Halo>(step);
        over_channels(team, op, arena, slice_of(step, op.count), op.channels, 1.0, kernels.halo);
        break;
      }
      case kGather: {
        const Gather& op = as<Gather>(step);
        over_channels(team, op, arena, op.channels * op.images, 0.5 * op.count * op.rows, kernels.gather);
        break;
      }
      case kTranspose: {
        const Transpose& op = as<Transpose>(step);
        over_channels(team, op, arena, (op.rows + kLanes - 1) / kLanes, 12.0 * op.columns, kernels.transpose);
        break;
      }
      case kLinearManyRows: {
        const LinearManyRows& op = as<LinearManyRows>(step);
        const int64_t items = op.parts * ((op.vectors + op.tile - 1) / op.tile);
        const double weights = static_cast<double>(op.lists[op.parts]) / 6;
        over_channels(team, op, arena, items, 0.5 * op.tile * weights / op.parts, kernels.listed);
        break;
      }
      case kLinearFewRows: {
        const LinearFewRows& op = as<LinearFewRows>(step);
        if (kernels.lookup == nullptr) return i;
        over_channels(team, op, arena, op.parts, 1.5 * op.starts[3 * op.parts + 1] / op.parts, kernels.lookup);
        break;
      }
      case kAttention:
        run_attention(kernels, as<Attention>(step), arena, team);
        break;
      case kLayerNorm: {
        const LayerNorm& op = as<LayerNorm>(step);
        over_channels(team, op, arena, (op.vectors + 1) / 2, 8.0 * op.channels, kernels.normalization);
        break;
      }
      case kChannelNorm: {
        const ChannelNorm& op = as<ChannelNorm>(step);
        const Slice rows = slice_of(step, op.height);
        const double nanoseconds = 4.0 * (rows.last - rows.first) * op.width * op.channels;
        divided(team, rows.last - rows.first, 1, nanoseconds, [&](int64_t first, int64_t last) {
          for (int64_t row = first; row < last; ++row) kernels.channel_norm(op, arena, rows.first + row);
        });
        break;
      }
      case kResample: {
        const Resample& op = as<Resample>(step);
        over_channels(team, op, arena, slice_of(step, op.height), op.channels, 3.0 * op.width, kernels.resample);
        break;
      }
      case kGroupNorm:
        run_group_norm(kernels, as<GroupNorm>(step), arena, team);
        break;
      default:
        return i;
    }
  }
  return -1;
}

}  // namespace

// Runs `count` steps, each of them divided among threads.
EXPORT int64_t pareback_run(const Step* steps, int64_t count, float* base, float* const* brought, int32_t threads) {
  const Arena arena{base, brought};
  if (threads < 2) return run_steps(steps, count, arena, nullptr);
  const auto team = std::make_shared<pareback::ThreadTeam>(threads);
  const int64_t wrong = run_steps(steps, count, arena, team.get());
  team->end();
  return wrong;
}

// Runs the same steps `times` times, each time whole on one thread; `bases` are as many arenas as threads, and `brought`
// holds `places` addresses for every time.
EXPORT int64_t pareback_run_each(const Step* steps, int64_t count, float* const* bases, float* const* brought,
                                 int64_t places, int64_t times, int32_t threads) {
  std::atomic<int64_t> next{0}, wrong{-1};
  std::atomic<int32_t> thread{0};
  const std::function<void()> loop = [&] {
    float* base = bases[thread.fetch_add(1)];
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < times;) {
      const int64_t step = run_steps(steps, count, Arena{base, brought + i * places}, nullptr);
      if (step >= 0) wrong = step;
    }
  };
  if (threads > 1)
    pareback::shared_pool().run(threads, loop);
  else
    loop();
  return wrong;
}

// See packing.h.
EXPORT int64_t pareback_pack(const Packing* what, int32_t* rows, int32_t* pairs) {
  return pack_nonzeros(*what, rows, pairs);
}

EXPORT int64_t pareback_count_rows(const RowPacking* what, int32_t* counts) { return count_rows(*what, counts); }

EXPORT int64_t pareback_order_rows(const RowPacking* what, const int32_t* counts, uint16_t* entries, int64_t* bounds,
                                   int64_t* begins) {
  return order_rows(*what, counts, entries, bounds, begins);
}

EXPORT void pareback_list_rows(const RowPacking* what, const int32_t* counts, const int64_t* begins, int16_t* list) {
  list_rows(*what, counts, begins, list);
}

// The instruction set in use, for reports: 512, 256 or 128 bits.
EXPORT int32_t pareback_register_bits() {
  const Kernels& kernels = best_kernels();
#ifdef HAVE_X86
  if (&kernels == &avx512::kernels) return 512;
  if (&kernels == &avx2::kernels) return 256;
#endif
  return &kernels == &portable::kernels ? 128 : 0;
}

// How many positions a tile may have before its sums no longer fit the registers.
EXPORT int32_t pareback_positions() { return best_kernels().positions; }
